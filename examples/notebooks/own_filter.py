# %% [markdown]
# # Write your own filter
#
# You learn how to write a graph filter as one small module and to check it against explicit matrices. You then
# put it into a pretrained model, look at what it does, and save and load it.

# %%
# %matplotlib inline
import os
from dataclasses import dataclass

import matplotlib.pyplot as plt
import torch
from torch import nn
from transformers import AutoModel, AutoTokenizer

from hf_graphfilter import (
    DenseShift,
    FilterConfig,
    GraphFilter,
    check_filter,
    filter_status,
    patch_model,
    register_filter,
    unpatch_model,
)
from hf_graphfilter.analysis import response_curves, smoothing
from hf_graphfilter.demo import load_snippets, pretrained_path

TEXTS = int(os.environ.get("TEXTS", "16"))  # to measure on

# %% [markdown]
# ## The idea
#
# The attention matrix A of a head is a *shift operator* on the graph of tokens: `A @ value` moves information
# along its edges. A *graph filter* is a function of A. A filter never sees the model. It receives an operator
# `shift` that applies A, so it works in BERT, GPT-2, Llama or ViT, with any attention kernel.

# %%
A = torch.tensor([[0.8, 0.2, 0.0], [0.3, 0.4, 0.3], [0.0, 0.2, 0.8]])
shift = DenseShift(A[None, None])  # an operator with an explicit matrix: (batch, heads, tokens, tokens)
value = torch.tensor([1.0, 0.0, 0.0]).view(1, 1, 3, 1)  # (batch, heads, tokens, features)
for name, signal in {"value": value, "once": shift(value), "twice": shift(shift(value))}.items():
    print(f"{name:5}", [round(x, 2) for x in signal.flatten().tolist()])

# %% [markdown]
# The third token receives something only after two steps, because no edge leads to it from the first.
#
# ## The filter
#
# Our filter is H = A + g (I - A). It returns a part g of what attention smoothed away, with one learned g per
# head. A filter consists of two classes:
#
# - a module with the coefficients and `forward`; `shift(value)` applies A, and `shift.identity(value)` applies I;
# - a configuration with the options, which are saved in `config.json` of the model.


# %%
class HighPass(GraphFilter):
    """Compute H = A + g (I - A)."""

    per_head = ("g",)  # one value per head

    def __init__(self, config, site):
        super().__init__(config, site)
        self.g = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self):
        nn.init.constant_(self.g, self.config.start)

    def forward(self, shift, value):  # (batch, heads, tokens, features)
        smooth = shift(value)
        g = self.g.to(value.dtype).view(-1, 1, 1)
        return smooth + g * (shift.identity(value) - smooth)


@register_filter("high-pass")
@dataclass(frozen=True)
class HighPassConfig(FilterConfig):
    module = HighPass
    start: float = 0.0

    @property
    def starts_as_original(self):
        return self.start == 0


# %% [markdown]
# ## Check it
#
# `check_filter` runs the filter in tiny models: against our formula with explicit matrices, with padding,
# causal masks, caches, half precision, `torch.compile`, saving and loading. A check that fails raises an error
# that says what is wrong.


# %%
def formula(A, coefficients):
    g = coefficients["g"].view(-1, 1, 1)
    return A + g * (torch.eye(A.shape[-1]) - A)


print(check_filter("high-pass", formula=formula))

# %% [markdown]
# ## Use it
#
# Options of the configuration are options of `patch_model`. Nothing else changes: `filter_status`, the Trainer
# and the analysis know the new filter.

# %%
source = pretrained_path()  # or a model of the Hub
tokenizer = AutoTokenizer.from_pretrained(source)
texts = sorted((text for _, text in load_snippets()), key=len)[-TEXTS:]
batches = [tokenizer(texts[i : i + 8], padding=True, return_tensors="pt") for i in range(0, len(texts), 8)]
model = AutoModel.from_pretrained(source).eval()
patch_model(model, "high-pass", start=0.1)
filter_status(model)

# %% [markdown]
# We try some strengths. The left figure shows the response of the filter to an eigenvalue of A. The right
# figure shows how alike the tokens are after each layer.

# %%
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.2), layout="constrained")
for start in (0.0, 0.1, 0.2):
    patch_model(unpatch_model(model), "high-pass", start=start)
    curve = next(iter(response_curves(model).values()))
    left.plot(curve.at, curve.response[0], label=f"g = {start}")
    measured = smoothing(model, batches)
    layers = measured.layers()
    right.plot(
        [x.index for x in layers], [measured[x, "cosine"].mean for x in layers], marker="o", label=f"g = {start}"
    )
left.set(xlabel="eigenvalue of A", ylabel="response")
right.set(xlabel="layer", ylabel="mean cosine of two tokens")
right.legend(frameon=False)
plt.show()

# %% [markdown]
# With a larger g more of the high frequencies passes, and the tokens stay further apart. Whether this helps a
# task is another question: fine-tune the model, with `filter_lr` for g, and compare it with the baseline.
#
# ## Save and load
#
# The checkpoint holds the name of the filter, its options and coefficients, but no code. A program that loads
# it must first import the module that registers the filter.

# %%
model.save_pretrained("runs/own_filter")
loaded = AutoModel.from_pretrained("runs/own_filter").eval()
with torch.no_grad():
    difference = (model(**batches[0]).last_hidden_state - loaded(**batches[0]).last_hidden_state).abs().max()
print(f"largest difference of the outputs: {difference:.1e}")

# %% [markdown]
# ## What to read next
#
# - [Write a filter](../docs/write_filter.md): losses, filters that replace attention, packages with filters of
#   their own.
# - The source of GFSA: [gfsa.py](../hf_graphfilter/filters/gfsa.py), a filter of the package in one file.
# - [Fine-tune with GFSA](fine_tune.ipynb): the same steps for training apply to your filter.
