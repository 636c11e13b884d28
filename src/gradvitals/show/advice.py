"""What `gradvitals advise` prints: for each setting what to do, how sure that is, and the figures it rests on."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.text import Text

from gradvitals.advise import Advice, Advised, Confidence, Figure
from gradvitals.show.findings import LABEL, Hanging
from gradvitals.show.text import clean

TITLES = {
    "max_grad_norm": "Gradient clipping",
    "batch_size": "Batch size",
    "warmup": "Warmup",
    "decay": "Learning-rate decay",
    "layers": "Layers",
}
STYLES: dict[Confidence, str] = {"good": "green", "fair": "cyan", "low": "yellow", "none": "dim"}


def render_advice(advised: Advised) -> RenderableType:
    """All advice, ready for `rich.console.Console.print`."""
    return Group(*_sections(advised))


def _sections(advised: Advised) -> Iterator[RenderableType]:
    told = sum(advice.can_tell for advice in advised.pieces)
    steps = f"{advised.steps:,} step{'' if advised.steps == 1 else 's'}{' so far' if advised.live else ''}"
    head = f"Advice on {told} of {len(advised.pieces)} settings"
    yield Hanging("", Text.assemble((head, "bold"), f", from {steps}."))
    yield Hanging("", Text(clean(advised.run), style="dim"))
    for advice in advised.pieces:
        yield from (Text(), *_one(advice))


def _one(advice: Advice) -> Iterator[RenderableType]:
    style = "bold" if advice.can_tell else "bold dim"
    yield Text(TITLES.get(advice.topic, advice.topic), style=style)
    yield Hanging("  ", clean(advice.answer))
    if advice.can_tell:
        because = f": {advice.because}" if advice.because else ""
        sure = Text.assemble((advice.confidence, STYLES[advice.confidence]), clean(because))
        yield Hanging("  sure".ljust(LABEL), sure, "bold")
    for i, figure in enumerate(advice.figures):
        yield Hanging(f"  {'' if i else 'seen'}".ljust(LABEL), clean(_with_steps(figure)), "bold")
    for i, note in enumerate(advice.notes):
        yield Hanging(f"  {'' if i else 'note'}".ljust(LABEL), clean(note), "bold")


def _with_steps(figure: Figure) -> str:
    first, last = figure.first_step, figure.last_step
    if first is None or last is None or last <= first:
        return figure.text
    return f"{figure.text}; steps {first:,} to {last:,}"
