"""Draw the picture of the README: ``python benchmarks/picture.py`` (two minutes on two cores).

MiniLM-L6 is fine-tuned on film reviews with GFSA, all coefficients learned. The picture shows one head on one sentence:
its attention matrix, what the filter makes of it, and the response of the filter before and after training.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from matplotlib.figure import Figure
from transformers import AutoModelForSequenceClassification, AutoTokenizer, Trainer, set_seed

from hf_graphfilter import FilterTrainingArguments, patch_model
from hf_graphfilter.analysis import attention_maps, response_curves
from hf_graphfilter.demo import Snippets, load_snippets, pretrained_path

SENTENCE = "a quiet film that slowly becomes a great one"
OUTPUT = Path(__file__).parents[1] / "docs" / "figures" / "overview.png"


def train_model() -> tuple[AutoModelForSequenceClassification, AutoTokenizer]:
    """Fine-tune the encoder on ratings of film reviews."""
    set_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(pretrained_path())
    model = AutoModelForSequenceClassification.from_pretrained(pretrained_path(), num_labels=1)
    patch_model(model, "gfsa", K=3, learn=["w_0", "w_1", "w_K"])
    rows = Snippets(load_snippets()[:4000], tokenizer)
    with tempfile.TemporaryDirectory() as folder:
        args = FilterTrainingArguments(
            folder,
            per_device_train_batch_size=16,
            num_train_epochs=1,
            learning_rate=5e-5,
            filter_lr=1e-2,
            lr_scheduler_type="cosine",
            report_to="none",
            save_strategy="no",
        )
        Trainer(model, args, train_dataset=rows, processing_class=tokenizer).train()
    return model.eval(), tokenizer


def draw(model: AutoModelForSequenceClassification, tokenizer: AutoTokenizer) -> Figure:
    """Draw the head whose filter moved most."""
    batch = tokenizer(SENTENCE, return_tensors="pt")
    words = tokenizer.convert_ids_to_tokens(batch["input_ids"][0])
    before, after = (attention_maps(model, dict(batch), filtered=filtered)[0] for filtered in (False, True))
    curves = list(response_curves(model).values())
    changes = torch.stack([(curve.response - curve.at).abs().amax(-1) for curve in curves])  # (layers, heads)
    layer, head = divmod(int(changes.argmax()), changes.shape[1])
    key = list(before)[layer]
    matrices = {"attention matrix A": before[key][head], "graph filter H": after[key][head]}
    largest = max(float(matrix.abs().max()) for matrix in matrices.values())

    figure = Figure(figsize=(12, 4), layout="constrained")
    figure.suptitle(f"MiniLM fine-tuned on film reviews with GFSA: layer {layer + 1}, head {head + 1}", fontsize=11)
    axes = figure.subplots(1, 3, width_ratios=[1, 1, 1.15])
    for ax, (title, matrix) in zip(axes, matrices.items(), strict=False):
        image = ax.imshow(matrix.float(), cmap="RdBu", vmin=-largest, vmax=largest)
        ax.set_title(title, fontsize=12)
        ax.set_xticks(range(len(words)), words, rotation=60, ha="right", rotation_mode="anchor", fontsize=8)
        ax.set_yticks(range(len(words)), words, fontsize=8)
        ax.set_xlabel("token that is read", fontsize=9)
    axes[0].set_ylabel("token that reads", fontsize=9)
    figure.colorbar(image, ax=axes[1], shrink=0.8, label="weight (same scale)")
    axes[1].set_title("filter  H = $w_0$ I + $w_1$ A + $w_K$ [A + 2 (A² − A)]", fontsize=12)
    curve = curves[layer]
    axes[2].plot(curve.at, curve.at, color="grey", linestyle="--", label="before training: H = A")
    for index, response in enumerate(curve.response):
        chosen = index == head
        label = (
            "after training: this head" if chosen else "the other heads of the layer" if index == (head == 0) else None
        )
        colour, width = ("tab:blue", 2.5) if chosen else ("tab:blue", 0.8)
        axes[2].plot(curve.at, response, color=colour, linewidth=width, alpha=1 if chosen else 0.35, label=label)
    axes[2].axhline(0, color="black", linewidth=0.5)
    axes[2].set(xlabel="eigenvalue of A  (1: alike in all tokens)", ylabel="what H makes of it")
    axes[2].set_title("response of the filter", fontsize=12)
    axes[2].legend(frameon=False, fontsize=9)
    return figure


if __name__ == "__main__":
    draw(*train_model()).savefig(OUTPUT, dpi=110)
    print(f"wrote {OUTPUT}")
