"""A tiny random model of any architecture of transformers, and inputs for it, from nothing but its config class.

Configs name their sizes in a few dozen ways. Here every size is made small by its name, so that features, heads and
features a head agree whatever an architecture calls them; what a config derives from its sizes it derives again. Of the
kinds of layers that an architecture mixes (full and sliding attention, recurrences ...) one of each stays.
"""

import importlib
import inspect
import re

import torch
from transformers import CONFIG_MAPPING, MODEL_MAPPING, PreTrainedConfig

FEATURES, HEADS, HEAD_DIM, LAYERS, VOCABULARY, TOKENS = 32, 4, 8, 2, 128, 9
IMAGE, PATCH = 32, 8
MOST_PARAMETERS = 40_000_000

LAYER_COUNT = r".*(hidden_layers|num_layers|n_layers?|encoder_layers|decoder_layers|num_blocks|depth|n_blocks)"
HEAD_COUNT = r".*(attention_heads|num_heads|n_heads|n_head|nhead|num_query_heads)"
KEY_HEADS = r".*(num_key_value_heads|n_kv_heads|num_kv_heads|n_head_kv|kv_heads)"
# whole names of integer fields, the first match wins; None: as it is
SIZES = [
    (
        r".*(latent|relative|rel_pos|conv|lora_alpha|num_labels|num_channels|stride|kernel|dilation|sample|groups).*",
        None,
    ),
    (r".*lora_rank", 16),
    (r".*(intermediate_size|intermediate_dim|ffn_dim|d_ff|n_inner|mlp_dim|ffn_hidden_size|ffn_hidden_dim)", 48),
    (r".*(feedforward|feed_forward).*(size|dim)", 48),
    (HEAD_COUNT, HEADS),
    (r".*(head_dim|head_size|d_kv|rotary_dim)", HEAD_DIM),
    (r".*(vocab_size|vocab_size_per_layer_input|num_codebook_vectors|codebook_size)", VOCABULARY),
    (LAYER_COUNT, LAYERS),
    (r".*(hidden_size|d_model|n_embd|embed_dim|hidden_dim|embedding_size|model_dim|emb_dim|projection_dim)", FEATURES),
    (r"(dim|width|hidden_channels|channels|fpn_hidden_size|out_hidden_size|proj_dim|output_dim)", FEATURES),
    (r".*(max_position_embeddings|n_positions|max_seq_len|max_sequence_length|max_target_positions|n_ctx)", 256),
    (r"sliding_window|attention_window", 4),
    (r".*image_size", IMAGE),
    (r"(vision_)?patch_size", PATCH),
    (r".*(num_local_experts|num_experts|n_routed_experts|moe_num_experts)", 4),
    (r".*(num_experts_per_tok|num_experts_per_token|moe_top_?k|moe_k|top_k_experts)", 2),
    (r"n_group|topk_group|n_shared_experts|num_expert_group.*|first_k_dense_replace", 1),
    (r"attn_layer_period|expert_layer_period", 2),
    (r"attn_layer_offset|expert_layer_offset", 1),
    (r"prediction_length", 4),
]
# fields that a config cannot do without but gives no value
GIVEN = {"prediction_length": 4}
# architectures whose features of sound are (batch, frames, features); others have Whisper's (batch, features, frames)
FRAMES_FIRST = r"speech_to_text|wav2vec2-bert|parakeet_.*|lasr_.*|nemotron.*|granite_speech5_.*"
STACKED = r"granite_speech5_.*"  # of these a frame has 4 * num_mel_bins features: two frames, each with its change


def shrink(config: PreTrainedConfig) -> dict:
    """Fields to make a small config of this class with."""
    fields = config.to_dict()
    made = {}
    for name in config.sub_configs:
        if isinstance(sub := getattr(config, name, None), PreTrainedConfig):
            made[name] = {**shrink(sub), "model_type": sub.model_type}
    kept = layers_to_keep(fields)
    counts = {v for k, v in fields.items() if _is_int(v) and re.fullmatch(LAYER_COUNT, k)}
    heads = next((v for k, v in fields.items() if _is_int(v) and re.fullmatch(HEAD_COUNT, k)), 0)
    for name, value in fields.items():
        if name in made or name in ("model_type", "transformers_version", "dtype") or name.startswith("_"):
            continue
        if value is None and name in GIVEN:
            made[name] = GIVEN[name]
        elif _is_int(value) and name.endswith("token_id"):
            made[name] = min(value, 3)
        elif _is_int(value) and re.fullmatch(KEY_HEADS, name):
            made[name] = HEADS if value == heads else min(value, 2)
        elif _is_int(value):
            size = next((size for pattern, size in SIZES if re.fullmatch(pattern, name)), None)
            if size is not None and value > 0:
                made[name] = len(kept) if size == LAYERS and re.fullmatch(LAYER_COUNT, name) else size
        elif isinstance(value, float) and "drop" in name:
            made[name] = 0.0
        elif isinstance(value, (list, tuple)) and re.fullmatch(r".*(image_size|patch_size)", name):
            made[name] = type(value)(IMAGE if "image" in name else PATCH for _ in value)
        elif isinstance(value, list) and len(value) in counts and max(kept) < len(value):
            made[name] = [value[i] for i in kept]
        elif isinstance(value, dict) and name.startswith("rope_") and _shares_out_features(config):
            rotated = (
                int(HEAD_DIM * (value.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or 1)) // 2
            )
            made[name] = {**value, "mrope_section": [rotated - rotated // 4 * 2, rotated // 4, rotated // 4]}
    return made


def _shares_out_features(config: PreTrainedConfig) -> bool:
    """Whether rotary positions have several axes (multimodal models)."""
    module = importlib.import_module(type(config).__module__.replace("configuration_", "modeling_"))
    return "mrope_section" in inspect.getsource(module)


def _is_int(value) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def layers_to_keep(fields: dict) -> list[int]:
    """The first layer of each kind, at least two."""
    kinds = next((v for k, v in fields.items() if k in ("layer_types", "layers_block_type") and v), [])
    first = list(dict.fromkeys(kinds.index(kind) for kind in kinds))
    return sorted({*first, *range(LAYERS - len(first))} if len(first) < LAYERS else first) or [*range(LAYERS)]


def build(model_type: str, implementation: str) -> torch.nn.Module:
    """The base model of an architecture, in evaluation mode."""
    config_class = CONFIG_MAPPING[model_type]
    model_class = MODEL_MAPPING[config_class]
    model_class = model_class[0] if isinstance(model_class, (list, tuple)) else model_class
    config = config_class(**shrink(config_class()))
    config._attn_implementation = implementation
    with torch.device("meta"):
        parameters = sum(p.numel() for p in model_class(config).parameters())
    if parameters > MOST_PARAMETERS:
        raise ValueError(f"{parameters:,} parameters even with small sizes")
    torch.manual_seed(0)
    return plain_experts(model_class(config).eval())


def plain_experts(model: torch.nn.Module) -> torch.nn.Module:
    """The fused kernels of mixtures of experts know no float64."""
    for module in model.modules():
        if hasattr(getattr(module, "config", None), "_experts_implementation"):
            module.config._experts_implementation = "eager"
    return model


def inputs(model: torch.nn.Module, batch: int = 2) -> dict[str, torch.Tensor]:
    """What ``forward`` must be given: the main input, and what has no default."""
    config, g = model.config, torch.Generator().manual_seed(1)
    parts = [config, *(sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None)]

    def field(*names, default):
        found = (getattr(part, name, None) for part in parts for name in names)
        return next((value for value in found if value), default)

    def normal(*shape):
        return torch.randn(shape, generator=g)

    side = field("image_size", default=IMAGE)
    side = side if isinstance(side, int) else side[0]
    frames = field("num_frames", default=2)
    words = min(config.get_text_config().to_dict().get("vocab_size") or VOCABULARY, VOCABULARY)
    ids = torch.randint(4, words, (batch, TOKENS), generator=g)
    patch = field("patch_size", default=PATCH)
    per_patch = field("in_channels", "num_channels", default=3) * field("temporal_patch_size", default=1)
    grid = torch.tensor([[1, 4, 4]] * batch)
    names = ("input_feat_per_channel", "feature_projection_input_dim", "num_mel_bins", "feature_size", "n_mels")
    audio = field(*names, default=80)
    sound = (audio, 2 * field("max_source_positions", default=20))
    if re.fullmatch(FRAMES_FIRST, config.model_type):
        sound = (80, 4 * audio if re.fullmatch(STACKED, config.model_type) else audio)
    images = normal(batch, field("num_channels", "in_channels", default=3), side, side)
    available = {
        "input_ids": ids,
        "decoder_input_ids": ids.flip(1),
        "pixel_values": images,
        "pixel_values_videos": normal(batch, frames, 3, side, side),
        "input_features": normal(batch, *sound),
        "input_values": normal(batch, 800),
        "past_values": normal(batch, field("context_length", default=32), field("num_input_channels", default=1)),
        "hidden_states": normal(16 * batch, per_patch * (patch if isinstance(patch, int) else patch[0]) ** 2),
        "grid_thw": grid,
        "image_grid_thw": grid,
        "bbox": torch.ones(batch, TOKENS, 4, dtype=torch.long),
        "inputs_embeds": normal(batch, TOKENS, FEATURES),
    }
    parameters = inspect.signature(model.forward).parameters
    needed = {n for n, p in parameters.items() if p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD}
    made = {name: available[name] for name in (*needed, model.main_input_name) if name in available}
    if "grid_thw" in needed and "pixel_values" in made:
        made["pixel_values"] = available["hidden_states"]
    if config.is_encoder_decoder and "decoder_input_ids" in parameters:
        made["decoder_input_ids"] = ids.flip(1)
    if hasattr(config, "projection_dim") and {"pixel_values", "input_ids"} <= set(parameters):
        made |= {"pixel_values": images, "input_ids": ids}
    return made
