"""Filters that other people write: importing them, mistakes in them, and ``check_filter``."""

import re
import sys
from dataclasses import dataclass

import pytest
import torch
from models import FAMILIES, output
from torch import nn

from hf_graphfilter import FilterConfig, GraphFilter, GraphFilterError, patch_model, register_filter
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


def test_a_file_named_like_another_module(folder):
    (folder / "torch.py").write_text(SOURCE.format(name="test-torch"))
    with pytest.raises(GraphFilterError, match=r"the name 'torch' is taken by .*; rename the file"):
        import_filters(["torch.py"])


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
@pytest.mark.parametrize("compiled", [False, True])
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
