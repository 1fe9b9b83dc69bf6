"""Filters that other people write: importing them, mistakes in them, and ``check_filter``."""

import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from models import FAMILIES, TORCH_2_11, output
from torch import nn

from hf_graphfilter import (
    AGFConfig,
    FilterConfig,
    GFSAConfig,
    GraphFilter,
    GraphFilterError,
    check_filter,
    create_model_card,
    load_filter,
    patch_model,
    register_filter,
    save_filter,
)
from hf_graphfilter.filters import available_filters, import_filters

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
    known = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - known:
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
        ("", "bad", "are a list of names, got the string 'bad': give ['bad']"),
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


class Scaled(GraphFilter):
    """c S(V), as it should be written; those below change one thing."""

    per_head = ("c",)

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.ones_(self.c)

    def scale(self, x):
        return self.c.to(x.dtype).view(-1, 1, 1) * x

    def forward(self, shift, value):
        return self.scale(shift(value))


def config_of(filter_class, **attributes):
    """A registered config of the class, without options."""
    name = f"test-{filter_class.__name__}-{len(available_filters())}"
    body = {"module": filter_class, "__module__": __name__, **attributes}
    made = dataclass(frozen=True)(type(f"{filter_class.__name__}Config", (FilterConfig,), body))
    globals()[made.__name__] = made  # where pickle looks
    return register_filter(name)(made)()


class Transposed(Scaled):
    def forward(self, shift, value):
        return super().forward(shift, value).transpose(1, 2)


class ReturnsNone(Scaled):
    def forward(self, shift, value):
        super().forward(shift, value)


class ReturnsPair(Scaled):
    def forward(self, shift, value):
        return super().forward(shift, value), None


class Promoted(Scaled):
    def forward(self, shift, value):
        return self.c.view(-1, 1, 1) * shift(value)


@pytest.mark.parametrize(
    ("filter_class", "dtype", "message"),
    [
        (Transposed, torch.float32, r"= (2, 4, 9, 8) of torch.float32, as the value is, and returned (2, 9, 4, 8) of"),
        (ReturnsNone, torch.float32, "and returned NoneType"),
        (ReturnsPair, torch.float32, "and returned tuple"),
        (Promoted, torch.bfloat16, "(2, 4, 9, 8) of torch.bfloat16, as the value is, and returned (2, 4, 9, 8) of tor"),
    ],
)
@pytest.mark.parametrize(
    "compiled",
    [False, pytest.param(True, marks=pytest.mark.skipif(TORCH_2_11, reason="its compiler hides what is raised"))],
)
def test_an_output_of_another_form_is_an_error_at_the_first_forward(filter_class, dtype, message, compiled):
    family = FAMILIES["bert"]
    model = patch_model(family.build().to(dtype), config_of(filter_class))
    if compiled:
        model.compile(backend="eager")
    with pytest.raises(GraphFilterError, match=re.escape(message)) as caught, torch.no_grad():
        model(**family.inputs())
    assert f"encoder.layer.0.attention.self: {filter_class.__name__}.forward must return a tensor" in str(caught.value)


def test_another_dtype_is_not_an_error_under_autocast():
    family = FAMILIES["bert"]
    model = patch_model(family.build(), config_of(Promoted))
    with torch.autocast("cpu", torch.bfloat16):
        assert output(model, family.inputs()).isfinite().all()


class NoReset(Scaled):
    def __init__(self, config, site):
        GraphFilter.__init__(self, config, site)
        self.c = nn.Parameter(torch.ones(site.heads))

    reset_parameters = GraphFilter.reset_parameters


class NoForward(Scaled):
    forward = GraphFilter.forward


class LateSuper(Scaled):
    def __init__(self, config, site):
        self.c = nn.Parameter(torch.empty(site.heads))


class NoSuper(Scaled):
    def __init__(self, config, site):
        self.c = torch.ones(site.heads)


class SuperWithoutSite(Scaled):
    def __init__(self, config, site):
        super().__init__()


class OtherArguments(Scaled):
    def __init__(self, heads):
        pass


class PlainTensor(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.table = torch.ones(3)


class PlainList(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.maps = [nn.Linear(2, 2)]


class NotPerHead(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = nn.Parameter(torch.empty(3))


class AbsentPerHead(Scaled):
    per_head = ("c", "d")


class PerHeadAsText(Scaled):
    per_head = "c"


class PerHeadAndMore(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.shared = nn.Parameter(torch.ones(1))


class Tied(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.again = self.c


class OtherDecoding(Scaled):
    decoding = "row"


@pytest.mark.parametrize(
    ("filter_class", "message"),
    [
        (NoReset, ": NoReset has parameters or buffers and no reset_parameters()"),
        (NoForward, ": NoForward has no forward(shift, value)"),
        (LateSuper, ": LateSuper cannot be built (AttributeError: cannot assign parameters before Module.__init__() c"),
        (NoSuper, "must return a GraphFilter, got a NoSuper without super().__init__(config, site)"),
        (SuperWithoutSite, "takes (config, site) and first calls super().__init__(config, site)"),
        (OtherArguments, ": OtherArguments cannot be built (TypeError: "),
        (PlainTensor, ": PlainTensor: self.table holds tensors that would not be moved, trained or saved"),
        (PlainList, ": PlainList: self.maps holds tensors that would not be moved, trained or saved"),
        (NotPerHead, "names 'c', which must be a parameter or buffer (4, ...), one entry a head, and is (3,)"),
        (AbsentPerHead, "names 'd', which must be a parameter or buffer (4, ...), one entry a head, and is None"),
        (PerHeadAsText, ": PerHeadAsText: per_head must be a tuple of names, got 'c'"),
        (PerHeadAndMore, "per_head must name all parameters or none, and lacks 'shared'"),
        (Tied, ": Tied has one tensor under two names, which safetensors does not save"),
        (OtherDecoding, "decoding must be one of 'rows', 'state', 'state and keys', got 'row'"),
    ],
)
def test_mistakes_are_found_when_a_model_is_patched(filter_class, message):
    family = FAMILIES["bert"]
    model, config = family.build(), config_of(filter_class)
    expected = output(model, family.inputs())
    with pytest.raises(GraphFilterError, match=re.escape(message)) as caught:
        patch_model(model, config)
    assert filter_class.__name__ in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(output(model, family.inputs()), expected)


def test_a_filter_without_parameters_needs_no_reset(tmp_path):
    class Same(GraphFilter):
        def forward(self, shift, value):
            return shift(value)

    family = FAMILIES["bert"]
    model, config = family.build(), config_of(Same)
    expected = output(model, family.inputs())
    patch_model(model, config).save_pretrained(tmp_path)
    assert torch.equal(output(family.model_class.from_pretrained(tmp_path), family.inputs()), expected)


def test_a_config_without_a_module_or_frozen_dataclass_is_refused():
    class NoDataclass(FilterConfig):
        module = Scaled
        start: float = 1.0

    @dataclass(frozen=True)
    class Parent(FilterConfig):
        module = Scaled

    class NoDataclassOfItsOwn(Parent):
        start: float = 1.0

    @dataclass
    class NotFrozen(FilterConfig):
        module = Scaled

    for config_class in (NoDataclass, NoDataclassOfItsOwn, NotFrozen):
        with pytest.raises(
            GraphFilterError, match=rf"{config_class.__name__} must be a frozen dataclass.*'test-wrong'"
        ):
            register_filter("test-wrong")(config_class)

    @dataclass(frozen=True)
    class Annotated(FilterConfig):
        module: type = Scaled

    with pytest.raises(GraphFilterError, match="Annotated: 'module' belongs to FilterConfig and cannot be an option"):
        register_filter("test-wrong")(Annotated)
    for module in (nn.Linear, "Scaled", GraphFilter):
        Parent.module = module
        with pytest.raises(GraphFilterError, match="Parent must derive from FilterConfig and set `module`"):
            register_filter("test-wrong")(Parent)
    assert "test-wrong" not in available_filters()


def same(c):
    """A coefficient (heads,) for a matrix (batch, heads, tokens, tokens)."""
    return c.view(-1, 1, 1)


def gfsa(A, c):
    return same(c["w_0"]) * torch.eye(A.shape[-1]) + same(c["w_1"]) * A + same(c["w_K"]) * (A + 2 * (A @ A - A))


def scaled(A, c):
    return same(c["c"]) * A


EVERYWHERE = {
    "config",
    "patching",
    "start values",
    "meta",
    "forward",
    "gradients",
    "finite differences",
    "causality",
} | {
    *("padding", "cached decoding", "half precision", "save and load", "filter file", "unpatching", "copies"),
    "compiling",
}
OF_S = EVERYWHERE | {"starts as the original", "explicit matrix", "formula", "values a head"}


@pytest.mark.parametrize(
    ("config", "formula", "passed", "reason"),
    [
        pytest.param(GFSAConfig(), gfsa, OF_S, "", id="gfsa"),
        pytest.param(config_of(Scaled), scaled, OF_S, "", id="third-party"),
        pytest.param(AGFConfig(correction=True), None, EVERYWHERE, "starts_as_original", id="agf"),
        pytest.param(
            AGFConfig(init="blend", window=2),
            None,
            EVERYWHERE | {"starts as the original"},
            "explicit matrix.*is no function of a matrix.*AGF is made of the model's projections",
            id="agf-blend",
        ),
    ],
)
def test_filters_that_pass(config, formula, passed, reason):
    before = torch.get_rng_state()
    report = check_filter(config, formula=formula)
    assert torch.equal(torch.get_rng_state(), before)
    assert {row.check for row in report if row.outcome == "passed"} == passed
    others = [row for row in report if row.check not in passed]
    assert all(row.outcome == "does not apply" and row.detail for row in others)
    assert re.search(reason, str(report))
    assert str(report).splitlines()[0].split() == ["check", "outcome", "detail"]


class Uninitialised(Scaled):
    def __init__(self, config, site):
        GraphFilter.__init__(self, config, site)
        self.c = nn.Parameter(torch.empty(site.heads))


class ResetsSome(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.register_buffer("d", torch.zeros(site.heads))


class NeedsNumbers(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.first = self.c[0].item()


class InPlace(Scaled):
    def forward(self, shift, value):
        return self.scale(shift(value.mul_(2)))


class StartsElsewhere(Scaled):
    def reset_parameters(self):
        nn.init.constant_(self.c, 1.01)


class OtherOnAMatrix(Scaled):
    def forward(self, shift, value):
        return super().forward(shift, value) * (1 if hasattr(shift, "attend") else 2)


class Coupled(Scaled):
    def forward(self, shift, value):
        return self.scale(shift(value)) * self.c.mean().to(value.dtype)


class Unused(Scaled):
    per_head = ()

    def __init__(self, config, site):
        super().__init__(config, site)
        self.d = nn.Parameter(torch.ones(1))


class Detached(Scaled):
    def scale(self, x):
        return self.c.detach().to(x.dtype).view(-1, 1, 1) * x


class Infinite(Scaled):
    def scale(self, x):
        return (self.c.sum() - self.c.sum()).to(x.dtype).sqrt() + super().scale(x)


class WrongBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


class WrongGradient(Scaled):
    def scale(self, x):
        return WrongBackward.apply(super().scale(x))


class SeesAll(Scaled):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out + out.mean(2, keepdim=True)


class CountsFromTheCall(Scaled):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out * torch.arange(1, out.shape[2] + 1, dtype=out.dtype).view(-1, 1)


class Coarse(Scaled):
    def forward(self, shift, value):
        out = super().forward(shift, value)
        return out if out.dtype != torch.bfloat16 else torch.ones_like(out)


class Shared(Scaled):
    everyones = nn.Parameter(torch.ones(4))

    def __init__(self, config, site):
        super().__init__(config, site)
        self.c = Shared.everyones

    def __deepcopy__(self, memo):
        return self


class ForgetsToSave(Scaled):
    per_head = ()

    def __init__(self, config, site):
        super().__init__(config, site)
        self.register_buffer("used", torch.rand(1), persistent=False)
        with torch.no_grad():
            self.c.fill_(2.0)

    def forward(self, shift, value):
        self.used = self.used * 0 + self.c.detach().float()[:1]
        return super().forward(shift, value)


class ChangesTheModel(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        with torch.no_grad():
            next(site.module.parameters()).mul_(1.5)


class HoldsALambda(Scaled):
    def __init__(self, config, site):
        super().__init__(config, site)
        self.activation = lambda x: x

    def forward(self, shift, value):
        return self.activation(super().forward(shift, value))


class OtherWhenCompiled(Scaled):
    def forward(self, shift, value):
        return super().forward(shift, value) * (2 if torch.compiler.is_compiling() else 1)


BROKEN = [
    (ReturnsNone, "forward", "BERT: .*ReturnsNone.forward must return a tensor .*, and returned NoneType"),
    (Transposed, "forward", "BERT: .*Transposed.forward must return a tensor .*, and returned \\(2, 9, 4, 8\\)"),
    (NoReset, "patching", "NoReset has parameters or buffers and no reset_parameters"),
    (Uninitialised, "start values", "BERT: __init__ leaves uninitialised memory .* in c, at encoder.layer.0"),
    (ResetsSome, "start values", "reset_parameters does not set d, at"),
    (ResetsSome, "meta", "built on the meta device, reset_parameters does not set d, at"),
    (NeedsNumbers, "meta", "BERT: RuntimeError: .*meta"),
    (InPlace, "forward", "changes the value in place"),
    (Infinite, "gradients", "the gradient of c is not finite"),
    (StartsElsewhere, "starts as the original", "right after patching the model is not the original"),
    (OtherOnAMatrix, "explicit matrix", "S through the model's attention and S as a matrix differ"),
    (Coupled, "formula", "forward and formula differ"),
    (Coupled, "values a head", "half of the values of per_head do not give half of the output"),
    (Unused, "gradients", "d gets no gradient"),
    (Detached, "gradients", "RuntimeError|c gets no gradient"),
    (WrongGradient, "finite differences", "its gradients are not those of its output in float64"),
    (SeesAll, "causality", "Llama: a later token changes the output at an earlier one"),
    (SeesAll, "padding", "BERT: padding changes the output at other tokens"),
    (CountsFromTheCall, "cached decoding", "Llama: decoding token by token with a cache differs from decoding without"),
    (Promoted, "half precision", "of torch.bfloat16, as the value is, and returned .* of torch.float32"),
    (Coarse, "half precision", "in bfloat16 its output loses"),
    (ForgetsToSave, "save and load", "used is not what was saved"),
    (ChangesTheModel, "unpatching", "unpatch_model does not give the original again"),
    (HoldsALambda, "copies", "pickle"),
    (Shared, "copies", "a copy made by deepcopy shares its parameters with the model"),
    (OtherWhenCompiled, "compiling", "the compiled model gives other outputs"),
]


@pytest.mark.parametrize(
    ("filter_class", "check", "message"), [pytest.param(*case, id=f"{case[0].__name__}-{case[1]}") for case in BROKEN]
)
def test_broken_filters_are_caught(filter_class, check, message):
    config = config_of(filter_class)
    report = check_filter(config, formula=scaled, only=[check], raise_on_failure=False)
    assert [row.check for row in report.failures] == [check], report
    assert re.search(message, report.failures[0].detail), report.failures[0].detail


def test_all_failures_are_named():
    with pytest.raises(
        GraphFilterError, match=r"^SeesAllConfig fails 2 of 5 checks: causality \(.*\); padding \(.*\)$"
    ):
        check_filter(config_of(SeesAll), only=["causality", "padding"])
    with pytest.raises(GraphFilterError, match="no check 'speed'; the checks are config, patching"):
        check_filter("gfsa", only=["speed"])


class EncodersOnly(SeesAll):
    def __init__(self, config, site):
        if site.causal:
            raise GraphFilterError("it sees later tokens")
        super().__init__(config, site)


def test_a_model_that_the_filter_refuses_is_left_out():
    report = check_filter(config_of(EncodersOnly), only=["causality", "starts as the original"], raise_on_failure=False)
    rows = {row.check: row for row in report}
    assert rows["patching"].detail == "not in Llama: it sees later tokens; not in BART: it sees later tokens"
    assert rows["causality"].outcome == "does not apply"
    assert rows["starts as the original"].outcome == "failed"


class Breaks(Scaled):
    def forward(self, shift, value):
        torch._dynamo.graph_break()
        return super().forward(shift, value)


def test_a_graph_break_is_told():
    row = check_filter(config_of(Breaks), only=["compiling"])[-1]
    assert row.outcome == "passed"
    assert row.detail.startswith("in more than one graph: ")


def test_checkpoints_and_cards_name_the_module_to_import(folder):
    (folder / "test_hinted.py").write_text(SOURCE.format(name="test-hinted"))
    import_filters(["test_hinted"])
    family = FAMILIES["bert"]
    model = patch_model(patch_model(family.build(), "gfsa", layers=[0]), "test-hinted", layers=[1, 2])
    assert "import test_hinted  # registers its filter" in create_model_card(model).text
    assert "registers" not in create_model_card(patch_model(family.build())).text
    assert "imports" not in patch_model(family.build()).config.graph_filter  # as earlier releases wrote it

    model.save_pretrained(folder / "model")
    save_filter(model, folder / "filter")
    assert torch.equal(
        output(family.model_class.from_pretrained("model"), family.inputs()), output(model, family.inputs())
    )
    for file in ("model/config.json", "filter/graph_filter.json"):
        path = folder / file
        path.write_text(path.read_text().replace("test-hinted", "test-forgotten"))
    hint = r"^unknown filter 'test-forgotten'.*: import 'test_hinted', as was done to patch the model$"
    with pytest.raises(GraphFilterError, match=hint):
        family.model_class.from_pretrained("model")
    with pytest.raises(GraphFilterError, match=hint):
        load_filter(family.build(), "filter")
    for odd in ("os; x", ["os; x"], [1], [], None):
        config = json.loads((folder / "model/config.json").read_text())
        config["graph_filter"]["imports"] = odd
        (folder / "model/config.json").write_text(json.dumps(config))
        with pytest.raises(GraphFilterError, match=r"must be imported first\)$"):
            family.model_class.from_pretrained("model")
        partly = patch_model(family.build(), layers=[0])
        partly.config.graph_filter["imports"] = odd
        assert "imports" not in patch_model(partly, layers=[1]).config.graph_filter


def test_the_page_on_filters_runs_as_it_stands(folder, capsys):
    text = (Path(__file__).parents[1] / "docs" / "filters.md").read_text()
    blocks = {language: "\n".join(found) for language, found in _blocks(text).items()}
    page = type(sys)("filters_page")
    sys.modules[page.__name__] = page  # where pickle looks
    exec(compile(blocks["python"], "docs/filters.md", "exec"), vars(page))
    assert page.loaded.config.graph_filter["filters"][0]["config"]["start"] == 0.1
    page.test_high_pass(0.1)
    page.test_kernel_attention()
    assert page.penalties.total().item() == pytest.approx(1e-2 * 0.1**2)
    assert set(page.filter_status(page.kernel)[0].coefficients) == {"c", "gate"}
    assert capsys.readouterr().out.count("passed") == 20  # every check applies
    entry_points = tomllib.loads(blocks["toml"])["project"]["entry-points"]
    assert entry_points == {"hf_graphfilter.filters": {"high-pass": "my_package.my_filters"}}


def _blocks(text):
    found = {}
    for language, code in re.findall(r"^```(\w+)\n(.*?)^```$", text, flags=re.M | re.S):
        found.setdefault(language, []).append(code)
    return found
