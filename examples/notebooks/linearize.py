# %% [markdown]
# # Linearize an encoder
#
# You learn how to replace softmax attention, whose time grows with the square of the length, by a filter in
# linear time. You also learn how to see what the replacement costs, and from which length on it is faster.

# %%
# %matplotlib inline
import os

import torch
from IPython.display import Markdown
from transformers import AutoModel, AutoTokenizer, BertConfig, BertModel, set_seed

from hf_graphfilter import AGFConfig, linearize, patch_model
from hf_graphfilter.demo import load_snippets, pretrained_path
from hf_graphfilter.fitting import save_conversion, speed, text_batches

BUDGET = int(os.environ.get("BUDGET", "12000"))  # tokens to fit on; use a million or more for your own model
set_seed(0)

# %% [markdown]
# ## The model and the text
#
# The model is MiniLM, a sentence encoder that the extra `demo` installs. The fit needs text, but no labels. Here
# each text consists of eight snippets of film reviews.

# %%
source = pretrained_path()  # or the name of an encoder of the Hub
tokenizer = AutoTokenizer.from_pretrained(source)
model = AutoModel.from_pretrained(source).eval()
snippets = [text for _, text in load_snippets()]
texts = [" ".join(snippets[i : i + 8]) for i in range(0, len(snippets), 8)]
print(f"{len(texts):,} texts, for example: {texts[0][:200]} ...")

# %% [markdown]
# We keep the embeddings of five sentences, so that we can compare them afterwards.

# %%
sentences = [
    "A warm and funny film.",
    "This comedy made me smile all evening.",
    "The plot is dull and far too long.",
    "I nearly fell asleep before the end.",
    "The train to Rome leaves at noon.",
]


@torch.no_grad()
def similarities(model):
    """Return the cosine of the mean embeddings of each pair of sentences."""
    batch = tokenizer(sentences, padding=True, return_tensors="pt")
    mask = batch["attention_mask"].unsqueeze(-1)
    embeddings = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
    embeddings = torch.nn.functional.normalize(embeddings, dim=-1)
    return embeddings @ embeddings.T


original = similarities(model)

# %% [markdown]
# ## Linearize
#
# `linearize` replaces each attention module by the filter AGF and fits it in stages. First, each layer learns
# the output of its original attention. Then all layers together learn the hidden states of the original model.
# `budget` is the number of tokens for all stages. `window=4` keeps softmax attention over the 4 nearest tokens
# on each side, and over the first 4 tokens of the text (the sinks). The filter AGF is responsible for the rest.

# %%
batches = text_batches(tokenizer, texts, length=128, tokens=512)
report = linearize(model, batches, "agf", window=4, budget=BUDGET, holdout=2, evaluations=4, progress=False)
Markdown(report.to_markdown())

# %% [markdown]
# Read the first table as follows. *Cosine* compares the outputs of the converted model with those of the
# original; 1 means that they are equal. *Without window* and *without far* show what each of the two parts of
# the filter contributes: softmax attention to the nearest and the first tokens, and AGF for all others. The
# budget of this notebook is small, so the filter is not fully fitted: more tokens and a wider window lower the
# error.

# %%
report.plot()

# %%
converted = similarities(model)
print("similarity to the first sentence")
for sentence, a, b in zip(sentences[1:], original[0, 1:], converted[0, 1:], strict=True):
    print(f"{a:5.2f} original, {b:5.2f} converted: {sentence}")

# %% [markdown]
# ## When is it faster?
#
# The time of the filter grows linearly with the length, but it does more work per token. So short texts gain
# nothing. MiniLM knows only 512 positions, so we time a model of the same shape with more positions and random
# weights. Time does not depend on the values of the weights. The result depends on your machine.

# %%
shape = {"hidden_size": 384, "num_attention_heads": 12, "intermediate_size": 1536, "num_hidden_layers": 1}
longer = BertModel(BertConfig(**shape, max_position_embeddings=2048)).eval()
patch_model(longer, AGFConfig.for_conversion(window=4))
for row in speed(longer, [128, 512, 2048], rounds=3):
    print(f"{row.tokens:5,} tokens: {'AGF' if row.ratio < 1 else 'attention'} is faster")

# %% [markdown]
# ## Save and load
#
# The checkpoint loads like any other model. `save_conversion` writes the tables above into its model card.

# %%
model.save_pretrained("runs/linearize")
tokenizer.save_pretrained("runs/linearize")
save_conversion(model, report, "runs/linearize", base_model="sentence-transformers/all-MiniLM-L6-v2")
loaded = AutoModel.from_pretrained("runs/linearize")
print(f"largest difference of the similarities: {(similarities(loaded) - converted).abs().max():.1e}")

# %% [markdown]
# ## What to read next
#
# - [Linearize a model](../docs/linearize.md): decoders, images, long texts, and what was measured with larger budgets.
# - [AGF](../docs/agf.md): the filter, and its time and memory by length.
# - [Analyse a model](analyse.ipynb): look into the converted model.
