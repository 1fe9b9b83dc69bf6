"""The notebooks: in step with their scripts, with outputs, and without anything of the machine that ran them."""

import re
import runpy
from pathlib import Path

import pytest

pytest.importorskip("jupytext")
nbformat = pytest.importorskip("nbformat")
nbclient = pytest.importorskip("nbclient")

ROOT = Path(__file__).parents[1]
BUILD = runpy.run_path(str(ROOT / "notebooks" / "build.py"))
SCRIPTS = BUILD["SCRIPTS"]
LITTLE = {"BUDGET": "300", "STEPS": "1", "TEXTS": "2"}
of_each = pytest.mark.parametrize("script", SCRIPTS, ids=lambda file: file.stem)


def stored(script):
    return nbformat.read(BUILD["notebook_path"](script), as_version=4)


def code(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def test_each_notebook_has_a_script():
    assert {BUILD["notebook_path"](script) for script in SCRIPTS} == {*(ROOT / "notebooks").glob("*.ipynb")}


@of_each
def test_notebooks_are_in_step_with_their_scripts(script):
    """After a change of a script, or of the project's address: make notebooks."""
    pair = stored(script), BUILD["read_script"](script)
    found, wanted = ([(cell.id, cell.cell_type, cell.source) for cell in notebook.cells] for notebook in pair)
    assert found == wanted


@of_each
def test_notebooks_hold_outputs_and_figures(script):
    notebook = stored(script)
    nbformat.validate(notebook)
    assert [cell.execution_count for cell in code(notebook)] == [*range(1, len(code(notebook)) + 1)]
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    assert {output.output_type for output in outputs} <= {"display_data", "execute_result", "stream"}
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert any(output.get("name") == "stdout" for output in outputs)


@of_each
def test_notebooks_say_nothing_of_the_machine(script):
    text = BUILD["notebook_path"](script).read_text()
    assert len(text) < 500_000
    text = re.sub(r'"image/png": "[^"]*"', "", text)
    assert re.findall(r"/(?:home|root|tmp|site-packages)/\S*|\b\d\d:\d\d\b| at 0x\w+", text) == []


@of_each
def test_notebooks_begin_and_end_alike(script):
    first, install, *_, last = stored(script).cells
    assert first.source.startswith("# ")
    assert "colab.research.google.com/github/" in first.source
    assert f"notebooks/{script.stem}.ipynb" in first.source
    assert BUILD["LINKS"]["ADDRESS"] in install.source
    assert last.source.startswith("## What to read next\n")


@of_each
def test_links_of_notebooks_lead_to_files(script):
    path = BUILD["notebook_path"](script).relative_to(ROOT).as_posix()
    found = []
    BUILD["LINKS"]["relinked"](script.read_text(), path, lambda link: found.append(link) or link)
    assert found
    assert [link for link in found if not (ROOT / link).exists()] == []


SLOW = {"analyse", "fine_tune", "linearize"}  # the quickest runs in make test-long


def test_slow_notebooks_exist_and_are_not_all():
    assert {script.stem for script in SCRIPTS} > SLOW


@pytest.mark.parametrize(
    "script",
    [pytest.param(file, marks=pytest.mark.slow if file.stem in SLOW else (), id=file.stem) for file in SCRIPTS],
)
def test_notebooks_run(script, monkeypatch):
    """With small settings, each of which a notebook reads in one line."""
    for name, value in LITTLE.items():
        monkeypatch.setenv(name, value)
    assert any(f'os.environ.get("{name}"' in script.read_text() for name in LITTLE)
    notebook = BUILD["run"](BUILD["read_script"](script))
    assert [len(cell.outputs) > 0 for cell in code(notebook)] == [
        len(cell.outputs) > 0 for cell in code(stored(script))
    ]
