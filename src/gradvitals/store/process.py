"""Whether the process that writes a run still exists, as far as this machine knows."""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def pid_space() -> str | None:
    """Names where process ids mean the same: one machine since it was started, and one container on it.

    None if that is not known. Containers may share the name of a machine but not its process ids.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        container = Path("/proc/self/ns/pid").readlink()
        return hashlib.sha256(f"{boot} {container}".encode()).hexdigest()[:16]
    except (OSError, UnicodeError):
        return None


def here() -> dict[str, Any]:
    """Where this process runs, as `is_gone` wants to know."""
    return {"pid_space": pid_space(), "hostname": socket.gethostname()}


def is_gone(meta: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a run last, by what the run says of it, is known to have ended.

    The name of the machine must be the same too: copies of one that was running share its `pid_space`.
    """
    space = meta.get("pid_space")
    known = space is not None and space == pid_space() and meta["hostname"] == socket.gethostname()
    return known and not is_alive(meta["pid"])


def is_alive(pid: int) -> bool:
    """Whether there is a process of this id, and not only what is left of one until its parent asks for it."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError, TypeError):
        return True  # there, and somebody else's; or not to be known
    try:
        state = Path(f"/proc/{pid}/stat").read_text("ascii", "replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return True
    return state not in ("Z", "X")
