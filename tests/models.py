"""Tiny random models of every family, with inputs: the architecture axis of the common tester."""

import copy
import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import transformers as t
from safetensors.torch import load_file, save_file
from torch import nn

from hf_graphfilter import GraphFilter, GraphormerConfig, GraphormerModel, filter_parameters, patch_model
from hf_graphfilter.graphs import GraphCollator
from hf_graphfilter.hosts import host_of

TEXT = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODER_DECODER = {
    "vocab_size": 99,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 3,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "dropout": 0.0,
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "decoder_start_token_id": 2,
}
VISION = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "image_size": 16,
    "patch_size": 4,
}
TOKENS = 9
# the oldest supported releases, which can do less
TORCH_2_11 = torch.__version__.startswith("2.11.")
TORCH_2_12 = torch.__version__.startswith("2.12.")
TRANSFORMERS_5_17 = t.__version__.startswith("5.17.")


@dataclass(frozen=True)
class Family:
    """kind: encoder (text), decoder, encoder-decoder, vision, audio, graph, or composite (with sub-configs).

    ``whole_windows``: the ``layers`` whose windows are not shifted, as a filter without scores needs them.
    ``causal``: where the names of modules begin whose mask is causal, which they do not declare.
    ``backends``: the attention implementations that it has; the first stands for those that it does not have.
    """

    model_class: type
    config: Any
    kind: str
    patched: int  # self-attention modules
    whole_windows: str | None = None
    causal: str = "none"
    backends: tuple[str, ...] = ("sdpa", "eager")

    def patch(self, model, entry):
        """With a filter of filters.py."""
        layers = self.whole_windows if entry.config.module.reads_mask else None
        if entry.reads_first and self.whole_windows:
            pytest.skip("reads values in the order of the first layer")
        if entry.encoders_only or entry.decoders_only:
            sites = [site for site in host_of(model).find(model)[0] if not site.name.startswith(self.causal)]
            step, names = 2 if layers else 1, {site.name for site in sites if site.causal == entry.decoders_only}
            if not names:
                pytest.skip("a filter without a causal form, or of decoders only")
            layers = lambda index, name: index % step == 0 and name in names  # noqa: E731
        return patch_model(model, entry.config, layers=layers)

    def build(self, implementation=None, **overrides) -> nn.Module:
        if implementation is None or {implementation} <= {"sdpa", "eager"} - {*self.backends}:
            implementation = self.backends[0]
        config = type(self.config)(**{**self.config.to_dict(), **overrides})
        config._attn_implementation = implementation
        model = self.model_class(config).eval()
        # larger weights than the default 0.02: attention far from uniform, so that errors show
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)
        return model

    def inputs(self, dtype=torch.float32, *, batch=2, tokens=TOKENS) -> dict[str, torch.Tensor]:
        made = self._inputs(batch, tokens)
        return {k: v.to(dtype) if v.is_floating_point() else v for k, v in made.items()}

    def _inputs(self, batch, tokens):
        g = torch.Generator().manual_seed(1)
        ids = torch.randint(5, 99, (batch, tokens), generator=g)
        if self.kind == "graph":
            return GraphCollator(self.config)([random_graph(tokens - 1, self.config, seed) for seed in range(batch)])
        if self.kind == "vision":
            return {"pixel_values": torch.randn(batch, 3, 16, 16, generator=g)}
        if self.model_class is t.Wav2Vec2Model:
            return {"input_values": torch.randn(batch, 400, generator=g)}
        if self.model_class is t.WhisperModel:
            return {"input_features": torch.randn(batch, 8, 40, generator=g), "decoder_input_ids": ids}
        if self.model_class is t.Speech2TextModel:
            return {"input_features": torch.randn(batch, 48, 8, generator=g), "decoder_input_ids": ids}
        if self.kind == "composite":
            return {"input_ids": ids, "pixel_values": torch.randn(batch, 3, 16, 16, generator=g)}
        mask = torch.ones_like(ids)
        if self.kind == "encoder-decoder":
            return {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": ids.flip(1)}
        return {"input_ids": ids, "attention_mask": mask}


def random_graph(nodes, config, seed=0, connect=1.5):
    """A graph with features of all kinds, in parts where ``connect``, its edges per node, is small."""
    g = np.random.default_rng(seed)
    pairs = np.array([(a, b) for a in range(nodes) for b in range(a)]).reshape(-1, 2)
    pairs = pairs[g.permutation(len(pairs))[: round(connect * nodes)]]
    return {
        "node_features": np.stack([g.integers(0, size, nodes) for size in config.node_feature_sizes], 1),
        "edge_index": pairs.T,
        "edge_features": np.stack([g.integers(0, size, len(pairs)) for size in config.edge_feature_sizes], 1),
        "labels": g.standard_normal(config.num_labels),
    }


T5 = {"vocab_size": 99, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 3, "num_decoder_layers": 2, "num_heads": 4}
T5_TOKENS = {"dropout_rate": 0.0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 0}

FAMILIES = {
    "bert": Family(t.BertModel, t.BertConfig(**TEXT, **DROPOUT), "encoder", 3),
    "roberta": Family(t.RobertaModel, t.RobertaConfig(**TEXT, **DROPOUT), "encoder", 3),
    "albert": Family(
        t.AlbertModel,
        t.AlbertConfig(**TEXT, **DROPOUT, embedding_size=16, pad_token_id=0, bos_token_id=2, eos_token_id=3),
        "encoder",
        1,  # one set of weights, shared by all layers
    ),
    "distilbert": Family(
        t.DistilBertModel,
        t.DistilBertConfig(vocab_size=99, dim=32, n_layers=3, n_heads=4, hidden_dim=48, dropout=0, attention_dropout=0),
        "encoder",
        3,
    ),
    "electra": Family(t.ElectraModel, t.ElectraConfig(**TEXT, **DROPOUT, embedding_size=16), "encoder", 3),
    "gpt2": Family(
        t.GPT2Model,
        t.GPT2Config(
            vocab_size=99,
            n_embd=32,
            n_layer=3,
            n_head=4,
            bos_token_id=0,
            eos_token_id=0,
            attn_pdrop=0.0,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
        ),
        "decoder",
        3,
    ),
    "llama": Family(t.LlamaModel, t.LlamaConfig(**TEXT, num_key_value_heads=2), "decoder", 3),
    "bart": Family(t.BartModel, t.BartConfig(**ENCODER_DECODER), "encoder-decoder", 5),
    "plbart": Family(t.PLBartModel, t.PLBartConfig(**ENCODER_DECODER), "encoder-decoder", 5),
    "t5": Family(t.T5Model, t.T5Config(**T5, **T5_TOKENS), "encoder-decoder", 5),
    "codet5": Family(t.T5Model, t.T5Config(**T5, **T5_TOKENS, feed_forward_proj="gated-gelu"), "encoder-decoder", 5),
    "deit": Family(t.DeiTModel, t.DeiTConfig(**VISION, **DROPOUT), "vision", 3),
    "vit": Family(t.ViTModel, t.ViTConfig(**VISION, **DROPOUT), "vision", 3),
    "beit": Family(
        t.BeitModel,
        t.BeitConfig(
            **VISION, **DROPOUT, use_relative_position_bias=True, layer_scale_init_value=0.5, drop_path_rate=0
        ),
        "vision",
        3,
    ),
    "beit-shared": Family(
        t.BeitModel,
        t.BeitConfig(**VISION, **DROPOUT, use_shared_relative_position_bias=True, drop_path_rate=0),
        "vision",
        3,
    ),
    "swin": Family(
        t.SwinModel,
        t.SwinConfig(
            **{**DROPOUT, "image_size": 16, "patch_size": 2, "window_size": 4, "drop_path_rate": 0},
            **{"embed_dim": 16, "depths": [2, 2], "num_heads": [2, 4]},
        ),
        "vision",
        4,
        whole_windows="even",
    ),
    "speech_to_text": Family(
        t.Speech2TextModel,
        t.Speech2TextConfig(
            **ENCODER_DECODER,
            input_feat_per_channel=8,
            conv_channels=16,
            max_source_positions=40,
            max_target_positions=32,
        ),
        "encoder-decoder",
        5,
        backends=("eager",),
    ),
    "whisper": Family(
        t.WhisperModel,
        t.WhisperConfig(**ENCODER_DECODER, num_mel_bins=8, max_source_positions=20, max_target_positions=32),
        "encoder-decoder",
        5,
    ),
    "clip": Family(
        t.CLIPModel,
        t.CLIPConfig(
            text_config={**TEXT, "num_hidden_layers": 2, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0},
            vision_config=VISION,
        ),
        "composite",
        5,
        causal="text_model",
    ),
    "wav2vec2": Family(
        t.Wav2Vec2Model,
        t.Wav2Vec2Config(
            **{**TEXT, "vocab_size": 32},
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation_dropout=0.0,
            layerdrop=0.0,
            apply_spec_augment=False,
            feat_proj_dropout=0.0,
            conv_dim=(16, 16),
            conv_stride=(5, 4),
            conv_kernel=(10, 3),
            num_conv_pos_embeddings=8,
            num_conv_pos_embedding_groups=2,
        ),
        "audio",
        3,
    ),
    "graphormer": Family(
        GraphormerModel,
        GraphormerConfig(
            **{k: v for k, v in TEXT.items() if k != "vocab_size"},
            node_feature_sizes=[9, 3],
            edge_feature_sizes=[4, 2],
            max_hops=2,
            max_distance=3,
            attention_dropout=0.0,
            activation_dropout=0.0,
        ),
        "graph",
        3,
    ),
}
ONE_OF_A_KIND = tuple({family.kind: name for name, family in FAMILIES.items()}.values())


def use(model, implementation):
    """set_attn_implementation, which in transformers 5.17 passes over the stacks of T5."""
    for module in model.modules():
        if isinstance(module, t.PreTrainedModel):
            module.config._attn_implementation = implementation
    return model


def output(model, inputs):
    """Last hidden state, of the decoder where there are two; both embeddings of a composite."""
    found = model(**inputs)
    if "last_hidden_state" in found:
        return found.last_hidden_state
    return torch.cat([found.text_embeds, found.image_embeds])


def assert_equal_in_float32(found, expected, model, inputs):
    """``found`` is the output of ``model`` on ``inputs``, which ``expected`` is too, but for rounding in float32.

    For what cannot be compared in float64: formats of float32, and eager attention functions, many of which take their
    softmax in float32 whatever the model's dtype. How far rounding may lead depends on the model; so it is measured:
    16 times the distance between this very model's outputs in float32 and in float64.
    """

    def in_dtype(dtype):
        given = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
        return output(copy.deepcopy(model).to(dtype), given).double()

    with torch.no_grad():
        wide = in_dtype(torch.float64)
        allowance = 16 * (in_dtype(torch.float32) - wide).abs().max().item()
    assert 0 < allowance < 1e-2 * wide.abs().max(), "too badly conditioned to tell a fault from rounding"
    torch.testing.assert_close(found.double(), expected.double(), atol=allowance, rtol=0)


def realigned(model):
    """Give weights that were read from a file, which lie at any address, addresses as those of a model made here have:
    some kernels round differently by alignment, and outputs could not be compared bit for bit."""
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data = tensor.data.clone()
    return model


def turn_on(model, scale=0.4):
    """Give every learned coefficient a value that makes the filter act, and open the gate of a blend halfway."""
    for module in model.modules():
        if isinstance(module, GraphFilter) and getattr(module, "gate", None) is not None:
            module.gate.fill_(0.5)

    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in filter_parameters(model):
            parameter.add_(torch.randn(parameter.shape, generator=g) * scale)
    return model


def checkpointed(model, reentrant):
    enable = getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)  # since 5.2x
    enable({"use_reentrant": reentrant})
    return model


def without_record(folder):
    """An adapter as earlier versions wrote it."""
    file = folder / "adapter_config.json"
    file.write_text(json.dumps({k: v for k, v in json.loads(file.read_text()).items() if k != "graph_filter"}))
    weights = load_file(folder / "adapter_model.safetensors")
    kept = {k: v for k, v in weights.items() if not k.endswith("graph_filter_record")}
    save_file(kept, folder / "adapter_model.safetensors", metadata={"format": "pt"})
