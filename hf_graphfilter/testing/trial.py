"""The common parts of all checks: the trial of a filter, rows of the report, exceptions, and helpers for models."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from ..errors import GraphFilterError
from ..filters import FilterConfig, GraphFilter
from ..filters.core.attached import filters_of
from ..patching.patch import patch_model
from ..tables import text_table
from ..training.blend import set_blend

# Models run in float64, but a filter may compute in float32. Its rounding errors grow over two layers whose attention
# is far from uniform. The mistakes that the checks look for change the first digits of the outputs.
TOLERANCE = 1e-5
TOKENS = 9
PRETRAINED = ("encoder", "decoder", "encoder-decoder", "vision")  # models of transformers
ALL = (*PRETRAINED, "module")


@dataclass(frozen=True)
class CheckRow:
    """The result of one check: its name, how it ended, and a sentence on why it failed or does not apply."""

    check: str
    outcome: Literal["passed", "failed", "does not apply"]
    detail: str = ""


class FilterReport(list[CheckRow]):
    """The rows of ``check_filter``; prints as a table."""

    @property
    def failures(self) -> list[CheckRow]:
        return [row for row in self if row.outcome == "failed"]

    def __str__(self) -> str:
        return text_table(["check", "outcome", "detail"], [[row.check, row.outcome, row.detail] for row in self])


class Failed(Exception):
    """A failed check; the message says in a sentence what is wrong."""


class DoesNotApply(Exception):
    """A check that does not apply; the message says why."""


class TorchEncoder(nn.Module):
    """A model around PyTorch's own attention, with the arguments and outputs of transformers.

    Layers without a filter may use PyTorch's fast path.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        layer = nn.TransformerEncoderLayer(**config, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, inputs_embeds: Tensor, attention_mask: Tensor) -> BaseModelOutput:
        hidden = self.encoder(inputs_embeds, src_key_padding_mask=~attention_mask.bool())
        return BaseModelOutput(last_hidden_state=hidden)


@dataclass(frozen=True)
class Family:
    """A tiny model; its kind is encoder, decoder, encoder-decoder, vision or module (of PyTorch)."""

    name: str
    kind: str
    model_class: Any
    config: Any

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """Return the model, with the same weights at each call."""
        torch.manual_seed(0)
        model = self.model_class(copy.deepcopy(self.config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # attention far from uniform, so that errors show
        return model.to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(1)
        if self.kind == "vision":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g).to(dtype)}
        ids = torch.randint(5, 99, (2, TOKENS), generator=g)[:, :tokens]
        if self.kind == "module":
            embeds = torch.randn(2, TOKENS, self.config["d_model"], generator=g).to(dtype)
            return {"inputs_embeds": embeds[:, :tokens], "attention_mask": torch.ones_like(ids)}
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {**inputs, "decoder_input_ids": ids.flip(1)} if self.kind == "encoder-decoder" else inputs


def families() -> list[Family]:
    """Return the tiny models that a filter is tried on."""
    t = transformers
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    no_dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bart: Any = {"vocab_size": 99, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0}
    for stack in ("encoder", "decoder"):
        bart |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}
    return [
        Family("BERT", "encoder", t.BertModel, t.BertConfig(vocab_size=99, **sizes, **no_dropout)),
        Family("Llama", "decoder", t.LlamaModel, t.LlamaConfig(vocab_size=99, **sizes, num_key_value_heads=2)),
        Family("BART", "encoder-decoder", t.BartModel, t.BartConfig(**bart)),
        Family("ViT", "vision", t.ViTModel, t.ViTConfig(**sizes, **no_dropout, image_size=16, patch_size=4)),
        Family(
            *("TransformerEncoder", "module", TorchEncoder),
            {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0},
        ),
    ]


@dataclass(frozen=True)
class Check:
    """A check: its name, the function that it runs, and the kinds of models that it needs."""

    name: str
    run: Callable[[Trial, Family], str | None]
    kinds: tuple[str, ...]  # kinds of models; empty if the check needs no model
    basic: bool


def check(name: str, *kinds: str, basic: bool = False) -> Callable[[Callable[[Trial, Family], str | None]], Check]:
    """Register a function as a check of that name."""
    return lambda run: Check(name, run, kinds, basic)


@dataclass
class Trial:
    """A filter under trial, with its options."""

    config: FilterConfig
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor] | None
    folder: Path
    families: list[Family] = field(default_factory=families)

    def patched(self, family: Family, dtype: torch.dtype = torch.float64, scale: float = 0.3) -> Any:
        model = patch_model(family.build(dtype), self.config)
        turn_on(model, scale)
        return model

    def run(self, check: Check) -> CheckRow:
        families = [f for f in self.families if f.kind in check.kinds] if check.kinds else self.families[:1]
        details, reasons = [], []
        for family in families:
            prefix = f"{family.name}: " if check.kinds else ""
            try:
                details.append(check.run(self, family))
            except DoesNotApply as error:
                reasons.append(str(error))
            except Exception as error:
                kind = "" if isinstance(error, (Failed, GraphFilterError)) else f"{type(error).__name__}: "
                return CheckRow(check.name, "failed", f"{prefix}{kind}{one_line(error)}")
        if details:
            return CheckRow(check.name, "passed", "; ".join(dict.fromkeys(d for d in details if d)))
        return CheckRow(check.name, "does not apply", reasons[0] if reasons else "no model of this kind takes it")


def one_line(error: Exception) -> str:
    """Return an error as one line."""
    return " ".join(str(error).split())


def equal(computed: Tensor, expected: Tensor, complaint: str, tolerance: float = TOLERANCE) -> None:
    """Fail with ``complaint`` if the largest difference, relative to the largest entry, exceeds ``tolerance``."""
    error = ((computed - expected).abs().max() / expected.abs().max()).item()
    if not error <= tolerance:  # NaN too
        raise Failed(f"{complaint} (relative difference {error:.1e}, allowed {tolerance:.0e})")


def state(model: nn.Module) -> dict[str, Tensor]:
    """Return the parameters and buffers of all filters."""
    return {
        f"{name}.{key}": tensor
        for name, graph_filter in filters_of(model)
        for key, tensor in (*graph_filter.named_parameters(), *graph_filter.named_buffers())
    }


def output(model: Any, inputs: dict[str, Tensor], **further: Any) -> Tensor:
    """Return the main output of a model for its inputs."""
    with torch.no_grad():
        return model(**inputs, **further).last_hidden_state


def turn_on(module: nn.Module, scale: float = 0.3) -> None:
    """Move all parameters of filters away from their start values."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, GraphFilter):
                for parameter in part.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float32) * scale)
    with contextlib.suppress(GraphFilterError):  # raised without a blend
        set_blend(module, 0.5)
