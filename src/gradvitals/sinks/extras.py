"""Packages that a sink needs and gradvitals does not: asked for when the sink is made, imported when it is used."""

from __future__ import annotations

from importlib.util import find_spec

from gradvitals.errors import MissingExtraError


def require(package: str, extra: str) -> None:
    """Check that a package is there without importing it.

    Raises:
        MissingExtraError: If it is not; says what to install.
    """
    try:
        found = find_spec(package) is not None
    except ModuleNotFoundError:  # its parent is not there
        found = False
    if not found:
        raise MissingExtraError(
            f"there is no package {package!r} here; install it with: pip install 'gradvitals[{extra}]'"
        )
