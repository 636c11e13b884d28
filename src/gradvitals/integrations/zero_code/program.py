"""`gradvitals run` from start to end: run a script as Python would, watch it, print its verdict."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType, TracebackType
from typing import TYPE_CHECKING, Any

from gradvitals.errors import GradvitalsError

if TYPE_CHECKING:
    from gradvitals.integrations.zero_code.watcher import Hooks, Watcher


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of `gradvitals run`."""

    run: Path
    """Folder of the run."""
    program: str
    """The script or module, as recorded in the run."""
    every: int = 50
    """Steps from one per-tensor reading to the next."""
    sinks: tuple[str, ...] = ()
    alerts: tuple[str, ...] = ()
    quiet: bool = False


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call `then` once the module has been imported; at once if it already has."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _ImportObserver(name, then))


class _ImportObserver(MetaPathFinder):
    """Stays on the import path until the module has been executed, because `find_spec` may be called without importing.

    Other finders find and load the module. If one of them hides the import from this one, the next import of
    anything else shows that the module is there.
    """

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then
        self._executing = False
        self._done = False

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Returns the module's own spec, whose loader reports when it has executed the module."""
        if fullname != self._name:
            if not self._executing and _is_loaded(sys.modules.get(self._name)):
                self._finish()
            return None
        for finder in sys.meta_path:
            spec = finder.find_spec(fullname, path, target) if finder is not self else None
            if spec is not None:
                if spec.loader is not None and not self._done:
                    self._observe(spec.loader)
                return spec
        return None

    def _observe(self, loader: Loader) -> None:
        original = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            self._executing = True
            try:
                original(module)
            finally:
                self._executing = False
            vars(loader).pop("exec_module", None)  # the class's own method is back
            self._finish()

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _finish(self) -> None:
        if self._done:
            return
        self._done = True
        if self in sys.meta_path:
            sys.meta_path.remove(self)
        self._then()


def _is_loaded(module: ModuleType | None) -> bool:
    """Whether a module has been executed. A lazy one has a class of its own until then, and must not be asked."""
    return type(module) is ModuleType and not getattr(module.__spec__, "_initializing", False)


OURS = (str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "collect" / "hooks.py"), "<frozen importlib")
"""Files whose frames a traceback skips. Python hides its own import machinery, but not around a frame of ours."""


def hide_our_frames() -> None:
    """Remove our frames from the traceback of the error that is about to end the program."""
    theirs = sys.excepthook

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        _clean(error, set())
        theirs(kind, error, error.__traceback__)

    sys.excepthook = show


def _clean(error: BaseException | None, seen: set[int]) -> None:
    """Clean the traceback of an error and of its causes."""
    if error is None or id(error) in seen:
        return
    seen.add(id(error))
    error.__traceback__ = without_ours(error.__traceback__)
    for other in (error.__cause__, error.__context__, *getattr(error, "exceptions", ())):
        if isinstance(other, BaseException):
            _clean(other, seen)


def without_ours(trace: TracebackType | None) -> TracebackType | None:
    """Returns a traceback that starts at the script, without our frames in between."""
    frames: list[TracebackType] = []
    while trace is not None:
        frames.append(trace)
        trace = trace.tb_next
    launches = [i for i, frame in enumerate(frames) if frame.tb_frame.f_code is _run_script.__code__]
    cleaned: TracebackType | None = None
    for frame in reversed(frames[launches[-1] + 1 if launches else 0 :]):
        if not _file(frame).startswith(OURS):
            cleaned = TracebackType(cleaned, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    return cleaned


def _file(frame: TracebackType) -> str:
    return frame.tb_frame.f_code.co_filename


@dataclass(frozen=True)
class Program:
    """A script or a module to run in this process as Python would, and its arguments."""

    name: str
    """Path of the script, or name of the module."""
    args: Sequence[str] = ()
    is_module: bool = False

    def load(self) -> Callable[[], None]:
        """Give this process the program's arguments, import path and ``__main__``. Returns a function that runs it."""
        if not sys.flags.safe_path and sys.path:
            sys.path[0] = str(Path.cwd()) if self.is_module else os.path.dirname(os.path.realpath(self.name))  # noqa: PTH120
        module, read = self._module() if self.is_module else self._script()
        sys.modules["__main__"] = module

        return lambda: _run_script(read(), vars(module))

    def _script(self) -> tuple[ModuleType, Callable[[], CodeType]]:
        path = os.path.abspath(self.name)  # noqa: PTH100 - Python does not follow links here
        if Path(path).is_dir():
            raise GradvitalsError(f"{self.name} is a folder; expected a script, or -m and the name of a module")
        try:
            with io.open_code(path) as file:
                source = file.read()
        except OSError as error:
            reason = error.strerror or str(error)
            raise GradvitalsError(
                f"{self.name} cannot be read: {reason}; expected the path of a Python script"
            ) from None
        module = _main()
        vars(module).update(__file__=path, __loader__=SourceFileLoader("__main__", path), __cached__=None)
        sys.argv = [self.name, *self.args]
        return module, lambda: compile(source, path, "exec", dont_inherit=True)

    def _module(self) -> tuple[ModuleType, Callable[[], CodeType]]:
        sys.argv = ["-m", *self.args]  # what Python has while it looks for the module
        spec = _find(self.name)
        module = _main()
        module.__spec__, module.__package__, module.__loader__ = spec, spec.parent, spec.loader
        vars(module).update(__file__=spec.origin, __cached__=spec.cached)
        sys.argv[0] = str(spec.origin)

        def read() -> CodeType:
            code = spec.loader.get_code(spec.name) if spec.loader is not None else None  # type: ignore[attr-defined]
            if code is None:
                raise GradvitalsError(f"the module {self.name} has no Python code; expected one that can be run")
            return code  # type: ignore[no-any-return]

        return module, read


def _run_script(code: CodeType, variables: dict[str, Any]) -> None:
    """Run a program. Tracebacks start below this frame."""
    exec(code, variables)


def _main() -> ModuleType:
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins  # only __main__ has the module here; others have its dict
    if sys.version_info < (3, 14):
        vars(module)["__annotations__"] = {}
    return module


def _find(name: str) -> ModuleSpec:
    try:
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(f"{name}.__main__")
    except (ModuleNotFoundError, ValueError) as error:
        raise GradvitalsError(f"there is no module {name!r} to run ({error})") from None
    if spec is None:
        raise GradvitalsError(f"there is no module {name!r} to run, or it is a package without a __main__")
    return spec


class Launch:
    """Runs a program and watches it.

    Args:
        program: The script or module. It is loaded now, so that a missing one is a usage error.
        settings: How to watch it.
    """

    def __init__(self, program: Program, settings: Settings) -> None:
        self._settings = settings
        self._watcher: Watcher | None = None
        self._hooks: Hooks | None = None
        self._process = os.getpid()
        self._start: Callable[[], None] = program.load()

    def __call__(self) -> None:
        """Run the program. Its exceptions pass through, with tracebacks that do not show gradvitals."""
        when_imported("torch", self._install)
        error: BaseException | None = None
        try:
            self._start()
        except BaseException as raised:
            error = raised
            hide_our_frames()
            raise
        finally:
            if os.getpid() == self._process:  # a process that the script forked ends here too
                self._end(error)

    def _install(self) -> None:
        try:
            from gradvitals.integrations.zero_code.watcher import Hooks, Watcher

            self._watcher = Watcher(self._settings)
            self._hooks = Hooks(self._watcher)
            self._hooks.install()
        except Exception as error:
            self._print(f"the script is not watched: {error!r}")

    def _end(self, error: BaseException | None) -> None:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            error = None
        try:
            if self._watcher is not None and self._hooks is not None:
                self._hooks.remove()
                self._watcher.close(error)
            if isinstance(error, Exception):
                self._print_after_traceback()
                return
            for line in self._closing_lines(failed=error is not None):
                self._print(line)
        except Exception as failure:
            self._print(f"the verdict could not be computed: {failure!r}")

    def _closing_lines(self, *, failed: bool) -> Iterable[str]:
        watcher, is_first = self._watcher, int(os.environ.get("RANK", "0")) == 0
        runs = {} if watcher is None else watcher.runs
        if not is_first:  # the run may be on another machine
            runs = {path: model for path, model in runs.items() if path.exists()}
        if runs:
            from gradvitals.report.verdict import closing_lines

            return closing_lines(runs)
        if failed or not is_first or (watcher is not None and watcher.is_explained):
            return ()  # the script's own error says more
        return [f"nothing was watched: {self._why_nothing(watcher)}"]

    @staticmethod
    def _why_nothing(watcher: Watcher | None) -> str:
        if watcher is None:
            return "the script did not import torch in this process"
        if not watcher.num_backwards:
            return (
                "no backward pass ran in this process; training in processes that it started is not followed. Start "
                "them with torchrun -m gradvitals run SCRIPT, or call gradvitals.watch in them"
            )
        if watcher.num_backwards == 1:
            return "1 backward pass ran, and no optimizer stepped; a run needs two steps at least"
        ran = f"{watcher.num_backwards:,} backward passes ran, but no weights were updated between them"
        made = " and ".join(watcher.made)
        return f"{ran}: {made} never stepped; call its step()" if made else f"{ran}, by an optimizer or by the script"

    def _print_after_traceback(self) -> None:
        """Once Python has shown the error, name the runs up to it; the error needs no second mention."""
        runs = [] if self._watcher is None else [path for path in self._watcher.runs if path.exists()]
        theirs = sys.excepthook

        def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            from gradvitals.places import relative

            theirs(kind, error, trace)
            for path in runs:
                self._print(f"details: gradvitals doctor {relative(path)}")

        sys.excepthook = show

    def _print(self, line: str) -> None:
        if not self._settings.quiet:
            print(f"gradvitals: {line}", file=sys.stderr)
