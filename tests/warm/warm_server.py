"""Imports torch once, and forks a process for each client of `warm_client`.

    python warm_server.py SOCKET PID

Ready when this command ends; it goes on in the background until process PID has ended. Each client has a guard, which
waits for its process, passes on signals to it, and kills it when the client is gone.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import json
import os
import runpy
import select
import shutil
import signal
import socket
import sys
import types
import warnings
from pathlib import Path
from typing import NoReturn

import warm_imports  # noqa: F401


def serve(address: Path, owner: int) -> None:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address.with_suffix(".new")))
    listener.listen(64)
    if os.fork():
        return
    os.setsid()
    address.with_suffix(".new").rename(address)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for a guard
    while Path(f"/proc/{owner}").exists():
        if select.select([listener], [], [], 1.0)[0]:
            client, _ = listener.accept()
            if os.fork() == 0:
                listener.close()
                guard(client)
            client.close()
    shutil.rmtree(address.parent, ignore_errors=True)


def guard(client: socket.socket) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    start, streams, _, _ = socket.recv_fds(client, 1 << 16, 3)
    size = int.from_bytes(start[:8], "big")
    request = start[8:]
    while len(request) < size:
        more = client.recv(1 << 16)
        if not more:
            os._exit(1)
        request += more
    process = os.fork()
    if process == 0:
        client.close()
        run(*json.loads(request), streams)
    for stream in streams:
        os.close(stream)
    ended = os.pidfd_open(process)
    while ended not in select.select([client, ended], [], [])[0]:
        passed_on = client.recv(1)
        os.kill(process, passed_on[0] if passed_on else signal.SIGKILL)
        if not passed_on:
            break
    status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    with contextlib.suppress(OSError):
        client.sendall(str(status).encode())
    os._exit(0)


def run(arguments: list[str], folder: str, environment: dict[str, str], streams: list[int]) -> NoReturn:
    """What ``python arguments...`` does, from its first line to its end."""
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    sys.stdin = sys.__stdin__ = os.fdopen(0, encoding="utf-8")
    sys.stdout = sys.__stdout__ = os.fdopen(1, "w", encoding="utf-8")
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", encoding="utf-8", errors="backslashreplace", buffering=1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    # Torch tells scripts, as if they were at fault, what it is about to change.
    warnings.simplefilter(environment.get("PYTHONWARNINGS", "ignore"))  # type: ignore[arg-type]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    status = 0
    try:
        start(arguments)
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else int(left.code is not None)
        if isinstance(left.code, str):
            print(left.code, file=sys.stderr)
    except BaseException as error:
        status = 1
        trace = error.__traceback__
        while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
            trace = trace.tb_next
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error.with_traceback(trace), trace
        sys.excepthook(type(error), error, trace)
    ctypes.pythonapi.Py_Exit(status)  # waits for threads, calls what is registered for it, takes everything apart
    raise AssertionError("the process goes on")


def start(arguments: list[str]) -> None:
    arguments = arguments[arguments[:1] == ["-u"] :]
    kind, *rest = arguments
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        sys.path.insert(0, "")
        exec(compile(rest[0], "<string>", "exec"), main.__dict__)
    elif kind == "-m":
        sys.argv = ["-m", *rest[1:]]
        sys.path.insert(0, str(Path.cwd()))
        runpy._run_module_as_main(rest[0])  # type: ignore[attr-defined]
    elif not kind.startswith("-"):
        sys.argv = arguments
        sys.path.insert(0, str(Path(kind).resolve().parent))
        main.__file__ = str(Path(kind).absolute())
        # Not by `runpy.run_path`, which forgets what a script has made when it ends: here it lives on, to Python's end.
        exec(compile(Path(kind).read_bytes(), kind, "exec"), main.__dict__)
    else:
        raise SystemExit(f"there is no option {kind} here; expected -u, -c CODE, -m MODULE or the path of a script")


if __name__ == "__main__":
    serve(Path(sys.argv[1]), int(sys.argv[2]))
