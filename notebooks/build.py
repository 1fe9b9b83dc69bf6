"""Write the notebooks from their scripts in examples/notebooks, and run them, so that they hold outputs and figures.

    make notebooks
    python notebooks/build.py fine_tune          # one of them

The scripts are in the percent format of jupytext. A notebook gets a badge for Colab and a cell that installs the
package. Both take the project's address from pyproject.toml.
"""

import argparse
import re
import runpy
import tempfile
from pathlib import Path
from urllib.parse import urlsplit

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat.v4 import new_code_cell

ROOT = Path(__file__).parents[1]
LINKS = runpy.run_path(str(ROOT / "docs" / "links.py"))
SCRIPTS = sorted((ROOT / "examples" / "notebooks").glob("*.py"))
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({})"
INSTALL = "# In Colab, remove the first # of the next line and run this cell.\n# %pip install --quiet {}"
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def notebook_path(script: Path) -> Path:
    return ROOT / "notebooks" / f"{script.stem}.ipynb"


def colab_link(path: str) -> str:
    """Return the address that opens a file of the repository in Colab."""
    return f"https://colab.research.google.com/github{urlsplit(LINKS['hosted'](path)).path}"


def read_script(script: Path) -> nbformat.NotebookNode:
    """Return the notebook of a script, without outputs."""
    notebook = jupytext.read(script)
    path = notebook_path(script).relative_to(ROOT).as_posix()
    title, *_ = notebook.cells
    title.source += "\n\n" + BADGE.format(colab_link(path))
    requirement = f'"hf-graphfilter[demo] @ git+{LINKS["ADDRESS"]}"'
    notebook.cells.insert(1, new_code_cell(INSTALL.format(requirement)))
    for number, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"{script.stem}-{number}", {}  # jupytext draws ids at random
        if cell.cell_type == "markdown":  # Colab knows no relative links
            cell.source = LINKS["relinked"](cell.source, path, LINKS["hosted"])
    notebook.metadata = KERNEL
    return notebook


def run(notebook: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run the cells in an empty folder and return the notebook, with what is worth keeping of the outputs."""
    with tempfile.TemporaryDirectory() as folder:
        options = {"timeout": 1200, "record_timing": False, "coalesce_streams": True}
        NotebookClient(notebook, resources={"metadata": {"path": folder}}, **options).execute()
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.metadata = {}
            # stderr has bars and warnings that differ between runs
            cell.outputs = [without_bars(output) for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata = KERNEL  # without the version of Python
    return notebook


def without_bars(output: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Return an output without the bar of a Trainer, which holds times."""
    if "text/html" in (data := output.get("data", {})):
        data["text/html"] = re.sub(r"\s*<div>\s*<progress.*?</div>\s*", "", data["text/html"], flags=re.DOTALL)
    return output


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", choices=[[], *(script.stem for script in SCRIPTS)], metavar="NAME")
    names = parser.parse_args().names
    for script in SCRIPTS:
        if not names or script.stem in names:
            nbformat.write(run(read_script(script)), notebook_path(script))
            print(notebook_path(script).relative_to(ROOT))


if __name__ == "__main__":
    main()
