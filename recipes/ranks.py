"""What several processes share: the GPUs of this machine, and the files of one run."""

import os
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather_object

from hf_graphfilter import GraphFilterError
from hf_graphfilter.errors import shown


def check_ranks(*, cpu: bool = False, **facts: Any) -> None:
    """Raise in all processes unless each has the same ``facts``: of its settings, its data and its checkpoints.

    On several machines the data must be equal and the output folder shared. Otherwise processes would train on other
    rows, or some would resume while others begin. ``cpu``: whether they compute on the CPU, if nothing has said so yet.

    Example:
        >>> check_ranks(data="12f0")  # one process agrees with itself
    """
    if PartialState(cpu=cpu).num_processes == 1:
        return
    all_facts = gather_object([facts])
    for rank, rank_facts in enumerate(all_facts):
        for name, value in rank_facts.items():
            if value != all_facts[0][name]:
                raise GraphFilterError(
                    f"process {rank} found {name} {shown(value)}, and process 0 {shown(all_facts[0][name])}: give all "
                    "machines the same files for --data and --model, and one shared folder for --output_dir"
                )


def list_gpus() -> list[str]:
    """Return the names of the GPUs that this command sees, as ``CUDA_VISIBLE_DEVICES`` has them."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return visible.split(",") if visible else [str(i) for i in range(torch.cuda.device_count())]
