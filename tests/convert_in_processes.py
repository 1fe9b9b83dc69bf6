"""The two processes of test_conversion.py, started by processes.py with DIR."""

import sys
from pathlib import Path

import torch
import torch.distributed as dist
from test_conversion import bert, llama, texts

from hf_graphfilter import linearize
from hf_graphfilter.filters.core.attached import filters_of

folder = Path(sys.argv[1])
dist.init_process_group("gloo")
rank = dist.get_rank()
model = llama()
torch.manual_seed(rank)  # filters would start elsewhere
options = {"budget": 2000, "holdout": 2, "window": 2, "evaluations": 5, "progress": False, "train": "lora"}
report = linearize(model, texts(), **options, checkpoint=folder / "progress" if rank else folder / "first")
assert report.error < report.error_before
assert 2000 <= report.tokens < 2000 + 2 * 2 * 96, report.tokens
assert [stage.steps for stage in report.stages.values()] == [8, 4]
for name, tensor in model.state_dict().items():
    first = tensor.clone()
    dist.broadcast(first, 0)
    torch.testing.assert_close(tensor, first, rtol=0, atol=0, msg=name)
assert list(filters_of(model))
assert (folder / "first").is_dir() if rank == 0 else not (folder / "progress").exists()

model = bert()
torch.manual_seed(rank)
options = {"window": 2, "budget": 200, "holdout": 2, "progress": False}
report = linearize(model, texts(), "singularformer", **options)  # starts at random
before = torch.tensor([*report.before.values(), report.stages["attention"].history[0][1]], dtype=torch.float64)
torch.testing.assert_close(before[-1], before[:-1].mean())  # measured after all processes had the same filters
first = before.clone()
dist.broadcast(first, 0)
torch.testing.assert_close(before, first, rtol=0, atol=0)
