"""The tables of docs/any-model.md: what the fast path of PyTorch is worth, and models trained without and with GFSA."""

from hf_graphfilter.analysis.comparison import paired_comparison
from hf_graphfilter.tables import markdown_table

from .sources import read, where


def fast_path_table() -> str:
    """Return times of a layer of PyTorch's encoder."""
    rows = read("overhead-torch-cpu")
    forms = {"fast path": "fast path", "plain": "without it", "route": "a filter that only applies S", "gfsa": "GFSA"}
    cells = {(row["case"], row["form"]): row for row in rows}
    header = ["microseconds per layer", *forms.values(), "without : fast path", "GFSA : fast path"]
    body = []
    for case in dict.fromkeys(row["case"] for row in rows):
        times = [f"{float(cells[case, form]['microseconds']):,.0f}" for form in forms]
        body.append([case, *times, *(cells[case, form]["ratio"] for form in ("plain", "gfsa"))])
    text = (
        'Two layers in evaluation, without gradients. "tiny" is 4 tokens of 32 features; the others are 8 sequences of '
    )
    return f"{text}256 features. {where(rows)}\n\n{markdown_table(header, body)}"


TASKS = {
    "text": "`nn.TransformerEncoder` from scratch, film reviews",
    "images": "torchvision's ViT with the weights of DeiT-tiny, CIFAR-10 at 64 x 64",
}


def training_table() -> str:
    """Return accuracies without and with GFSA, and their paired difference."""
    rows, body, comparisons = read("any-model-cpu"), [], []
    kinds = sorted(
        {(row["task"], float(row["lr"])) for row in rows}, key=lambda kind: ([*TASKS].index(kind[0]), kind[1])
    )
    for task, lr in kinds:
        runs = [row for row in rows if (row["task"], float(row["lr"])) == (task, lr)]
        values = {m: [float(row["accuracy"]) for row in runs if row["model"] == m] for m in ("baseline", "gfsa")}
        paired = paired_comparison(values["baseline"], values["gfsa"])
        comparisons.append(paired)
        means = [f"{sum(v) / len(v):.3f}" for v in values.values()]
        interval = paired.format("+.3f")
        sizes = f"{int(runs[0]['train']):,} x {runs[0]['epochs']}"
        body.append([TASKS[task], f"{lr:g}", sizes, f"{int(runs[0]['test']):,}", *means, interval, str(paired.pairs)])
    header = [
        "model",
        "learning rate",
        "training rows x epochs",
        "test rows",
        "baseline",
        "GFSA",
        "difference [95 % interval]",
        "seeds",
    ]
    num_clear = sum(paired.low > 0 or paired.high < 0 for paired in comparisons)
    verdict = f"The interval excludes zero in {num_clear} of {len(comparisons)} rows."
    return f"Accuracy on held-out rows. {verdict} {where(rows)}\n\n{markdown_table(header, body)}"
