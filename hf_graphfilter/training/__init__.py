"""Training of patched models with the ordinary Trainer, and fitting of filters to the attention that they replace."""

import lazy_loader

# loaded lazily: the check of learning rates is loaded with accelerate, and the other modules need the Trainer
__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "arguments": ["FilterArgumentsMixin", "FilterTrainingArguments"],
        "blend": ["BlendSchedule", "drop_blend", "set_blend"],
        "callbacks": ["CoefficientCallback"],
        "optimizer": ["filter_optimizer", "parameter_groups"],
        "orthogonality": ["OrthogonalityCallback", "orthogonality_loss"],
        "penalties": ["Penalties", "RegularizerCallback", "collect_penalties"],
        "smoothing_callback": ["SmoothingCallback"],
        "transfer": ["TransferReport", "transfer_attention"],
    },
)
