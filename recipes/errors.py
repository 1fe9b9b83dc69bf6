"""What goes wrong for a user, as one line of the process that writes."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from huggingface_hub.errors import HfHubHTTPError
from safetensors import SafetensorError

from hf_graphfilter import GraphFilterError

NETWORK_ERRORS = HfHubHTTPError.__bases__  # OSError, and HTTPError of whichever client the installed version has


def is_main_process() -> bool:
    """Return whether this is the process that writes, under torchrun or accelerate launch; without them it is."""
    return os.environ.get("RANK", "0") == "0"


class OtherSettingsError(GraphFilterError):
    """What is there was run with other settings."""


class RefusedError(GraphFilterError):
    """What a filter says of a model that it cannot be in, or of inputs that it cannot take."""


@contextmanager
def mark_refusals() -> Iterator[None]:
    """Mark what a filter refuses: a comparison of many leaves it out there, and stops at any other mistake."""
    try:
        yield
    except GraphFilterError as error:
        raise RefusedError(str(error)) from error


@contextmanager
def name_missing_packages() -> Iterator[None]:
    """Say in one line which package a setting needs, such as wandb for ``--report_to wandb``."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "to be installed" not in str(error):
            raise
        raise GraphFilterError(f"settings of the training: {line(error)}") from error


@contextmanager
def one_line_errors(program: str, command: str = "the same command") -> Iterator[None]:
    """Turn user mistakes and what the machine refuses into one line on stderr, exit code 1; 130 when interrupted."""
    resume = f"; finished seeds and checkpoints are kept: run {command} again to resume"
    try:
        yield
    except (GraphFilterError, SafetensorError, *NETWORK_ERRORS) as error:
        hint = resume if isinstance(error, SafetensorError) or getattr(error, "errno", None) in (27, 28, 122) else ""
        code, message = 1, line(error) + hint
    except RuntimeError as error:
        if "PytorchStreamWriter" not in str(error) and "unexpected pos" not in str(error):
            raise
        code, message = 1, f"cannot write a checkpoint ({line(error)})" + resume
    except KeyboardInterrupt:
        code, message = 130, "interrupted" + resume
    else:
        return
    print(f"{program}: {message}", file=sys.stderr)
    sys.exit(code)


def note(message: str) -> None:
    """Say on stderr, in one line, what is left out; of several processes one says it."""
    if is_main_process():
        print(message, file=sys.stderr)


def line(error: BaseException) -> str:
    """Return the message of an error as one line, shortened in the middle."""
    return str(GraphFilterError(error)) or type(error).__name__
