"""The catalog of findings, built from the rules and their texts: for the terminal, JSON and the docs' page per rule."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterable
from dataclasses import MISSING, dataclass, fields
from difflib import get_close_matches
from functools import cache
from itertools import pairwise
from typing import Any

from gradvitals.diagnose import FAMILIES, RULES, Rule
from gradvitals.diagnose.rule import NEVER
from gradvitals.errors import GradvitalsError
from gradvitals.types import SEVERITIES, Severity

PLACEHOLDER = re.compile(r"\{(\w+)[^{}]*\}")
OTHERS = "others"
"""Family of rules that users registered."""
NOTICE = "Notices"
"""Family of findings that no rule makes."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One threshold of a rule."""

    name: str
    default: Any
    text: str


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Everything there is to know about one kind of finding."""

    id: str
    family: str
    name: str
    pattern: str
    """When it fires."""
    causes: tuple[str, ...] = ()
    """Likely causes, the commonest first."""
    fixes: tuple[str, ...] = ()
    """What to do, the first thing to try first."""
    severities: tuple[Severity, ...] = ()
    """Those that the rule's source names."""
    passed: str = ""
    """What holds if the check passed."""
    reference: str = ""
    needs: tuple[str, ...] = ()
    min_steps: int = 0
    closes_after: int = 0
    settings: tuple[Setting, ...] = ()
    default: bool = True
    """Whether the rule is on by default."""

    @property
    def conditions(self) -> str:
        """Severity, the data it needs, and from when on it looks, in a few sentences."""
        severity = f"Severity: {_listed(self.severities, 'or')}. " if self.severities else ""
        if self.family == NOTICE:
            return f"{severity}Not found by a rule: gradvitals reports it when it happens."
        start = f" Silent for the first {self.min_steps:,} steps." if self.min_steps else ""
        end = f" Resolves after {self.closes_after:,} clean step{'' if self.closes_after == 1 else 's'}."
        end = end if self.closes_after < NEVER else " Stays open until the run ends."
        parts = (needed.split(":") for needed in self.needs)
        needs = _listed((f"`{metric}`" + "".join(f" of {part}" for part in of) for *of, metric in parts), "and")
        return f"{severity}Needs {needs}.{start}{end}"

    def to_json(self) -> dict[str, Any]:
        """Returns the entry as plain JSON values."""
        own = {f.name: getattr(self, f.name) for f in fields(self)}
        return {**own, "settings": {s.name: {"default": s.default, "text": s.text} for s in self.settings}}


def _notice(
    name: str,
    title: str,
    severities: tuple[Severity, ...],
    pattern: str,
    causes: tuple[str, ...],
    fixes: tuple[str, ...],
) -> Entry:
    return Entry(id=name, family=NOTICE, name=title, severities=severities, pattern=pattern, causes=causes, fixes=fixes)


# fmt: off
_NOTICES = (
    _notice("training_stopped", "Training stopped", ("info", "critical"),
        "The training loop ended with an exception or was stopped manually. Recorded when a `with` block ends or the "
        "program exits.",
        causes=("the error in its title; manually means Ctrl-C or sys.exit",),
        fixes=("look at earlier findings: a NaN, a spike, a lost rank",)),
    _notice("run_cut_off", "Run cut off", ("warning",),
        "The run was not closed, and its process is gone. Found when the run is read, because a killed process "
        "cannot report it.",
        causes=(
            "the process was killed: out of memory, a scheduler's time limit, kill -9, or the machine went down",
            "the files were copied while the run was active, or the disk is full and nothing more can be written",
        ),
        fixes=(
            "check the end of its output and the log of the system or scheduler for what killed it",
            "restart from the last checkpoint with watch(..., resume=True), which continues the record",
        )),
    _notice("ranks_lost", "Ranks lost", ("critical",),
        "Other ranks stopped responding, so their readings are missing from then on.",
        causes=("a process died or hangs", "the network between hosts is down", "ranks take different steps"),
        fixes=("look at the output of the missing rank", "under torchrun, let it restart all ranks")),
    _notice("source_unavailable", "Source not available", ("info",),
        "A source of GSNR, or another measurement that was requested, is not available in this run.",
        causes=(
            "no micro-batches, one process, or an optimizer without Adam-like moments",
            "overhead_budget with several ranks: all must read the same steps",
        ),
        fixes=(
            "no action needed if another source is available; otherwise see the documentation for what each source "
            "needs",
        )),
    _notice("readings_thinned", "Readings thinned", ("info",),
        "Monitoring exceeded Config.overhead_budget (2% of the step time by default on a CPU), so gradvitals reads "
        "tensors less often or skips steps.",
        causes=("the model has many small tensors, or steps are very short",),
        fixes=("raise overhead_budget (1 removes the limit), or choose fewer metrics",)),
    _notice("monitor_error", "Internal error", ("warning",),
        "A part of gradvitals, or a rule, raised an error and is disabled from then on. Training continues.",
        causes=("a bug in gradvitals or in one of your own rules", "an unsupported model or optimizer"),
        fixes=("run `gradvitals report --json` for the traceback; unless the rule is yours, please report it",)),
    _notice("observe_ignored", "Observed value is not a loss", ("warning",),
        "Monitor.observe received something other than a tensor or a number. gradvitals ignores that call; training "
        "continues, and later calls count.",
        causes=("the loop passed a string, a list or a whole model output instead of the loss",),
        fixes=("call monitor.observe(loss), or monitor.observe(loss, batch_size=len(inputs))",)),
    _notice("no_steps", "No steps", ("critical",),
        "The loop continues but skips every batch, so the optimizer takes no more steps.",
        causes=(
            "the loop skips batches that are NaN or infinite, and now all of them are: the weights are NaN or Inf",
        ),
        fixes=("stop, and restore a checkpoint from before the first skipped batch; gv.Guard can do that",)),
    _notice("optimizer_remade", "Optimizer created at every step", ("critical",),
        "The script creates a new optimizer for the same weights at nearly every step. `gradvitals run` then stops "
        "watching them.",
        causes=(
            "the optimizer is created inside the training loop, so momentum and moments start from zero every time",
        ),
        fixes=("create the optimizer once, before the training loop",)),
    _notice("optimizers_overlap", "Two optimizers, same weights", ("critical",),
        "Two optimizers step the same weights in turn, and one of them holds all that the other has.",
        causes=(
            "an optimizer was built from the parameters of another model too, as if a discriminator's optimizer held "
            "the generator: each undoes the other's steps",
        ),
        fixes=("give each optimizer the parameters of its own model only",)),
    _notice("evaluated_in_training_mode", "Evaluated in training mode", ("warning",),
        "The script calls the model under torch.no_grad() while dropout or batch norm are in training mode, not at "
        "every step, and never calls model.eval(). Found when the run is closed.",
        causes=(
            "without model.eval() the model drops activations or normalizes by the statistics of the batch, so that "
            "validation looks worse than it is",
        ),
        fixes=("call model.eval() before each evaluation, and model.train() after it",)),
    _notice("plateau_mode", "ReduceLROnPlateau in the wrong mode", ("warning",),
        "ReduceLROnPlateau lowered the learning rate twice or more because its metric improved. Found when the run is "
        "closed.",
        causes=("mode='max' takes every fall of a loss for a plateau, and mode='min' every rise of an accuracy",),
        fixes=("create it with mode='min' for a loss, and mode='max' for an accuracy",)),
    _notice("clipped_twice", "Clipped twice", ("info",),
        "The loop clips gradients, and an optimizer with max_norm clips them again. The lower limit wins.",
        causes=("the loop calls clip_grad_norm_, and the optimizer has max_norm set",),
        fixes=("remove one of them: the higher limit changes nothing; `gradvitals advise` suggests a limit",)),
    _notice("store_error", "Run cannot be written", ("warning",),
        "gradvitals could not write readings. Training continues, and gradvitals keeps trying.",
        causes=("the disk is full, the folder is not writable, or the file was damaged",),
        fixes=("free space, or pass another folder as run=...",)),
    _notice("sink_error", "Sink or alert failed", ("info", "warning"),
        "A sink (TensorBoard, W&B and the like) or an alert failed, or was too slow for the run. Training continues, "
        "and the run's own folder has everything.",
        causes=(
            "the network or the service is down, a disk is full, or settings are wrong",
            "the sink takes longer than a training step",
        ),
        fixes=("check the error in its title; a failed sink stays off for this run, but later alerts are still sent",)),
    _notice("rank_lr_differs", "Learning rates differ", ("critical",),
        "A rank uses a different learning rate than the first one.",
        causes=("the rank builds its optimizer or schedule from different settings",),
        fixes=("build optimizer and schedule the same way on every rank",)),
    _notice("guard_error", "Guard stopped", ("warning", "critical"),
        "The Guard stopped, gave up on a run, or does not see the steps of an optimizer.",
        causes=(
            "an error inside gradvitals",
            "the weights were broken before the first step, or every batch makes the loss NaN",
            "gradients are computed inside optimizer.step(closure)",
        ),
        fixes=(
            "look at the data and the loss of the first step",
            "call backward before optimizer.step(), without a closure",
        )),
    _notice("snapshot_error", "Snapshot not saved", ("warning",),
        "The Guard could not write a snapshot; it keeps trying.",
        causes=("the folder is missing, full or not writable",),
        fixes=("free space, or give the Guard another folder",)),
)
# fmt: on
NOTICES: dict[str, Entry] = {notice.id: notice for notice in _NOTICES}
"""Findings that no rule makes: how a run ended, and what gradvitals reports about itself."""


def entries() -> list[Entry]:
    """Returns every registered rule, family by family."""
    order = [*FAMILIES, OTHERS]
    return sorted((entry(name) for name in RULES), key=lambda found: order.index(found.family))


def entry(name: str) -> Entry:
    """Returns the entry of a rule or notice.

    Raises:
        GradvitalsError: If there is no such id.
    """
    if name in NOTICES:
        return NOTICES[name]
    if name not in RULES:
        known = [*RULES, *NOTICES]
        asked = name.lower().replace(" ", "_").replace("-", "_")
        close = [other for other in known if asked in other] or get_close_matches(asked, known)
        meant = f"; did you mean {' or '.join(close[:3])}?" if close else ""
        raise GradvitalsError(
            f"there is no rule {name!r}{meant}; `gradvitals doctor --rules` lists all rules; other findings: "
            f"{', '.join(NOTICES)}"
        )
    rule = RULES[name]
    words = rule.message
    return Entry(
        id=name,
        family=rule.family,
        name=words.name if words else name,
        pattern=without_numbers(words.pattern if words else inspect.getdoc(rule) or ""),
        causes=tuple(map(without_numbers, words.causes.values())) if words else (),
        fixes=tuple(without_numbers(fix) for fix in words.fixes.values()) if words else (),
        severities=_severities(rule),
        passed=words.passed if words else "",
        reference=words.reference if words else "",
        needs=rule.needs,
        min_steps=rule.min_steps,
        closes_after=rule.closes_after,
        settings=_settings(rule),
        default=rule.default,
    )


def name_of(finding_id: str) -> str:
    """Returns the name of a kind of finding; the id itself if it has none."""
    if finding_id in NOTICES:
        return NOTICES[finding_id].name
    message = RULES[finding_id].message if finding_id in RULES else None
    return finding_id if message is None else message.name


def passed_text(rule: str) -> str:
    """Returns what holds if the check of a rule passed."""
    message = RULES[rule].message
    return (message.passed if message else "") or f"no sign of: {name_of(rule)}"


NAMED = {
    "first": "the tensor", "where": "the tensors", "layer": "that layer", "who": "one rank", "what": "values",
    "unread": "The steps before it were", "known_loss": "", "instead": "", "activation": "bounded activation",
    "given": "something else", "noise": "the noise scale", "dtype": "adjacent", "twin": "M",
}  # fmt: skip
"""What stands in a text for a name of a run, and how it reads about no run in particular."""
LOSS_FUNCTION = re.compile(r"\{loss\}(?= (?:applies|expects))|(?<=before )\{loss\}")
ASIDE = re.compile(r" \((?!\{)[^()]*\{\w+[^{}]*\}[^()]*\)")
SETTINGS = r"\{(?:lr|max_norm|limit|clips_at|weight_decay|decay_|momentum|dropout|peak_lr)\w*\}"
CHANGE = re.compile(
    r"\b([Tt]he (?:learning rate|weight decay|limit)(?: back)?|momentum|dropout)"
    rf"(?: (?:of|from|to about|to) {SETTINGS})+"
)
"""Phrases that only name numbers of a run."""


def without_numbers(text: str) -> str:
    """Returns a text of a rule about no run in particular: settings without their values, and N for other numbers.

    >>> without_numbers("Lower the learning rate from {lr} to about {lr_proposed}")
    'Lower the learning rate'
    >>> without_numbers("Restore a checkpoint from before step {safe}; reset {first}")
    'Restore a checkpoint from before step N; reset the tensor'
    """
    text = LOSS_FUNCTION.sub("the loss", CHANGE.sub(r"\1", ASIDE.sub("", text)))
    text = PLACEHOLDER.sub(lambda match: NAMED.get(match[1], "N%" if match[0].endswith(":%}") else "N"), text)
    is_code = text.startswith(("optimizer.", "requires_grad", "zero_grad", "nll_loss"))
    return text if is_code else text[:1].upper() + text[1:]


def _listed(words: Iterable[str], last: str) -> str:
    *head, tail = words
    return f"{', '.join(head)} {last} {tail}" if head else tail


# -- read from the source of a rule ------------------------------------------------------------------------------


def _settings(rule: type[Rule]) -> tuple[Setting, ...]:
    texts: dict[str, str] = {}
    for above, below in (pair for base in reversed(rule.__mro__) for pair in pairwise(_body(base))):
        if isinstance(above, ast.AnnAssign) and isinstance(above.target, ast.Name) and isinstance(below, ast.Expr):
            value = below.value  # the string under a field, which Python keeps in the source alone
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                texts[above.target.id] = " ".join(value.value.split())
    chosen = (f for f in fields(rule) if f.init)  # type: ignore[arg-type]
    found = []
    for f in chosen:
        default = getattr(rule, f.name, None) if f.default_factory is MISSING else f.default_factory()
        found.append(Setting(name=f.name, default=default, text=texts.get(f.name, "")))
    return tuple(found)


def _severities(rule: type[Rule]) -> tuple[Severity, ...]:
    named: set[object] = set()
    for base in rule.__mro__:
        if issubclass(base, Rule) and base is not Rule:
            body = _body(base)  # type: ignore[arg-type]  # a class has a hash, whatever its instances have
            named |= {node.value for part in body for node in ast.walk(part) if isinstance(node, ast.Constant)}
    return tuple(severity for severity in SEVERITIES if severity in named)


@cache
def _body(cls: type) -> list[ast.stmt]:
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError, SyntaxError):  # defined at a prompt, or built in
        return []
    found = tree.body[0]
    return found.body if isinstance(found, ast.ClassDef) else []
