"""Write the measured tables into the documents: ``python benchmarks/tables.py``.

Reads ``benchmarks/results/*.csv`` (from the other programs here), ``recipes/results/*.json`` (from
recipes/compare.py) and ``model_cards/minilm-movie-snippets/results.json`` (copied from a demo's output with
``--demo runs/demo``), and replaces what stands between the markers. Also writes the reference values of a report
into the package.
"""

import argparse
import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

from pages.conversions import conversion_overview, conversion_tables
from pages.galleries import gallery, gallery_costs, likeness_table, write_references
from pages.layers import blocks_table, single_layers
from pages.leagues import answers, equal_time, league_tables
from pages.lengths import agf_ratios, agf_speed, gibbs_table, growth_tables, linear_tables, scan_table, threshold_table
from pages.long_texts import long_depth, long_encoders, long_quality, long_ratios, long_retrieval, long_speed
from pages.modules import fast_path_table, training_table
from pages.overview import demo_table, headlines
from pages.sources import CARD, ROOT
from pages.speed import (
    bench_tables,
    busy_table,
    compiled_table,
    decoding_table,
    gpu_tables,
    graph_tables,
    machines_tables,
    menu_steps,
    overhead_table,
    speech_tables,
    vision_table,
    waiting_table,
    whisper_table,
)
from pages.trained import ablations_beside_paper, listops_table, recipe_tables
from pages.transfers import agf_transfer, singular_transfer

from hf_graphfilter.filters.core.overview import HEADER as MENU
from hf_graphfilter.filters.core.overview import overview as menu
from hf_graphfilter.tables import markdown_table

LEAGUES = (
    "depth",
    "control",
    "long",
    "time",
    "time_deep",
    "cheap",
    "few",
    "replicated",
    "wide",
    "wide_replicated",
    "small",
    "contranorm",
    "contranorm_time",
)


def keep_demo(output: Path) -> None:
    """Keep card, plot and results of a demo run that really happened."""
    CARD.mkdir(parents=True, exist_ok=True)
    shutil.copy(output / "checkpoint" / "README.md", CARD / "README.md")
    for name in ("results.json", "coefficients.png"):
        shutil.copy(output / name, CARD / name)


def replace(file: Path, name: str, content: str) -> None:
    text = file.read_text()
    content = re.sub(r"\b1 threads\b", "1 thread", content)  # as records name their machine
    pattern = re.compile(rf"(<!-- {name}: begin.*?-->\n).*?(<!-- {name}: end -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"{file.name} has no markers for {name}")
    file.write_text(pattern.sub(lambda m: f"{m[1]}\n{content}\n\n{m[2]}", text))
    print(f"wrote {name} into {file.name}")


CONVERTED = ("reviews", "images", "text", "translation")
TABLES: dict[str, dict[str, Callable[[], str]]] = {
    "README.md": {"headlines": headlines},
    "docs/benchmarks.md": {
        "demo": demo_table,
        "bench": bench_tables,
        "busy": busy_table,
        "waiting": waiting_table,
        "gpu": gpu_tables,
        "decoding": decoding_table,
        "overhead": overhead_table,
        "machines": machines_tables,
    },
    "docs/filters.md": {
        "menu": lambda: markdown_table(MENU, menu()),
        "steps": menu_steps,
    },
    "docs/export.md": {"compiled": compiled_table},
    "docs/any-model.md": {"fast-path": fast_path_table, "any-model": training_table},
    "docs/agf.md": {
        "ablations-paper": ablations_beside_paper,
        "ablations": partial(recipe_tables, "ablations-"),
        "ratios": agf_ratios,
        "speed": agf_speed,
        "transfer": agf_transfer,
    },
    "docs/singularformer.md": {
        "linear": linear_tables,
        "thresholds": threshold_table,
        "singular": singular_transfer,
        "likeness": likeness_table,
        "scratch": partial(recipe_tables, "sequences-bbc", "sequences-20newsgroups"),
    },
    "docs/analysis.md": {
        **{section: partial(gallery, section) for section in ("pretrained", "minilm", "deit", "language")},
        "costs": gallery_costs,
    },
    "docs/linearize.md": {"single-layers": single_layers, "blocks": blocks_table, "long-ratios": long_ratios},
    "docs/linearize_measured.md": {
        **{name: partial(conversion_tables, name) for name in CONVERTED},
        **{f"{name}-overview": partial(conversion_overview, name) for name in CONVERTED},
        "finetuned": partial(recipe_tables, "converted-"),
        "long-quality": long_quality,
        "long-retrieval": long_retrieval,
        "long-depth": long_depth,
        "long-encoders": long_encoders,
        "long-speed": long_speed,
    },
    "docs/league.md": {
        "answers": answers,
        "equal-time": equal_time,
        **{name: partial(league_tables, name) for name in LEAGUES},
    },
    "docs/converter.md": {
        "gibbs": gibbs_table,
        "scan": scan_table,
        "imdb": partial(recipe_tables, "sequences-imdb"),
    },
    "docs/sequences.md": {
        "growth": growth_tables,
        "arena": partial(recipe_tables, "lra-"),
        "listops": listops_table,
        "series": partial(recipe_tables, "sequences-JapaneseVowels", "sequences-BasicMotions", "sequences-Handwriting"),
    },
    "docs/graphs.md": {
        "zinc": partial(recipe_tables, "graphs-"),
        "smoothing": partial(gallery, "zinc"),
        "graph-steps": graph_tables,
    },
    "docs/speech.md": {
        "mboshi": partial(recipe_tables, "speech-mboshi"),
        "fillets": partial(recipe_tables, "speech-fillets-cs"),
        "speech": partial(gallery, "speech"),
        "steps": speech_tables,
        "whisper": whisper_table,
    },
    "docs/vision.md": {"throughput": vision_table},
    "docs/recipes_results.md": {
        name: partial(recipe_tables, name) for name in ("glue", "language_modeling", "code", "imagenet")
    },
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo", type=Path, help="first keep the results of this demo output")
    options = parser.parse_args()
    if options.demo:
        keep_demo(options.demo)
    for file, parts in TABLES.items():
        for name, make in parts.items():
            replace(ROOT / file, name, make())
    write_references()


if __name__ == "__main__":
    main()
