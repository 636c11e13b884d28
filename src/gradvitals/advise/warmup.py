"""How long to warm up: when norms and updates settled and a signal showed, and when the rate was at its height."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from gradvitals.advise.advice import Advice, CannotTell, Confidence, Figure, advises_on, rounded_up
from gradvitals.advise.record import Floats, Record
from gradvitals.diagnose.history import fall
from gradvitals.format import number

NAMES = ("steps", "used", "peak_lr", "peak_step", "norms_settled", "updates_settled", "gsnr_seen", "harm")
"""`steps` is the length advised, `used` the one in use, both in steps; the others are what they rest on."""

WINDOW = 20
"""Values whose median is compared with a later one."""
SETTLED = 1.5
"""Factor within which it has to stay."""
FULL = 0.999
"""Share of its highest value from which the learning rate is at its height."""
AVERAGED = 10
"""The fewest readings in a GSNR that shows no signal."""
LONGEST_GUESS = 200
"""The longest warmup advised for a run that shows harm but not how long it takes to settle."""
EARLY = 50
"""Steps at the start that harm is looked for in, or twice as many as the warmup has."""
ROSE = 1.2
"""Times its first value that the loss rose to, as the median of three."""
BEYOND_NOISE = 5.0
"""Standard deviations of the logarithm of single losses that it has to rise by: a first loss may be low by chance."""
SURE = 4.0
"""Standard errors of a median of norms or updates within which it counts as the same."""


class Start(NamedTuple):
    """The start of a run. Steps are counted from its first one; None if unknown."""

    used: int
    peak_lr: float
    norms: int | None
    updates: int | None
    signal: int | None
    """Steps without a GSNR above zero."""
    restless: str
    """Metrics that were read and did not settle."""
    seen: int | None
    """The step at which the GSNR was first known to be above zero."""
    harm: str
    """Problems of the first steps."""


@advises_on("warmup", NAMES)
def advise_warmup(record: Record) -> Advice:
    """Returns how long the learning rate should rise, by how this run began."""
    start = _start(record)
    figures = list(_figures(record, start))
    known = [steps for steps in (start.norms, start.updates, start.signal) if steps is not None]
    if not known:
        raise CannotTell("norms and updates were still changing fast when the run ended", figures)
    steps, answer, confidence, because = _answer(record, start, max(known))
    return Advice(
        answer=answer,
        confidence=confidence,
        because=because,
        values={
            "steps": steps,
            "used": start.used,
            "peak_lr": start.peak_lr,
            "peak_step": record.first_step + start.used,
            "norms_settled": start.norms,
            "updates_settled": start.updates,
            "gsnr_seen": start.seen,
            "harm": start.harm or None,
        },
        figures=figures,
        notes=["This applies to the learning rate of this run; a higher one needs a longer warmup."],
    )


def settled_after(values: Floats) -> int | None:
    """Values after which a series no longer changes fast: what it is after i of them is what it is after 2 i.

    Medians over 20 values, or a quarter of those before, are compared. It has settled where they stay within a factor
    of 1.5 from i on, or of what noise makes of them, up to an eighth of the series: what changes later is no matter of
    the start. None where they do not, or where there are too few values.
    """
    settled: int | None = None
    noise = noise_of(values)
    at = 0
    while at <= len(values) / 8:
        width = max(WINDOW, at // 4)
        later = 2 * at + width
        if later + width > len(values):
            break
        early, late = (float(np.median(values[begin : begin + width])) for begin in (at, later))
        within = max(math.log(SETTLED), SURE * noise * math.sqrt(math.pi / width))  # of two medians' difference
        if not (early > 0 and late > 0 and abs(math.log(early / late)) < within):
            settled = None
        elif settled is None:
            settled = at
        at += max(1, at // 20)
    return settled


def noise_of(values: Floats) -> float:
    """Standard deviation of the logarithm from one value to the next, by their median; 0 for fewer than three.

    >>> round(noise_of(np.exp(np.random.default_rng(0).normal(size=10_000))), 1)
    1.0
    """
    changes = np.diff(np.log(values[values > 0]))
    return float(np.median(np.abs(changes))) / 0.6745 / math.sqrt(2) if len(changes) > 1 else 0.0


def _start(record: Record) -> Start:
    if record.first_step > 0:
        raise CannotTell(f"the record starts at step {record.first_step:,} and does not show how training started")
    if not len(record.lr):
        raise CannotTell("the run has no learning rate")
    if len(record.norms) < 4 * WINDOW:
        raise CannotTell(f"it needs {4 * WINDOW:,} steps, and the run has {len(record.norms):,}")
    if record.lr.values.max() <= 0:
        raise CannotTell("the learning rate is zero")
    peak, first = float(record.lr.values.max()), float(record.lr.values[0])
    # A warmup that begins at peak / n is at its height in its n-th step.
    used = int(np.argmax(record.lr.values >= FULL * peak)) + int(first > 0) if first < 0.9 * peak else 0
    if used > 0.9 * len(record.lr):
        raise CannotTell("the learning rate was still rising when the run ended")
    moves = record.series("update/rms")
    rates = record.lr.at(moves.steps)
    with np.errstate(divide="ignore", invalid="ignore"):
        per_rate = moves.values / rates  # the change itself follows the learning rate
    signal, seen = _signal(record)
    norms = settled_after(record.norms.values)
    usable = per_rate[np.isfinite(per_rate) & (per_rate > 0)]
    updates = settled_after(usable)
    restless = ["norms"] if norms is None else []
    restless += ["updates"] if updates is None and len(usable) >= 4 * WINDOW else []
    return Start(used, peak, norms, updates, signal, " and ".join(restless), seen, _harm(record, used))


def _signal(record: Record) -> tuple[int | None, int | None]:
    """Steps at the start that had no signal, and the step by which there was one."""
    looked = [average for average in record.averages if average.count >= AVERAGED and math.isfinite(average.low)]
    first = next((average for average in looked if average.low > 0), None)
    if first is None or first.begins > record.last_step / 2:
        return None, None
    # An interval that includes zero shows nothing; one that ends below all of a later one shows less signal.
    later = max((average.low for average in looked if average.established), default=-math.inf)
    silent = [average.step for average in looked if average.step < first.step and average.high < later]
    return (silent[-1] if silent else 0), first.step


def _harm(record: Record, used: int) -> str:
    """Returns what went wrong in the first steps; empty if nothing did."""
    until = max(EARLY, 2 * used)
    early = ("warmup_needed", "explosion", "loss_nonfinite", "nonfinite", "near_zero_initial_gsnr")
    for finding in record.findings:
        if finding.id in early and finding.severity != "info" and finding.first_step < until:
            # One bad batch comes with any learning rate.
            lasted = finding.last_step is None or finding.last_step - finding.first_step > 2
            if finding.id != "explosion" or lasted:
                return f"{finding.title} (step {finding.first_step:,}, {finding.id})"
    losses = record.loss.chosen(record.loss.steps < until).values
    if len(losses) >= 10 and losses[0] > 0:
        highest = float(np.max(np.median(np.lib.stride_tricks.sliding_window_view(losses, 3), axis=1)))
        # The harm itself may have made the first losses swing: the later ones show their noise then.
        noise = min(noise_of(losses), noise_of(record.loss.since(record.last_step / 2).values))
        if highest > losses[0] * max(ROSE, math.exp(BEYOND_NOISE * noise)):
            return f"the loss rose from {number(float(losses[0]))} to {number(highest)}"
    return ""


def _answer(record: Record, start: Start, settled: int) -> tuple[int, str, Confidence, str]:
    """Returns the steps advised, the answer, the confidence and its reason."""
    used, single = start.used, "based on one run at one learning rate"
    if start.harm:
        guess = min(LONGEST_GUESS, max(WINDOW, record.num_steps // 10))
        steps = round(rounded_up(max(settled, 2 * used, guess)))
        now = f"instead of {used:,}" if used else "where there was none"
        because = "a warmup is needed, but its length is a guess: a tenth of the run" if steps == guess else single
        confidence: Confidence = "fair"
        fell, error = fall(record.loss.chosen(record.loss.steps < max(EARLY, 2 * used)).values)
        if used >= record.num_steps // 10:
            confidence, because = "low", "the warmup is already a tenth of the run and did not prevent the harm"
        elif fell > 2 * error:
            confidence, because = "low", "the loss fell in the meantime"
        return steps, f"Warm up for about {steps:,} steps {now}: the first steps did harm.", confidence, because
    kept = f"Keep the warmup of {used:,} steps" if used else "No warmup needed"
    if start.restless:
        because = f"{start.restless} still changed fast after an eighth of the run"
        return used, f"{kept}: nothing went wrong in the first steps.", "low", because
    if settled <= used:
        answer = f"{kept}: the start was calm, and everything had settled by step {settled:,}."
        return used, answer, "fair" if used else "low", single
    if settled <= WINDOW:
        text = f"A warmup of {used:,} steps is" if used else "No warmup is"
        answer = f"{text} enough, as far as this run shows: everything settled within {settled} steps."
        return used, answer, "low", single
    until_settled = record.first_step + settled + WINDOW
    fell, error = fall(record.loss.chosen(record.loss.steps < until_settled).values)
    if fell > 2 * error:
        answer = f"{kept}: everything settled only by step {settled:,}, but the loss fell in the meantime."
        return used, answer, "low", single
    steps = round(rounded_up(settled))
    answer = (
        f"A longer warmup of about {steps:,} steps may help: the learning rate peaked after {used:,} steps, and "
        f"everything settled only after {settled:,}, while the loss did not fall."
    )
    return steps, answer, "low", f"late settling does not prove harm, and {single}"


def _figures(record: Record, start: Start) -> Iterator[Figure]:
    first, begun = record.first_step, float(record.lr.values[0])
    text = f"the learning rate started at its peak of {number(begun)}"
    if start.used:
        text = f"the learning rate rose from {number(begun)} to {number(start.peak_lr)} over {start.used:,} steps"
    rise = {"first": begun, "peak": start.peak_lr, "steps": start.used}
    yield Figure(text=text, values=rise, first_step=first, last_step=first + start.used)
    for name, what, at in (
        ("norms_settled", "the gradient norm", start.norms),
        ("updates_settled", "the size of updates over the learning rate", start.updates),
    ):
        when = f"had settled by step {first + at:,}" if at is not None else "is not known to have settled"
        yield Figure(text=f"{what} {when}", values={name: at})
    if start.seen is not None:
        late = f", and far lower up to step {start.signal:,}" if start.signal else ""
        text = f"the whole interval of the GSNR was above zero by step {start.seen:,}{late}"
        yield Figure(text=text, values={"gsnr_seen": start.seen, "no_signal_until": start.signal})
    calm = "nothing went wrong in the first steps" if len(record.loss) else "the run has no loss that could show harm"
    yield Figure(text=start.harm or calm, values={"harm": bool(start.harm)}, first_step=first)
