"""Being there when the script imports torch, and not before: it may have things to set up first."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


def when_imported(name: str, then: Callable[[], None]) -> None:
    """Call a function as soon as a module has been imported; now, if it has been."""
    if name in sys.modules:
        then()
    else:
        sys.meta_path.insert(0, _Doorkeeper(name, then))


class _Doorkeeper(MetaPathFinder):
    """Leaves the finding and the loading to others, and tells when they are done. Once."""

    def __init__(self, name: str, then: Callable[[], None]) -> None:
        self._name = name
        self._then = then

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's own spec, with a loader that tells."""
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            _tell_after(spec.loader, self._then)
        return spec


def _tell_after(loader: Loader, then: Callable[[], None]) -> None:
    original = loader.exec_module

    def exec_module(module: ModuleType) -> None:
        original(module)
        del loader.exec_module  # the class's own is back
        then()

    loader.exec_module = exec_module  # type: ignore[method-assign]
