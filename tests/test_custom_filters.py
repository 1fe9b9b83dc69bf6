"""Filters that other people write: importing them, mistakes in them, and ``check_filter``."""

import re
import sys

import pytest

from hf_graphfilter import GraphFilterError
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
