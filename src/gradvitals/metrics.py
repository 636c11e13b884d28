"""Every metric, in one table: what is recorded for it, when, how ranks combine it, and how the worker finishes it.

A metric of single tensors is made of sums: numbers that add up over the parts of a tensor, over tensors and over ranks.
The training process records them under their names in `SUMS` (`collect/`), ranks combine them
(`distributed/allreduce.py`), and the worker makes the metric of them (`worker/aggregate.py`). A new one takes a row in
`SUMS`, a row in `METRICS`, and the function that reads its sum, in `collect/reductions.py`.

No torch here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

import numpy as np

When = Literal["step", "full", "detail"]
"""Steps at which something is recorded: all of them, those of a full reading, or those of a detailed one."""


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A number per tensor that the training process records."""

    due: When
    is_norm: bool = False
    """Whether it is recorded as a norm. Its square is what adds up."""
    is_scaled: bool = False
    """Whether a loss scale multiplies it."""
    combine: Literal["sum", "mean", "max"] = "sum"
    """The rule by which tensors, and the parts of a tensor on several ranks, combine."""
    after_step: bool = False
    """Whether it is read after the optimizer's step, of what the step made."""
    is_local: bool = False
    """Whether every data-parallel rank has another one: it is of gradients before they are reduced."""
    of_whole: bool = False
    """Whether only a rank that has the tensor in one piece can read it: the parts of a product would have to be added
    up before they are squared."""

    def is_due(self, *, full: bool, detail: bool) -> bool:
        """Whether it is recorded at such a step."""
        return self.due == "step" or (full if self.due == "full" else detail)


SUMS: dict[str, Sum] = {
    # of the gradient that the optimizer receives
    "norm": Sum(due="step", is_norm=True, is_scaled=True),
    "nonfinite": Sum(due="step"),
    "largest": Sum(due="detail", is_scaled=True, combine="max"),
    "nonzero": Sum(due="detail"),
    # of the gradients of micro-batches, or of each rank
    "parts": Sum(due="full", is_local=True),
    "inner": Sum(due="detail", is_local=True, of_whole=True),
    "inner_squares": Sum(due="detail", is_local=True, of_whole=True),
    # of weights, and how far a step moved them
    "weight_before": Sum(due="detail", is_norm=True),
    "weight": Sum(due="full", is_norm=True, after_step=True),
    "update": Sum(due="full", after_step=True),
    "change": Sum(due="step", after_step=True),
    # of Adam's moments
    "first_moment": Sum(due="full", is_norm=True, after_step=True),
    "second_moment": Sum(due="full", after_step=True),
    "adam_step": Sum(due="full", combine="mean", after_step=True),
    "beta1": Sum(due="full", combine="mean", after_step=True),
    "beta2": Sum(due="full", combine="mean", after_step=True),
    "alive": Sum(due="detail", after_step=True),
    "below_one": Sum(due="detail", after_step=True),
    "median_sum": Sum(due="detail", after_step=True),
    "median_size": Sum(due="detail", after_step=True),
    # of the factors of a variance-reduced optimizer
    "factor_sum": Sum(due="full", after_step=True),
    "factor_low": Sum(due="full", after_step=True),
    "factor_one": Sum(due="full", after_step=True),
}
"""The sums that are recorded per tensor, by their names in the journal."""


@dataclass(frozen=True)
class Metric:
    """One metric."""

    text: str
    """Meaning, in a sentence."""
    sums: tuple[str, ...] = ()
    """The sums it is made of."""
    finish: Callable[..., Any] | None = None
    """Makes it of these sums and the number of elements: of each tensor, and of the whole model. None for what takes
    more than that."""
    _: KW_ONLY
    setting: str = ""
    """The entry of `Config.metrics` that turns it on, if it is not one itself."""
    of_ranks: When | None = None
    """When every rank sends a number of its own."""
    label: str = ""
    """Name in charts."""
    unit: str = ""
    """Empty for a ratio, or for what has the unit of the loss or of the weights."""


def _root(square: Any, size: Any) -> Any:
    return np.sqrt(square)


def _mean(total: Any, size: Any) -> Any:
    return total / size


def _as_it_is(number: Any, size: Any) -> Any:
    return number


MOMENTS = ("first_moment", "second_moment", "adam_step", "beta1", "beta2")

METRICS: dict[str, Metric] = {
    "loss": Metric("the loss, as the training loop reports it", label="Loss"),
    "lr": Metric("learning rate of the first parameter group", label="Learning rate"),
    "grad/norm": Metric("L2 norm of the gradient, before clipping, unscaled", ("norm",), _root, label="Gradient norm"),
    "grad/max": Metric("largest absolute value in the gradient", ("largest",), _as_it_is),
    "grad/zero_fraction": Metric(
        "share of gradient elements that are exactly zero", ("nonzero",), lambda nonzero, size: (size - nonzero) / size
    ),
    "grad/nonfinite": Metric(
        "number of NaN or infinite gradient elements; until first seen, of tensors that have any",
        ("nonfinite",),
        _as_it_is,
        unit="elements",
    ),
    "grad/spike_ratio": Metric("norm over its moving average"),
    "grad/norm_cv": Metric("standard deviation over mean of the norm, over the window"),
    "gsnr": Metric(
        "debiased gradient signal-to-noise ratio at the reading's batch size", ("parts", *MOMENTS), label="GSNR"
    ),
    "gsnr_low": Metric("lower end of the 95% interval of gsnr"),
    "gsnr_high": Metric("upper end of the 95% interval of gsnr"),
    "gsnr/below_one_fraction": Metric("share of coordinates whose own GSNR is below 1", ("below_one", "alive")),
    "gsnr/median": Metric("median over coordinates of their own GSNR", ("median_sum", "median_size")),
    "noise_scale": Metric(
        "B_simple in samples: ratio of smoothed means; NaN if it is not identifiable",
        label="Noise scale",
        unit="samples",
    ),
    "noise_scale_low": Metric("lower end of the 95% interval of noise_scale", unit="samples"),
    "noise_scale_high": Metric("upper end of the 95% interval of noise_scale", unit="samples"),
    "weight/norm": Metric("L2 norm of the weights", ("weight",), _root),
    "update/norm": Metric("L2 norm of the change one optimizer step made to the weights", ("update",), _root),
    "update/ratio": Metric(
        "update norm over weight norm",
        ("update", "weight"),
        lambda update, weight, size: np.sqrt(update) / np.sqrt(weight),
        setting="update/norm",
        label="Update over weight",
    ),
    "radial_gsnr": Metric(
        "GSNR of the gradient along the weights, <W,g>/|W|", ("weight_before", "inner", "inner_squares")
    ),
    "update/rms": Metric(
        "root mean square change of the weights in one step, from up to 64 coordinates of each tensor",
        ("change",),
        lambda change, size: np.sqrt(change / size),
        setting="update/norm",
    ),
    "update/cosine": Metric("cosine between this step's change of those coordinates and the one before"),
    "vrgd/mean": Metric(
        "mean factor by the rule of a variance-reduced optimizer, before any moving average", ("factor_sum",), _mean
    ),
    "vrgd/at_gamma": Metric(
        "share of those factors that are at their lower bound, gamma", ("factor_low",), _mean, setting="vrgd/mean"
    ),
    "vrgd/at_one": Metric("share of those factors that are 1", ("factor_one",), _mean, setting="vrgd/mean"),
    "clip/max_norm": Metric("the norm that the training loop clips gradients to"),
    "clip/scale": Metric("the loss scale that gradients still carried when the training loop clipped them"),
    "grad/carried": Metric("1 if backward added to gradients that the previous step left: they were not zeroed"),
    "batches/given_up": Metric("batches that the loop skipped since the previous step, if any", unit="batches"),
    "batches/given_up_loss": Metric("the loss of the last of them, if it was reported"),
    "batches/given_up_norm": Metric("the norm of its gradient, if it was read: one optimizer, no loss scale"),
    "step/in_turn": Metric("1 if the model alternates with another one, by losses that go through both, as in a GAN"),
    "step/skipped": Metric("1 if a GradScaler skipped the optimizer step"),
    "step/left_out": Metric("1 if a Guard skipped the optimizer step"),
    "ranks/norm": Metric("the rank's own gradient norm before the reduction, root mean square over its micro-batches"),
    "ranks/norm_ratio": Metric("that norm over the median of the other ranks'"),
    "ranks/norm_z": Metric("its distance from the other ranks' norms, in robust standard deviations of the log"),
    "ranks/norm_dispersion": Metric(
        "standard deviation over mean of the ranks' own gradient norms, before the reduction"
    ),
    "ranks/checksum_mismatch": Metric(
        "tensors whose copies differ between ranks, in weights or optimizer state", unit="tensors"
    ),
    "ranks/replica": Metric(
        "0 if a rank's copies are those of the majority, 1 if one differs, NaN if there are no copies"
    ),
    "ranks/duplicates": Metric("ranks that have the gradient or the samples of another one", unit="ranks"),
    "ranks/twin": Metric("the lowest other rank with the same gradient or samples, -1 for none"),
    "ranks/rng": Metric("group of ranks with one state of random numbers: 0 the largest, 1 the next"),
    "ranks/out_of_step": Metric(
        "ranks whose random numbers or samples differ from those of the ranks they should agree with", unit="ranks"
    ),
    "ranks/nonfinite": Metric(
        "1 if the rank's own loss or gradient, before the reduction, held NaN or Inf; only if one did",
        of_ranks="step",
    ),
    "ranks/errors": Metric("errors of gradvitals itself on that rank, so far", unit="errors", of_ranks="full"),
    "ranks/lr": Metric("learning rate of the rank's first parameter group", of_ranks="full"),
    "ranks/step_seconds": Metric(
        "mean time of the rank's steps since the last full reading", unit="s", of_ranks="full"
    ),
    "activation/dead_fraction": Metric(
        "share of a layer's units that its ReLU turns off for every sample of the batch"
    ),
    "activation/saturated_fraction": Metric("share of a layer's outputs at the flat ends of its sigmoid or tanh"),
    "val/loss": Metric("loss on validation data, as observed"),
    "monitor/overhead": Metric("cost of monitoring over the step's time, as gradvitals estimates it"),
}
"""Every metric by its id: the same string in the store, the commands and the docs."""

TENSOR_METRICS: tuple[str, ...] = tuple(name for name, one in METRICS.items() if one.sums and not one.setting)
"""The metrics that a per-tensor reading can measure; all others are derived from these at no cost."""

DETAIL_METRICS: tuple[str, ...] = tuple(
    name for name in TENSOR_METRICS if all(SUMS[each].due == "detail" for each in METRICS[name].sums)
)
"""Those of them that cost most and change least."""

METRIC_OF: dict[str, str] = {name: metric for metric in reversed(METRICS) for name in METRICS[metric].sums}
"""The first metric that each sum is for."""


def sums_of(settings: Iterable[str]) -> frozenset[str]:
    """Returns the sums that the chosen `Config.metrics` are made of, and the norm, which is always read.

    >>> sorted(sums_of(["grad/max"]))
    ['largest', 'norm']
    """
    chosen = set(settings)
    wanted = (metric for name, metric in METRICS.items() if (metric.setting or name) in chosen)
    return frozenset({"norm", *(name for metric in wanted for name in metric.sums)})


INSPECTED: dict[str, str] = {
    "input/mean": "mean of what the first layer is fed",
    "input/std": "its standard deviation",
    "input/max": "its largest absolute value",
    "input/min": "its smallest value",
    "input/offset": "largest absolute mean of a column or channel",
    "input/spread_high": "largest standard deviation of a column or channel",
    "input/spread_low": "smallest standard deviation of a column or channel that is not constant",
    "input/constant": "columns or channels that are constant in the batch",
    "input/columns": "columns or channels",
    "input/integer": "share of values that are whole numbers",
    "input/nonfinite": "values that are NaN or Inf",
    "input/nonfinite_columns": "columns or channels that are NaN or Inf in every sample",
    "input/checksum": "a number that differs if the batch does",
    "input/part": "1 if the batch is a view of a larger tensor, or a new copy of the same samples of one",
    "input/normalized": "1 if the first layer normalizes it",
    "input/lookup": "1 if the first layer looks up ids",
    "target/min": "smallest target",
    "target/max": "largest target",
    "target/mean": "mean of the targets of the batches inspected so far",
    "target/std": "their standard deviation",
    "target/integer": "share of targets that are whole numbers",
    "target/row_sum": "mean sum of the targets of a sample",
    "target/columns": "targets per sample",
    "target/nonfinite": "targets that are NaN or Inf",
    "target/one_hot": "share of samples whose targets are a single 1 and zeros",
    "target/purity": "share of the most frequent class in the batch, 0 if targets are no classes",
    "target/dominant": "the most frequent class in the batch",
    "target/classes": "classes in the batches inspected so far",
    "target/copied": "1 if each label is the id that the model is fed at the same place",
    "target/padding": "share of labels of one class that stand where the input has one id, and nowhere else",
    "target/trivial_loss": "loss of predicting the mean, or the frequency of each class, whatever the input",
    "head/loss": "the loss function, as its place in LOSSES",
    "head/activation": "what the outputs go through, as its place in ACTIVATIONS",
    "head/units": "outputs of the last layer",
    "head/samples": "samples in the batch",
    "head/softmax_units": "outputs that a softmax is taken over",
    "head/broadcast": "1 if outputs and targets of different shapes were combined into a square",
    "head/reached": "1 if the loss depends on a parameter that is watched, -1 if nothing computed it",
    "head/scrambled": "1 if outputs were reshaped to another order of dimensions without a transpose",
    "head/logs": "logarithms that the loss takes",
    "head/log": "1 if the loss takes the log of a probability that can be 0",
    "head/negated": "1 if the loss is the negative of an error",
    "head/root": "1 if the loss takes a root or a norm, whose gradient at 0 is infinite",
    "head/raw_log": "1 if the loss takes the log of outputs that are not probabilities",
    "head/foreign": "1 if the loss reaches the model through another one",
    "head/products": "1 if the loss compares outputs with each other, as a contrastive one does",
    "head/cosine_range": "mean range of the scores of a sample, if they are cosines between outputs",
    "head/chosen": "1 if the loss picks some of the outputs, such as those of chosen actions",
    "head/signed_weights": "1 if the loss weights outputs by numbers of both signs, such as advantages",
    "head/terms": "layers that the loss reaches first",
    "body/layers": "matrices and convolutions that the loss goes through",
    "body/nonlinear": "nonlinear operations between them",
    "body/hidden": "trainable tensors of layers that a module keeps in a plain list or dict, and that nothing changes",
    "body/equal_units": "matrices whose rows were all the same at the first step, and not zero unless all are",
    "body/softmax_units": "units of a softmax whose result a linear layer is fed, at most",
    "body/time_first": "1 if the samples of a batch are read as the time steps of a recurrent layer, which comes first",
    "mode/eval": "batch norms and dropouts in evaluation mode while the model trains",
    "mode/dropout": "largest dropout probability",
    "mode/frozen_random": "frozen matrices that still hold torch's random initialization",
    "mode/norm_samples": "values that a batch norm averages over, per channel, at least",
    "head/purity": "share of the samples that the outputs put into the most frequent class",
    "head/batch_softmax": "1 if the softmax of the outputs is taken over the samples of the batch",
    "head/scaled": "1 if anything is multiplied or added between the last layers and the loss",
    "input/same": "1 if all samples of the batch have the same input",
    "body/single_softmax": "softmaxes between layers that are taken over one element",
    "body/batch_softmax": "1 if a softmax between layers is taken over the samples of the batch",
    "body/batch_mean": "1 if the model averages over the samples of the batch, and all outputs are the same",
    "body/peaked": "mean of the largest weight that attention gives to one place",
    "input/misread": "1 if a view gave the input another order of dimensions without a permutation",
    "target/batch_mean": "mean of the targets of the batch",
    "target/batch_std": "their standard deviation",
    "head/dropout": "1 if dropout acts on the outputs",
    "head/normalized": "1 if a batch norm acts on the outputs",
    "input/leak": "1 if a column of the inputs is the target",
    "input/padded": "share of a sequence that is padding at its end, if a recurrent layer's last step alone is used",
    "target/visible": "1 if each label is the next token, and attention has no mask that hides it",
    "body/narrow": "units of the narrowest hidden layer that all data must pass, if there are up to three; else 0",
    "body/unordered": "1 if attention is fed a sequence to which nothing was added or joined, such as positions",
    "head/encouraged": "1 if the loss weights log-probabilities of what was chosen, without a minus",
    "head/penalty": "1 if the loss uses weights directly, as a penalty on them does",
    "head/error": "mean error of the outputs, if the loss has other terms too, is a sum, or is scaled",
    "target/trivial_error": "the same for predicting the mean, or the frequency of each class",
    "head/weights": "largest weight that the loss gives to a class over the smallest",
    "input/broken_sample": "first sample with a NaN or Inf, in the batch of a loss that is not finite",
    "input/broken_column": "first column or channel with one",
}
"""Facts about an inspected batch. The journal has each at its place in this table."""

METRICS |= {name: Metric(text) for name, text in INSPECTED.items()}
