"""The equations, as pure functions: tensors or numbers in, numbers with their intervals out."""

from gradvitals.functional.adam import adam_gsnr, adam_gsnr_below_one, adam_gsnr_from_sums, adam_signal_and_noise
from gradvitals.functional.examples import layer_shares, norm_example_gradients
from gradvitals.functional.gsnr import gsnr, gsnr_elementwise, gsnr_from_norms, gsnr_plug_in
from gradvitals.functional.intervals import Estimate, gsnr_interval, ratio_of_means
from gradvitals.functional.noise_scale import NoiseScale, noise_scale, signal_and_noise, signal_and_noise_of_sums
from gradvitals.functional.norms import global_norm, squared_norm
from gradvitals.functional.radial import radial, radial_gsnr
from gradvitals.functional.spikes import coefficient_of_variation, gss, spike_ratio
from gradvitals.functional.thresholds import is_exploding, is_vanishing
from gradvitals.functional.vrgd import vrgd_scale, vrgd_scale_from_variance, wiener_scale

__all__ = [
    "Estimate",
    "NoiseScale",
    "adam_gsnr",
    "adam_gsnr_below_one",
    "adam_gsnr_from_sums",
    "adam_signal_and_noise",
    "coefficient_of_variation",
    "global_norm",
    "gsnr",
    "gsnr_elementwise",
    "gsnr_from_norms",
    "gsnr_interval",
    "gsnr_plug_in",
    "gss",
    "is_exploding",
    "is_vanishing",
    "layer_shares",
    "noise_scale",
    "norm_example_gradients",
    "radial",
    "radial_gsnr",
    "ratio_of_means",
    "signal_and_noise",
    "signal_and_noise_of_sums",
    "spike_ratio",
    "squared_norm",
    "vrgd_scale",
    "vrgd_scale_from_variance",
    "wiener_scale",
]
