"""Start any other program with the package loaded: ``hf-graphfilter run``."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from .errors import GraphFilterError, is_number, shown

LEARNING_RATE = "HF_GRAPHFILTER_LR"
IMPORTS = "HF_GRAPHFILTER_IMPORT"
_STARTUP = str(Path(__file__).parent / "startup")


def run_program(
    program: str,
    arguments: Sequence[str] = (),
    *,
    module: bool = False,
    imports: Sequence[str] = (),
    filter_lr: float | None = None,
) -> NoReturn:
    """Become the program (``exec``), with the package imported in it and in every Python process that it starts.

    Since this process is replaced, the program's arguments, path, exit code, signals and tracebacks are its own.

    Args:
        program: a Python file, a command of this environment or on PATH, or the name of a module.
        arguments: what it is called with.
        module: ``program`` is a module, as with ``python -m``.
        imports: modules that register filters, or paths of their files; imported together with transformers' models.
        filter_lr: learning rate of the filter coefficients, for every Trainer and every loop with accelerate.

    Raises:
        GraphFilterError: there is no such program, or it does not start; a rate that is none.
    """
    if filter_lr is not None and not is_number(filter_lr):
        raise GraphFilterError(f"filter_lr must be a finite learning rate >= 0, got {shown(filter_lr)}")
    command = command_line(program, arguments, module=module)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execve(command[0], command, environment(os.environ, imports, filter_lr))
    except OSError as error:
        raise GraphFilterError(f"{command[0]} does not start: {error.strerror}; is it a program?") from error


def command_line(program: str, arguments: Sequence[str] = (), *, module: bool = False) -> list[str]:
    """Return what starts the program: this Python for modules and files, else the command itself.

    Example:
        >>> command_line("train.py", ["--lr", "0.1"])[1:]
        ['train.py', '--lr', '0.1']
    """
    if module:
        return [sys.executable, "-m", program, *arguments]
    if program.endswith(".py"):
        return [sys.executable, program, *arguments]
    scripts = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    if command := shutil.which(program, path=scripts):
        return [command, *arguments]
    if program and Path(program).exists():  # an empty one is the current directory
        return [sys.executable, program, *arguments]
    raise GraphFilterError(
        f"no program {program!r}: it is neither a file nor a command of this environment or on PATH; for a module give "
        "-m before its name"
    )


def environment(
    inherited: Mapping[str, str], imports: Sequence[str] = (), filter_lr: float | None = None
) -> dict[str, str]:
    """Return ``inherited`` with what makes Python processes import the package, ``imports`` and the filter's rate."""
    files = [os.path.abspath(name) if name.endswith(".py") or os.sep in name else name for name in imports]
    paths = {"PYTHONPATH": [_STARTUP, inherited.get("PYTHONPATH")], IMPORTS: [inherited.get(IMPORTS), *files]}
    rate = {} if filter_lr is None else {LEARNING_RATE: str(filter_lr)}
    return {**inherited, **rate, **{name: os.pathsep.join(filter(None, parts)) for name, parts in paths.items()}}
