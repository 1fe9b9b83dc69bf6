"""What analysis measures: against direct computation in float64, whatever the batches, and without a trace."""

import copy
import json
from dataclasses import dataclass

import pytest
import torch
from accelerate import disk_offload
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BartConfig,
    BartModel,
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    CLIPConfig,
    CLIPModel,
    CLIPVisionConfig,
    GPT2Config,
    GPT2LMHeadModel,
    GPT2Model,
    Llama4VisionConfig,
    Llama4VisionModel,
    LlamaConfig,
    LlamaModel,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    SwinConfig,
    SwinModel,
    T5Config,
    T5ForConditionalGeneration,
    T5Model,
    ViTConfig,
    ViTModel,
    Wav2Vec2Config,
    Wav2Vec2Model,
)

from hf_graphfilter import FilterConfig, GraphFilter, GraphFilterError, filter_status, patch_model, register_filter
from hf_graphfilter.analysis import (
    attention_correlation,
    attention_maps,
    branch_report,
    frequency_response,
    response_curves,
    rollout,
    smoothing,
    spectrum,
    taylor_error,
)
from hf_graphfilter.analysis.model_inputs import cut_batch
from hf_graphfilter.analysis.observing import Layer, Reader, observe
from hf_graphfilter.analysis.plots import plot_coefficients
from hf_graphfilter.analysis.report import report
from hf_graphfilter.analysis.report.drawing import heat_maps
from hf_graphfilter.analysis.response import gain, on_grid, plot_curves
from hf_graphfilter.filters.core.attached import filters_of


class Asking(GraphFilter):
    """A third party's filter that looks at the query too."""

    def forward(self, shift, value):
        return shift(value) * shift.query.norm().clamp(1, 1)


@register_filter("test-asking")
@dataclass(frozen=True)
class AskingConfig(FilterConfig):
    module = Asking


SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "bert": lambda: BertModel(BertConfig(vocab_size=50, **SIZES)),
    "albert": lambda: AlbertModel(AlbertConfig(vocab_size=50, embedding_size=16, **SIZES)),
    "gpt2": lambda: GPT2Model(
        GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, bos_token_id=1, eos_token_id=1)
    ),
    "llama": lambda: LlamaModel(LlamaConfig(vocab_size=50, num_key_value_heads=2, **SIZES)),
    "t5": lambda: T5Model(T5Config(vocab_size=50, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64)),
}
FILTERS = {
    "gfsa": {"w_0": 0.2, "w_K": 0.3},
    "agf": {"window": 2},
    "singularformer": {"residual": True},
    "kernelution": {"init": "blend"},
}
CLOSE = {"atol": 1e-8, "rtol": 1e-8}
FLOAT32 = {"atol": 1e-6, "rtol": 1e-6}  # in which Llama's own code takes the softmax of the reference


def build(family, seed=0):
    torch.manual_seed(seed)
    model = FAMILIES[family]().double()
    with torch.no_grad():
        for parameter in model.parameters():  # sharper attention than a new model has
            parameter.mul_(3)
    return model.train()


def texts(rows=3, tokens=9, family="bert"):
    torch.manual_seed(1)
    batch = {"input_ids": torch.randint(5, 50, (rows, tokens)), "attention_mask": torch.ones(rows, tokens).long()}
    batch["attention_mask"][1, 6:] = 0
    if family == "t5":
        batch["decoder_input_ids"] = torch.randint(5, 50, (rows, tokens))  # as many, of which the mask says nothing
    return batch


def reference(model, batch):
    """Per stack: hidden states by layer from -1, attention matrices by layer, the mask."""
    before = model.config._attn_implementation
    model.set_attn_implementation("eager")
    with torch.no_grad():
        out = model.eval()(**batch, output_attentions=True, output_hidden_states=True)
    model.set_attn_implementation(before)
    model.train()
    mask = batch["attention_mask"].bool()
    if "decoder_input_ids" not in batch:
        stack = "encoder" if type(model).__name__ in ("BertModel", "AlbertModel") else "decoder"
        return {stack: (out.hidden_states, out.attentions, mask)}
    all_there = torch.ones_like(batch["decoder_input_ids"]).bool()
    return {
        "encoder": (out.encoder_hidden_states, out.encoder_attentions, mask),
        "decoder": (out.decoder_hidden_states, out.decoder_attentions, all_there),
    }


def direct(hidden, attentions, mask):
    """By definition, slowly: quantity to a list over the layers of means over the texts."""
    result = {}
    for layer, states in enumerate(hidden, -1):
        for x, there in zip(states, mask, strict=True):
            x = x[there]
            unit = x / x.norm(dim=1, keepdim=True)
            cosines = [unit[i] @ unit[j] for i in range(len(x)) for j in range(len(x)) if i != j]
            values = torch.linalg.svdvals(x)
            share = values / values.sum()
            off = x - x.mean(0)
            for name, value in {
                "cosine": torch.stack(cosines).mean(),
                "high_frequency": off.square().sum() / x.square().sum(),
                "effective_rank": torch.exp(-(share * share.log()).sum()),
                "stable_rank": (values**2).sum() / values[0] ** 2,
            }.items():
                result.setdefault((layer, name), []).append(value)
    for layer, matrices in enumerate(attentions):
        for heads, x, there in zip(matrices, hidden[layer], mask, strict=True):
            heads, x = heads[:, there][:, :, there], x[there]
            n = len(x)
            step = torch.arange(n, dtype=torch.float64)
            fourier = torch.exp(-2j * torch.pi * step[:, None] * step / n)
            distances = torch.cdist(x, x, compute_mode="donot_use_mm_for_euclid_dist") ** 2
            energy, ratio, error = [], [], []
            for A in heads:
                energy.append((A * distances).sum() / 2 / x.square().sum())
                through = (fourier @ A.to(fourier.dtype) @ fourier.inverse()).diagonal().abs()[: n // 2 + 1]
                ratio.append(through[1:].mean() / through[0])
                off = torch.linalg.matrix_power(A, 4) - (A + 3 * (A @ A - A))
                error.append(torch.linalg.matrix_norm(off, torch.inf))
            for name, value in {"dirichlet": energy, "high_to_low": ratio, "K=4": error}.items():
                result.setdefault((layer, name), []).append(torch.stack(value).mean())
    return {name: torch.stack(values).mean() for name, values in result.items()}


def everything(model, batches, **options):
    measured = [smoothing, spectrum, frequency_response, taylor_error]
    return [measure(model, list(batches), **options) for measure in measured]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_direct_computation(family, implementation, transformers_warnings):
    model, batch = build(family), texts(family=family)
    expected = reference(model, batch)
    transformers_warnings.clear()  # of T5 before transformers 5.21, which leaves a layer at sdpa
    model.set_attn_implementation(implementation)
    results = everything(model, [batch])
    for stack, given in expected.items():
        last = len(given[0]) - 2
        for (layer, name), value in direct(*given).items():
            if layer == last and name in ("cosine", "high_frequency", "effective_rank", "stable_rank"):
                continue  # transformers gives the last layer's states after the final norm
            measured = next(r for r in results if (Layer(stack, layer), name) in r.bands)
            band = measured.bands[Layer(stack, layer), name]
            torch.testing.assert_close(
                band.mean, value, msg=f"{stack} {layer} {name}", **(FLOAT32 if family == "llama" else CLOSE)
            )
            assert band.samples == 3


@pytest.mark.parametrize("filter", [None, *FILTERS])
def test_batches_and_padding_change_nothing(filter):
    model = build("bert")
    if filter:
        patch_model(model, filter, **FILTERS[filter])
    batch = texts()
    alone = [{k: v[i : i + 1, : 6 if i == 1 else 9] for k, v in batch.items()} for i in range(3)]
    for together, one_by_one in zip(everything(model, [batch]), everything(model, alone), strict=True):
        assert together.bands.keys() == one_by_one.bands.keys()
        for name, band in together.bands.items():
            torch.testing.assert_close(band.mean, one_by_one.bands[name].mean, **CLOSE)
            torch.testing.assert_close(band.sd, one_by_one.bands[name].sd, atol=1e-7, rtol=1e-6)


class Kept(Reader):
    matrices = True

    def __init__(self):
        self.calls = []

    def attention(self, call):
        earlier = None if call.earlier is None else call.earlier.copy()
        whole = call.filtered @ call.value
        again = type(call.graph_filter).forward(call.graph_filter, call.shift.restart(earlier), call.value)
        torch.testing.assert_close(whole, again)
        self.calls.append(call.layer)


@pytest.mark.parametrize("filter", FILTERS)
def test_the_matrix_of_a_filter_does_what_the_filter_does(filter):
    model = patch_model(build("bert"), filter, **FILTERS[filter])
    reader = Kept()
    observe(model, [texts()], [reader])
    assert [layer.index for layer in reader.calls] == [0, 1]


def traces(model):
    """What observing could leave behind."""
    hooks = [(n, len(m._forward_hooks), len(m._forward_pre_hooks)) for n, m in model.named_modules()]
    return hooks, [m.training for m in model.modules()], [n for n, _ in model.named_modules()], type(model.config)


@pytest.mark.parametrize("how", ["done", "error", "interrupt"])
@pytest.mark.parametrize("filter", [None, "gfsa"])
def test_the_model_is_left_as_it_was(filter, how):
    model = build("bert")
    model.encoder.layer[1].eval()
    if filter:
        patch_model(model, filter, layers=[0])
    before, state = traces(model), {k: v.clone() for k, v in model.state_dict().items()}

    def batches():
        yield texts()
        if how != "done":
            raise {"error": RuntimeError, "interrupt": KeyboardInterrupt}[how]

    if how == "done":
        smoothing(model, batches())
    else:
        with pytest.raises((RuntimeError, KeyboardInterrupt)):
            smoothing(model, batches())
    assert traces(model) == before
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert torch.is_grad_enabled()


def broken(model):
    with torch.no_grad():
        model.encoder.layer[0].output.dense.bias[0] = torch.nan
    return model


@pytest.mark.parametrize(
    ("prepare", "batches", "message"),
    [
        (lambda m: nn.Linear(2, 2), [torch.ones(1, 2)], "cannot patch a torch.nn.modules.linear.Linear"),
        (lambda m: m, [], "there are no batches"),
        (lambda m: m, [{"input_ids": torch.zeros(1, 0).long()}], "a batch holds no tokens"),
        (lambda m: m, [{"input_ids": torch.ones(1, 1).long()}], "no text has two tokens|no text of two"),
        (lambda m: m, torch.ones(2, 4).long(), "got one batch: put it into a list"),
        (lambda m: m, [{"input_ids": torch.ones(1, 600).long()}], r"BertModel does not run on input_ids \(1, 600\): "),
        (lambda m: m, [texts() | {"attention_mask": torch.eye(3, 7).long()}], r"BertModel does not run on"),
        (lambda m: m, [["text"]], "got list: hf_graphfilter.fitting.text_batches makes batches of texts"),
        (lambda m: m, ["text"], "got str: hf_graphfilter.fitting.text_batches makes batches of texts"),
        (lambda m: m, None, "batches must be a list or an iterator of batches, got None"),
        (lambda m: m, [{"input_ids": [[1, 2]]}], "input_ids of a batch holds no tensor"),
        (lambda m: m, [[3]], "a batch is a dict of the model's arguments or a tensor, got list$"),
        (broken, [texts()], "output of layer encoder 0 has numbers that are not finite"),
    ],
)
def test_what_cannot_be_measured_is_one_sentence(prepare, batches, message):
    with pytest.raises(GraphFilterError, match=message):
        frequency_response(prepare(build("bert")), batches)


def test_all_padding_is_one_sentence():
    batch = texts() | {"attention_mask": torch.zeros(3, 9).long()}
    with pytest.raises(GraphFilterError, match=r"no batches with a token|no text"):
        spectrum(build("bert"), [batch])


class There(Reader):
    """How many tokens of each row are no padding, as the layers are told."""

    def __init__(self):
        self.found = {}

    def tokens(self, layer, tokens, there):
        self.found[str(layer)] = there.sum(1).tolist()


def counted(model, batch):
    reader = There()
    observe(model, [batch], [reader])
    return reader.found


NO_SPECIAL_TOKENS = {"bos_token_id": None, "eos_token_id": None}
VISION = {"image_size": 8, "patch_size": 4, **SIZES}


def test_padding_of_texts_beside_images():
    text = LlamaConfig(vocab_size=50, pad_token_id=0, num_key_value_heads=2, **SIZES)
    options = {"image_token_index": 49, "vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**VISION), text_config=text, **options)
    )
    ids = torch.tensor([[49] * 5 + [1, 2, 0, 0]])
    found = counted(model, {"input_ids": ids, "attention_mask": ids != 0, "pixel_values": torch.randn(1, 3, 8, 8)})
    assert (found["encoder 1"], found["decoder -1"], found["decoder 1"]) == ([5], [7], [7])


def test_two_towers_are_two_stacks():
    special = {"eos_token_id": 3, "bos_token_id": 1, "pad_token_id": 0}
    text = {"vocab_size": 50, "max_position_embeddings": 16, **special, **SIZES}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION | {"num_hidden_layers": 3}, projection_dim=8))
    ids = torch.tensor([[1, 5, 6, 7, 3], [1, 5, 3, 0, 0]])  # as many tokens as the image has
    batch = {"input_ids": ids, "attention_mask": ids != 0, "pixel_values": torch.randn(2, 3, 8, 8)}
    found = counted(model, batch)
    assert found["text_model.encoder.layers 1"] == [5, 3]
    assert found["vision_model.encoder.layers 2"] == [5, 5]
    assert ("vision_model.encoder.layers", 0) in {(x.stack, x.index) for x, q in smoothing(model, [batch]).bands}
    with pytest.raises(
        GraphFilterError, match=r"vision_model\.\S+ and text_model\.\S+ has several stacks and no encoder"
    ):
        attention_correlation(model, model, [batch])


def test_a_layer_that_attends_image_by_image_is_one_layer():
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 10000.0}
    text = {"vocab_size": 60, "num_key_value_heads": 2, "rope_parameters": rope, **NO_SPECIAL_TOKENS, **SIZES}
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "mlp_ratio": 2, "patch_size": 4}
    special = {"image_token_id": 50, "video_token_id": 51, "vision_start_token_id": 52, "vision_end_token_id": 53}
    torch.manual_seed(0)
    model = Qwen2VLForConditionalGeneration(Qwen2VLConfig(text_config=text, vision_config=vision, **special)).double()
    ids = torch.randint(1, 49, (2, 9))
    ids[:, 1], ids[:, 2:6] = 52, 50
    images = torch.randn(2, 16, 3 * 2 * 4 * 4).double()  # each of 4 x 4 patches
    grid = torch.tensor([[1, 4, 4]])

    def batch(rows):
        shared = {"input_ids": ids[rows], "mm_token_type_ids": (ids[rows] == 50).int()}
        return shared | {"pixel_values": images[rows].flatten(0, 1), "image_grid_thw": grid.expand(len(ids[rows]), -1)}

    together = taylor_error(model, [batch(slice(2))], orders=[3])
    one_by_one = taylor_error(model, [batch(slice(1)), batch(slice(1, 2))], orders=[3])
    assert [str(layer) for layer in together.layers()] == ["decoder 0", "decoder 1", "encoder 0", "encoder 1"]
    assert together.bands.keys() == one_by_one.bands.keys()
    for name, band in together.bands.items():
        assert band.samples == 2
        torch.testing.assert_close(band.mean, one_by_one.bands[name].mean, **FLOAT32)
    assert {str(layer) for layer in attention_maps(model, batch(slice(1)))[0]} == set(map(str, together.layers()))
    with pytest.raises(GraphFilterError, match="image by image"):
        attention_maps(model, batch(slice(2)))
    tower, tower_batch = model.model.visual, {"hidden_states": images.flatten(0, 1), "grid_thw": grid.expand(2, -1)}
    assert [band.samples for band in taylor_error(tower, [tower_batch], orders=[3]).bands.values()] == [2, 2]


@pytest.mark.parametrize(
    "analyse",
    [
        smoothing,
        lambda model, batch: report(model, batch, model),
        lambda model, batch: attention_correlation(model, model, batch),
        lambda model, batch: branch_report(patch_model(model, "gfsa"), batch),
    ],
)
def test_one_batch_in_place_of_batches_is_named(analyse):
    with pytest.raises(GraphFilterError, match="got one batch: put it into a list"):
        analyse(build("bert"), texts())


def test_a_text_of_padding_alone_counts_nowhere():
    model, batch = build("bert"), texts()
    batch["attention_mask"][1] = 0
    alone = {name: value[::2] for name, value in batch.items()}
    measured, expected = (attention_correlation(model, build("bert", seed=5), [each]) for each in (batch, alone))
    assert measured.values == pytest.approx(expected.values)
    assert measured.band.samples == 2


def test_a_stack_of_padding_alone_has_no_band():
    both = texts(family="t5") | {"decoder_attention_mask": torch.zeros(3, 9).long()}
    assert {layer.stack for layer, _ in taylor_error(build("t5"), [both], orders=[3]).bands} == {"encoder"}


def test_other_numbers_of_texts_than_of_images_have_no_maps():
    text = {"vocab_size": 50, "max_position_embeddings": 16, "eos_token_id": 3, "bos_token_id": 1, **SIZES}
    model = CLIPModel(CLIPConfig(text_config=text, vision_config=VISION, projection_dim=8))
    with pytest.raises(GraphFilterError, match="other numbers of texts and images"):
        attention_maps(model, {"input_ids": torch.randint(5, 49, (3, 5)), "pixel_values": torch.randn(1, 3, 8, 8)})


def test_the_input_of_a_layer_may_have_any_name():
    sizes = {"image_size": 16, "patch_size": 4, "vision_output_dim": 32, "pixel_shuffle_ratio": 0.5}
    torch.manual_seed(0)
    config = Llama4VisionConfig(**SIZES | {"intermediate_size": 128}, **sizes)
    model = Llama4VisionModel(config).double()  # its encoder calls a layer with hidden_state=
    images = torch.randn(2, 3, 16, 16).double()
    together, *alone = (smoothing(model, [batch]) for batch in (images, images[:1], images[1:]))
    assert [layer.index for layer in together.layers()] == [-1, 0, 1]
    for layer in range(2):
        means = [measured[Layer("encoder", layer), "dirichlet"].mean for measured in alone]
        assert together[Layer("encoder", layer), "dirichlet"].samples == 2
        torch.testing.assert_close(together[Layer("encoder", layer), "dirichlet"].mean, sum(means) / 2, **FLOAT32)


def test_masks_of_other_shapes():
    model, batch = build("bert"), texts()
    whole = batch["attention_mask"][:, None, None].bool() & torch.ones(9, 1).bool()
    expected = counted(model, batch)
    assert counted(model, batch | {"attention_mask": whole}) == expected
    torch.manual_seed(0)
    config = Wav2Vec2Config(conv_dim=(8,), conv_stride=(4,), conv_kernel=(4,), num_feat_extract_layers=1, **SIZES)
    sounds = {"input_values": torch.randn(2, 64), "attention_mask": torch.arange(64) < torch.tensor([[64], [32]])}
    assert counted(Wav2Vec2Model(config).eval(), sounds)["encoder 1"] == [16, 8]
    encoder_decoder = T5ForConditionalGeneration(build("t5").config)
    encoder_decoder.config.decoder_start_token_id = 0
    labels = torch.tensor([[5, 6, 7, -100], [5, 6, 7, 8], [5, -100, -100, -100]])
    found = counted(encoder_decoder, texts() | {"labels": labels})
    assert (found["encoder 1"], found["decoder 1"]) == (expected["encoder 1"], [3, 4, 1])
    collated = texts() | {"labels": labels, "decoder_input_ids": labels.clamp_min(0)}  # as DataCollatorForSeq2Seq does
    assert counted(encoder_decoder, collated)["decoder 1"] == [3, 4, 1]
    sizes = {"encoder_layers": 2, "decoder_layers": 2, "d_model": 32, "encoder_attention_heads": 4}
    sizes |= {"decoder_attention_heads": 4, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "vocab_size": 50}
    bart = BartModel(BartConfig(**sizes)).eval()
    assert counted(bart, texts())["decoder 1"] == expected["encoder 1"], "of what the encoder is given"
    vit = ViTModel(ViTConfig(**VISION))
    vit.forward, plain = lambda pixel_values, attention_mask: plain(pixel_values), vit.forward
    with pytest.raises(GraphFilterError, match=r"mask \(2, 9\) hides tokens, and no layer of ViTModel has as many"):
        counted(vit, {"pixel_values": torch.randn(2, 3, 8, 8), "attention_mask": torch.eye(2, 9).long()})


@pytest.mark.parametrize("tokens", [3, 5, 8, 9, 64, 65])
def test_the_gain_lies_at_its_frequency(tokens):
    """Of the mean of a token and the one before, |cos(pi f)|."""
    mean = (torch.eye(tokens) + torch.eye(tokens).roll(1, 0)).double() / 2
    found, at = on_grid(gain(mean[None])[0], tokens), torch.linspace(0, 0.5, 33, dtype=torch.float64)
    known = torch.arange(tokens // 2 + 1) / tokens
    for frequency in known:
        nearest = (at - frequency).abs().argmin()
        bound = 0.5 * torch.pi / tokens + torch.pi / 64  # a straight line between two, and the distance on the grid
        assert abs(found[nearest] - torch.cos(torch.pi * frequency)) < bound
    assert (at[found.argmax()], len(found)) == (0, 33)
    assert found[16].item() == pytest.approx(0.5**0.5, abs=0.5 * torch.pi / tokens)


def test_windows_and_images_are_read():
    config = SwinConfig(image_size=16, patch_size=2, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
    images = [torch.randn(2, 3, 16, 16)]
    measured = smoothing(SwinModel(config), images)
    assert [layer.index for layer in measured.layers()] == [-1, 0, 1]
    assert frequency_response(SwinModel(config), images)[0, "gain"].samples == 2 * 4, "four windows an image"
    with pytest.raises(GraphFilterError, match="within windows"):
        attention_maps(SwinModel(config), images[0])


@pytest.mark.parametrize("filter", [None, "gfsa"])
def test_timm_models_are_read(filter):
    timm = pytest.importorskip("timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, embed_dim=32, num_heads=2)
    if filter:
        patch_model(model, filter, w_K=0.2)
    measured = frequency_response(model, [torch.randn(3, 3, 32, 32)])
    assert [(layer.index, measured[layer, "gain"].samples) for layer in measured.layers()] == [(0, 3), (1, 3)]


def test_weights_on_the_disk_are_fetched(tmp_path, transformers_warnings):
    model = build("bert").eval()
    away = disk_offload(copy.deepcopy(model), tmp_path / "weights")
    assert next(away.parameters()).is_meta
    found, expected = (smoothing(one, [texts()]).rows() for one in (away, model))
    assert [row["mean"] for row in found] == pytest.approx([row["mean"] for row in expected])
    transformers_warnings.clear()  # that weights are on the disk


def test_maps_rollout_and_correlation():
    model, other, batch = build("bert"), build("bert", seed=5), texts()
    maps = attention_maps(model, batch)
    assert [m[Layer("encoder", 0)].shape for m in maps] == [(4, 9, 9), (4, 6, 6), (4, 9, 9)]
    with pytest.raises(GraphFilterError, match="pass one element of what attention_maps returns"):
        rollout(maps)
    torch.testing.assert_close(rollout(maps[1]).sum(-1), torch.ones(6, dtype=torch.float64))
    assert attention_correlation(model, model, [batch]).band.mean == pytest.approx(1)
    between = attention_correlation(model, other, [batch])
    assert len(between.values) == 3
    assert abs(between.band.mean) < 0.9
    filtered = attention_maps(patch_model(build("bert"), "gfsa", w_K=0.3, K=3), batch)[0][Layer("encoder", 0)]
    A = maps[0][Layer("encoder", 0)]
    torch.testing.assert_close(filtered, A + 0.3 * (A + 2 * (A @ A - A)))


def test_response_curves_are_the_polynomial():
    model = BertModel(BertConfig(vocab_size=50, **SIZES | {"num_hidden_layers": 3}))
    patch_model(model, "gfsa", w_0=0.1, w_K=0.3, K=4, layers=[0])
    patch_model(model, "agf", layers=[1], theta="per_head", basis="chebyshev", K=2, constrain_theta=False)
    patch_model(model, "singularformer", layers=[2])
    _, (_, replaced), _ = filters_of(model)
    torch.nn.init.normal_(replaced.theta)
    gfsa, agf = response_curves(model).values()  # Singularformer's is no function of singular values alone
    expected = 0.1 + gfsa.at + 0.3 * (gfsa.at + 3 * (gfsa.at**2 - gfsa.at))
    torch.testing.assert_close(gfsa.response, expected.expand(4, -1))
    at, theta = agf.at, replaced.theta.detach()
    assert (gfsa.at[0], at[0], at[-1], agf.domain) == (-1, 0, 1, "singular value")
    torch.testing.assert_close(agf.response, theta @ torch.stack([at**0, at, 2 * at**2 - 1]))
    figure = plot_curves({"a": gfsa, "b": agf})
    assert [axes.get_xlabel() for axes in figure.axes] == ["eigenvalue of A", "singular value"]


def test_a_filter_that_reads_more_than_attention_has_no_curve_and_a_report():
    model = patch_model(BertModel(BertConfig(vocab_size=50, **SIZES)), AskingConfig())
    assert response_curves(model) == {}
    assert "curves" not in report(model, [texts()]).figures()


@pytest.mark.parametrize("images", [False, True])
def test_batches_are_cut_by_the_tokens_of_their_own(images, monkeypatch):
    """Of texts by their length, whatever was longer before; of images by what a module has seen."""
    monkeypatch.setattr("hf_graphfilter.analysis.model_inputs.ENTRIES", 4 * 9**2 * 2)  # two sequences of nine tokens
    rows = []

    class Rows(Reader):
        matrices = True

        def tokens(self, layer, tokens, there):
            rows.append(len(tokens)) if layer.index == -1 else None

    if images:
        model = ViTModel(ViTConfig(image_size=8, patch_size=2, **SIZES))  # 17 tokens
        observe(model, [{"pixel_values": torch.randn(2, 3, 8, 8)}], [Rows()])
        assert rows == [1, 1]
    else:
        long, short = torch.ones(1, 18, dtype=torch.long), torch.ones(4, 9, dtype=torch.long)
        observe(build("bert"), [{"input_ids": long}, {"input_ids": short}], [Rows()])
        assert rows == [1, 2, 2]


def test_a_batch_of_other_numbers_of_texts_and_images_stays_whole():
    batch = {"input_ids": torch.ones(3, 5, dtype=torch.long), "pixel_values": torch.randn(1, 3, 8, 8)}
    assert [*cut_batch(batch, 4, lambda: 0)] == [batch]


def test_a_stack_whose_filter_has_no_matrix_has_no_chart_of_its_rank():
    model = patch_model(build("t5"), "featscale", stack="decoder")  # not linear
    found = spectrum(model, [texts(family="t5")])
    stacks = [axes.get_label().rpartition(", ")[2] for axes in found.plot().axes]
    assert (stacks.count("encoder"), stacks.count("decoder")) == (5, 3)


def test_branches_are_switched_off_one_at_a_time():
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES)).train()
    patch_model(model, "gfsa", w_0=0.5, w_K=0.3, layers=[0])
    patch_model(model, "agf", window=2, layers=[1])
    batch = texts() | {"labels": torch.tensor([0, 1, 1])}
    before = {k: v.clone() for k, v in model.state_dict().items()}
    report = branch_report(model, [batch])
    parts = {"w_0": 1, "w_1": 1, "w_K": 1, "window": 1, "far": 1}
    assert (report[0].name, {b.name: b.modules for b in report[1:]}) == ("all", parts)
    assert report[0].change == 0
    assert all(b.change != 0 and b.value == pytest.approx(report[0].value + b.change) for b in report[1:])
    assert model.training
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert branch_report(model, lambda m: 2.0)[1].change == 0
    with pytest.raises(GraphFilterError, match="the model returned no loss"):
        branch_report(model, [texts()])
    with pytest.raises(GraphFilterError, match="a batch is a tensor, which has no labels"):
        branch_report(model, [texts()["input_ids"]])
    with pytest.raises(GraphFilterError, match=r"agf.* no parts"):
        branch_report(patch_model(build("bert"), "agf"), [batch])


def test_a_mean_loss_does_not_depend_on_the_batches(transformers_warnings):
    torch.manual_seed(0)
    model = patch_model(GPT2LMHeadModel(build("gpt2").config).double(), "gfsa", w_K=0.3)
    labels = texts()["input_ids"].clone()
    labels[0, 3:] = labels[1, 2:] = -100
    rows = [{"input_ids": x[None], "labels": y[None]} for x, y in zip(texts()["input_ids"], labels, strict=True)]
    whole = branch_report(model, [{"input_ids": texts()["input_ids"], "labels": labels}])
    for one, other in zip(whole, branch_report(model, rows), strict=True):
        assert one.value == pytest.approx(other.value, rel=1e-5)  # transformers takes it in float32
    transformers_warnings.clear()  # of the loss of a GPT-2


def test_coefficients_of_several_numbers_a_head_are_drawn_as_their_mean(tmp_path):
    model = patch_model(build("bert"), "featscale")
    drawn = [axes.images[0].get_array() for axes in heat_maps(filter_status(model)).axes if axes.images]
    assert {values.shape for values in drawn} == {(2, 4)}
    assert plot_coefficients(model, tmp_path / "plot.png").is_file()
    with pytest.raises(GraphFilterError, match="gated: the filter has weights but no coefficients"):
        plot_coefficients(patch_model(build("bert"), "gated"), tmp_path / "plot.png")


def test_results_are_rows_json_and_figures(tmp_path):
    results = everything(build("bert"), [texts()])
    other = everything(patch_model(build("bert"), "gfsa", w_K=0.5), [texts()])
    for measured, against in zip(results, other, strict=True):
        figure = measured.plot(against)
        assert all(axes.get_xlabel() and axes.get_ylabel() for axes in figure.axes)
        content = json.loads(measured.to_json(tmp_path / "out" / "result.json").read_text())
        assert content["rows"] == measured.rows()
        assert len(measured.to_frame()) == len(content["rows"])
    assert results[0][-1, "cosine"] is results[0].bands[Layer("encoder", 1), "cosine"]
    with pytest.raises(GraphFilterError, match="has no 'cosines' of layer encoder 0; it has"):
        results[0][0, "cosines"]
    with pytest.raises(GraphFilterError, match="has no 'cosine' of layer encoder -100"):
        results[0][-100, "cosine"]
    with pytest.raises(GraphFilterError, match="has no 'cosines'; it has cosine"):
        results[0].plot(quantities=["cosine", "cosines"])
    with pytest.raises(GraphFilterError, match="has no 'dirichlet'; it has cosine, high_frequency"):
        smoothing(build("bert"), [texts()], dirichlet=False).plot(quantities=["dirichlet"])


@pytest.mark.parametrize(
    ("analyse", "options", "message"),
    [
        (taylor_error, {"most": 0}, "most must be 1 or more, got 0"),
        (taylor_error, {"most": 1.5}, "most must be 1 or more, got 1.5: pass an integer"),
        (taylor_error, {"most": "3"}, "most must be 1 or more, got '3': pass an integer"),
        (taylor_error, {"orders": 3}, "orders must be a list of one or more integers from 2 on, got 3"),
        (taylor_error, {"orders": [1, 2]}, r"from 2 on, got \[1, 2\]"),
        (spectrum, {"attention": -1}, "attention must be a number of texts, 0 for none, got -1"),
    ],
)
def test_numbers_that_cannot_be_are_refused(analyse, options, message):
    with pytest.raises(GraphFilterError, match=message):
        analyse(build("bert"), [texts()], **options)


def test_a_curve_has_two_points():
    with pytest.raises(GraphFilterError, match="points from 2 on, got points=0"):
        response_curves(patch_model(build("bert"), "gfsa"), points=0)


def test_a_number_is_a_layer_of_the_encoder_where_there_are_both():
    measured = smoothing(build("t5"), [texts(family="t5")], dirichlet=False)
    assert measured[0, "cosine"] is measured[Layer("encoder", 0), "cosine"]
    assert measured[-1, "cosine"] is measured[Layer("encoder", 1), "cosine"]


def test_float16_models_are_measured_in_float32():
    """Squares of their hidden states are beyond the range of float16."""
    model = build("bert").float()
    model.embeddings.LayerNorm.weight.data *= 30
    model = model.half()
    ((states, *_),) = reference(model, texts()).values()
    assert states[0].square().sum(-1).max().isinf()
    found, expected = (smoothing(m, [texts()]) for m in (model, copy.deepcopy(model).float()))
    for layer in (-1, 0, 1):
        mean = expected[layer, "cosine"].mean.item()
        assert found[layer, "cosine"].mean.item() == pytest.approx(mean, rel=1e-2)
