"""The options of every verb: the revision of a checkpoint, a token, the device, and a repository to push to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..console import Console
from ..errors import GraphFilterError

SAVING = ("patch", "unpatch", "linearize", "convert", "transfer", "load-filter")
FLAGS = ("--revision", "--token", "--device", "--push-to-hub")
_revision: list[str] = []
_saved: list[tuple[Path, Any]] = []  # directories with their models


def move_to_front(argv: list[str]) -> list[str]:
    """Return the command line with the flags of all verbs moved before the verb, where the program reads them.

    The arguments after ``run`` belong to another program and stay in place.

    Example:
        >>> move_to_front(["patch", "bert-base-uncased", "out", "--revision", "main"])
        ['--revision', 'main', 'patch', 'bert-base-uncased', 'out']
        >>> move_to_front(["run", "train.py", "--device", "cpu"])
        ['run', 'train.py', '--device', 'cpu']
        >>> move_to_front(["status", "run", "--device", "cpu"])  # "run" is a folder
        ['--device', 'cpu', 'status', 'run']
    """
    front, rest, words, verb = [], [], iter(argv), ""
    for word in words:
        if word == "--" or (word == "run" and not verb):
            rest.append(word)
            break
        if word in FLAGS:
            front += [word, *([value] if (value := next(words, None)) is not None else [])]
        elif word.partition("=")[0] in FLAGS:
            front.append(word)
        elif word == "--import":
            rest += [word, *([value] if (value := next(words, None)) is not None else [])]
        else:
            rest.append(word)
            verb = verb or ("" if word.startswith("-") else word)
    return [*front, *rest, *words]


def begin(revision: str | None) -> None:
    """Set the revision, and forget what an earlier command saved."""
    _revision[:] = filter(None, [revision])
    _saved.clear()


@contextmanager
def no_revision() -> Iterator[None]:
    """Ignore ``--revision`` inside the ``with`` block, since it belongs to another checkpoint."""
    requested, _revision[:] = [*_revision], []
    try:
        yield
    finally:
        _revision[:] = requested


def from_source(kind: Any, source: str, **options: Any) -> Any:
    """Call ``kind.from_pretrained`` on a directory, or on a Hub id at the revision of ``--revision``."""
    return kind.from_pretrained(source, **hub_options(source), **options)


def hub_options(source: str) -> dict[str, Any]:
    """Return the options of ``from_pretrained`` that select the revision of ``--revision``, if it was given.

    Raises:
        GraphFilterError: ``--revision`` was given, but the source is a directory.
    """
    if _revision and Path(source).exists():
        raise GraphFilterError(f"--revision {_revision[0]} is of a checkpoint on the Hub, and {source} is on this disk")
    return {"revision": _revision[0]} if _revision else {}


def note_saved(output: Path, model: Any) -> None:
    """Note a directory that a verb has written, and the model in it."""
    _saved.append((output, model))


def check_device(device: str | None, verb: str | None) -> None:
    """Raise an error if the verb cannot compute on the device that was chosen."""
    if device is None:
        return
    if verb == "run":
        raise GraphFilterError("--device: run starts a program that chooses its device itself: use its own option")
    import torch

    chosen, found = torch.device(device), torch.accelerator.current_accelerator(check_available=True)
    is_first = found is not None and chosen.type == found.type and not chosen.index
    if verb == "demo" and chosen.type != "cpu" and not is_first:
        raise GraphFilterError(
            f"--device {device}: the demo computes on cpu or the first accelerator, as the Trainer does: hide other "
            "accelerators from it (CUDA_VISIBLE_DEVICES)"
        )


def check_push(repo_id: str | None, verb: str | None) -> None:
    """Raise an error if the verb saves no checkpoint, or if ``repo_id`` is no valid name of a repository."""
    if repo_id is None:
        return
    if verb not in SAVING:
        raise GraphFilterError(f"--push-to-hub: {verb} saves no checkpoint")
    from huggingface_hub.errors import HFValidationError
    from huggingface_hub.utils import validate_repo_id

    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise GraphFilterError(f"--push-to-hub {repo_id}: {error}") from error


def push(repo_id: str | None) -> None:
    """Upload the directory that the verb has written, with a card that names the repository.

    A card of the repository that this package did not write is kept.

    Raises:
        GraphFilterError: the verb has written no directory, or the Hub refuses the upload.
    """
    if repo_id is None:
        return
    if not _saved:
        raise GraphFilterError("--push-to-hub: this verb saves no checkpoint")
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HTTPError

    from ..checkpoints.filter_card import CARD
    from ..checkpoints.readme import write_hub_readme

    api, (folder, model) = HfApi(), _saved[-1]
    try:
        name = api.create_repo(repo_id, exist_ok=True).repo_id
        is_ours = write_hub_readme(model, folder, api, name)
        api.upload_folder(repo_id=name, folder_path=folder, ignore_patterns=[".*", *([] if is_ours else [CARD])])
    except (HTTPError, OSError) as error:
        raise GraphFilterError(f"{folder} is saved, but cannot be pushed to {repo_id}: {error}") from error
    if not is_ours:
        Console(stderr=True).print(f"note: {name} keeps its {CARD}, which hf_graphfilter did not write", style="dim")
    Console().print(f"pushed to {name}")
