"""Sink: where readings and findings go besides the run's own file. Write one in ten lines."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

from gradvitals.errors import MissingExtraError
from gradvitals.types import SEVERITIES, Action, Finding


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
    An error is told once, as a finding, and the sink is left out from then on. Of several ranks only the first feeds
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
        """What one step showed.

        Args:
            metrics: By metric id: ``loss``, ``grad/norm``, ``gsnr`` and so on for the whole model,
                ``tensors/grad/norm/blocks.0.weight`` for one that stands out. Some tens of them, never thousands.
            step: The optimizer step.
        """

    def finding(self, finding: Finding) -> None:
        """A finding that has opened (its `last_step` is None), got worse, or closed."""

    def action(self, action: Action) -> None:
        """What a Guard or a schedule did, or would have done."""

    def close(self) -> None:
        """The run is over: write what is left."""


class TrackerSink(Sink):
    """A sink for a tracker of runs: logs to the run that the script has started, or else to one of its own.

    Args:
        project: Project of a run of its own, "gradvitals" unless given.
        prefix: Put before every key, so that it is none of the script's.
        alerts: Whether warnings and critical findings become alerts.
        settings: More arguments for a run of its own.
    """

    def __init__(self, project: str | None, prefix: str, alerts: bool, settings: Mapping[str, Any] | None) -> None:
        self._project = project or "gradvitals"
        self._prefix = prefix
        self._alerts = alerts
        self._settings = dict(settings or {})
        self._name: str | None = None
        self._is_own = False
        self._run: Any = None
        self._openings = Openings()

    def __repr__(self) -> str:
        return f"{type(self).__name__}(project={self._project!r})"

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder, for a run of its own."""
        self._name = run.name

    def close(self) -> None:
        """Finish a run of its own; the script's is left to the script."""
        if self._run is not None and self._is_own:
            self._run.finish()

    def _is_alert(self, finding: Finding) -> bool:
        return self._alerts and finding.severity != "info" and self._openings.opens(finding)


class GaugeSink(Sink):
    """A sink of gauges, which hold the latest values of the whole model.

    Values of single tensors are not exported: every tensor would be a time series of its own.
    """

    tensors: ClassVar[bool] = False
    gauges: ClassVar[bool] = True

    def __init__(self) -> None:
        self._run = ""
        self._gauges: dict[str, Any] = {}
        self._open: dict[str, dict[tuple[int | None, int], str]] = {}

    def _set(self, key: str, value: float, **labels: str) -> None:
        """Set one gauge of the run."""
        raise NotImplementedError

    def begin(self, run: Path) -> None:
        """Keep the name of the run's folder, with which every value is labeled."""
        self._run = run.name

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Set every gauge."""
        for key, value in {**metrics, "step": step}.items():
            self._set(key, value)

    def finding(self, finding: Finding) -> None:
        """Set the gauges of its id: how many are open, by severity.

        A finding that gets worse or closes leaves what it was counted as before.
        """
        of_id = self._open.setdefault(finding.id, {})
        key = (finding.rank, finding.first_step)
        if finding.last_step is None:
            of_id[key] = finding.severity
        else:
            of_id.pop(key, None)
        for severity in SEVERITIES:
            count = list(of_id.values()).count(severity)
            self._set("finding/open", count, id=finding.id, severity=severity)


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
