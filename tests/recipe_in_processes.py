"""The two processes of test_sequences.py under FSDP2, started by processes.py with the FLAGS of the recipe."""

import sys

import torch
from accelerate.state import AcceleratorState, DistributedType
from distributed import accelerate_shards_on_the_cpu

from recipes import runs, sequences

torch.set_num_threads(1)
accelerate_shards_on_the_cpu()
runs.main(sequences.RECIPE, sys.argv[1:])
assert AcceleratorState().distributed_type == DistributedType.FSDP
