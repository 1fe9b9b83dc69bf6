"""Training arguments with the filter's learning rate."""

from __future__ import annotations

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .learning_rate import FILTER_LR, check_rates


@dataclass
class FilterArgumentsMixin:
    """A mixin that adds ``filter_lr`` to any class of training arguments, also of TRL and sentence-transformers.

    A Trainer with such arguments gives the filter's coefficients a group with this rate and without weight decay,
    whatever optimizer it builds. ``HfArgumentParser`` offers the flag ``--filter_lr``, and ``hyperparameter_search``
    may vary it. For a model without a filter nothing changes. An optimizer that you pass to the Trainer keeps its own
    groups: make it with ``parameter_groups``.

    Args:
        filter_lr: learning rate of the filter's coefficients (``w_K``, ``theta`` ...). Default: 1e-2.

    Raises:
        GraphFilterError: ``filter_lr`` is not a finite number >= 0.

    Example:
        >>> from dataclasses import dataclass
        >>> from transformers import Seq2SeqTrainingArguments
        >>> @dataclass
        ... class Arguments(FilterArgumentsMixin, Seq2SeqTrainingArguments):
        ...     pass
        >>> Arguments(filter_lr=3e-2, use_cpu=True).filter_lr
        0.03
    """

    filter_lr: float = field(default=FILTER_LR, metadata={"help": "Learning rate of the graph filter's coefficients."})

    def __post_init__(self) -> None:
        check_rates(filter_lr=self.filter_lr)
        if parent_post_init := getattr(super(), "__post_init__", None):
            parent_post_init()


@dataclass
class FilterTrainingArguments(FilterArgumentsMixin, TrainingArguments):
    """The ``TrainingArguments`` with ``filter_lr``, the learning rate of the filter's coefficients.

    Example:
        ``Trainer(model, FilterTrainingArguments("runs/bert", learning_rate=2e-5, filter_lr=1e-2), ...).train()``
    """
