"""The house: floors that import only what lies below, no circle, and files of a size that can be read."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "hf_graphfilter"
# from the ground up: a module imports what is on a lower floor, or on its own
FLOORS = [
    {"errors", "devices", "files", "logs", "packages", "tables", "text", "wrappers", "_on_import"},
    {"ops"},
    {"shift"},
    {"functional"},
    {"filters"},
    {"models", "graphs"},
    {"hosts"},
    {"patching"},
    {"checkpoints", "remote_code"},
    {"training", "analysis"},
    {"fitting", "testing"},
    {"hf_graphfilter"},  # the names that the package exports
    {"startup", "launch", "console", "demo", "cli", "__main__"},
]


def name_of(file):
    parts = file.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = sorted(PACKAGE.rglob("*.py"))
MODULES = {name_of(file): file for file in FILES}


def imports(file):
    """Modules of the package that a file imports: anywhere in it, for type checkers only, or by a string."""
    package = name_of(file) if file.stem == "__init__" else name_of(file).rpartition(".")[0]
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            source = ".".join([*above, *filter(None, [node.module])])
            for alias in node.names:
                yield f"{source}.{alias.name}" if f"{source}.{alias.name}" in MODULES else source
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            name = node.args[0]
            yield f"hf_graphfilter{name.value}" if isinstance(name, ast.Constant) else ""


# earlier names, which nothing of ours imports
SHIMS = {"hf_graphfilter.conversion", "hf_graphfilter.status", "hf_graphfilter.training.transfer"}


def arrows():
    found = {name: {m for m in imports(file) if m in MODULES} - {name} for name, file in MODULES.items()}
    assert not SHIMS & {target for targets in found.values() for target in targets}
    found = {name: targets for name, targets in found.items() if name not in SHIMS}
    found["hf_graphfilter"] |= {m for m in imports(PACKAGE / "__init__.pyi") if m in MODULES}
    found["hf_graphfilter.filters"] |= {m for m in MODULES if m.startswith("hf_graphfilter.filters.")}
    return found


def floor(module):
    room = module.split(".")[1] if "." in module else module
    return next(i for i, rooms in enumerate(FLOORS) if room in rooms)


def test_every_module_has_a_floor_and_imports_only_what_lies_below():
    upward = [(a, b) for a, targets in arrows().items() for b in targets if floor(b) > floor(a)]
    assert upward == []


def test_no_module_imports_itself_by_way_of_others():
    try:
        TopologicalSorter(arrows()).prepare()
    except CycleError as error:
        pytest.fail(f"a circle: {' <- '.join(error.args[1])}")


def test_the_reader_of_imports_sees_all_kinds(tmp_path, monkeypatch):
    """Or the two tests above would show nothing."""
    seen = arrows()
    assert "hf_graphfilter.hosts.timm" in seen["hf_graphfilter.hosts"], "in a function"
    assert "hf_graphfilter.checkpoints.transformers" in seen["hf_graphfilter"], "by a string"
    assert "hf_graphfilter.training.blend" in seen["hf_graphfilter"], "exported"
    assert "hf_graphfilter.hosts.transformers.cache" in seen["hf_graphfilter.hosts.transformers.attention"], "a module"
    assert len(MODULES) > 50


def lines(file):
    return len(file.read_text().splitlines())


RECIPES = sorted((ROOT / "recipes").rglob("*.py"))


def test_files_are_short():
    assert {str(f): lines(f) for f in FILES if lines(f) > 300} == {}
    assert sum(lines(f) > 280 for f in FILES) <= 3
    assert {str(f): lines(f) for f in RECIPES if lines(f) > 260} == {}
    assert median(lines(f) for f in (*FILES, *RECIPES)) <= 150


def test_files_have_names_of_their_own():
    """A name says what a file answers to; hosts and models repeat those of the libraries."""
    ours = [f for f in FILES if f.stem not in ("__init__",) and not {"hosts", "models"} & {*f.parts}]
    ours = [f for f in ours if name_of(f) not in SHIMS]
    assert len({f.stem for f in ours}) == len(ours)


def test_the_map_of_contributing_names_every_room():
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text[text.index("| floor |") : text.index("`tests/test_structure.py` reads")]
    rooms = [f.name + "/" * f.is_dir() for f in PACKAGE.iterdir() if f.suffix in (".py", ".pyi") or f.is_dir()]
    rooms = [room for room in rooms if room not in ("__pycache__/", "data/")]
    assert [room for room in rooms if f"`{room}`" not in table] == []
    named = [word for word in table.split("`") if word.endswith((".py", "/")) and " " not in word and "|" not in word]
    assert [word for word in named if not (PACKAGE / word).exists() and not (ROOT / word).exists()] == []


LIST_WRAPPED = """
import hf_graphfilter, peft, sentence_transformers, transformers.modeling_utils, transformers.trainer
from hf_graphfilter.training.optimizer import give_filter_rate
from hf_graphfilter.training.resuming import check_when_resuming
from hf_graphfilter.wrappers import WRAPPED
check_when_resuming(transformers.trainer.Trainer)
give_filter_rate(transformers.trainer.Trainer)
print("\\n".join(WRAPPED))
"""


def test_contributing_lists_what_is_wrapped():
    for library in ("peft", "sentence_transformers"):
        pytest.importorskip(library)
    done = subprocess.run([sys.executable, "-c", LIST_WRAPPED], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    listed = re.findall(r"^\| `(\w+: [\w.]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.M)
    assert sorted(listed) == sorted(done.stdout.split("\n")[:-1])
    assert [name for name, file in MODULES.items() if "functools.wraps" in file.read_text()] == [
        "hf_graphfilter.wrappers"
    ]


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_files_that_a_newcomer_is_sent_to_are_there(page):
    named = re.findall(r"`([\w/]+\.py)`", (ROOT / page).read_text())
    assert named
    assert [name for name in named if not (ROOT / name).exists() and not (PACKAGE / name).exists()] == []
