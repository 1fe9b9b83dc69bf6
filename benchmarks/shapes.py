"""The models whose training steps the benchmarks time: shapes that users have, with new weights.

Each function returns what builds the model, a batch, its tokens, and whether attention is causal. ``size`` changes the
model's config. A GPU is given sixteen times as much, which keeps it busy.
"""

from __future__ import annotations

import torch
from measure import Call, half
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

from hf_graphfilter import patch_model
from hf_graphfilter.filters.core.attached import filters_of

BATCHES = {"cpu": 1, "cuda": 16}


def bert(dropout: bool, device: str, **size: int) -> tuple:
    dropout_rates = {} if dropout else {"attention_probs_dropout_prob": 0.0}
    ids = torch.randint(0, 30000, (8 * BATCHES[device], 128), device=device)
    batch = {"input_ids": ids, "labels": torch.zeros(len(ids), dtype=torch.long, device=device)}
    return lambda: BertForSequenceClassification(BertConfig(**dropout_rates, **size)), batch, 128, False


def minilm(dropout: bool, device: str, **size: int) -> tuple:
    """all-MiniLM-L6: 32 sentences of 8 to 40 tokens, padded to 40."""
    shape = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12, "intermediate_size": 1536, **size}
    lengths = torch.linspace(8, 40, 32 * BATCHES[device], device=device).round()
    build, batch, _, causal = bert(dropout, device, **shape)
    batch["input_ids"] = torch.randint(0, 30000, (len(lengths), 40), device=device)
    batch["attention_mask"] = (torch.arange(40, device=device) < lengths[:, None]).long()
    batch["labels"] = torch.zeros(len(lengths), dtype=torch.long, device=device)
    return build, batch, 40, causal


def deit_s(dropout: bool, device: str, **size: int) -> tuple:
    config = {"hidden_size": 384, "num_attention_heads": 6, "intermediate_size": 1536, "num_labels": 1000, **size}
    pixels = torch.randn(16 * BATCHES[device], 3, 224, 224, device=device)
    batch = {"pixel_values": pixels, "labels": torch.zeros(len(pixels), dtype=torch.long, device=device)}
    return lambda: ViTForImageClassification(ViTConfig(**config)), batch, 197, False


def gpt2(dropout: bool, device: str, **size: int) -> tuple:
    dropout_rates = {} if dropout else {"attn_pdrop": 0.0}
    ids = torch.randint(0, 50000, (1 * BATCHES[device], 1024), device=device)
    return lambda: GPT2LMHeadModel(GPT2Config(**dropout_rates, **size)), {"input_ids": ids, "labels": ids}, 1024, True


def narrow(
    dropout: bool, device: str, *, width: int = 32, heads: int = 2, batch: int = 32, tokens: int = 64, **size: int
) -> tuple:
    """Return the 12 layers of recipes/configs/language_modeling/deep.yaml, or wider ones."""
    sizes = {"vocab_size": 2048, "n_embd": width, "n_head": heads, "n_positions": tokens, **size}
    dropout_rates = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.1 if dropout else 0.0}
    config = GPT2Config(**sizes, **dropout_rates, activation_function="gelu_pytorch_tanh")
    ids = torch.randint(0, 2048, (batch, tokens), device=device)
    return lambda: GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}, tokens, True


def patch_filter(model: torch.nn.Module, name: str, **options: object) -> torch.nn.Module:
    """Patch a model, and move the coefficients that train off their start, where some filters are quicker."""
    patch_model(model, name, **options)
    with torch.no_grad():
        for _, graph_filter in filters_of(model):
            for coefficient in graph_filter.coefficient_tensors().values():
                if coefficient.requires_grad:  # a fixed one, such as w_0 of GFSA, keeps its value in training
                    coefficient.add_(0.05)
    return model


def training_step(model: torch.nn.Module, batch: dict) -> Call:
    model.config.use_cache = False  # as the Trainer does
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    device = next(model.parameters()).device.type

    def step() -> None:
        with torch.autocast(device, half(device), enabled=device == "cuda"):
            loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step
