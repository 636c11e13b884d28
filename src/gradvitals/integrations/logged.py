"""What callbacks put into a framework's own logs, where asked for."""

from __future__ import annotations

import math

from gradvitals.monitor import Monitor

LOGGED = ("grad/norm", "gsnr", "noise_scale", "update/rms")


def newest(monitor: Monitor) -> dict[str, float]:
    """The newest of these values, as ``gradvitals/...``; what is not known or not finite is left out."""
    latest = monitor.latest
    return {f"gradvitals/{name}": latest[name] for name in LOGGED if math.isfinite(latest.get(name, math.nan))}
