"""Errors that a caller can catch. Each says what was given, what was expected and what to do."""


class GradvitalsError(Exception):
    """Base of every error gradvitals raises on purpose."""


class RunError(GradvitalsError):
    """A run could not be opened or read."""


class RunNotFoundError(RunError):
    """There is no run at the given path."""


class RunFormatError(RunError):
    """The file is there but is not a run this version can read."""


class ConfigError(GradvitalsError, ValueError):
    """A setting is out of range."""


class MissingExtraError(GradvitalsError, ImportError):
    """A package that is only needed for this is not installed."""


def expect(fine: bool, name: str, given: object, expected: str) -> None:
    """Raise a `ConfigError` that names the setting, unless it is fine."""
    if not fine:
        raise ConfigError(f"{name} is {given!r}; expected {expected}")


class LoopError(GradvitalsError):
    """Something about the training loop that is told once, as a finding, and never raised into training."""


class ObserveError(LoopError, TypeError):
    """An argument of `Monitor.observe` cannot be used."""


class NoStepError(LoopError):
    """The loop gives up one batch after the other, and the optimizer makes no steps."""

    def __init__(self, batches: int) -> None:
        super().__init__(f"the optimizer makes no steps any more: the last {batches} batches were given up")
        self.batches = batches


class ClippedTwiceError(LoopError):
    """The loop clips gradients and the optimizer does so again."""

    def __init__(self, loop: float, optimizer: float) -> None:
        super().__init__(
            f"gradients are clipped twice: to {loop:g} by the loop, then to {optimizer:g} by the optimizer; the lower, "
            f"{min(loop, optimizer):g}, rules"
        )
        self.loop, self.optimizer = loop, optimizer
