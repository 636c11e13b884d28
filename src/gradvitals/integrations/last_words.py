"""What a framework's own loop leaves unsaid at its end: how the run did, and where it is kept."""

from __future__ import annotations

from gradvitals.integrations.verdicts import verdicts
from gradvitals.judge import say
from gradvitals.monitor import Monitor


def say_last_words(monitor: Monitor) -> None:
    """Say on stderr how a run that is closed did; of several ranks one says it. A `Config(quiet=True)` keeps silent."""
    if monitor.config.quiet or not monitor.speaks or not monitor.run_path.exists():
        return
    try:
        lines = list(verdicts({monitor.run_path: ""}))
    except Exception as error:  # a disk that is full, say: it must not end the program
        lines = [f"the run could not be judged: {error!r}"]
    for line in lines:
        say(line, quiet=False)
