"""A script or a module, run in this process as `python script.py` or `python -m module` would run it."""

from __future__ import annotations

import builtins
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.machinery import ModuleSpec, SourceFileLoader
from pathlib import Path
from types import CodeType, ModuleType

from gradvitals.errors import GradvitalsError


@dataclass(frozen=True)
class Program:
    """What to run, and the arguments that belong to it."""

    name: str
    """Path of a script, or name of a module."""
    args: Sequence[str] = ()
    is_module: bool = False

    def load(self) -> Callable[[], None]:
        """Make this process the program's: arguments, import path and ``__main__``. Returns what runs it."""
        if not sys.flags.safe_path and sys.path:
            sys.path[0] = str(Path.cwd()) if self.is_module else os.path.dirname(os.path.realpath(self.name))  # noqa: PTH120
        module, read = self._module() if self.is_module else self._script()
        sys.modules["__main__"] = module

        def start() -> None:
            exec(read(), vars(module))

        return start

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
        sys.argv = ["-m", *self.args]  # as long as it is looked for, as Python has it
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


def _main() -> ModuleType:
    module = ModuleType("__main__")
    vars(module)["__builtins__"] = builtins  # the module, which only __main__ has; others have its contents
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
