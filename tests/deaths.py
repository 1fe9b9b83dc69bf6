"""A process that dies while it writes, played in this one: a file stays half written, and nothing follows."""

import builtins
import io
import os
from contextlib import contextmanager
from pathlib import Path

import pytest
import safetensors.torch
import torch


class Death(BaseException):
    """What no handler of the program sees to: its writes have no effect any more."""


class Writes:
    """The writes below a folder so far; the one of number ``last`` is cut short, as are all that follow."""

    def __init__(self, folder, last=None):
        self.folder, self.last, self.count = Path(folder), last, 0

    def reached(self, path, cut=lambda: None):
        if not isinstance(path, (str, os.PathLike)) or self.folder not in Path(path).absolute().parents:
            return
        self.count += 1
        if self.last is not None and self.count >= self.last:
            if self.count == self.last:
                cut()
            raise Death(f"write {self.last}: {path}")

    def change(self, original):
        """A change of a folder: before it, nothing has happened."""

        def changed(path, *arguments, **options):
            self.reached(path)
            return original(path, *arguments, **options)

        return changed

    def open(self, original):
        """A file that is written: empty, or with half of the first of its parts."""

        def opened(path, mode="r", *arguments, **options):
            if not set(mode) & {*"wxa+"}:
                return original(path, mode, *arguments, **options)
            self.reached(path, lambda: original(path, mode, *arguments, **options).close())
            file = original(path, mode, *arguments, **options)
            write = file.write

            def written(content):
                self.reached(path, lambda: (write(content[: len(content) // 2]), file.close()))
                return write(content)

            file.write = written
            return file

        return opened

    def save(self, original, place):
        """A file of tensors: its first half."""

        def saved(*arguments, **options):
            path = arguments[place]

            def cut():
                original(*arguments, **options)
                os.truncate(path, os.path.getsize(path) // 2)

            self.reached(path, cut)
            return original(*arguments, **options)

        return saved


@contextmanager
def dying(folder, last=None):
    """Let what runs within die at a write below a folder; gives the ``Writes``."""
    writes = Writes(folder, last)
    with pytest.MonkeyPatch.context() as patch:
        for name in ("replace", "rename", "unlink", "remove", "rmdir"):
            patch.setattr(os, name, writes.change(getattr(os, name)))
        for module in (io, builtins):
            patch.setattr(module, "open", writes.open(module.open))
        patch.setattr(safetensors.torch, "serialize_file", writes.save(safetensors.torch.serialize_file, 1))
        patch.setattr(torch, "save", writes.save(torch.save, 1))
        yield writes


def some(count):
    """How many of the points of a sweep a quick test takes; all of them are slow."""
    return pytest.mark.parametrize("points", [count, pytest.param(None, marks=pytest.mark.slow, id="all")])


def deaths(tmp_path, points, command):
    """Run ``command(folder)`` to its end, then for ``points`` of its writes until it dies there; yields each folder,
    and what a command gives that is not disturbed."""
    with dying(tmp_path / "whole") as writes:
        expected = command(tmp_path / "whole")
    chosen = range(1, writes.count + 1)
    if points is not None:
        chosen = sorted({1 + i * (writes.count - 1) // (points - 1) for i in range(points)})
    for last in chosen:
        folder = tmp_path / f"{last}"
        with dying(folder, last), pytest.raises(Death):
            command(folder)
        yield folder, expected
