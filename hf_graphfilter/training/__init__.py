"""Training patched models with the ordinary Trainer, and fitting filters to the attention that they replace."""

from .blend import BlendSchedule, drop_blend, set_blend
from .callbacks import CoefficientCallback
from .optimizer import filter_optimizer, parameter_groups
from .orthogonality import OrthogonalityCallback, orthogonality_loss
from .penalties import Penalties, RegularizerCallback, collect_penalties
from .smoothing import SmoothingCallback
from .transfer import TransferReport, transfer_attention

__all__ = [
    "BlendSchedule",
    "CoefficientCallback",
    "OrthogonalityCallback",
    "Penalties",
    "RegularizerCallback",
    "SmoothingCallback",
    "TransferReport",
    "collect_penalties",
    "drop_blend",
    "filter_optimizer",
    "orthogonality_loss",
    "parameter_groups",
    "set_blend",
    "transfer_attention",
]
