"""Filters that other people write: importing them, mistakes in them, ``check_filter``, loading what they hold."""

import copy
import json
import os
import re
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from filters import Damped, damped_matrix, filters
from linear_attention import LinearAttention, LinearAttentionConfig
from models import FAMILIES, TORCH_2_11, output, realigned, turn_on
from torch import nn
from transformers import AutoConfig, AutoModel

from hf_graphfilter import (
    FilterConfig,
    GraphFilter,
    GraphFilterError,
    check_filter,
    create_model_card,
    filter_parameters,
    filter_status,
    load_filter,
    patch_model,
    register_filter,
    save_filter,
    unpatch_model,
)
from hf_graphfilter.filters import available_filters, import_filters

BERT = FAMILIES["bert"]
SOURCE = """
from dataclasses import dataclass
from hf_graphfilter import FilterConfig, GraphFilter, register_filter

class Same(GraphFilter):
    def forward(self, shift, value):
        return shift(value)

@register_filter({name!r})
@dataclass(frozen=True)
class SameConfig(FilterConfig):
    module = Same
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory; what is imported from it is forgotten."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    yield tmp_path
    for name, module in [*sys.modules.items()]:  # only these: PyTorch cannot import its own modules twice
        if Path(getattr(module, "__file__", None) or "").is_relative_to(tmp_path):
            del sys.modules[name]


def test_import_by_dotted_name_and_by_path(folder):
    package = folder / "test_package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "test_dotted.py").write_text(SOURCE.format(name="test-dotted"))
    (folder / "elsewhere").mkdir()
    (folder / "elsewhere" / "test_by_path.py").write_text("import test_beside")
    (folder / "elsewhere" / "test_beside.py").write_text(SOURCE.format(name="test-beside"))
    for _ in range(2):
        import_filters(["test_package.test_dotted", "elsewhere/test_by_path.py"])
    assert {"test-dotted", "test-beside"} <= set(available_filters())


@pytest.mark.parametrize(
    ("source", "modules", "message"),
    [
        ("", "bad", "must be a list of names, got the string 'bad': pass ['bad']"),
        ("", ["absent"], "from 'absent': ModuleNotFoundError: No module named 'absent'"),
        ("", ["absent.py"], "from 'absent.py': there is no such file"),
        ("", ["a/folder"], "from 'a/folder': there is no such file"),
        ("", [".bad"], "from '.bad': TypeError: "),
        ("", [""], "from '': ValueError: Empty module name"),
        ("import not_installed", ["bad"], "from 'bad': ModuleNotFoundError: No module named 'not_installed'"),
        ("1 / 0", ["bad.py"], "from 'bad.py': ZeroDivisionError: division by zero"),
        ("raise RuntimeError('two\\nlines')", ["bad"], "from 'bad': RuntimeError: two lines"),
        ("def", ["bad"], "from 'bad': SyntaxError: "),
        ("raise SystemExit(2)", ["bad"], "from 'bad': SystemExit: 2"),
        (SOURCE.format(name="gfsa"), ["bad"], "from 'bad': GraphFilterError: the filter name 'gfsa' is taken by"),
    ],
)
def test_what_cannot_be_imported_is_named(folder, source, modules, message):
    (folder / "bad.py").write_text(source)
    with pytest.raises(GraphFilterError, match=re.escape(message)) as caught:
        import_filters(modules)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["torch", "sys"])
def test_a_file_named_like_another_module(folder, name):
    (folder / f"{name}.py").write_text(SOURCE.format(name="test-taken"))
    with pytest.raises(GraphFilterError, match=f"the name '{name}' is taken by .*; rename the file"):
        import_filters([f"{name}.py"])


def config_of(filter_class, **attributes):
    """A registered config of the class, without options."""
    name = f"test-{filter_class.__name__}-{len(available_filters())}"
    body = {"module": filter_class, "__module__": __name__, **attributes}
    made = dataclass(frozen=True)(type(f"{filter_class.__name__}Config", (FilterConfig,), body))
    globals()[made.__name__] = made  # where pickle looks
    return register_filter(name)(made)()


class Transposed(Damped):
    def forward(self, shift, value):
        return super().forward(shift, value).transpose(1, 2)


class ReturnsNone(Damped):
    def forward(self, shift, value):
        super().forward(shift, value)


class ReturnsPair(Damped):
    def forward(self, shift, value):
        return super().forward(shift, value), None


class Promoted(Damped):
    def forward(self, shift, value):
        return self.c.view(-1, 1, 1) * shift(value)


OTHER_FORMS = {
    case[0].__name__: case
    for case in [
        (Transposed, torch.float32, r"= (2, 4, 9, 8) of torch.float32, like the value, but returned (2, 9, 4, 8) of"),
        (ReturnsNone, torch.float32, "but returned NoneType"),
        (ReturnsPair, torch.float32, "but returned tuple"),
        (Promoted, torch.bfloat16, "(2, 4, 9, 8) of torch.bfloat16, like the value, but returned (2, 4, 9, 8) of tor"),
    ]
}
OTHER_WHEN_COMPILED = {name: [pytest.mark.slow] * (name != "Transposed") for name in OTHER_FORMS}  # seconds each


@pytest.mark.parametrize(
    ("filter_class", "dtype", "message", "compiled"),
    [
        *(pytest.param(*case, False, id=name) for name, case in OTHER_FORMS.items()),
        *(
            pytest.param(
                *OTHER_FORMS[name],
                True,
                id=f"{name}-compiled",
                marks=[*marks, pytest.mark.skipif(TORCH_2_11, reason="its compiler hides what is raised")],
            )
            for name, marks in OTHER_WHEN_COMPILED.items()
        ),
    ],
)
def test_an_output_of_another_form_is_an_error_at_the_first_forward(filter_class, dtype, message, compiled):
    model = patch_model(BERT.build().to(dtype), config_of(filter_class))
    if compiled:
        model.compile(backend="eager")
    with pytest.raises(GraphFilterError, match=re.escape(message)) as caught, torch.no_grad():
        model(**BERT.inputs())
    assert f"encoder.layer.0.attention.self: {filter_class.__name__}.forward must return a tensor" in str(caught.value)


def test_another_dtype_is_not_an_error_under_autocast():
    model = patch_model(BERT.build(), config_of(Promoted))
    with torch.autocast("cpu", torch.bfloat16):
        assert output(model, BERT.inputs()).isfinite().all()


class NoReset(Damped):
    def __init__(self, config, site):
        GraphFilter.__init__(self, config, site)
        self.c = nn.Parameter(torch.ones(site.heads))

    reset_parameters = GraphFilter.reset_parameters


class NoForward(Damped):
    forward = GraphFilter.forward


class LateSuper(Damped):
    def __init__(self, config, site):
        self.c = nn.Parameter(torch.empty(site.heads))


class NoSuper(Damped):
    def __init__(self, config, site):
        self.c = torch.ones(site.heads)


class SuperWithoutSite(Damped):
    def __init__(self, config, site):
        super().__init__()


class OtherArguments(Damped):
    def __init__(self, heads):
        pass


class PlainTensor(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.table = torch.ones(3)


class PlainList(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.maps = [nn.Linear(2, 2)]


class NotPerHead(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(3))


class AbsentPerHead(Damped):
    per_head = ("c", "d")


class PerHeadAsText(Damped):
    per_head = "c"


class PerHeadAndMore(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.shared = nn.Parameter(torch.ones(1))


class Tied(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.again = self.c


class OtherDecoding(Damped):
    decoding = "row"


@pytest.mark.parametrize(
    ("filter_class", "message"),
    [
        (NoReset, ": NoReset has parameters or buffers but no reset_parameters()"),
        (NoForward, ": NoForward has no forward(shift, value)"),
        (NoSuper, "must return a GraphFilter, got a NoSuper without super().__init__(config, site)"),
        (PlainTensor, ": PlainTensor: self.table holds tensors that would not be moved, trained or saved"),
        (PlainList, ": PlainList: self.maps holds tensors that would not be moved, trained or saved"),
        (NotPerHead, "names 'c', which must be a parameter or buffer (4, ...), one entry per head, but is (3,)"),
        (AbsentPerHead, "names 'd', which must be a parameter or buffer (4, ...), one entry per head, but is None"),
        (PerHeadAsText, ": PerHeadAsText: per_head must be a tuple of names, got 'c'"),
        (PerHeadAndMore, "per_head must name all parameters or none, but lacks 'shared'"),
        (Tied, ": Tied has one tensor under two names, which safetensors does not save"),
        (OtherDecoding, "decoding must be one of 'rows', 'state', 'state and keys', got 'row'"),
    ],
)
def test_mistakes_are_found_when_a_model_is_patched(filter_class, message):
    model, config = BERT.build(), config_of(filter_class)
    expected = output(model, BERT.inputs())
    with pytest.raises(GraphFilterError, match=re.escape(message)) as caught:
        patch_model(model, config)
    assert filter_class.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(output(model, BERT.inputs()), expected)


@pytest.mark.parametrize(
    ("filter_class", "message"),
    [
        (LateSuper, "cannot assign parameters before Module.__init__() call"),
        (SuperWithoutSite, "Damped.__init__() missing 2 required positional arguments: 'config' and 'site'"),
        (OtherArguments, "OtherArguments.__init__() takes 2 positional arguments but 3 were given"),
    ],
)
def test_mistakes_that_python_names_itself_leave_the_model_as_it_was(filter_class, message):
    model, config = BERT.build(), config_of(filter_class)
    expected = output(model, BERT.inputs())
    with pytest.raises((TypeError, AttributeError), match=re.escape(message)):
        patch_model(model, config)
    assert torch.equal(output(model, BERT.inputs()), expected)
    assert not filter_status(model)


def test_a_filter_without_parameters_needs_no_reset(tmp_path):
    class Same(GraphFilter):
        def forward(self, shift, value):
            return shift(value)

    model, config = BERT.build(), config_of(Same)
    expected = output(model, BERT.inputs())
    patch_model(model, config).save_pretrained(tmp_path)
    assert torch.equal(output(BERT.model_class.from_pretrained(tmp_path), BERT.inputs()), expected)


def test_a_config_without_a_module_or_frozen_dataclass_is_refused():
    class NoDataclass(FilterConfig):
        module = Damped
        start: float = 1.0

    @dataclass(frozen=True)
    class Parent(FilterConfig):
        module = Damped

    class NoDataclassOfItsOwn(Parent):
        start: float = 1.0

    @dataclass
    class NotFrozen(FilterConfig):
        module = Damped

    for config_class in (NoDataclass, NoDataclassOfItsOwn, NotFrozen):
        with pytest.raises(
            GraphFilterError, match=rf"{config_class.__name__} must be a frozen dataclass.*'test-wrong'"
        ):
            register_filter("test-wrong")(config_class)

    @dataclass(frozen=True)
    class Annotated(FilterConfig):
        module: type = Damped

    with pytest.raises(GraphFilterError, match="Annotated: 'module' belongs to FilterConfig and cannot be an option"):
        register_filter("test-wrong")(Annotated)
    for module in (nn.Linear, "Damped", GraphFilter):
        Parent.module = module
        with pytest.raises(GraphFilterError, match="Parent must derive from FilterConfig and set `module`"):
            register_filter("test-wrong")(Parent)
    assert "test-wrong" not in available_filters()


@filters(
    lambda entry: entry.everywhere or entry.config.module is Damped,
    quick=lambda entry: entry.config.filter == "gfsa" or (entry.quick and not entry.config.starts_as_original),
)
def test_filters_that_pass(entry):
    before = torch.get_rng_state()
    formula = None if entry.replaces else lambda A, c: entry.formula(A, c, entry.config, None)
    report = check_filter(entry.config, formula=formula)
    assert torch.equal(torch.get_rng_state(), before)
    absent = {"explicit matrix", "formula"} if entry.replaces else set()
    absent |= {"causality", "cached decoding"} if entry.encoders_only else set()
    absent |= set() if entry.config.starts_as_original else {"starts as the original"}
    absent |= set() if entry.config.module.per_head else {"values per head"}
    assert {row.check for row in report if row.outcome == "does not apply" and row.detail} == absent
    assert {row.outcome for row in report if row.check not in absent} == {"passed"}
    assert ("is no function of a matrix" in str(report)) == entry.replaces
    assert ("starts_as_original" in str(report)) == (not entry.config.starts_as_original)
    assert str(report).splitlines()[0].split() == ["check", "outcome", "detail"]


class Uninitialised(Damped):
    per_head = ("c", "d")

    def __init__(self, config, site):
        super().__init__(config, site)
        self.d = nn.Parameter(torch.empty(site.heads))  # not used: what it holds may be NaN


class ResetsSome(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.register_buffer("d", torch.zeros(site.heads))


class NeedsNumbers(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.first = self.c[0].item()


class InPlace(Damped):
    def forward(self, shift, value):
        return self.scale(shift(value.mul_(2)))


class StartsElsewhere(Damped):
    def reset_parameters(self):
        nn.init.constant_(self.c, 1.01)


class OtherOnAMatrix(Damped):
    def forward(self, shift, value):
        return super().forward(shift, value) * (1 if hasattr(shift, "attend") else 2)


class Coupled(Damped):
    def forward(self, shift, value):
        return self.scale(shift(value)) * self.c.mean().to(value.dtype)


class Unused(Damped):
    per_head = ()

    def __init__(self, config, site):
        super().__init__(config, site)
        self.d = nn.Parameter(torch.ones(1))


class Detached(Damped):
    def scale(self, x):
        return self.c.detach().to(x.dtype).view(-1, 1, 1) * x


class Infinite(Damped):
    def scale(self, x):
        return (self.c.sum() - self.c.sum()).to(x.dtype).sqrt() + super().scale(x)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WrongGradient(Damped):
    def scale(self, x):
        return WrongBackward.apply(super().scale(x))


class SeesAll(Damped):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out + out.mean(2, keepdim=True)


class CountsFromTheCall(Damped):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out * torch.arange(1, out.shape[2] + 1, dtype=out.dtype).view(-1, 1)


class Coarse(Damped):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out if out.dtype != torch.bfloat16 else torch.ones_like(out)


class Shared(Damped):
    everyones = nn.Parameter(torch.ones(4))

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = Shared.everyones

    def __deepcopy__(self, memo):
        return self


class ForgetsToSave(Damped):
    per_head = ()

    def __init__(self, config, site):
        super().__init__(config, site)
        self.register_buffer("used", torch.rand(1), persistent=False)
        with torch.no_grad():
            self.c.fill_(2.0)

    def forward(self, shift, value):
        self.used = self.used * 0 + self.c.detach().float()[:1]
        return super().forward(shift, value)


class ChangesTheModel(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        with torch.no_grad():
            next(site.module.parameters()).mul_(1.5)


class HoldsALambda(Damped):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.activation = lambda x: x

    def forward(self, shift, value):
        return self.activation(super().forward(shift, value))


class OtherWhenCompiled(Damped):
    def forward(self, shift, value):
        return super().forward(shift, value) * (2 if torch.compiler.is_compiling() else 1)


BROKEN = [
    (ReturnsNone, "forward", "BERT: .*ReturnsNone.forward must return a tensor .*, but returned NoneType"),
    (Transposed, "forward", "BERT: .*Transposed.forward must return a tensor .*, but returned \\(2, 9, 4, 8\\)"),
    (NoReset, "patching", "NoReset has parameters or buffers but no reset_parameters"),
    (Uninitialised, "start values", "BERT: __init__ leaves uninitialised memory .* in d, at encoder.layer.0"),
    (ResetsSome, "start values", "reset_parameters does not set d, at"),
    (ResetsSome, "meta", "built on the meta device, reset_parameters does not set d, at"),
    (NeedsNumbers, "meta", "BERT: RuntimeError: .*meta"),
    (InPlace, "forward", "changes the value in place"),
    (Infinite, "gradients", "the gradient of c is not finite"),
    (StartsElsewhere, "starts as the original", "right after patching the model is not the original"),
    (OtherOnAMatrix, "explicit matrix", "S through the model's attention and S as a matrix differ"),
    (Coupled, "formula", "forward and formula differ"),
    (Coupled, "values per head", "half of the values of per_head do not give half of the output"),
    (Unused, "gradients", "d gets no gradient"),
    (Detached, "gradients", "RuntimeError|c gets no gradient"),
    (WrongGradient, "finite differences", "its gradients are not those of its output in float64"),
    (SeesAll, "causality", "Llama: a later token changes the output at an earlier one"),
    (SeesAll, "padding", "BERT: padding changes the output at other tokens"),
    (CountsFromTheCall, "cached decoding", "Llama: decoding token by token with a cache differs from decoding without"),
    (Promoted, "half precision", "of torch.bfloat16, like the value, but returned .* of torch.float32"),
    (Coarse, "half precision", "in bfloat16 its output loses"),
    (ForgetsToSave, "save and load", "used is not what was saved"),
    (ChangesTheModel, "unpatching", "unpatch_model does not give the original again"),
    (HoldsALambda, "copies", "pickle|local object"),
    (Shared, "copies", "a copy made by deepcopy shares its parameters with the model"),
    (OtherWhenCompiled, "compiling", "the compiled model gives other outputs"),
]


@pytest.mark.parametrize(
    ("filter_class", "check", "message"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in BROKEN]
)
def test_broken_filters_are_caught(filter_class, check, message):
    config = config_of(filter_class)
    report = check_filter(config, formula=damped_matrix, only=[check], raise_on_failure=False)
    assert [row.check for row in report.failures] == [check], report
    assert re.search(message, report.failures[0].detail), report.failures[0].detail


def test_a_state_without_gradients_is_caught(monkeypatch):
    filtered = LinearAttention.filtered

    def detaching(self, shift, value):
        out = filtered(self, shift, value)
        if shift.state is not None:
            shift.state.update({name: kept.detach() for name, kept in shift.state.items()})
        return out

    monkeypatch.setattr(LinearAttention, "filtered", detaching)
    with pytest.raises(GraphFilterError, match=r"gradients through a cache differ .*is its state detached\?"):
        check_filter(LinearAttentionConfig(), only=["cached decoding"])


def test_all_failures_are_named():
    with pytest.raises(
        GraphFilterError, match=r"^SeesAllConfig fails 2 of 5 checks: causality \(.*\); padding \(.*\)$"
    ):
        check_filter(config_of(SeesAll), only=["causality", "padding"])
    with pytest.raises(GraphFilterError, match="no check 'speed'; the checks are config, patching"):
        check_filter("gfsa", only=["speed"])


def test_whatever_the_state_of_autograd():
    with torch.no_grad():
        assert not check_filter("gfsa", only=["gradients"]).failures


class EncodersOnly(SeesAll):
    def __init__(self, config, site):
        if site.causal:
            raise GraphFilterError("it sees later tokens")
        super().__init__(config, site)


def test_a_window_that_spans_the_texts_leaves_nothing_to_learn():
    row = check_filter("far_field", only=["gradients"])[-1]
    assert row.outcome == "does not apply"
    assert row.detail.endswith("act beyond 128 tokens, and the models here read 9: choose a smaller window")
    assert check_filter("far_field", window=2, sinks=1, only=["gradients"])[-1].outcome == "passed"


def test_a_model_that_the_filter_refuses_is_left_out():
    report = check_filter(config_of(EncodersOnly), only=["causality", "starts as the original"], raise_on_failure=False)
    rows = {row.check: row for row in report}
    assert rows["patching"].detail == "not in Llama: it sees later tokens; not in BART: it sees later tokens"
    assert rows["causality"].outcome == "does not apply"
    assert rows["starts as the original"].outcome == "failed"


class Breaks(Damped):
    def forward(self, shift, value):
        torch._dynamo.graph_break()
        return super().forward(shift, value)


def test_a_graph_break_is_told():
    row = check_filter(config_of(Breaks), only=["compiling"])[-1]
    assert row.outcome == "passed"
    assert row.detail.startswith("in more than one graph: ")


# ------------------------------------------------------------------------------------------- loaded values stay


class Weighted(GraphFilter):
    """c_0 V + c_1 S(V), c (heads, 2); a fixed scale, a small network on V, and a table that no checkpoint holds."""

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads, 2))
        self.register_buffer("scale", torch.empty(site.heads, 1, 1))
        self.register_buffer("table", torch.empty(3), persistent=False)
        self.mix = nn.Linear(site.head_dim, site.head_dim)
        self.reset_parameters()

    def forward(self, shift, value):
        c = self.c.to(value.dtype)[:, :, None, None]
        signal = c[:, 0] * shift.identity(value) + c[:, 1] * shift(value)
        return signal + self.scale.to(value.dtype) * self.table.sum().to(value.dtype) * self.mix(signal)


def through_init(f):
    nn.init.zeros_(f.c)
    nn.init.ones_(f.c[:, 1])
    nn.init.constant_(f.scale, 0.0)
    nn.init.constant_(f.table, 1.0)
    f.mix.reset_parameters()


def in_place(f):
    with torch.no_grad():
        f.c.zero_()
        f.c[:, 1] = 1.0
        f.scale.fill_(0.0)
        f.table.fill_(1.0)
        f.mix.weight.zero_()
        f.mix.bias.zero_()


def through_data(f):
    f.c.data = torch.tensor([0.0, 1.0], device=f.c.device).repeat(f.heads, 1)
    f.scale.data.zero_()
    f.table.data.copy_(torch.ones(3))
    f.mix.weight.data.normal_()
    f.mix.bias.data = torch.zeros_like(f.mix.bias)


def as_new_tensors(f):
    f.c = nn.Parameter(torch.tensor([[0.0, 1.0]] * f.heads))
    f.scale = torch.zeros(f.heads, 1, 1)
    f.table = torch.ones(3)
    f.mix.weight, f.mix.bias = nn.Parameter(torch.eye(len(f.mix.bias))), nn.Parameter(torch.zeros(len(f.mix.bias)))


def in_a_loop(f):
    start = {"c": torch.tensor([0.0, 1.0]), "scale": torch.zeros(()), "table": torch.ones(())}
    with torch.no_grad():
        for name, tensor in (*f.named_parameters(), *f.named_buffers()):
            tensor.copy_(start.get(name, torch.tensor(0.1)).expand_as(tensor))


WAYS = [through_init, in_place, through_data, as_new_tensors, in_a_loop]


@pytest.fixture(params=WAYS, ids=lambda way: way.__name__)
def weighted(request):
    return config_of(type("Weighted", (Weighted,), {"reset_parameters": lambda self: request.param(self)}))


def trained(weighted):
    model = turn_on(patch_model(BERT.build(), weighted))
    for module in model.modules():
        if isinstance(module, GraphFilter):
            module.scale.fill_(0.7)
    return model


@pytest.mark.parametrize(
    "options",
    [{}, {"dtype": torch.bfloat16}, {"device_map": "cpu"}, {"shards": "20KB"}],
    ids=lambda o: next(iter(o), ""),
)
def test_trained_values_survive(weighted, options, tmp_path):
    model = trained(weighted)
    plain = unpatch_model(copy.deepcopy(model))
    assert not torch.equal(output(model, BERT.inputs()), output(plain, BERT.inputs()))
    model.save_pretrained(tmp_path, max_shard_size=options.get("shards", "5GB"))
    dtype = options.get("dtype", torch.float32)
    loaded = realigned(AutoModel.from_pretrained(tmp_path, dtype=dtype, device_map=options.get("device_map")))
    for (key, found), expected in zip(loaded.state_dict().items(), model.state_dict().values(), strict=True):
        own = key.rpartition(".graph_filter.")[2] in ("c", "scale")
        torch.testing.assert_close(found, expected if own else expected.to(dtype), atol=0, rtol=0)
    assert all(m.table.tolist() == [1, 1, 1] for m in loaded.modules() if isinstance(m, GraphFilter))
    if dtype == torch.float32:
        assert torch.equal(output(loaded, BERT.inputs()), output(model, BERT.inputs()))


def test_values_that_were_not_saved_start(weighted, tmp_path, transformers_warnings):
    BERT.build().save_pretrained(tmp_path / "plain")
    trained(weighted).save_pretrained(tmp_path / "patched")
    config = AutoConfig.from_pretrained(tmp_path / "patched")
    loaded = AutoModel.from_pretrained(tmp_path / "plain", config=config)
    transformers_warnings.clear()
    assert all(r.coefficients["c"].tolist() == [[0, 1]] * 4 for r in filter_status(loaded))
    assert torch.equal(output(loaded, BERT.inputs()), output(unpatch_model(loaded), BERT.inputs()))


class Numbered(GraphFilter):
    """c_i i S(V) for head i: what ``__init__`` alone sets, and integers."""

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads))
        self.register_buffer("order", torch.arange(site.heads))
        self.register_buffer("number", torch.arange(1.0, 1.0 + site.heads), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.c, 0.5)

    def forward(self, shift, value):
        return (self.c[self.order] * self.number).to(value.dtype).view(-1, 1, 1) * shift(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_values_that_only_init_sets_are_there_after_loading(dtype, tmp_path):
    model = turn_on(patch_model(BERT.build(), config_of(Numbered)))
    model.save_pretrained(tmp_path)
    seed = torch.random.get_rng_state()
    loaded = realigned(AutoModel.from_pretrained(tmp_path, dtype=dtype))
    assert torch.equal(torch.random.get_rng_state(), seed)
    of_filter = [(n, b) for n, b in loaded.named_buffers() if "graph_filter" in n]
    assert all(b.tolist() == ([0, 1, 2, 3] if n.endswith("order") else [1, 2, 3, 4]) for n, b in of_filter)
    assert {b.dtype for n, b in of_filter if n.endswith("order")} == {torch.int64}
    found = output(loaded, BERT.inputs(dtype))
    if dtype == torch.float32:
        assert torch.equal(found, output(model, BERT.inputs()))


def test_the_filter_file_keeps_them(weighted, tmp_path):
    model = trained(weighted)
    save_filter(model, tmp_path)
    again = load_filter(unpatch_model(copy.deepcopy(model)), tmp_path)
    assert torch.equal(output(again, BERT.inputs()), output(model, BERT.inputs()))
    assert sum(p.numel() for p in filter_parameters(again)) == sum(p.numel() for p in filter_parameters(model))


# ------------------------------------------------------------------------------------------------ what names them


def test_checkpoints_and_cards_name_the_module_to_import(folder):
    (folder / "test_hinted.py").write_text(SOURCE.format(name="test-hinted"))
    import_filters(["test_hinted"])
    model = patch_model(patch_model(BERT.build(), "gfsa", layers=[0]), "test-hinted", layers=[1, 2])
    assert "import test_hinted  # registers its filter" in create_model_card(model).text
    assert "registers" not in create_model_card(patch_model(BERT.build())).text
    assert "imports" not in patch_model(BERT.build()).config.graph_filter  # as earlier releases wrote it

    model.save_pretrained(folder / "model")
    save_filter(model, folder / "filter")
    assert torch.equal(output(BERT.model_class.from_pretrained("model"), BERT.inputs()), output(model, BERT.inputs()))
    for file in ("model/config.json", "filter/graph_filter.json"):
        path = folder / file
        path.write_text(path.read_text().replace("test-hinted", "test-forgotten"))
    hint = r"^unknown filter 'test-forgotten'.*: import 'test_hinted', as was done to patch the model$"
    with pytest.raises(GraphFilterError, match=hint):
        BERT.model_class.from_pretrained("model")
    with pytest.raises(GraphFilterError, match=hint):
        load_filter(BERT.build(), "filter")
    for odd in ("os; x", ["os; x"], [1], [], None):
        config = json.loads((folder / "model/config.json").read_text())
        config["graph_filter"]["imports"] = odd
        (folder / "model/config.json").write_text(json.dumps(config))
        with pytest.raises(GraphFilterError, match=r"must be imported first\)$"):
            BERT.model_class.from_pretrained("model")
        partly = patch_model(BERT.build(), layers=[0])
        partly.config.graph_filter["imports"] = odd
        assert "imports" not in patch_model(partly, layers=[1]).config.graph_filter


def test_filters_whose_classes_share_a_name_stay_apart(folder):
    model = BERT.build()
    for name, layers in (("test-first", [0, 2]), ("test-second", [1])):
        (folder / f"{name.replace('-', '_')}.py").write_text(SOURCE.format(name=name))
        import_filters([name.replace("-", "_")])
        patch_model(model, name, layers=layers)
    del model.encoder.layer[2]  # so that saving makes a new record
    model.config.num_hidden_layers = 2
    model.save_pretrained(folder / "model")
    found = filter_status(BERT.model_class.from_pretrained(folder / "model"))
    assert [row.filter.filter for row in found] == ["test-first", "test-second"]


def test_the_page_on_filters_runs_as_it_stands(folder, capsys):
    text = (Path(__file__).parents[1] / "docs" / "write_filter.md").read_text()
    blocks = {language: "\n".join(found) for language, found in _blocks(text).items()}
    page = type(sys)("filters_page")
    sys.modules[page.__name__] = page  # where pickle looks
    exec(compile(blocks["python"], "docs/write_filter.md", "exec"), vars(page))
    assert page.loaded.config.graph_filter["filters"][0]["config"]["start"] == 0.1
    page.test_high_pass(0.1)
    page.test_kernel_attention()
    assert page.penalties.total().item() == pytest.approx(1e-2 * 0.1**2)
    assert set(page.filter_status(page.kernel)[0].coefficients) == {"c", "gate"}
    out = capsys.readouterr().out
    assert blocks["text"] in out
    assert out.count("passed") == 20  # every check applies
    entry_points = tomllib.loads(blocks["toml"])["project"]["entry-points"]
    assert entry_points == {"hf_graphfilter.filters": {"high-pass": "my_package.my_filters"}}


def test_the_page_s_calls_of_earlier_layers_run():
    page = (Path(__file__).parents[1] / "docs" / "write_filter.md").read_text()
    leave, left_before = re.findall(r"`(shift\.earlier\.\w+\(.*?\))`", page)
    found = []

    class Earlier(Damped):
        reads_earlier, linear, spectral = True, False, False

        def forward(self, shift, value):
            tensor = super().forward(shift, value)
            found.append(eval(left_before))
            eval(leave)
            return tensor

    output(patch_model(BERT.build(), config_of(Earlier)), BERT.inputs())
    assert [len(tensors) for tensors in found] == [0, 1, 2]
    assert found[2][0] is found[1][0]


OUTSIDE = """
from filters import Entry
FILTERS = {"outside": Entry(SameConfig(), lambda A, c, config, seen: 2 * A)}
"""
IN_SUITES = (
    "test_common.py::test_equals_the_dense_form[sdpa-bert-outside]",
    "test_decoding.py::test_decoding_with_a_cache_equals_without[static-outside-1-gpt2]",
    "test_transforms.py::test_vmap[llama-outside]",
)


@pytest.mark.slow
def test_the_suites_take_a_filter_from_outside(folder):
    source = SOURCE.format(name="test-outside").replace("return shift(value)", "return 2 * shift(value)")
    (folder / "outside.py").write_text(source + OUTSIDE)
    tests = Path(__file__).parent
    environment = {**os.environ, "TEST_FILTERS": "outside", "PYTHONPATH": os.pathsep.join([str(folder), *sys.path])}
    command = [sys.executable, "-m", "pytest", "-q", *(str(tests / name) for name in IN_SUITES)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tests.parent)
    assert "3 passed" in done.stdout, done.stdout


def _blocks(text):
    found = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S):
        found.setdefault(language, []).append(code)
    return found
