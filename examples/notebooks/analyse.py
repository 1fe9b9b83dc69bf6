# %% [markdown]
# # Analyse a model
#
# You learn how to measure whether the tokens of a model become alike from layer to layer, and which frequencies
# attention passes. You then see what a graph filter changes in both.

# %%
# %matplotlib inline
import os

import matplotlib.pyplot as plt
from transformers import AutoModel, AutoTokenizer

from hf_graphfilter import filter_status, patch_model
from hf_graphfilter.analysis import attention_maps, frequency_response, response_curves, smoothing
from hf_graphfilter.analysis.report import report
from hf_graphfilter.demo import load_snippets, pretrained_path

TEXTS = int(os.environ.get("TEXTS", "32"))  # the longest snippets of film reviews that the package ships

# %%
source = pretrained_path()  # or a model of the Hub
tokenizer = AutoTokenizer.from_pretrained(source)
texts = sorted((text for _, text in load_snippets()), key=len)[-TEXTS:]
batches = [tokenizer(texts[i : i + 8], padding=True, return_tensors="pt") for i in range(0, len(texts), 8)]
baseline = AutoModel.from_pretrained(source).eval()
print(texts[-1])

# %% [markdown]
# ## Do tokens become alike?
#
# Attention replaces each token by a weighted mean of all tokens. Many layers of it can make all tokens alike.
# This effect is called over-smoothing. `smoothing` measures it after each layer, over all texts and without the
# padding.

# %%
measured = smoothing(baseline, batches)
for layer in measured.layers():
    print(f"layer {layer.index:2}: mean cosine of two tokens {measured[layer, 'cosine'].mean:.2f}")

# %% [markdown]
# Layer -1 stands for the input of the first layer. In MiniLM the tokens become more alike, but they do not
# collapse.
#
# ## Which frequencies does attention pass?
#
# The order of the tokens defines frequencies: frequency 0 is the mean of all tokens, high frequencies are
# differences between neighbours. A gain of 1 means that attention passes a frequency as it is. Attention is a
# low-pass filter: it keeps frequency 0 and weakens all others.

# %%
frequency_response(baseline, batches).plot(quantities=["gain"])

# %% [markdown]
# ## What does a filter change?
#
# GFSA computes w_0 I + w_1 A + w_K (A + (K-1)(A^2 - A)), whose last bracket approximates A^K. With w_K below 0
# it subtracts a part that is smoothed about K times, so it smooths less than attention. Training usually finds
# w_K. Here we set it by hand.

# %%
model = patch_model(AutoModel.from_pretrained(source).eval(), "gfsa", K=3, w_K=-0.2)
filter_status(model)

# %%
smoothing(model, batches).plot(against=measured, quantities=["cosine", "high_frequency"])

# %% [markdown]
# The dashed line is the baseline. The tokens are less alike in the patched model, and more of their energy lies
# off the mean token. `response_curves` shows the reason. It gives the response of the filter to an eigenvalue
# of A:

# %%
curve = next(iter(response_curves(model).values()))
figure, axes = plt.subplots(figsize=(4, 3), layout="constrained")
axes.plot(curve.at, curve.response[0], label="GFSA, w_K = -0.2")
axes.plot(curve.at, curve.at, "--", color="grey", label="attention")
axes.set(xlabel="eigenvalue of A", ylabel="response")
axes.legend(frameon=False)
plt.show()

# %% [markdown]
# The eigenvalue 1 belongs to signals that are equal at all tokens. The filter weakens them, so all others weigh
# more.
#
# ## The matrices
#
# `attention_maps` returns the matrix that each head applies: attention, or what the filter makes of it. The
# filter can have negative entries (blue), which attention cannot have.

# %%
text = tokenizer("The film starts slowly, but its last hour is a joy.", return_tensors="pt")
words = tokenizer.convert_ids_to_tokens(text["input_ids"][0])
figure, axes = plt.subplots(1, 2, figsize=(9, 4), layout="constrained")
for ax, (name, chosen) in zip(axes, {"attention": baseline, "GFSA": model}.items(), strict=True):
    matrix = next(iter(attention_maps(chosen, text)[0].values()))[0]  # the first layer and head
    limit = matrix.abs().max()
    image = ax.imshow(matrix, cmap="RdBu_r", vmin=-limit, vmax=limit)
    ax.set_xticks(range(len(words)), words, rotation=90, fontsize=7)
    ax.set_yticks(range(len(words)), words, fontsize=7)
    ax.set_title(name)
    figure.colorbar(image, ax=ax)
plt.show()

# %% [markdown]
# ## Everything on one page
#
# `report` makes all measurements and writes them to a page that needs no network. `hf-graphfilter report` does
# the same on the command line.

# %%
whole = report(model, batches, baseline)
whole.to_html("runs/report.html")
for sentence in whole.summary()[:4]:
    print("-", sentence)

# %% [markdown]
# ## What to read next
#
# - [Analysis](../docs/analysis.md): all measures, with results of four pretrained models.
# - [Fine-tune with GFSA](fine_tune.ipynb): let training find the coefficients.
# - [Write your own filter](own_filter.ipynb).
