# The public names, each once: type checkers read this file, and the package imports them from here.
# ruff: noqa: I001  # by subject
from .patching.patch import patch_model as patch_model, unpatch_model as unpatch_model
from .patching.status import filter_parameters as filter_parameters, filter_status as filter_status
from .hosts.torch.attend import GraphFilterAttention as GraphFilterAttention

from .filters.gfsa import GFSAConfig as GFSAConfig
from .filters.agf import AGFConfig as AGFConfig
from .filters.singularformer import SingularformerConfig as SingularformerConfig
from .filters.far_field import FarFieldConfig as FarFieldConfig
from .filters.hedgehog import HedgehogConfig as HedgehogConfig
from .filters.linear_transformer import LinearTransformerConfig as LinearTransformerConfig
from .filters.performer import PerformerConfig as PerformerConfig
from .filters.kernelution import KernelutionConfig as KernelutionConfig
from .filters.synvolution import SynvolutionConfig as SynvolutionConfig
from .filters.polynomial import PolynomialConfig as PolynomialConfig
from .filters.ppr import PPRConfig as PPRConfig
from .filters.arma import ARMAConfig as ARMAConfig
from .filters.attnscale import AttnScaleConfig as AttnScaleConfig
from .filters.featscale import FeatScaleConfig as FeatScaleConfig
from .filters.centered import CenteredConfig as CenteredConfig
from .filters.contranorm import ContraNormConfig as ContraNormConfig
from .filters.neutreno import NeuTRENOConfig as NeuTRENOConfig
from .filters.value_residual import ValueResidualConfig as ValueResidualConfig
from .filters.xsa import XSAConfig as XSAConfig
from .filters.dex import DexConfig as DexConfig
from .filters.gated import GatedConfig as GatedConfig

from .models.converter.configuration import ConverterConfig as ConverterConfig
from .models.converter.modeling import ConverterForMaskedLM as ConverterForMaskedLM
from .models.converter.modeling import ConverterForSequenceClassification as ConverterForSequenceClassification
from .models.converter.modeling import ConverterModel as ConverterModel
from .models.graphormer.configuration import GraphormerConfig as GraphormerConfig
from .models.graphormer.modeling import GraphormerForGraphPrediction as GraphormerForGraphPrediction
from .models.graphormer.modeling import GraphormerModel as GraphormerModel

from .filters.core.base import FilterConfig as FilterConfig, GraphFilter as GraphFilter
from .filters.core.site import AttentionSite as AttentionSite
from .filters.core.replacing import ReplacingConfig as ReplacingConfig, ReplacingFilter as ReplacingFilter
from .filters.core.build import register_filter as register_filter
from .filters.core.registry import available_filters as available_filters
from .testing import check_filter as check_filter
from .shift.operator import DenseShift as DenseShift, ShiftOperator as ShiftOperator
from .shift.attention import AttentionCall as AttentionCall, AttentionShift as AttentionShift

from .training.arguments import FilterArgumentsMixin as FilterArgumentsMixin
from .training.arguments import FilterTrainingArguments as FilterTrainingArguments
from .training.optimizer import filter_optimizer as filter_optimizer, parameter_groups as parameter_groups
from .fitting import transfer_attention as transfer_attention
from .fitting import convert as convert, linearize as linearize
from .training.blend import BlendSchedule as BlendSchedule, drop_blend as drop_blend, set_blend as set_blend
from .training.penalties import RegularizerCallback as RegularizerCallback, collect_penalties as collect_penalties
from .training.orthogonality import OrthogonalityCallback as OrthogonalityCallback
from .training.orthogonality import orthogonality_loss as orthogonality_loss
from .training.callbacks import CoefficientCallback as CoefficientCallback
from .training.smoothing_callback import SmoothingCallback as SmoothingCallback

from .checkpoints.filter_file import load_filter as load_filter, save_filter as save_filter
from .checkpoints.filter_hub import load_filtered_model as load_filtered_model, push_filter as push_filter
from .checkpoints.timm import load_timm_model as load_timm_model
from .checkpoints.card import create_model_card as create_model_card
from .remote_code import export_remote_code as export_remote_code
from .errors import GraphFilterError as GraphFilterError

__version__: str
