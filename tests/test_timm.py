"""Filters on timm models: the same contract as for transformers, with the module's own unfused form as the oracle."""

import copy
import functools
import inspect
import pickle
import subprocess
import sys
import types

import pytest
import torch
from filters import NO_THIRD, Third, combinations, common, each_once
from hub_server import TOKEN, Hub
from models import realigned, turn_on
from oracle import compare_own_gradients, timm_twin
from safetensors.torch import load_file, save_file

from hf_graphfilter import (
    AGFConfig,
    GFSAConfig,
    GraphFilterError,
    create_model_card,
    filter_parameters,
    filter_status,
    load_filter,
    load_timm_model,
    patch_model,
    save_filter,
    transfer_attention,
    unpatch_model,
)

timm = pytest.importorskip("timm")
from timm.layers.attention import Attention  # noqa: E402
from timm.models import create_feature_extractor  # noqa: E402
from timm.models.cait import Cait  # noqa: E402
from timm.models.deit import VisionTransformerDistilled  # noqa: E402
from timm.models.eva import Eva  # noqa: E402
from timm.models.swin_transformer import SwinTransformer  # noqa: E402
from timm.models.vision_transformer import VisionTransformer  # noqa: E402
from timm.utils import AttentionExtract  # noqa: E402

SMALL = {"img_size": 32, "num_classes": 5, "embed_dim": 48, "num_heads": 3, "patch_size": 8, "depth": 3}
SWIN = {"img_size": 32, "num_classes": 5, "embed_dim": 24, "num_heads": (2, 4), "patch_size": 2, "window_size": 4}
FAMILIES = {
    "vit": lambda: VisionTransformer(**SMALL),
    "vit-qk-norm": lambda: VisionTransformer(**SMALL, qk_norm=True, init_values=0.1),
    "vit-dynamic": lambda: VisionTransformer(**SMALL, dynamic_img_size=True, dynamic_img_pad=True),
    "deit-distilled": lambda: VisionTransformerDistilled(**SMALL),
    "swin": lambda: SwinTransformer(**SWIN, depths=(2, 2)),
    "swin-odd": lambda: SwinTransformer(**SWIN, depths=(2, 2), strict_img_size=False),
    "cait": lambda: Cait(**SMALL, depth_token_only=1, init_values=0.5),
    "eva-rope": lambda: Eva(**SMALL, use_rot_pos_emb=True, qkv_bias=False),
}
PATCHED = {"swin": 4, "swin-odd": 4}
SIZES = {"vit-dynamic": (37, 29), "swin-odd": (36, 44)}

families = pytest.mark.parametrize("family", FAMILIES)
MATRIX_FREE = ("vit", "vit-qk-norm", "vit-dynamic", "deit-distilled", "swin", "swin-odd")  # no scores are needed
FEW = ("vit", "swin")
BOTH = Third("fused", {"fused": True, "unfused": False}, lambda fused, *both: fused or each_once(FEW)(*both))
honoured_fused_or_not, honoured = (
    combinations(
        FAMILIES,
        lambda family, entry: not entry.decoders_only and (family in MATRIX_FREE or not entry.replaces),
        quick=common(FEW),
        third=third,
    )
    for third in (BOTH, NO_THIRD)
)


def patch(model, family, entry):
    """A filter without scores goes only into those layers of Swin whose windows are not shifted."""
    if entry.reads_first:
        with pytest.raises(GraphFilterError, match=r"pass nothing on to each other|choose layers of the same shape"):
            patch_model(model, entry.config)
        pytest.skip("layers pass nothing on to each other")
    return patch_model(
        model, entry.config, layers="even" if family in PATCHED and entry.config.module.reads_mask else None
    )


def build(family, fused=True):
    torch.manual_seed(0)
    model = FAMILIES[family]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(3)  # attention far from uniform
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = fused
    return model


def images(family, dtype=torch.float32, batch=2):
    g = torch.Generator().manual_seed(1)
    return torch.randn(batch, 3, *SIZES.get(family, (32, 32)), generator=g, dtype=dtype)


def test_families_of_any_size_get_images_that_need_padding():
    assert images("vit-dynamic").shape[-2:] == (37, 29)
    assert images("swin-odd").shape[-2:] == (36, 44)


def test_transfer_takes_images_as_tensors():
    model = patch_model(build("vit"), "agf", correction=True)
    draw = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 3, 32, 32, generator=draw) for _ in range(4)]
    report = transfer_attention(model, batches, steps=4, holdout=1, progress=False)
    assert report.mean_after < report.mean_before


@honoured_fused_or_not
def test_identical_at_the_start(family, entry, fused):
    model, x = build(family, fused), images(family)

    def both():
        with torch.no_grad():
            inference = model(x)
        return inference, model(x)

    expected = both()
    keys = set(model.state_dict())
    assert patch(model, family, entry) is model
    assert all(map(torch.equal, both(), expected)) == entry.config.starts_as_original
    assert keys <= set(model.state_dict())  # equal where a filter learns nothing
    status = filter_status(model)
    assert len(status) == PATCHED.get(family, 3) // (2 if family in PATCHED and entry.config.module.reads_mask else 1)
    assert {row.backend for row in status} == {"sdpa" if fused and family != "cait" else "eager"}


@honoured_fused_or_not
def test_equals_the_dense_form(family, entry, fused):
    plain, x = build(family, fused).double(), images(family, torch.float64)
    patched = turn_on(patch(copy.deepcopy(plain), family, entry))
    twin_filters = copy.deepcopy(patched)
    before, twin = plain(x), timm_twin(copy.deepcopy(plain), twin_filters, entry.formula)
    found, expected = patched(x), twin(x)
    torch.testing.assert_close(found, expected, rtol=1e-7, atol=1e-9)
    assert not torch.allclose(found, before, rtol=1e-7, atol=1e-9), "the filter is on"
    for out in (found, expected):
        out.square().sum().backward()
    gradients = dict(patched.named_parameters())
    for key, parameter in twin.named_parameters():
        if gradients[key].grad is None:
            assert parameter.grad is None or not parameter.grad.any(), "a position bias is dropped"
        elif parameter.grad is not None:
            torch.testing.assert_close(gradients[key].grad, parameter.grad, rtol=1e-5, atol=1e-7)
    compare_own_gradients(patched, twin_filters, rtol=1e-5, atol=1e-7)
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(patched))


def test_agf_on_a_vision_transformer_is_linear_attention():
    model, x = build("vit").double(), images("vit", torch.float64)
    before = model(x)
    patch_model(model, AGFConfig(init="blend", theta="per_head"), layers=[-1])
    assert torch.equal(model(x), before)
    unpatch_model(model)
    patch_model(model, AGFConfig(), layers=[-1])
    seen = {}
    model.blocks[2].attn.register_forward_pre_hook(lambda m, args: seen.update(x=args[0]))
    model.blocks[2].attn.proj.register_forward_pre_hook(lambda m, args: seen.update(out=args[0]))
    model(x)
    q, k, v = model.blocks[2].attn.qkv(seen["x"]).unflatten(-1, (3, 3, 16)).permute(2, 0, 3, 1, 4)
    expected = q.softmax(-1) @ (k.softmax(-2).mT @ v)  # Sigma is 1 at the start
    torch.testing.assert_close(seen["out"], expected.transpose(1, 2).flatten(2))
    model(x).sum().backward()
    assert all(p.grad is not None for p in filter_parameters(model))


def test_agf_refuses_what_it_cannot_honour():
    for family, reason in (("cait", "talking heads"), ("eva-rope", "rotary positions"), ("swin", "bias of positions")):
        model = build(family)
        before = model.state_dict()
        with pytest.raises(GraphFilterError, match=reason):
            patch_model(model, "agf")
        assert model.state_dict().keys() == before.keys()
        assert not filter_status(model)
    with pytest.raises(GraphFilterError, match="shifted windows"):
        patch_model(build("swin"), AGFConfig(position_bias="drop"))(images("swin"))
    patch_model(build("swin"), AGFConfig(position_bias="drop"), layers="even")(images("swin"))


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (lambda: timm.create_model("vit_tiny_patch16_224", depth=1, attn_layer="attn", scale_attn_norm=True), "a norm"),
        (lambda: timm.create_model("swinv2_tiny_window8_256", depths=(1, 1, 1, 1)), "an unsupported form of attention"),
        (lambda: timm.create_model("resnet18"), "Attention found: none"),
        (lambda: timm.create_model("beit_base_patch16_224", depth=1), "an unsupported form of attention"),
    ],
    ids=["scale-norm", "swin-v2", "resnet", "beit"],
)
def test_what_is_not_honoured_is_refused_by_name(model, reason):
    with pytest.raises(GraphFilterError, match=reason):
        patch_model(model())


def test_gates_and_separate_projections_are_refused():
    model = build("vit")
    model.blocks[0].attn.gate = torch.nn.Linear(48, 48)
    patch_model(model)
    assert [row.module for row in filter_status(model)] == ["blocks.1.attn", "blocks.2.attn"]
    if "gated" not in inspect.signature(Attention).parameters:
        return  # of a later release
    model = build("vit")
    for block in model.blocks:
        block.attn = Attention(48, 3, gated=True)
    with pytest.raises(GraphFilterError, match="a gate on its output"):
        patch_model(model)


def test_class_attention_of_cait_stays_as_it_is():
    model = patch_model(build("cait"))
    assert all(row.module.startswith("blocks.") for row in filter_status(model))


@families
def test_unpatch_copy_and_pickle(family):
    model, x = build(family), images(family)
    before, types = model(x), [type(m) for m in model.modules()]
    turn_on(patch_model(model, K=4))
    filtered = model(x)
    assert not torch.equal(filtered, before)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x), filtered)
        with torch.no_grad():
            next(filter_parameters(twin)).add_(1)
        assert torch.equal(model(x), filtered), "a copy of its own"
    unpatch_model(model)
    assert torch.equal(model(x), before)
    assert [type(m) for m in model.modules()] == types
    assert not filter_status(model)


@pytest.mark.parametrize("family", ["vit", "swin", "cait"])
def test_training_with_dropout_and_checkpointing(family):
    model, x = patch_model(build(family).double(), K=3, learn=("w_0", "w_K")).train(), images(family, torch.float64)
    for module in model.modules():
        if hasattr(module, "attn_drop"):
            module.attn_drop.p = 0.2
    turn_on(model)
    torch.manual_seed(0)
    model(x).square().sum().backward()
    expected = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    model.zero_grad()
    model.set_grad_checkpointing()
    torch.manual_seed(0)
    model(x).square().sum().backward()
    found = [p.grad for p in model.parameters() if p.grad is not None]
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("family", [f if f == "vit" else pytest.param(f, marks=pytest.mark.slow) for f in FAMILIES])
@pytest.mark.parametrize("fused", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["fused", "unfused"])
def test_compiled_without_a_graph_break(family, fused):
    model, x = turn_on(patch_model(build(family, fused).double())), images(family, torch.float64)
    torch.compiler.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    compiled(x).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in filter_parameters(model))


def test_dropout_draws_a_mask_for_each_application():
    model = patch_model(build("cait"), w_1=0.0, w_K=1.0, K=2, approximation="none", layers=[0]).train()
    attn = model.blocks[0].attn
    attn.attn_drop.p = 0.5
    torch.manual_seed(0)
    x = torch.randn(1, 6, 48)
    mean = torch.stack([attn(x) for _ in range(4000)]).mean(0)
    attn.attn_drop.p = 0.0
    assert (mean - attn(x)).abs().max() < 0.15 * attn(x).abs().max(), "E[A_1 A_2] = A^2"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_leaves_the_coefficients(dtype):
    model = turn_on(patch_model(build("vit"))).to(dtype)
    assert {p.dtype for p in filter_parameters(model)} == {torch.float32}
    assert model(images("vit", dtype)).isfinite().all()


NAMED = {"depth": 2, "embed_dim": 48}  # which timm writes by itself from 1.0.31 on


def saved(model, folder):
    timm.models.save_for_hf(model, folder, safe_serialization=True, model_args=NAMED)
    return folder


def named():
    torch.manual_seed(0)
    return timm.create_model("deit_tiny_patch16_224", **NAMED, num_classes=7)


def test_saved_by_timm_and_loaded_again(tmp_path):
    model = turn_on(patch_model(named(), GFSAConfig(K=4), layers=[-1])).eval()
    x = torch.randn(1, 3, 224, 224)
    folder = saved(model, tmp_path / "checkpoint")
    again = realigned(load_timm_model(folder))
    assert torch.equal(again(x), model(x))
    assert [row.filter for row in filter_status(again)] == [GFSAConfig(K=4)]
    assert again.num_classes == 7
    with pytest.raises(Exception, match="hf_graphfilter"):
        timm.create_model(f"local-dir:{folder}", pretrained=True)
    with pytest.raises(GraphFilterError, match="holds no graph filter; load it with"):
        load_timm_model(saved(unpatch_model(model), tmp_path / "plain"))
    with pytest.raises(GraphFilterError, match="cannot be loaded as a timm checkpoint"):
        load_timm_model(tmp_path)
    card = create_model_card(again, repo_id="me/deit-gfsa").content
    assert 'load_timm_model("me/deit-gfsa")' in card
    assert "library_name: timm" in card


@pytest.mark.parametrize("values", [torch.full((3,), torch.nan), torch.ones(3, dtype=torch.int64), torch.ones(2)])
def test_odd_coefficients_are_refused(values, tmp_path):
    file = saved(patch_model(named()), tmp_path) / "model.safetensors"
    tensors = load_file(file)
    tensors["blocks.1.attn.graph_filter.w_K"] = values
    save_file(tensors, file)
    with pytest.raises(GraphFilterError, match=r"blocks\.1\.attn\.graph_filter\.w_K (holds|should hold)"):
        load_timm_model(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[" * 100_000, "cannot be loaded as a timm checkpoint"),
        ('{"architecture": "x", "pretrained_cfg": []}', "cannot be loaded as a timm checkpoint"),
        ('{"architecture": "x", "pretrained_cfg": {"hf_graphfilter": {}}}', "names 'x', which is no architecture"),
        (
            '{"architecture": "deit_tiny_patch16_224", "pretrained_cfg": {"hf_graphfilter": {}, "num_classes": "x"}}',
            "build",
        ),
    ],
    ids=range(4),
)
def test_odd_checkpoints_are_refused(text, message, tmp_path):
    (saved(patch_model(named()), tmp_path) / "config.json").write_text(text)
    with pytest.raises(GraphFilterError, match=message):
        load_timm_model(tmp_path)
    for path in (None, "a" * 5000):
        with pytest.raises(GraphFilterError, match="cannot be loaded as a timm checkpoint"):
            load_timm_model(path)


PUSH = """
import timm, torch
from hf_graphfilter import filter_parameters, load_timm_model, patch_model
model = timm.create_model("deit_tiny_patch16_224", depth=2, embed_dim=48, num_classes=7)
patch_model(model, K=4).eval()
for parameter in filter_parameters(model):
    parameter.data.add_(0.3)
sizes = {"depth": 2, "embed_dim": 48}
timm.models.push_to_hf_hub(model, "me/deit-gfsa", safe_serialization=True, model_args=sizes)
images = torch.randn(1, 3, 224, 224)
torch.testing.assert_close(load_timm_model("me/deit-gfsa")(images), model(images))
"""


def test_pushed_by_timm_to_a_stand_in_of_the_hub_and_loaded_from_it(tmp_path):
    with Hub() as hub:
        environment = hub.environment(tmp_path, HF_TOKEN=TOKEN)
        done = subprocess.run([sys.executable, "-c", PUSH], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert set(hub.repos["me/deit-gfsa"]) == {"README.md", "config.json", "model.safetensors"}


def test_the_filter_alone_over_a_copy_of_the_base_model(tmp_path):
    model, x = turn_on(patch_model(named(), K=3)).eval(), torch.randn(1, 3, 224, 224)
    save_filter(model, tmp_path)
    other = load_filter(named().eval(), tmp_path)
    assert torch.equal(other(x), model(x))
    with pytest.raises(GraphFilterError, match="it was made for a VisionTransformer model, this is Cait"):
        load_filter(build("cait"), tmp_path)


def test_two_models_of_one_name_have_records_of_their_own():
    a, b = named(), named()
    patch_model(a)
    assert not filter_status(b)
    assert "hf_graphfilter" not in b.pretrained_cfg
    with pytest.raises(GraphFilterError, match="already patched"):
        patch_model(a)


def test_nothing_imports_timm_unless_a_timm_model_comes():
    program = (
        "import sys, torch; from transformers import BertConfig, BertModel; from hf_graphfilter import patch_model\n"
        "patch_model(BertModel(BertConfig(num_hidden_layers=1, hidden_size=16, num_attention_heads=2)))\n"
        "try: patch_model(torch.nn.Linear(2, 2))\n"
        "except ValueError as error: print(error)\n"
        "print('timm' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")
    assert "a timm model" in done.stdout


@pytest.mark.parametrize("dropout", [0.0, 0.1])
def test_the_joint_kernel_is_used_in_training_and_agrees(dropout, monkeypatch):
    """With gradients: where query and key alone make the scores, both applications are one call on the CPU."""
    from hf_graphfilter.ops import polynomial_form as attention

    monkeypatch.setattr(attention, "FEWEST_ENTRIES", 1)
    calls = []
    original = attention.apply_polynomial
    monkeypatch.setattr(attention, "apply_polynomial", lambda *a, **k: calls.append(1) or original(*a, **k))
    found = {}
    for fused in (True, False):
        model = turn_on(patch_model(build("vit", fused).double())).train()
        for block in model.blocks:
            block.attn.attn_drop.p = dropout if fused else 0.0
        model(images("vit", torch.float64)).square().sum().backward()
        found[fused] = {k: p.grad for k, p in model.named_parameters()}
    assert len(calls) == 3
    if not dropout:
        for name, gradient in found[True].items():
            torch.testing.assert_close(gradient, found[False][name], rtol=1e-8, atol=1e-8)


def attend_by_itself(self, x, **kwargs):
    """Attention of a module's own, as libraries put it in the place of timm's."""
    return self.proj(self.qkv(x)[..., -x.shape[-1] :])


REPLACEMENTS = {
    "object": lambda module, patch: setattr(module, "forward", types.MethodType(attend_by_itself, module)),
    "class": lambda module, patch: patch.setattr(Attention, "forward", attend_by_itself),
    "swapped": lambda module, patch: setattr(
        module, "__class__", type("OtherAttention", (Attention,), {"forward": attend_by_itself})
    ),
    "wrapped": lambda module, patch: setattr(
        module, "forward", functools.wraps(module.forward)(lambda x, f=module.forward, **kwargs: f(x, **kwargs))
    ),
}


@pytest.mark.parametrize("way", REPLACEMENTS)
@pytest.mark.parametrize("patched_first", [True, False])
def test_a_replaced_forward_is_refused_or_noticed(way, patched_first, monkeypatch):
    model, image = build("vit"), torch.randn(1, 3, 32, 32)
    plain, bare = model(image), copy.deepcopy(model)
    if patched_first:
        filtered = turn_on(patch_model(model))(image)
    for block in (*model.blocks, *bare.blocks):
        REPLACEMENTS[way](block.attn, monkeypatch)
    if not patched_first:
        with pytest.raises(GraphFilterError, match=r"3 x .*: (its forward was replaced|an unsupported form)"):
            patch_model(model)
    elif way == "class":  # the filter runs, over the attention that the class has now
        assert not torch.equal(model(image), filtered)
    elif way == "wrapped":
        assert torch.equal(model(image), filtered)
        assert torch.equal(unpatch_model(model)(image), plain)
    else:
        assert {row.backend for row in filter_status(model)} == {"forward replaced"}
        with pytest.raises(GraphFilterError, match=r"blocks.0.attn .* ran without its graph filter"):
            model(image)
        assert torch.equal(unpatch_model(model)(image), bare(image))


def test_a_class_that_derives_from_the_patched_one_must_go_first():
    model = patch_model(build("vit"))
    attention = model.blocks[1].attn
    attention.__class__ = type("FSDPAttention", (type(attention),), {})
    model(torch.randn(1, 3, 32, 32))
    assert {row.backend for row in filter_status(model)} == {"sdpa"}
    with pytest.raises(GraphFilterError, match=r"blocks.1.attn was given the class FSDPAttention.*before unpatch"):
        unpatch_model(model)
    attention.__class__ = type(attention).__mro__[1]
    assert not filter_status(unpatch_model(model))


@pytest.mark.filterwarnings("ignore:NOTE. The nodes obtained by tracing")  # of torchvision, for the plain model too
@pytest.mark.parametrize("family", ["vit", "swin", "eva-rope"])
def test_feature_extraction_by_fx(family):
    pytest.importorskip("torchvision")
    model, image = turn_on(patch_model(build(family))), torch.randn(2, 3, 32, 32)
    name = "layers.1" if family == "swin" else "blocks.1"
    expected = []
    handle = model.get_submodule(name).register_forward_hook(lambda module, args, output: expected.append(output))
    model(image)
    handle.remove()
    extract = create_feature_extractor(model, [name])
    assert torch.equal(extract(image)[name], expected[0])
    pickle.loads(pickle.dumps(model))


def test_attention_maps_by_hooks():
    model, image = turn_on(patch_model(build("vit", fused=False))), torch.randn(2, 3, 32, 32)
    maps = AttentionExtract(model, method="hook")(image)
    plain = AttentionExtract(unpatch_model(model), method="hook")(image)
    assert torch.equal(next(iter(maps.values())), next(iter(plain.values())))
    assert all(torch.allclose(found.sum(-1), torch.ones(())) for found in maps.values())


@pytest.mark.filterwarnings(
    *(f"ignore::{kind}" for kind in ("FutureWarning", "DeprecationWarning", "torch.jit.TracerWarning"))
)
def test_scripting_is_refused_and_tracing_works():
    model, image = turn_on(patch_model(build("vit"))), torch.randn(2, 3, 32, 32)
    with pytest.raises(GraphFilterError, match=r"blocks.0.attn: torch.jit.script cannot compile a graph filter"):
        torch.jit.script(model)
    torch.testing.assert_close(torch.jit.trace(model, image)(image), model(image))


def test_a_mask_with_two_dimensions_is_of_queries_by_keys():
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=16).eval()
    images, whole = torch.randn(5, 3, 32, 32), torch.ones(5, 5, dtype=torch.bool)  # as many images as tokens
    turn_on(patch_model(model, "contranorm"))
    causal = whole.tril()
    expected = model(images[:1], attn_mask=causal)
    torch.testing.assert_close(model(images, attn_mask=causal)[:1], expected, atol=1e-5, rtol=1e-5)
