"""Generate the data of ListOps and dashed paths, in the layout that recipes/sequences.py reads.

    python recipes/generate.py listops DATA/listops-1000 --seed 1
    python recipes/generate.py dashed-paths DATA/dashed-paths --images 20000

The same seed writes the same files. An interrupted or failed command leaves no files behind.
"""

if __name__ == "__main__":
    from recipes import check_extras

    check_extras("recipes")

import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Annotated

import typer

from hf_graphfilter import GraphFilterError
from recipes.errors import line
from recipes.sequence_tasks.dashed_paths import DashedPaths
from recipes.sequence_tasks.expressions import Expressions

app = typer.Typer(help=__doc__, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=False)
Output = Annotated[Path, typer.Argument(help="A new or empty folder.")]
Seed = Annotated[int, typer.Option(min=0)]


@contextmanager
def write_folder(output: Path) -> Iterator[Path]:
    """Yield a folder beside ``output`` that takes its place if all goes well."""
    if output.exists() and (not output.is_dir() or any(output.iterdir())):
        raise GraphFilterError(f"{output} is there already and not an empty folder: name another one")
    output.parent.mkdir(parents=True, exist_ok=True)
    folder = Path(tempfile.mkdtemp(dir=output.parent, prefix=f".{output.name}-"))
    try:
        yield folder
        folder.chmod(0o755)
        folder.replace(output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@app.command()
def listops(
    output: Output,
    train: Annotated[int, typer.Option(min=1, help="Number of expressions to train on.")] = 96_000,
    validation: Annotated[int, typer.Option(min=1, help="Number of expressions to validate on.")] = 2_000,
    test: Annotated[int, typer.Option(min=1, help="Number of expressions to test on.")] = 2_000,
    max_depth: Annotated[int, typer.Option(min=2, help="Maximum number of levels of a tree, with the digits.")] = 10,
    max_args: Annotated[int, typer.Option(min=2, help="Maximum number of arguments of an operator.")] = 10,
    min_length: Annotated[int, typer.Option(min=0, help="All expressions have more tokens than this.")] = 500,
    max_length: Annotated[int, typer.Option(min=2, help="All expressions have fewer tokens than this.")] = 2_000,
    seed: Seed = 0,
) -> None:
    """Generate ListOps by the published definition; the defaults are those of the Long Range Arena."""
    expressions = Expressions(max_depth, max_args, min_length, max_length)
    expressions.check(train + validation + test)
    with write_folder(output) as folder:
        generated = expressions.generate(seed)
        for part, count in {"train": train, "val": validation, "test": test}.items():
            with (folder / f"basic_{part}.tsv").open("w") as file:
                file.write("Source\tTarget\n")
                file.writelines(f"{text}\t{value}\n" for text, value in islice(generated, count))


@app.command()
def dashed_paths(
    output: Output,
    images: Annotated[int, typer.Option(min=20, help="Number of images; half of them have joined discs.")] = 20_000,
    size: Annotated[int, typer.Option(min=16, max=512, help="Side of an image, in pixels.")] = 32,
    dashes: Annotated[int, typer.Option(min=1, help="Number of dashes of a long path.")] = 9,
    distractors: Annotated[int, typer.Option(min=0, help="Number of short paths.")] = 3,
    seed: Seed = 0,
) -> None:
    """Generate images of two discs that a dashed path joins or does not join; they resemble Pathfinder's images."""
    paths = DashedPaths(size, dashes, distractors)
    next(paths.generate(1, seed))  # or what is asked for does not fit
    with write_folder(output) as folder:
        (folder / "metadata").mkdir()
        for number, (image, joined) in enumerate(paths.generate(images, seed)):
            place, name = f"imgs/{number // 1000}", f"sample_{number}.png"
            (folder / place).mkdir(parents=True, exist_ok=True)
            image.save(folder / place / name)
            with (folder / "metadata" / f"{number // 1000}.npy").open("a") as file:  # text, as in the official files
                file.write(f"{place} {name} {number} {joined} {dashes} {distractors}\n")


def main() -> None:
    try:
        app()
    except (GraphFilterError, OSError) as error:
        sys.exit(f"generate.py: {line(error)}")


if __name__ == "__main__":
    main()
