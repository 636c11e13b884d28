r"""Learnable multipliers: one number, or one for each row and column, that lets a weight matrix choose its scale.

Under weight decay the norm of a matrix whose gradients are mostly noise settles where the noise of its updates and the
decay balance, :math:`\mathrm{RMS}(W) = \sqrt{\eta / 2\lambda}` for AdamW, whatever norm the loss would like best. A
multiplier sees the sum of many gradient elements, in which noise averages out, and is free to move:

.. math:: W = s \tilde W, \qquad W_{ij} = r_i \tilde W_{ij} c_j, \qquad
          \frac{\partial L}{\partial s} = \sum_{ij} \tilde W_{ij} G_{ij}

`attach` adds them before training, `param_groups` gives them their own weight decay, `clip_grad_norm_` leaves them out
of the clip norm, `merge` folds them into the weights when training is over, and `suggest` says from a kept run which
tensors ask for one.

References:
    Velikanov et al., "Learnable multipliers: freeing the scale of language model matrix layers", arXiv 2601.04890.
"""

from gradvitals.multipliers.attaching import attach, merge, named_multipliers, without_multipliers
from gradvitals.multipliers.checkpoints import plain_state_dict
from gradvitals.multipliers.parametrization import Kind, Multiplier
from gradvitals.multipliers.suggestion import Suggestion, suggest
from gradvitals.multipliers.training import WEIGHT_DECAY, clip_grad_norm_, param_groups

__all__ = [
    "WEIGHT_DECAY",
    "Kind",
    "Multiplier",
    "Suggestion",
    "attach",
    "clip_grad_norm_",
    "merge",
    "named_multipliers",
    "param_groups",
    "plain_state_dict",
    "suggest",
    "without_multipliers",
]
