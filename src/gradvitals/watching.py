"""watch(): the one line that puts a Monitor, and a Guard where one is wanted, into a training script."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import nn

from gradvitals.alerts import Alert
from gradvitals.config import Config
from gradvitals.guard import Guard
from gradvitals.judge import say
from gradvitals.monitor import Monitor
from gradvitals.show.last_words import verdicts
from gradvitals.sinks import Sink
from gradvitals.types import Reading


def watch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    run: str | Path | None = None,
    config: Config | None = None,
    batch_size: float | None = None,
    resume: bool = False,
    on_reading: Callable[[Reading], object] | None = None,
    guard: Guard | None = None,
    group: Any = None,
    sinks: Sequence[Sink | str] = (),
    alerts: Sequence[Alert | str] = (),
) -> Monitor:
    """Watch a training run.

    Args:
        model: The model being trained.
        optimizer: The optimizer, or all of them, that step it.
        run: Folder to keep the run in. If a run is there already, the next free name is taken (``gpt-2``) and
            said. None takes ``runs/<date and time>``.
        config: Settings; the defaults are meant to be left alone.
        batch_size: Samples per optimizer step of this process, over all micro-batches. With it, the noise scale is in
            samples.
        resume: Continue the record in `run` rather than start a new one. A Monitor that loads a saved state does so
            by itself.
        on_reading: Called with every `Reading` as it is finished, on a thread of its own and a moment after its step.
        guard: A `Guard` that may act on what is seen. Without one nothing is ever changed.
        group: Under torch.distributed, the process group that trains this model; None for all processes. Every one of
            them must call `watch`. The first one keeps the run.
        sinks: Where readings and findings go besides the run's folder: `gradvitals.sinks`, or their texts such as
            ``"tensorboard:logs"``. A sink that fails is left out, with a finding.
        alerts: Who is told findings: `gradvitals.alerts`, or their texts such as the URL of a webhook.

    Returns:
        The Monitor. Without a Guard, training goes on exactly as it would without it. When it is closed, or the program
        ends, it says the verdict on stderr, unless `Config(quiet=True)`.

    Example:
        >>> import tempfile, torch, gradvitals as gv
        >>> model = torch.nn.Linear(4, 1)
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with gv.watch(model, optimizer, run=tempfile.mkdtemp() + "/first") as monitor:
        ...     for _ in range(3):
        ...         loss = model(torch.ones(8, 4)).square().mean()
        ...         optimizer.zero_grad()
        ...         loss.backward()
        ...         monitor.observe(loss)
        ...         optimizer.step()
        >>> steps, norms = gv.open_run(monitor.run_path).series("grad/norm")
        >>> steps.tolist()
        [0, 1, 2]
    """
    if guard is not None and not isinstance(guard, Guard):
        raise TypeError(f"watch got {guard!r} as guard; expected a gradvitals.Guard, such as Guard(mode='act')")
    monitor = Monitor(
        model,
        optimizer,
        run=run,
        config=config,
        batch_size=batch_size,
        resume=resume,
        on_reading=on_reading,
        group=group,
        sinks=sinks,
        alerts=alerts,
    )
    monitor.when_closed(say_last_words)
    if guard is not None:
        guard.attach(monitor)
    return monitor


def say_last_words(monitor: Monitor) -> None:
    """Say on stderr how a run that is closed did; of several ranks one says it. A `Config(quiet=True)` keeps silent."""
    config = monitor.config
    if config.quiet or not config.diagnose or not monitor.step or not monitor.speaks or not monitor.run_path.exists():
        return
    with suppress(Exception):  # a disk that is full, say, or a stderr that is gone: it must not end the program
        for line in verdicts({monitor.run_path: ""}):
            say(line, quiet=False)
