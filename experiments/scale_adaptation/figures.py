"""The figures as stand-alone SVG files: three that the reference note captions, and three of the language models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.figures import Panel, Trace, draw
from experiments.scale_adaptation.adaptation import ADAPTS, TensorRow, balanced_accuracy, best_threshold, gains, roc
from experiments.scale_adaptation.run import Results
from experiments.scale_adaptation.simulation import SimRow

SHAPES = ("matrix", "vector", "scalar", "multiplier")
OPTIMIZERS = {"sgd": "SGD", "adamw": "AdamW"}


def draw_figures(results: Results, folder: Path) -> list[Path]:
    """Write every figure that there is something for. Returns where they are."""
    figures: dict[str, tuple[list[Panel], str]] = {}
    if results.simulation:
        rows = [row for row in results.simulation if (row.case.noise, row.case.target) == ("iid", "aligned")]
        most = max((row.seed for row in rows if row.case.shape == "matrix"), default=0)
        few = [row for row in rows if row.seed <= most]  # as many of each shape
        figures |= {
            "1_predictor": (_predictor(few), "GSNR as predictor of scale adaptation"),
            "2_noise_levels": (_levels(rows), "GSNR and scale adaptation across noise levels"),
            "3_classifier": (_classifier(few), "Threshold classification by GSNR"),
        }
    if results.adaptation:
        figures |= {
            "4_language_models": (_language(results.adaptation), "Tensors of language models"),
            "5_indicators": (_indicators(results.adaptation), "What tells which tensors adapt"),
        }
    if results.cure:
        figures["6_multipliers"] = (_cure(results), "Loss with and without multipliers")
    folder.mkdir(parents=True, exist_ok=True)
    for name, (panels, title) in figures.items():
        draw(panels, title, folder / f"{name}.svg")
    return [folder / f"{name}.svg" for name in figures]


def _by(rows: Sequence[SimRow], optimizer: str) -> dict[str, list[SimRow]]:
    mine = [row for row in rows if row.case.optimizer == optimizer]
    found = {shape: [row for row in mine if row.case.shape == shape] for shape in SHAPES}
    return {shape: some for shape, some in found.items() if some}


def _predictor(rows: Sequence[SimRow]) -> list[Panel]:
    panels = []
    for optimizer, name in OPTIMIZERS.items():
        groups = {shape: some for shape, some in _by(rows, optimizer).items() if shape != "multiplier"}
        every = [row for some in groups.values() for row in some]
        scores, labels = np.array([r.gsnr for r in every]), np.array([r.elasticity > ADAPTS for r in every])
        panel = Panel(title=name, x_name="GSNR", y_name="elasticity", x_log=True)
        panel.x_marks, panel.y_marks = [best_threshold(scores, labels)], [ADAPTS]
        for shape, some in groups.items():
            x, y = [row.gsnr for row in some], [min(max(row.elasticity, -0.2), 1.5) for row in some]
            panel.traces.append(Trace(name=shape, x=x, y=y, color=SHAPES.index(shape)))
        panels.append(panel)
    return panels


def _levels(rows: Sequence[SimRow]) -> list[Panel]:
    left = Panel(title="GSNR", x_name="noise level", y_name="GSNR", x_log=True, y_log=True)
    panels = [left]
    for optimizer, name in OPTIMIZERS.items():
        panel = Panel(title=f"Adaptation, {name}", x_name="noise level", y_name="elasticity", x_log=True)
        for shape, some in _by(rows, optimizer).items():
            levels = sorted({row.noise_level for row in some})
            color = SHAPES.index(shape)
            middle = [float(np.median([r.elasticity for r in some if r.noise_level == level])) for level in levels]
            panel.traces.append(Trace(name=shape, x=levels, y=middle, line=True, color=color))
            if optimizer == "sgd":
                gsnr = [float(np.median([r.gsnr for r in some if r.noise_level == level])) for level in levels]
                left.traces.append(Trace(name=shape, x=levels, y=gsnr, line=True, color=color))
        panel.y_marks = [ADAPTS]
        panels.append(panel)
    return panels


def _classifier(rows: Sequence[SimRow]) -> list[Panel]:
    accuracy = Panel(title="Accuracy", x_name="threshold of GSNR", y_name="balanced accuracy", x_log=True)
    curve = Panel(title="ROC", x_name="false alarms", y_name="found")
    for place, (optimizer, name) in enumerate(OPTIMIZERS.items()):
        some = [row for row in rows if row.case.optimizer == optimizer and row.case.shape != "multiplier"]
        scores, labels = np.array([r.gsnr for r in some]), np.array([r.elasticity > ADAPTS for r in some])
        thresholds = np.geomspace(1e-4, 1e6, 120)
        told = [balanced_accuracy(scores, labels, float(threshold)) for threshold in thresholds]
        accuracy.traces.append(Trace(name=name, x=thresholds.tolist(), y=told, line=True, color=place))
        false, true = roc(scores, labels)
        curve.traces.append(Trace(name=name, x=false.tolist(), y=true.tolist(), line=True, color=place))
    return [accuracy, curve]


def _roles(rows: Sequence[TensorRow], x: str, y: str, panel: Panel) -> Panel:
    for color, role in enumerate(("matrix", "vector", "scalar")):
        some = [row for row in rows if row.role == role]
        if some:
            trace = Trace(name=role, x=[getattr(r, x) for r in some], y=[getattr(r, y) for r in some], color=color)
            panel.traces.append(trace)
    return panel


def _language(rows: Sequence[TensorRow]) -> list[Panel]:
    sizes = Panel(title="Size against pure noise", x_name="RMS by noise", y_name="RMS", x_log=True, y_log=True)
    ends = [min(row.noise_rms for row in rows), max(row.noise_rms for row in rows)]
    sizes.traces.append(Trace(name="", x=ends, y=ends, line=True, color=5))
    follow = Panel(title="Who follows", x_name="norm over that of noise", y_name="elasticity", x_log=True)
    follow.x_marks, follow.y_marks = [1.0], [ADAPTS]
    return [_roles(rows, "noise_rms", "rms", sizes), _roles(rows, "norm_ratio", "elasticity", follow)]


def _indicators(rows: Sequence[TensorRow]) -> list[Panel]:
    named = {"gsnr": "GSNR", "radial_gsnr": "radial GSNR", "adam_gsnr": "debiased Adam proxy"}
    return [
        _roles(rows, x, "elasticity", Panel(title=name, x_name=name, y_name="elasticity", x_log=True, y_marks=[ADAPTS]))
        for x, name in named.items()
    ]


def _cure(results: Results) -> list[Panel]:
    found = gains(results.cure)
    panels = []
    for lr in dict.fromkeys(gain.lr for gain in found):
        panel = Panel(title=f"learning rate {lr:g}", x_name="weight decay", y_name="loss, nats a byte", x_log=True)
        for color, arm in enumerate(dict.fromkeys(gain.arm for gain in found)):
            mine = [gain for gain in found if (gain.arm, gain.lr) == (arm, lr)]
            x, y = [gain.decay for gain in mine], [gain.loss for gain in mine]
            panel.traces.append(Trace(name=arm, x=x, y=y, line=True, color=color))
        panels.append(panel)
    return panels
