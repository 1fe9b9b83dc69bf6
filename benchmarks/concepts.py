"""Draw the three figures of docs/concepts.md: ``python benchmarks/concepts.py``.

The attention is that of MiniLM-L6 for one sentence (`pip install '.[demo]'`); the rest follows from its matrix.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from transformers import AutoModel, AutoTokenizer

from hf_graphfilter import patch_model
from hf_graphfilter.analysis import frequency_response
from hf_graphfilter.analysis.results import COLOURS
from hf_graphfilter.demo import pretrained_path

ROOT = Path(__file__).parents[1]
SENTENCE = "the film is slow but the end is great"
LAYER = 1
TIMES = 10  # how often the operator is applied


def load(**options: Any) -> nn.Module:
    """Return MiniLM, with GFSA if there are options of it."""
    model = AutoModel.from_pretrained(pretrained_path(), attn_implementation="eager").eval()
    return patch_model(model, "gfsa", **options) if options else model


def attention() -> tuple[list[str], Tensor]:
    """Return the tokens of the sentence and the attention matrix (tokens, tokens) of the most even head."""
    tokenizer = AutoTokenizer.from_pretrained(pretrained_path())
    batch = tokenizer(SENTENCE, return_tensors="pt")
    with torch.no_grad():
        maps = load()(**batch, output_attentions=True).attentions
    heads = maps[LAYER][0]
    spread = heads.sum(-2).amax(-1).argmin()  # the head whose tokens do not all read from one
    return tokenizer.convert_ids_to_tokens(batch["input_ids"][0]), heads[spread]


def response(x: Tensor, w_0: float, w_1: float, w_K: float, K: int = 3) -> Tensor:
    """Return what GFSA makes of an eigenvalue x of A."""
    return w_0 + w_1 * x + w_K * (x + (K - 1) * (x**2 - x))


def graph() -> Figure:
    """Draw the attention matrix, and the same numbers as arrows of a graph."""
    tokens, A = attention()
    figure = Figure(figsize=(9.0, 4.2), layout="constrained")
    matrix, circle = figure.subplots(1, 2)
    image = matrix.imshow(A, cmap="Blues", vmin=0)
    matrix.set_xticks(range(len(tokens)), tokens, rotation=60, ha="right", fontsize=8)
    matrix.set_yticks(range(len(tokens)), tokens, fontsize=8)
    matrix.set(xlabel="reads from", ylabel="token")
    matrix.set_title("attention matrix A: each row sums to 1", fontsize=10)
    figure.colorbar(image, ax=matrix, shrink=0.8)
    angle = torch.arange(len(tokens)) * 2 * torch.pi / len(tokens)
    positions = torch.stack([angle.sin(), angle.cos()], -1).tolist()
    for i, (x, y) in enumerate(positions):
        for j, weight in enumerate(A[i].tolist()):
            if i != j and weight > 0.05:
                arrow = {"arrowstyle": "->", "lw": 5 * weight, "color": COLOURS[0], "alpha": 0.6}
                arrow |= {"shrinkA": 16, "shrinkB": 16, "connectionstyle": "arc3,rad=0.12"}
                circle.annotate("", xy=(x, y), xytext=positions[j], arrowprops=arrow)
        circle.text(x, y, tokens[i], ha="center", va="center", fontsize=9)
    circle.set(xlim=(-1.3, 1.3), ylim=(-1.2, 1.2), aspect="equal")
    circle.set_title("the same numbers as a graph (weights above 0.05)", fontsize=10)
    circle.axis("off")
    return figure


def frequencies() -> Figure:
    """Draw the response of GFSA to an eigenvalue, and the gain of a layer over the frequency."""
    figure = Figure(figsize=(9.0, 3.4), layout="constrained")
    eigenvalue, frequency = figure.subplots(1, 2)
    x = torch.linspace(0, 1, 101)
    batch = AutoTokenizer.from_pretrained(pretrained_path())(SENTENCE, return_tensors="pt")
    for colour, w_K in zip(COLOURS, (0.0, 0.3, -0.3), strict=False):
        label = "attention (w_K = 0)" if w_K == 0 else f"GFSA, w_K = {w_K:g}"
        eigenvalue.plot(x, response(x, 0, 1, w_K), color=colour, label=label)
        measured = frequency_response(load(K=3, w_K=w_K), [dict(batch)])
        layer = measured.layers()[LAYER]
        gain = measured.bands[layer, "gain"].mean
        frequency.plot(torch.linspace(0, 0.5, len(gain)), gain, color=colour, label=label)
    eigenvalue.set(xlabel="eigenvalue of A", ylabel="what the filter makes of it")
    eigenvalue.set_title("the response of a filter", fontsize=10)
    eigenvalue.legend(frameon=False, fontsize=8)
    frequency.set(xlabel="frequency (cycles per token)", ylabel="gain", ylim=(0, None))
    frequency.set_title(f"the gain of layer {LAYER + 1} of MiniLM", fontsize=10)
    return figure


def smoothing() -> Figure:
    """Draw how tokens grow alike when A is applied again and again, and how a filter slows it."""
    _, A = attention()
    operators = {"attention: A": A, "filter: 0.6 I + 0.4 A": 0.6 * torch.eye(len(A)) + 0.4 * A}
    start = torch.randn(len(A), 64, generator=torch.Generator().manual_seed(0))
    figure = Figure(figsize=(10.0, 3.2), layout="constrained")
    *lines, cosines = figure.subplots(1, 3)
    for axes, colour, (name, H) in zip(lines, COLOURS, operators.items(), strict=False):
        signals = [start]
        for _ in range(TIMES):
            signals.append(H @ signals[-1])
        axes.plot(torch.stack(signals)[..., 0], color=colour, alpha=0.6)
        axes.set_title(name, fontsize=10)
        axes.set(xlabel="times applied", ylabel="one feature, a line per token")
        units = [nn.functional.normalize(signal, dim=-1) for signal in signals]
        off = ~torch.eye(len(A), dtype=torch.bool)
        cosines.plot([(u @ u.T)[off].mean() for u in units], color=colour, marker="o", markersize=3, label=name)
    cosines.set(xlabel="times applied", ylabel="mean cosine of two tokens", ylim=(None, 1.02))
    cosines.set_title("how alike tokens become", fontsize=10)
    cosines.legend(frameon=False, fontsize=8)
    return figure


FIGURES = {"concept-graph": graph, "concept-response": frequencies, "concept-smoothing": smoothing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="folder for the figures")
    options = parser.parse_args()
    options.figures.mkdir(parents=True, exist_ok=True)
    for name, draw in FIGURES.items():
        draw().savefig(options.figures / f"{name}.png", dpi=110)
        print(f"drew {options.figures / name}.png")


if __name__ == "__main__":
    main()
