"""What the verbs share: their common arguments, and functions that load and save checkpoints."""

from __future__ import annotations

import contextlib
import copy
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape

from ..console import Console, table
from ..errors import GraphFilterError, shown
from ..files import find_optional
from .common import from_source, hub_options, note_saved
from .inputs import tokenizer_of

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

Source = Annotated[str, typer.Argument(help="A checkpoint: a directory or a Hub id.")]
Output = Annotated[Path, typer.Argument(help="The directory to write to.")]
Force = Annotated[bool, typer.Option("--force", help="Replace the text of a card that this command did not write.")]
AutoClass = Annotated[
    str | None,
    typer.Option(
        "--auto-class", help="The class to load the model with instead of the saved one, e.g. AutoModelForCausalLM."
    ),
]

Seed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the start values, for filters that start at random.")]

_TOKENIZER_FILES = ("tokenizer", "tokenizer_config")


def check_output(output: Path, source: str | None = None) -> None:
    """Raise an error before long work if files cannot be written to the directory ``output``."""
    try:
        if source is not None and output.exists() and output.samefile(source):
            raise GraphFilterError(f"{output} is the checkpoint to read: name another directory to write to")
    except FileNotFoundError:
        pass  # the source is on the Hub
    nearest = next(path for path in (output, *output.absolute().parents) if path.exists())
    if not nearest.is_dir():
        raise GraphFilterError(f"cannot write to {output}: {nearest} is a file, name a directory")
    try:
        with tempfile.TemporaryFile(dir=nearest):
            pass
    except OSError as error:
        raise GraphFilterError(f"cannot write to {output}: {nearest}: {error.strerror}") from error


@contextlib.contextmanager
def keep_progress(progress: Path) -> Iterator[None]:
    """Say what progress is kept if a fit inside the ``with`` block is interrupted or fills the disk."""
    from ..fitting.checkpoint import is_kept

    note = f"progress is kept in {progress}, and the same command resumes"
    try:
        yield
    except KeyboardInterrupt:
        state = note if is_kept(progress) else "nothing was fitted yet"
        print(f"hf-graphfilter: interrupted: {state}", file=sys.stderr)
        raise typer.Exit(130) from None
    except OSError as error:
        raise GraphFilterError(f"{message_of(error)}; {note}" if is_kept(progress) else message_of(error)) from error


def message_of(error: Exception) -> str:
    """Return the message of an error, with the file concerned."""
    return f"{error.filename}: {error.strerror}" if isinstance(error, OSError) and error.filename else str(error)


def load_config(source: str, patched: bool = False) -> PreTrainedConfig:
    """Return the config of a checkpoint, which must have a filter if ``patched``."""
    import transformers

    from ..hosts.transformers.records import iterate_configs

    folder = Path(source)
    if folder.is_dir() and not (folder / "config.json").is_file():
        raise GraphFilterError(
            f"{source} holds no config.json, so it is no checkpoint: name the directory of a saved model"
        )
    if folder.is_dir() and '"pretrained_cfg"' in (folder / "config.json").read_text(errors="replace"):
        raise GraphFilterError(f"{source} is a checkpoint of timm: use load_timm_model in Python")
    if folder.is_file():
        raise GraphFilterError(f"{source} is a file: name the directory of a checkpoint, or a Hub id")
    with _name_source(source):
        config = from_source(transformers.AutoConfig, source)
    if patched and not any(getattr(part, "graph_filter", None) for part in iterate_configs(config)):
        raise GraphFilterError(f"{source} has no graph filter; patch it with: hf-graphfilter patch")
    return config


def load(
    source: str,
    auto_class: str | None,
    patched: bool = False,
    make: Callable[[Any], Any] = lambda model: model,
    dtype: str | None = None,
) -> Any:
    """Load the model of a checkpoint, and return ``make(model)``.

    ``make`` is first tried on a model without weights, so that its errors appear before a long download.
    """
    import transformers
    from accelerate import init_empty_weights
    from transformers import PreTrainedModel
    from transformers.models.auto.auto_factory import _BaseAutoModelClass
    from transformers.utils import logging

    from ..hosts.transformers.records import model_class as class_of

    config = load_config(source, patched)
    if auto_class is None:
        class_names = config.architectures if isinstance(config.architectures, list) else []
        auto_class = next((name for name in class_names if class_of(name)), "AutoModel")
    model_class: Any = class_of(auto_class) or getattr(transformers, auto_class, None)
    if not {PreTrainedModel, _BaseAutoModelClass} & {*getattr(model_class, "__mro__", ())}:
        raise GraphFilterError(f"transformers has no model class {auto_class!r}")
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # loading warns again
    with init_empty_weights():
        try:
            make(getattr(model_class, "from_config", model_class)(copy.deepcopy(config)))
        except GraphFilterError:
            raise
        except Exception:  # loading below reports what is wrong with the model itself
            pass
        finally:
            logging.set_verbosity(verbosity)
    with _name_source(source):
        return make(from_source(model_class, source, **({"dtype": dtype} if dtype else {})))


@contextlib.contextmanager
def _name_source(source: str) -> Iterator[None]:
    try:
        yield
    except GraphFilterError:
        raise
    except Exception as error:  # a damaged or hand-written file can raise anything
        text = " ".join(str(error).split())
        short = text if len(text) <= 300 else f"{text[:300]} ..."
        raise GraphFilterError(f"cannot load {source}: {short}") from error


def save(model: Any, source: str, output: Path, show: bool = True) -> None:
    """Save the checkpoint with its tokenizer or image processor, so that it is as usable as the source."""
    from transformers import AutoProcessor, PreTrainedTokenizerBase

    from ..checkpoints.tokenizer import knows_words

    save_modules(source, output)  # first, since it may raise, and the files saved below replace those that it copies
    model.save_pretrained(output)
    try:
        processor = from_source(AutoProcessor, source)
        if isinstance(processor, PreTrainedTokenizerBase) and not knows_words(processor):
            raise ValueError("made of nothing")
    except Exception:  # a damaged file can raise anything
        Console(stderr=True).print(f"note: {escape(_describe_lack(source))}", style="dim")
    else:
        processor.save_pretrained(output)
    if show:
        show_status(model)
    note_saved(output, model)
    Console().print(f"saved to {escape(str(output))}")


def _describe_lack(source: str) -> str:
    """Return why a checkpoint gave no tokenizer or processor; AutoProcessor hides what is wrong with a tokenizer."""
    if any(find_optional(source, f"{name}.json", **hub_options(source)) for name in _TOKENIZER_FILES):
        try:
            tokenizer_of(source)
        except GraphFilterError as error:
            return str(error)
    return f"no tokenizer or processor found in {source}"


def save_modules(source: str, output: Path) -> None:
    """Copy the files of sentence-transformers: the list of modules, their folders and the settings.

    The list may only name folders directly in the source. A link that leads out of the source raises an error.
    """
    import json
    import shutil

    from huggingface_hub import snapshot_download

    if (list_file := find_optional(source, "modules.json", **hub_options(source))) is None:
        return
    try:
        paths = [module["path"] for module in json.loads(Path(list_file).read_text())]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise GraphFilterError(f"modules.json of {source} is no list of modules: {shown(error)}") from error
    folders = [path for path in paths if path != ""]  # "" is the source folder itself
    if wrong := [path for path in folders if not (isinstance(path, str) and re.fullmatch(r"\w[\w.-]*", path))]:
        raise GraphFilterError(
            f"modules.json of {source} names {shown(wrong[0])}, which is no folder in it: correct that entry"
        )
    patterns = ["modules.json", "sentence_*_config.json", "config_sentence_transformers.json"]
    patterns += [f"{folder}/*" for folder in folders]
    root = (
        Path(source)
        if Path(source).is_dir()
        else Path(snapshot_download(source, allow_patterns=patterns, **hub_options(source)))
    )
    for file in [file for pattern in patterns for file in root.glob(pattern) if file.is_file()]:
        real_file = file.resolve()
        # the cache of the Hub holds links to the files of the same repository
        roots = [root.resolve(), *([root.resolve().parents[1] / "blobs"] if root.parent.name == "snapshots" else [])]
        if not any(real_file.is_relative_to(folder) for folder in roots):
            raise GraphFilterError(f"{file} is a link to a file outside {source}: put the file itself there")
        target = output / file.relative_to(root)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(real_file, target)


def show_status(model: Any) -> None:
    """Print the table of ``filter_status``, if the model is patched."""
    from ..patching.status import filter_status

    if status := filter_status(model):
        Console().print(table(*status.table()))
