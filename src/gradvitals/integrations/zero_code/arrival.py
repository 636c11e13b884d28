"""Calls a function once the script has imported a module, which may be after it has set things up."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


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
