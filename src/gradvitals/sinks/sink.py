"""Sink: where readings and findings go besides the run's own file. Write one in ten lines."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar

from gradvitals.errors import MissingExtraError
from gradvitals.types import Action, Finding


class Openings:
    """Tells a finding that opens or gets worse, or that was over as it began, from one that only closes."""

    def __init__(self) -> None:
        self._known: set[tuple[str, int | None, int]] = set()

    def opens(self, finding: Finding) -> bool:
        """Whether this is the news that there is a problem."""
        key = (finding.id, finding.rank, finding.first_step)
        known = key in self._known
        self._known.add(key)
        return finding.last_step is None or not known


class Sink:
    """A destination for what a Monitor sees. Subclass it and override what you need; nothing is required.

    All methods but `begin` are called on a thread of the sink's own, one after the other, a moment after the step:
    they may take their time, and training does not wait. A sink that falls far behind misses steps, which are counted.
    An error is reported once, as a finding, and the sink gets nothing more. Of several ranks only the first feeds
    sinks.

    Example:
        >>> import gradvitals as gv
        >>> class Print(gv.sinks.Sink):
        ...     def log(self, metrics, step):
        ...         print(step, metrics["grad/norm"])
        ...
        ...     def finding(self, finding):
        ...         print(finding)
        >>> monitor = gv.watch(model, optimizer, sinks=[Print()])  # doctest: +SKIP
    """

    tensors: ClassVar[bool] = True
    """Whether `log` gets the worst tensors too, or the values of the whole model only."""
    gauges: ClassVar[bool] = False
    """Whether `log` gets values that are not finite too, so that none stands there that is no longer true."""
    in_worker: bool = False
    """Whether it owns its output, so that it can run in the worker process. It must be picklable then, and importable
    there; a subclass says so again. Any other sink runs in the training process, where the script's own objects are."""
    every: int = 1
    """Steps from one `log` to the next; set it on a sink that should get fewer. Findings come all the same."""

    def begin(self, run: Path) -> None:
        """Called once, on the training thread, at the first step. Must be quick: for what belongs to that thread.

        Args:
            run: The folder the run is kept in.
        """

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """The reading of one step.

        Args:
            metrics: By metric id: ``loss``, ``grad/norm``, ``gsnr`` and so on for the whole model,
                ``tensors/grad/norm/blocks.0.weight`` for one that stands out. Some tens of them, never thousands.
            step: The optimizer step.
        """

    def finding(self, finding: Finding) -> None:
        """A finding that has opened (its `last_step` is None), got worse, or closed."""

    def action(self, action: Action) -> None:
        """An action that a Guard or a schedule took or proposed."""

    def close(self) -> None:
        """The run is over: write what is left."""


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
