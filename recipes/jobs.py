"""Start one command as several jobs of a cluster, which share its runs."""

import argparse
import sys
from pathlib import Path

from hf_graphfilter import GraphFilterError
from hf_graphfilter.console import Console
from hf_graphfilter.errors import require
from recipes.errors import line
from recipes.ranks import list_gpus
from recipes.records import tell

SCRIPT = Path(__file__).with_name("compare.py")
LOGS = Path("runs/jobs")
DAY = 24 * 60  # in minutes
YEAR = 365 * DAY


def split_flags(argv: list[str]) -> tuple[int | None, dict[str, str], list[str]]:
    """Return the number of jobs, what to ask Slurm for, and the rest of the command."""
    parser = argparse.ArgumentParser(prog="compare.py", add_help=False, allow_abbrev=False)
    parser.add_argument("--jobs", type=int)
    parser.add_argument("--slurm", default="")
    flags, remaining = parser.parse_known_args(argv)
    pairs = [pair.partition("=") for pair in flags.slurm.split(",") if pair]
    if incomplete := [name for name, equals, value in pairs if not (name and equals and value)]:
        raise GraphFilterError(f"--slurm is given as NAME=VALUE,NAME=VALUE, found {incomplete[0]!r} without a value")
    if pairs and flags.jobs is None:
        raise GraphFilterError("--slurm says what each job asks for: give their number with --jobs")
    if flags.jobs is not None and flags.jobs < 1:
        raise GraphFilterError(f"--jobs {flags.jobs}: at least one job")
    if flags.jobs is not None and "--fresh" in remaining:
        raise GraphFilterError("--fresh moves the runs that jobs share: give it to a command of its own, then --jobs")
    return flags.jobs, {name: value for name, _, value in pairs}, remaining


def submit(count: int, asked: dict[str, str], argv: list[str], console: Console) -> None:
    """Start ``count`` jobs of this command by submitit: with Slurm where it is found, else as processes here.

    Each job trains the runs that no other has begun. Jobs of Slurm are left alone, and processes are waited for.

    Args:
        count: of the jobs.
        asked: the flags of sbatch, ``{"partition": "gpu", "gres": "gpu:1"}``; a day where no ``time`` is given.
        argv: the command, without the flags of this module.
        console: to print to.

    Raises:
        GraphFilterError: submitit is missing, there is no Slurm to ask for something, or a process failed.
    """
    require("submitit", "slurm", "--jobs")
    from submitit import AutoExecutor
    from submitit.core.utils import FailedJobError
    from submitit.helpers import CommandFunction

    executor = AutoExecutor(folder=LOGS)
    if asked and executor.cluster != "slurm":
        raise GraphFilterError("--slurm asks for things of Slurm, which is not on this machine: no sbatch is found")
    executor.update_parameters(name="compare", timeout_min=DAY, slurm_additional_parameters=asked)
    if executor.cluster != "slurm":  # or the jobs end after a day
        executor.update_parameters(timeout_min=YEAR)
    command = [sys.executable, str(SCRIPT), *argv]
    # submitit hides all GPUs of this machine from a job, or shows those with the first numbers
    gpus = [] if executor.cluster == "slurm" else list_gpus()
    prefixes = [["env", f"CUDA_VISIBLE_DEVICES={gpus[number % len(gpus)]}"] if gpus else [] for number in range(count)]
    jobs = [executor.submit(CommandFunction([*prefix, *command], verbose=False)) for prefix in prefixes]
    tell(console, f"{executor.cluster} jobs {', '.join(job.job_id for job in jobs)}; what they print is in {LOGS}")
    for job in jobs if executor.cluster != "slurm" else ():
        try:
            tell(console, job.result())
        except FailedJobError as error:
            raise GraphFilterError(f"job {job.job_id} failed, the others continue: {line(error)}") from error
