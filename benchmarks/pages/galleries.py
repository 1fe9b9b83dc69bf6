"""What the analysis finds in real weights, from benchmarks/gallery.py."""

import csv

from hf_graphfilter.tables import markdown_table
from pages.sources import ROOT, read, where
from recipes.summary import name_variant

REFERENCES = ROOT / "hf_graphfilter" / "data" / "gallery.csv"

GALLERY = {  # quantity: (column, of what it is shown)
    "cosine": ("cosine of two tokens", ".2f"),
    "high_frequency": ("energy off the mean token", ".2f"),
    "effective_rank": ("effective rank", ".0f"),
    "stable_rank": ("stable rank", ".1f"),
    "high_to_low": ("gain off frequency 0", ".2f"),
}


def gallery(section: str) -> str:
    """From before the first layer (of gains: in it) to the last, with the largest or smallest between them."""
    rows = read(f"gallery-cpu-{section}")
    curves: dict[tuple[str, str], dict[str, list[float]]] = {}
    for row in sorted(rows, key=lambda row: int(row["layer"])):
        quantities = curves.setdefault((row["model"], row["stack"]), {})
        quantities.setdefault(row["quantity"], []).append(float(row["mean"]))
    names = [name for name, _ in curves]
    body = []
    for (name, stack), means in curves.items():
        cells = [name_variant(name) + (f", {stack}" if names.count(name) > 1 else ""), str(len(means["K=3"]))]
        for quantity, (_, form) in GALLERY.items():
            values = means[quantity]
            extreme = max(values, key=lambda x: abs(x - values[0]))
            between = "" if extreme in (values[0], values[-1]) else f"{extreme:{form}} … "
            cells.append(f"{values[0]:{form}} … {between}{values[-1]:{form}}")
        for K in (3, 10):
            shares = [value / (2 * K) for value in means[f"K={K}"]]
            cells.append(f"{min(shares):.0%} to {max(shares):.0%}")
        body.append(cells)
    header = ["model", "layers", *(title for title, _ in GALLERY.values()), "E_3 of its bound", "E_10 of its bound"]
    return f"{rows[0]['samples']} {rows[0]['data']}. {where(rows)}\n\n{markdown_table(header, body)}"


def gallery_costs() -> str:
    rows = read("gallery-cpu-costs")
    body = [[row["case"], row["seconds"], f"{int(row['peak_mb']):,}"] for row in rows]
    return f"{where(rows)}\n\n{markdown_table(['a report of', 's', 'peak MB'], body)}"


def write_references() -> None:
    """Write the values that the page of a report compares a model with: the last layer of the pretrained models."""
    last_rows: dict[tuple[str, str], dict] = {}
    for row in read("gallery-cpu-pretrained"):
        case = row["model"], row["stack"]
        if row["quantity"] == "cosine" and int(row["layer"]) >= int(last_rows.get(case, row)["layer"]):
            last_rows[case] = row
    names = ["model", "stack", "layers", "quantity", "mean", "sd", "samples", "data", "date"]
    with REFERENCES.open("w", newline="") as file:
        writer = csv.DictWriter(file, names, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(last_rows.values())
    print(f"wrote {REFERENCES.name}")


def likeness_table() -> str:
    """Return how alike the attention of Singularformer and of softmax models is, trained and after one step."""
    rows = read("likeness-cpu")
    body: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        body.setdefault((row["model"], row["other"]), []).append(f"{row['mean']} ({row['low']} to {row['high']})")
    header = ["model", "other", *dict.fromkeys(row["training"] for row in rows)]
    caption = f"Mean over {rows[0]['texts']} texts, with the range of the middle 80 %."
    return f"{caption} {where(rows)}\n\n{markdown_table(header, [[*pair, *cells] for pair, cells in body.items()])}"
