"""patch_model: selection, registry, errors, status, generation; a failed call leaves the model as it was."""

import copy
import functools
import json
import math
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import metadata
from types import MethodType

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from accelerate import cpu_offload
from models import FAMILIES, TORCH_2_11, assert_equal_in_float32, output, realigned, turn_on
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import (
    AutoConfig,
    AutoModel,
    BertModel,
    BloomConfig,
    BloomModel,
    CLIPConfig,
    CLIPModel,
    LlamaModel,
    SamConfig,
    SamModel,
)

import hf_graphfilter
from hf_graphfilter import (
    FilterConfig,
    GFSAConfig,
    GraphFilter,
    GraphFilterError,
    filter_parameters,
    filter_status,
    patch_model,
    register_filter,
    unpatch_model,
)
from hf_graphfilter.errors import LONGEST, shown


def patched_indices(model):
    return [row.module for row in filter_status(model)]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (None, [0, 1, 2]),
        ("even", [0, 2]),
        ("0,-1", [0, 2]),
        ("1:", [1, 2]),
        ("all", [0, 1, 2]),
        ("odd", [1]),
        ([0, -1], [0, 2]),
        ((1,), [1]),
        (range(2), [0, 1]),
        (slice(1, None), [1, 2]),
        (slice(None, None, -2), [0, 2]),
        (lambda i, name: i == 1 and "layer.1." in name, [1]),
        (np.array([0, -1]), [0, 2]),
        ([np.int64(0), torch.tensor(2)], [0, 2]),
        ({0, 2}, [0, 2]),
        (lambda i, name: np.bool_(i > 0), [1, 2]),
    ],
)
def test_layers(layers, expected):
    model = patch_model(FAMILIES["bert"].build(), layers=layers)
    assert patched_indices(model) == [f"encoder.layer.{i}.attention.self" for i in expected]


def test_layers_are_counted_in_each_stack():
    model = patch_model(FAMILIES["t5"].build(), layers=[-1])
    assert patched_indices(model) == ["encoder.block.2.layer.0.SelfAttention", "decoder.block.1.layer.0.SelfAttention"]
    unpatch_model(model)
    patch_model(model, layers=[2], stack="encoder")
    assert patched_indices(model) == ["encoder.block.2.layer.0.SelfAttention"]
    with pytest.raises(GraphFilterError, match=r"2 is out of range, decoder\.block has 2 layers"):
        patch_model(FAMILIES["t5"].build(), layers=[2])


def mixed_decoder():
    """A decoder in which some layers attend in both directions."""
    config = copy.deepcopy(FAMILIES["llama"].config)
    config.num_hidden_layers = 4
    model = LlamaModel(config)
    model.layers[0].self_attn.is_causal = model.layers[2].self_attn.is_causal = False
    return model


@pytest.mark.parametrize("layers", [[0], [-2], slice(0, 1), "even", lambda i, _: i == 0])
def test_layers_are_counted_among_those_of_the_stack(layers):
    model = patch_model(mixed_decoder(), layers=layers, stack="decoder")
    assert patched_indices(model) == ["layers.1.self_attn"]


def test_kept_heads_of_layers_that_stack_counts_otherwise_are_refused():
    model = mixed_decoder()
    with pytest.raises(GraphFilterError, match=r"stack='decoder' those of one: .* pass layers=\[1, 3\], which"):
        patch_model(model, "far_field", keep={1: [0]}, stack="decoder")
    patch_model(model, "far_field", keep={1: [0]}, layers=[1, 3])
    assert [layer.self_attn.graph_filter.kept is not None for layer in model.layers[1::2]] == [True, False]


@pytest.mark.parametrize("name", ["t5", "bart", "whisper"])
def test_cross_attention_is_never_patched(name):
    model = patch_model(FAMILIES[name].build())
    assert not any("EncDec" in row.module or "encoder_attn" in row.module for row in filter_status(model))


def test_attention_from_tokens_to_an_image_is_never_patched():
    """SAM names its last cross-attention otherwise than the others."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "mlp_dim": 32}
    image = {"image_size": 64, "patch_size": 16}
    config = SamConfig(
        vision_config={**sizes, **image, "output_channels": 32, "global_attn_indexes": [0], "num_pos_feats": 16},
        prompt_encoder_config={**image, "hidden_size": 32, "mask_input_channels": 4},
        mask_decoder_config={**sizes, "iou_head_hidden_dim": 32},
    )
    model = patch_model(SamModel(config).eval(), "attnscale")
    assert [row.module for row in filter_status(model)] == ["mask_decoder.transformer.layers.0.self_attn"]
    model(pixel_values=torch.zeros(1, 3, 64, 64), input_points=torch.zeros(1, 1, 1, 2))


def test_models_that_share_a_config_stay_apart(tmp_path):
    config = FAMILIES["bert"].config
    one, other = FAMILIES["bert"].model_class(config), FAMILIES["bert"].model_class(config)
    patch_model(one)
    assert one.config is not config
    assert not hasattr(config, "graph_filter")
    other.save_pretrained(tmp_path)
    assert not filter_status(type(other).from_pretrained(tmp_path))


def test_models_that_share_a_patched_config_stay_apart(tmp_path):
    patch_model(FAMILIES["bert"].build(), layers=[0]).save_pretrained(tmp_path / "first")
    config = AutoConfig.from_pretrained(tmp_path / "first")
    less, same, more = (FAMILIES["bert"].model_class(config) for _ in range(3))
    unpatch_model(less)
    patch_model(more, layers=[1])
    for model, count in ((less, 0), (same, 1), (more, 2)):
        model.save_pretrained(tmp_path / str(count))
        assert len(filter_status(type(model).from_pretrained(tmp_path / str(count)))) == count
    unpatch_model(more).save_pretrained(tmp_path / "plain")
    assert not filter_status(type(more).from_pretrained(tmp_path / "plain"))


def test_a_part_of_a_patched_model_is_saved_with_its_record_or_not_at_all(tmp_path):
    model = patch_model(FAMILIES["clip"].build())
    with pytest.raises(GraphFilterError, match=r"CLIPTextModel holds no record of the filter.*save the model"):
        model.text_model.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    unpatch_model(model)
    patch_model(model.text_model).save_pretrained(tmp_path)
    assert filter_status(type(model.text_model).from_pretrained(tmp_path))


def test_coefficients_are_float32_in_a_model_made_in_half_precision(tmp_path):
    patch_model(FAMILIES["bert"].build()).save_pretrained(tmp_path)
    made = AutoModel.from_config(AutoConfig.from_pretrained(tmp_path), dtype=torch.bfloat16)
    assert {p.dtype for p in filter_parameters(made)} == {torch.float32}
    assert made.embeddings.word_embeddings.weight.dtype == torch.bfloat16


def test_two_filters_in_one_model(tmp_path):
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    patch_model(model, "gfsa", layers="even", K=4)
    patch_model(model, "gfsa", layers="odd", K=2)
    expected = output(turn_on(model), inputs)
    model.save_pretrained(tmp_path)
    again = realigned(type(model).from_pretrained(tmp_path))
    assert [row.filter.K for row in filter_status(again)] == [4, 2, 4]
    assert torch.equal(output(again, inputs), expected)


def test_composite_model():
    text = {
        "vocab_size": 99,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    vision = {**text, "image_size": 16, "patch_size": 8}
    del vision["vocab_size"]
    model = CLIPModel(
        CLIPConfig(text_config={**text, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}, vision_config=vision)
    )
    patch_model(model, layers=[0])
    assert patched_indices(model) == [
        "text_model.encoder.layers.0.self_attn",
        "vision_model.encoder.layers.0.self_attn",
    ]


MISTAKES = [
    ({"filter": "gsfa"}, r"unknown filter 'gsfa' \(did you mean 'gfsa'\?\); known filters: .*gfsa"),
    ({"filter": 3}, "filter must be a name or a FilterConfig, got int"),
    ({"k": 3}, r"GFSAConfig has no option 'k' \(did you mean 'K'\?\); its options are K, w_0, w_1"),
    ({"filter": GFSAConfig(), "K": 4}, "go into the GFSAConfig object"),
    ({"K": 0}, "K must be an integer >= 1, got 0"),
    ({"K": 2.5}, "K must be an integer, got 2.5"),
    ({"K": True}, "K must be an integer, got True"),
    ({"w_0": math.nan}, "w_0 must be finite, got nan"),
    ({"w_1": "1"}, "w_1 must be a number, got '1'"),
    ({"learn": ("w_2",)}, "learn names 'w_2'"),
    ({"learn": ("w_0", "w_0")}, "twice"),
    ({"learn": 3}, "learn must be a tuple of a string"),
    ({"approximation": "exact"}, "approximation must be one of 'taylor', 'none', got 'exact'"),
    ({"layers": []}, r"selects no layer; layers found \(encoder.layer: 3\)"),
    ({"layers": slice(5, 9)}, "selects no layer"),
    ({"layers": lambda i, name: False}, "selects no layer"),
    ({"layers": [3]}, "3 is out of range, encoder.layer has 3 layers"),
    ({"layers": [-4]}, "-4 is out of range"),
    ({"layers": "evn"}, r"layers='evn': a text is 'all', .*'2:8' \(did you mean 'even'\?\)"),
    ({"layers": ""}, "layers='': a text is 'all'"),
    ({"layers": "0,,2"}, "layers='0,,2': a text is 'all'"),
    ({"layers": "1:2:3:4"}, "layers='1:2:3:4': a text is 'all'"),
    ({"layers": "0,3"}, "3 is out of range, encoder.layer has 3 layers"),
    ({"layers": "::0"}, "it raised ValueError.*slice step cannot be zero"),
    ({"layers": [True]}, "a list of indices.* it raised TypeError.*True is no index"),
    ({"layers": 1}, r"layers=1: use 'all', 'even', 'odd'.*module name\)$"),
    ({"stack": "decoder"}, "the model has encoder self-attention only"),
    ({"stack": np.array(["encoder", "decoder"])}, "stack=array.* the model has encoder self-attention only"),
    ({"layers": slice(0, 3, 0)}, "it raised ValueError.*slice step cannot be zero"),
    ({"layers": slice("a")}, "it raised TypeError.*slice indices must be integers"),
    ({"layers": range(10**9)}, r"layers=range\(0, 1000000000\): 3 is out of range"),
    ({"layers": range(-(10**30), 0)}, "is out of range"),
    ({"layers": [10**5000]}, "layers=<list without a repr>: <int without a repr> is out of range"),
    ({"layers": b"\0\1"}, r"layers=b'\\x00\\x01': use 'all', 'even', 'odd', a list of indices"),
    ({"layers": {0: 1}}, "a list of indices"),
    ({"layers": np.array(1)}, r"layers=array\(1\): use 'all'"),
    ({"layers": np.zeros((2, 2))}, "use 'all'"),
    ({"layers": [np.array([0, 1])]}, "it raised TypeError.*only integer scalar arrays"),
    ({"layers": [0.0]}, "it raised TypeError.*'float' object cannot be interpreted as an integer"),
    ({"layers": lambda i: True}, r"a predicate that takes \(index, module name\); it raised TypeError.*takes 1 pos"),
    ({"layers": lambda i, name: np.ones(2)}, "it raised ValueError.*truth value"),
    ({"layers": lambda i, name: torch.ones(2)}, "it raised RuntimeError"),
    ({"layers": lambda i, name: 1 / 0}, "it raised ZeroDivisionError"),
    ({"filter": FilterConfig()}, "FilterConfig is not registered.*@register_filter"),
    ({"filter": type("Mine", (GFSAConfig,), {})()}, "Mine is not registered"),
    ({"filter": "g" * 20_000}, r"^unknown filter 'ggg.{90,120}ggg'; known filters"),
    ({"cls": 1}, "has no option 'cls'"),
    ({"K": np.ones(2)}, r"K must be an integer, got array\(\[1\., 1\.\]\)"),
    ({"K": torch.tensor([1, 2])}, "K must be an integer, got tensor"),
    ({"K": 10**7}, "K must be at most 1000, got 10000000"),
    ({"K": 10**5000}, "K must be in the range of float32, got <int without a repr>"),
    ({"w_0": 1e39}, r"w_0 must be in the range of float32, got 1e\+39"),
    ({"w_0": -(10**400)}, "w_0 must be in the range of float32, got -1000"),
    ({"w_1": np.float32("inf")}, "w_1 must be finite"),
    ({"w_0": torch.zeros(4)}, "w_0 must be a number, got tensor"),
    ({"approximation": np.array(["taylor", "none"])}, "approximation must be one of"),
    ({"learn": np.array(["w_0"])}, "learn must be a tuple of a string"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_leave_the_model_as_it_was(arguments, message):
    model, inputs = FAMILIES["bert"].build(), FAMILIES["bert"].inputs()
    expected, state, config = output(model, inputs), list(model.state_dict()), model.config.to_dict()
    with pytest.raises(GraphFilterError, match=message) as caught:
        patch_model(model, **arguments)
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 500
    assert torch.equal(output(model, inputs), expected)
    assert (list(model.state_dict()), model.config.to_dict()) == (state, config)


def test_a_filter_that_fails_to_build_leaves_the_model_as_it_was():
    class Fails(GraphFilter):
        def __init__(self, config, site):
            if site.index == 2:
                raise GraphFilterError("no")
            super().__init__(config, site)

    @register_filter("test-fails")
    @dataclass(frozen=True)
    class FailsConfig(FilterConfig):
        module = Fails

    model = FAMILIES["bert"].build()
    with pytest.raises(GraphFilterError, match="no"):
        patch_model(model, "test-fails")
    assert not filter_status(model)
    assert not hasattr(model.config, "graph_filter")


@pytest.mark.parametrize(("host", "step"), [("transformers", "routing.watch"), ("torch", "attaching.swap_class")])
def test_an_interruption_at_a_module_leaves_the_model_as_it_was(host, step, monkeypatch):
    """Also that module, which already has its filter then."""
    if host == "transformers":
        model = FAMILIES["bert"].build()
        run = functools.partial(output, model, FAMILIES["bert"].inputs())
    else:
        layer = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 3, enable_nested_tensor=False).eval()
        run = functools.partial(model, torch.randn(2, 5, 32))
    expected, state = run(), list(model.state_dict())

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(f"hf_graphfilter.hosts.{host}.{step}", interrupt)
        with pytest.raises(KeyboardInterrupt):
            patch_model(model)
    assert list(model.state_dict()) == state
    assert torch.equal(run(), expected)
    assert len(filter_status(patch_model(model))) == 3


def test_a_model_with_nothing_to_patch_lists_what_was_found():
    model = BloomModel(BloomConfig(vocab_size=99, hidden_size=32, n_layer=2, n_head=4))
    with pytest.raises(
        GraphFilterError, match=r"BloomModel has no self-attention to patch\. Attention found: 2 x BloomAttention"
    ):
        patch_model(model)


@pytest.mark.parametrize("thing", [torch.nn.Linear(2, 2), None, "bert-base-uncased"])
def test_other_objects(thing):
    with pytest.raises(GraphFilterError, match="patch_model takes a transformers PreTrainedModel"):
        patch_model(thing)


@pytest.mark.parametrize("name", ["gfsa", "agf"])
def test_a_model_that_accelerate_has_offloaded(name):
    """Its weights are on meta, and a filter's are to be where they come to, in their dtype."""
    model = cpu_offload(FAMILIES["bert"].build().bfloat16(), execution_device="cpu")
    found = patch_model(model, name).encoder.layer[0].attention.self.graph_filter
    coefficients = found.coefficient_names()
    assert {p.device.type for p in found.parameters()} == {"cpu"}
    assert {p.dtype for n, p in found.named_parameters() if n not in coefficients} <= {torch.bfloat16}
    assert output(model, FAMILIES["bert"].inputs()).isfinite().all()


class Float8Linear(torch.nn.Linear):
    """A layer as quantizers make it: no operator but the cast takes its weight."""

    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


def test_a_filter_of_quantized_weights_has_a_dtype_to_compute_in():
    model = FAMILIES["llama"].build().bfloat16()
    for layer in (m for m in model.modules() if type(m) is torch.nn.Linear):
        layer.__class__, layer.weight.data = Float8Linear, layer.weight.data.to(torch.float8_e4m3fn)
    patch_model(model, "agf")
    assert {p.dtype for p in filter_parameters(model)} == {torch.float32}
    assert output(model, FAMILIES["llama"].inputs()).isfinite().all()


def test_status_copies_no_weights_of_an_offloaded_model(monkeypatch):
    copied, copy_tensor = [], torch.Tensor.__deepcopy__

    def count(self, memo):
        copied.extend([self] * (id(self) not in memo))
        return copy_tensor(self, memo)

    model = cpu_offload(patch_model(FAMILIES["bert"].build(), "gfsa"), execution_device="cpu")
    monkeypatch.setattr(torch.Tensor, "__deepcopy__", count)
    assert [row.moved for row in filter_status(model)] == [0, 0, 0]
    assert not any(tensor.numel() > 4 for tensor in copied), "a coefficient has four heads"


def test_status_with_a_hook_that_cannot_be_copied():
    lock, model = threading.Lock(), patch_model(FAMILIES["bert"].build(), "agf")
    graph_filter = model.encoder.layer[0].attention.self.graph_filter
    graph_filter.register_forward_hook(functools.partial(lambda lock, *_: None, lock))
    hooks = {**graph_filter._forward_hooks}
    assert filter_status(model)[0].moved == 0
    assert graph_filter._forward_hooks == hooks


def test_wrappers_of_pytorch_are_in_no_record(tmp_path):
    """Those of activation checkpointing, which accelerate puts into a model under FSDP2."""
    model = patch_model(BertModel(FAMILIES["bert"].config), "gfsa").eval()
    turn_on(model)
    ids = torch.arange(3, 11).view(1, 8)
    expected = model(ids).last_hidden_state
    for number, layer in enumerate(model.encoder.layer):
        model.set_submodule(f"encoder.layer.{number}", checkpoint_wrapper(layer))
    assert filter_status(model)[0].module.endswith("attention.self")
    # FSDP gathers the state, and leaves the wrappers out of its names
    for number, state in enumerate([None, model.state_dict()]):
        model.save_pretrained(tmp_path / str(number), state_dict=state)
        again = BertModel.from_pretrained(tmp_path / str(number)).eval()
        torch.testing.assert_close(again(ids).last_hidden_state, expected)


def test_context_parallelism_is_refused_where_a_filter_reads_the_whole_text(monkeypatch):
    """It replaces PyTorch's function, so that a process computes on a part of the text."""
    original, ids = F.scaled_dot_product_attention, torch.arange(3, 11).view(1, 8)

    def split(*args, **kwargs):
        return original(*args, **kwargs)

    split.__module__ = "torch.distributed.tensor.experimental._context_parallel._attention"
    gfsa, agf = (patch_model(FAMILIES["llama"].build(), name) for name in ("gfsa", "agf"))
    expected = gfsa(ids).last_hidden_state
    monkeypatch.setattr(F, "scaled_dot_product_attention", split)
    torch.testing.assert_close(gfsa(ids).last_hidden_state, expected)
    with pytest.raises(GraphFilterError, match="context parallelism gives each process a part of the text, and 'agf'"):
        agf(ids)


@pytest.mark.skipif(not hasattr(transformers, "NeoMMEModel"), reason="of transformers 5.24")
def test_a_window_that_a_config_has_for_each_layer():
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"vocab_size": 99, "num_key_value_heads": 4, "head_dim": 16, "embedding_rank": 8, "embedding_dim": 16}
    model = transformers.NeoMMEModel(transformers.NeoMMEConfig(**sizes))
    assert len(filter_status(patch_model(model, "gfsa"))) == 2


def test_unpatched_models_are_named():
    model = FAMILIES["bert"].build()
    with pytest.raises(GraphFilterError, match="BertModel has no graph filter"):
        unpatch_model(model)
    assert str(filter_status(model)) == "no graph filter"


def test_status_prints_a_table():
    model = turn_on(patch_model(FAMILIES["bert"].build(), layers=[1]))
    lines = str(filter_status(model)).splitlines()
    assert lines[0].split() == ["module", "filter", "w_K", "w_0", "w_1", "moved", "backend"]
    assert lines[2].startswith("encoder.layer.1.attention.self  gfsa ")
    assert lines[2].endswith("sdpa")


def test_shapes_in_the_error_for_another_number_of_heads():
    model = patch_model(FAMILIES["bert"].build())
    model.encoder.layer[1].attention.self.graph_filter.heads = 3
    with pytest.raises(
        GraphFilterError, match=r"encoder.layer.1.attention.self \(BertSelfAttention\).*3 heads.*\(2, 4, 9, 8\)"
    ):
        output(model, FAMILIES["bert"].inputs())


def test_our_name_without_a_filter_is_an_error():
    model = FAMILIES["bert"].build()
    model.set_attn_implementation("hf_graphfilter")
    with pytest.raises(GraphFilterError, match="has no graph filter: use patch_model"):
        output(model, FAMILIES["bert"].inputs())


def test_set_attn_implementation_keeps_the_filter():
    model, inputs = turn_on(patch_model(FAMILIES["llama"].build())).double(), FAMILIES["llama"].inputs()
    expected = output(model, inputs)
    model.set_attn_implementation("eager")
    assert_equal_in_float32(output(model, inputs), expected, model, inputs)
    assert {row.backend for row in filter_status(model)} == {"eager"}


def test_output_attentions_gives_the_weights():
    model, inputs = patch_model(FAMILIES["bert"].build("eager")), FAMILIES["bert"].inputs()
    weights = model(**inputs, output_attentions=True).attentions
    assert len(weights) == 3
    torch.testing.assert_close(weights[0].sum(-1), torch.ones(2, 4, 9))


# -------------------------------------------------------------------------------------------------- the registry


def test_configs_round_trip():
    config = GFSAConfig(K=5, w_0=-0.01, learn=("w_0", "w_K"), approximation="none")
    data = config.to_dict()
    assert (data["filter"], data["version"]) == ("gfsa", 1)
    assert FilterConfig.from_dict(data) == config


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": 2}, "version 2 of its config is unknown"),
        ({"version": None}, "version None"),
        ({"filter": "nope"}, "unknown filter 'nope'"),
        ({"filter": 1}, "a key 'filter'"),
        ({"depth": 3}, "has no option 'depth'"),
        ({"K": "3"}, "K must be an integer, got '3'"),
        ({"learn": [1]}, "learn must be a tuple of a string"),
        ({1: 2}, "a dict of options with a key 'filter', got"),
        ({"cls": 1}, "has no option 'cls'"),
        ({"version": True}, "version True"),
        ({"version": np.ones(2)}, "version array"),
        ({"x" * 20_000: 1}, "has no option 'xxx.{90,120}xxx'; its options"),
    ],
)
def test_from_dict_refuses_by_name(change, message):
    with pytest.raises(GraphFilterError, match=message):
        FilterConfig.from_dict({**GFSAConfig().to_dict(), **change})


def test_numbers_of_numpy_are_numbers():
    config = GFSAConfig(K=np.int64(4), w_0=np.float32(0.5), w_1=np.float64(2))
    assert config == GFSAConfig(K=4, w_0=0.5, w_1=2.0)
    assert filter_status(patch_model(FAMILIES["bert"].build(), w_0=10**30))[0].coefficients["w_0"][0] == 1e30
    assert json.loads(json.dumps(config.to_dict())) == config.to_dict()


def test_messages_show_any_value_on_one_short_line():
    class Hostile:
        def __repr__(self):
            raise RuntimeError

    nested = []
    for _ in range(10_000):
        nested = [nested]
    for value in ("a\nb" * 9_000, 10**5000, Hostile(), nested, torch.ones(99, 99)):
        assert len(shown(value)) <= 120
        assert shown(value).isprintable()
    error = GraphFilterError(f"one\ntwo {'x' * 9_000} what to do")
    assert str(error).startswith("one two xxx")
    assert str(error).endswith("xxx what to do")
    assert len(str(error)) <= LONGEST


def test_an_entry_point_that_cannot_be_imported_is_named(monkeypatch):
    point = metadata.EntryPoint("broken", "no_such_package", "hf_graphfilter.filters")
    monkeypatch.setattr(metadata, "entry_points", lambda **_: [point])
    with pytest.raises(GraphFilterError, match="'broken' is in no_such_package, which cannot be imported"):
        patch_model(FAMILIES["bert"].build(), "broken")


@pytest.mark.parametrize("name", [None, "", 3])
def test_filters_have_a_name(name):
    with pytest.raises(GraphFilterError, match="register_filter needs a name"):
        register_filter(name)(GFSAConfig)


def test_registry_is_open_and_names_are_taken_once():
    assert "gfsa" in hf_graphfilter.available_filters()
    with pytest.raises(GraphFilterError, match=r"'gfsa' is taken by hf_graphfilter\.filters\.gfsa\.GFSAConfig"):

        @register_filter("gfsa")
        @dataclass(frozen=True)
        class Other(FilterConfig):
            module = type("Mine", (GraphFilter,), {})

    with pytest.raises(GraphFilterError, match="must derive from FilterConfig and set `module`"):

        @register_filter("test-nothing")
        @dataclass(frozen=True)
        class Nothing(FilterConfig):
            pass


def replaced_forward(self, hidden_states, **kwargs):
    """Attention that does not go through the interface, as some methods put it in the place of a module's own."""
    return self.o_proj(self.v_proj(hidden_states).repeat(1, 1, 2)), None


REPLACEMENTS = {
    "object": lambda module, patch: patch.setattr(
        module, "forward", MethodType(replaced_forward, module), raising=False
    ),
    "class": lambda module, patch: patch.setattr(type(module), "forward", replaced_forward),
    "swapped": lambda module, patch: setattr(
        module, "__class__", type("OtherAttention", (type(module),), {"forward": replaced_forward})
    ),
}


@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.parametrize("name", ["gfsa", "agf"])
@pytest.mark.feature("Routes past the filter: an attention module's forward or class replaced", family="llama")
def test_a_replaced_forward_is_noticed(way, name, monkeypatch, refuses):
    family = FAMILIES["llama"]
    model, inputs = family.build(), family.inputs()
    before = output(patch_model(model, name), inputs)
    with monkeypatch.context() as patch:
        for layer in model.layers:
            REPLACEMENTS[way](layer.self_attn, patch)
        assert {row.backend for row in filter_status(model)} == {"forward replaced"}
        with refuses(
            r"layers.0.self_attn .* ran without its graph filter, since its forward or its class was replaced"
        ):
            output(model, inputs)
        unpatch_model(model)
        with pytest.raises(
            GraphFilterError, match=r"3 x (Llama|Other)Attention: its forward (was replaced|does not use)"
        ):
            patch_model(model, name)
    if way == "object":
        assert torch.equal(output(patch_model(model, name), inputs), before)


@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, None])
def test_a_replaced_forward_is_noticed_after_one_that_did_not_end(error, monkeypatch):
    """An error has ended it, or it was called itself, without the hooks of the module."""
    family = FAMILIES["llama"]
    model, inputs = patch_model(family.build(num_hidden_layers=1)), family.inputs()
    module = model.layers[0].self_attn

    def stop(*_):
        raise error

    with monkeypatch.context() as patch:
        if error:
            patch.setattr(module.o_proj, "forward", stop)
            with pytest.raises(error):
                output(model, inputs)
        else:
            patch.setattr(type(module), "__call__", type(module).forward)
            output(model, inputs)
    REPLACEMENTS["object"](module, monkeypatch)
    with pytest.raises(GraphFilterError, match="ran without its graph filter"):
        output(model, inputs)


def test_one_replaced_forward_is_not_left_out_in_silence():
    model = FAMILIES["llama"].build()
    model.layers[1].self_attn.forward = MethodType(replaced_forward, model.layers[1].self_attn)
    with pytest.raises(GraphFilterError, match=r"layers.1.self_attn cannot be patched: its forward was replaced"):
        patch_model(model)
    assert not filter_status(model)


@pytest.mark.parametrize("patched_first", [True, False])
@pytest.mark.parametrize("way", ["wraps", "class"])
def test_a_wrapper_around_the_forward_runs_the_filter(way, patched_first):
    """What ``functools.wraps`` marks is seen through; so is a class that calls the one it derives from, if later."""
    family = FAMILIES["llama"]
    model, inputs = family.build(), family.inputs()
    expected = output(turn_on(patch_model(copy.deepcopy(model), K=2)), inputs)

    own_forward = type(model.layers[0].self_attn).forward

    def wrap():
        for module in (layer.self_attn for layer in model.layers):
            if way == "wraps":
                module.forward = functools.wraps(module.forward)(lambda *a, f=module.forward, **k: f(*a, **k))
            else:
                body = {"forward": lambda self, *a, f=own_forward, **k: f(self, *a, **k)}
                module.__class__ = type("Other", (type(module),), body if patched_first else {})

    steps = [lambda: patch_model(model, K=2), wrap]
    for step in steps if patched_first else steps[::-1]:
        step()
    assert torch.equal(output(turn_on(model), inputs), expected)
    for copied in (copy.deepcopy(model), model):
        output(unpatch_model(copied), inputs)


def test_threads_share_a_patched_model():
    """Both run the filter of one module before either forward of it ends."""
    family = FAMILIES["llama"]
    model, inputs = patch_model(family.build(), w_K=0.5), family.inputs()
    expected, both = output(model, inputs), threading.Barrier(2, timeout=60)
    model.layers[0].self_attn.o_proj.register_forward_pre_hook(lambda *_: (both.wait(), None)[1])
    with ThreadPoolExecutor(2) as pool:
        assert all(torch.equal(out, expected) for out in pool.map(lambda _: output(model, inputs), range(2)))


@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_filter_in_compiled_code_is_noticed_from_outside():
    """The forward of the module is compiled by itself, and its hook is not."""
    family = FAMILIES["llama"]
    model, inputs = patch_model(family.build(), w_K=0.5), family.inputs()
    expected, module = output(model, inputs), model.layers[0].self_attn
    torch.compiler.reset()
    module.forward = torch.compile(module.forward, backend="eager")
    for _ in range(2):
        torch.testing.assert_close(output(model, inputs), expected)


def test_a_swapped_class_of_any_name_is_refused_by_name():
    model = FAMILIES["llama"].build()
    for layer in model.layers:
        layer.self_attn.__class__ = type("Other", (type(layer.self_attn),), {"forward": replaced_forward})
    with pytest.raises(GraphFilterError, match="3 x Other: its forward does not use the attention interface"):
        patch_model(model)


@pytest.mark.skipif(TORCH_2_11, reason="its compiler hides what is raised")
@pytest.mark.filterwarnings("ignore:The .grad attribute")
def test_a_forward_replaced_before_compiling_is_noticed():
    family = FAMILIES["llama"]
    model, inputs = patch_model(family.build()), family.inputs()
    model.layers[0].self_attn.forward = MethodType(replaced_forward, model.layers[0].self_attn)
    torch.compiler.reset()
    with pytest.raises(GraphFilterError, match="ran without its graph filter"):
        output(torch.compile(model, backend="eager"), inputs)


def test_a_module_whose_config_was_replaced_is_unpatched():
    model = patch_model(FAMILIES["bert"].build())
    module = next(m for m in model.modules() if "graph_filter" in m._modules)
    module.config = copy.deepcopy(module.config._graph_filter_base_config)
    unpatch_model(model)
    assert not any("graph_filter" in m._modules for m in model.modules())


def test_a_mask_of_layers_is_no_list_of_them():
    with pytest.raises(GraphFilterError, match="is no index"):
        patch_model(FAMILIES["bert"].build(), layers=torch.tensor([True, False, True]))
