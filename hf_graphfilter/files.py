"""Write files whole or not at all, check them when they are read, and lock folders."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .errors import GraphFilterError, has_type, shown

_CONTENT, _DIGEST = "content", "sha256"  # in the metadata of a file of tensors


class DamagedFileError(GraphFilterError):
    """A file does not hold what was written to it."""


class LockedError(GraphFilterError):
    """Another process is at work on the same files."""


def read_path(value: Any) -> str:
    """Return the path, or the id on the Hub, of a saved filter as a string that the file system accepts."""
    try:
        path = os.fspath(value)
        if not isinstance(path, str) or b"\0" in os.fsencode(path):
            raise TypeError("not a path")
    except Exception as error:
        raise GraphFilterError(f"a filter is saved at a path or on the Hub, got {shown(value)}") from error
    return path


def find_optional(source: str, name: str, **hub_options: Any) -> str | None:
    """Return the path of a file in a folder or Hub repository, downloaded if it must be, or None if there is none.

    Raises:
        OSError: there is no such folder or repository.
    """
    from transformers.utils import cached_file

    missing_is_none = {f"_raise_exceptions_for_{kind}": False for kind in ("missing_entries", "connection_errors")}
    return cached_file(source, name, **missing_is_none, **hub_options)  # type: ignore[arg-type, return-value]


@contextlib.contextmanager
def replacing(*files: Path) -> Iterator[list[Path]]:
    """Give a path beside each file to write to, and put what is there in the files' places at the end.

    Example:
        >>> from tempfile import mkdtemp
        >>> file = Path(mkdtemp(), "a.txt")
        >>> with replacing(file) as (part,):
        ...     _ = part.write_text("whole")
        >>> file.read_text()
        'whole'
    """
    parts = [file.with_name(f".{file.name}.{os.getpid()}.part") for file in files]
    for file in files:
        file.parent.mkdir(parents=True, exist_ok=True)
    try:
        yield parts
        for part, file in zip(parts, files, strict=True):
            os.replace(part, file)
    finally:
        for part in parts:
            part.unlink(missing_ok=True)


def write_text(file: Path, text: str) -> None:
    """Write a file of text."""
    with replacing(file) as (part,):
        part.write_text(text, encoding="utf-8", newline="")


def write_tensors(file: Path, tensors: Mapping[str, Any], metadata: dict[str, str] | None = None) -> None:
    """Write tensors as safetensors.

    Raises:
        OSError: it cannot be written; safetensors itself has an exception of its own for that.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    try:
        save_file({k: t.cpu().contiguous() for k, t in tensors.items()}, file, metadata)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(file)) from error


def write_state(file: Path, content: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """Write tensors, and JSON that belongs to them, as one file."""
    text, tensors = json.dumps(content), {k: t.detach().cpu().contiguous().clone() for k, t in tensors.items()}
    with replacing(file) as (part,):
        write_tensors(part, tensors, {_CONTENT: text, _DIGEST: digest(text, tensors)})


def read_state(file: Path) -> tuple[dict[str, Any] | None, dict[str, Any]]:
    """Return what ``write_state`` wrote; None for the JSON in a file of tensors that something else wrote.

    Raises:
        DamagedFileError: there is no such file, or it was changed after it was written.
    """
    from safetensors import safe_open

    try:
        with safe_open(file, framework="pt") as reader:
            metadata, tensors = reader.metadata() or {}, {name: reader.get_tensor(name) for name in reader.keys()}  # noqa: SIM118
    except Exception as error:  # safetensors names some damage by exceptions of torch
        raise DamagedFileError(f"{file} cannot be read ({error})") from error
    if _CONTENT not in metadata:
        return None, tensors
    if metadata.get(_DIGEST) != digest(metadata[_CONTENT], tensors):
        raise DamagedFileError(f"{file} does not hold what was written to it")
    return json.loads(metadata[_CONTENT]), tensors


def digest(text: str, tensors: Mapping[str, Any]) -> str:
    """Hash a text and tensors: their names, types, shapes and values."""
    import torch

    hasher = hashlib.sha256(text.encode())
    for name, tensor in sorted(tensors.items()):
        tensor = tensor.detach().cpu().contiguous()
        hasher.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        hasher.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return hasher.hexdigest()


def read_json(file: Path, **needed: Any) -> dict[str, Any]:
    """Return the JSON object in a file; ``needed`` are the types of what it must have.

    Raises:
        DamagedFileError: it cannot be read, or is no such object.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise DamagedFileError(f"{file} is no readable JSON ({error})") from error
    return check_content(content, file, **needed)


def check_content(content: Any, source: object, **needed: Any) -> dict[str, Any]:
    """Return ``content`` if it is a dict that has what is needed, by these types.

    Raises:
        DamagedFileError: it is not, or has not; ``source`` says where it was read.
    """
    if not isinstance(content, dict):
        raise DamagedFileError(f"{source} holds no JSON object but {shown(content)}")
    for name, hint in needed.items():
        if not has_type(content.get(name), hint):
            raise DamagedFileError(f"{source} is damaged: {name!r} is {shown(content.get(name))}")
    return content


@contextlib.contextmanager
def locked(*files: Path, work: str, wait: float = 0) -> Iterator[None]:
    """Keep other processes out: each of these lock files is held by one at a time.

    Args:
        files: the lock files.
        work: what a process that holds one is doing, for the error.
        wait: so many seconds for each.

    Raises:
        LockedError: another process holds one of them.
    """
    from filelock import FileLock, Timeout

    with contextlib.ExitStack() as stack:
        for file in files:
            file.parent.mkdir(parents=True, exist_ok=True)
            try:
                stack.enter_context(FileLock(file, timeout=wait))
            except Timeout:
                raise LockedError(
                    f"another command is {work}: {file} is locked; wait for its end, or name another folder"
                ) from None
        yield
