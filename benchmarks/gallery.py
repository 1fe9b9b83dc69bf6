"""What attention and filters do in real models: ``python benchmarks/gallery.py`` (``make figures``).

Sections ("baseline" is the same model without a filter):

pretrained: MiniLM-L6, DeiT-Tiny, SmolLM2-135M and Flan-T5-small, unchanged.
minilm: MiniLM-L6 fine-tuned on movie-review snippets, baseline and GFSA; also pretrained, with attention replaced by
    AGF and AGF fitted to it.
deit: 24 thin layers from scratch on CIFAR-10, baseline, GFSA and AGF.
language: GPT-2 with 12 narrow layers from scratch on PTB, baseline and GFSA with all coefficients learned, three seeds
    each (models of docs/league.md).
zinc: Graphormer-slim from scratch, baseline and GFSA, as in recipes/configs/graphs/small.yaml.
speech: Speech2Text from scratch on connected digits, baseline and GFSA; also the encoder of Whisper tiny.en.
costs: time and peak memory of a report.

Texts are film reviews, cut at 128 tokens, or PTB; images are from Tiny ImageNet or CIFAR-10. Data and weights are read
from --shared and from HF_GRAPHFILTER_WEIGHTS (see --shared's READMEs). Models that are not in --runs are trained (an
hour on one core). Figures go to docs/figures, numbers to benchmarks/results/gallery-DEVICE-SECTION.csv.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from measure import make_parser, stamp, write
from PIL import Image
from real import reviews, weights, windows
from torch import nn
from transfer import AGF, fit_filter
from transformers import (
    AutoFeatureExtractor,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoModelForSpeechSeq2Seq,
    AutoTokenizer,
)

from hf_graphfilter import load_filter, save_filter
from hf_graphfilter.analysis.observing import Layer
from hf_graphfilter.analysis.report import report
from hf_graphfilter.analysis.report.measurements import Measurements, measure
from hf_graphfilter.analysis.response import plot_curves
from hf_graphfilter.analysis.results import COLOURS, pick_some
from hf_graphfilter.cli.inputs import Images, texts_of
from hf_graphfilter.demo import pretrained_path

ROOT = Path(__file__).parents[1]
sys.path.append(str(ROOT))
FIELDS = ["date", "device", "data", "model", "stack", "layer", "layers", "quantity", "mean", "sd", "samples"]
COSTS = ["date", "device", "case", "seconds", "peak_mb"]
COUNT = 32  # texts or images
PANELS = {
    "cosine": "mean cosine of two tokens",
    "high_frequency": "share of energy off the mean token",
    "effective_rank": "effective rank of the tokens",
}
Found = dict[str, Measurements]


# ---------------------------------------------------------------------------------------------- models and their data


def texts(options: argparse.Namespace, source: str | Path, count: int = COUNT) -> list[Any]:
    files = sorted((options.shared / "data" / "imdb-subset" / "test").rglob("*.txt"))
    return texts_of(str(source), files[:: len(files) // count], count, 128, 8)


def images(options: argparse.Namespace) -> list[Any]:
    folder = options.shared / "data" / "tiny-imagenet-subset" / "val"
    return list(Images(str(options.shared / "weights" / "deit-tiny-patch16-224"), folder, 8, COUNT))


def pretrained(options: argparse.Namespace) -> Found:
    deit = options.shared / "weights" / "deit-tiny-patch16-224"
    cases: dict[str, tuple[Callable[[], nn.Module], list[Any]]] = {
        "MiniLM-L6": (partial(AutoModel.from_pretrained, pretrained_path()), texts(options, pretrained_path())),
        "DeiT-Tiny": (partial(AutoModelForImageClassification.from_pretrained, deit), images(options)),
    }
    for name, auto, folder in (
        ("SmolLM2-135M", AutoModelForCausalLM, weights("smollm2")),
        ("Flan-T5-small", AutoModelForSeq2SeqLM, weights("flan-t5-small")),
    ):
        cases[name] = partial(auto.from_pretrained, folder, dtype=torch.float32), texts(options, folder)
    results = {name: measure(build().to(options.device), batches) for name, (build, batches) in cases.items()}
    draw(options, "pretrained", depth(results))
    draw(options, "frequencies", frequencies(results))
    draw(options, "taylor", taylor(results))
    return results


def minilm(options: argparse.Namespace) -> Found:
    source = pretrained_path()
    models = {"pretrained": AutoModel.from_pretrained(source)}
    folder = options.runs / "minilm-agf"
    if not folder.is_dir():
        batches = reviews(options, AutoTokenizer.from_pretrained(source))
        save_filter(fit_filter(options, batches, "agf", AGF, 600)[0], folder)
    models["AGF, fitted"] = load_filter(AutoModel.from_pretrained(source), folder)
    for name, flags in {"fine-tuned": ["--filter", "none"], "fine-tuned with GFSA": ["--filter_lr", "1e-2"]}.items():
        common = ["--config", "glue/minilm.yaml", "--task", "movie-snippets", "--model", source, "--max_train_samples"]
        folder = trained(options, "glue", name, [*common, "8000", *flags, "--save_strategy", "epoch"])
        models[name] = AutoModelForSequenceClassification.from_pretrained(folder)
    batches = texts(options, source)
    results = {name: measure(model.to(options.device), batches) for name, model in models.items()}
    draw(options, "minilm", depth(results))
    draw(options, "minilm-gain", gains(results, ["pretrained", "AGF, fitted", "fine-tuned", "fine-tuned with GFSA"]))
    for name, file in {"AGF, fitted": "minilm-agf", "fine-tuned with GFSA": "minilm-gfsa"}.items():
        draw(options, f"{file}-curves", plot_curves(results[name].curves))
    return results


def deit(options: argparse.Namespace) -> Found:
    from timm.data import create_transform, resolve_data_config

    from recipes.image_models import load

    data = options.shared / "data" / "cifar10"
    common = ["--config", "imagenet/small-24.yaml", "--data", str(data), "--use_cpu"]
    models = {}
    for name, flags in {"plain": ["--filter", "none"], "with GFSA": [], "with AGF": ["--filter", "agf"]}.items():
        models[name] = load(trained(options, "imagenet", f"deit-24-{name}", [*common, *flags])).to(options.device)
    transform = create_transform(**resolve_data_config({"input_size": (3, 32, 32), "crop_pct": 1.0}))
    files = pick_some(sorted((data / "test").rglob("*.png")), COUNT)
    batches = list(torch.stack([transform(Image.open(file).convert("RGB")) for file in files]).split(16))
    results = {name: measure(model, batches) for name, model in models.items()}
    draw(options, "deit-24", depth(results))
    draw(options, "deit-24-gain", gains(results, list(results)))
    for file, name in {"deit-24": "with GFSA", "deit-24-agf": "with AGF"}.items():
        draw(options, f"{file}-curves", plot_curves(results[name].curves))
    return results


def language(options: argparse.Namespace) -> Found:
    data = options.shared / "data" / "ptb"
    common = ["--config", "language_modeling/deep.yaml", "--task", "ptb", "--data", str(data), "--use_cpu"]
    common += ["--save_strategy", "epoch"]
    kinds = {"plain": ["--filter", "none"], "with GFSA": []}
    folders = {
        f"{name}, seed {seed}": trained(options, "language_modeling", f"gpt2-12-{name}", [*common, *flags], seed)
        for (name, flags), seed in itertools.product(kinds.items(), (1, 2, 3))
    }
    tokenizer = AutoTokenizer.from_pretrained(folders["plain, seed 1"])
    batches = [{"input_ids": torch.stack(pick_some(list(windows(tokenizer, data / "ptb.test.txt", 64)), COUNT))}]
    models = {name: AutoModelForCausalLM.from_pretrained(folder) for name, folder in folders.items()}
    results = {name: measure(model.to(options.device), batches) for name, model in models.items()}
    first = {name: results[f"{name}, seed 1"] for name in kinds}
    draw(options, "gpt2-12", depth(first))
    draw(options, "gpt2-12-gain", gains(first, list(first)))
    draw(options, "gpt2-12-curves", plot_curves(first["with GFSA"].curves))
    return results


def zinc(options: argparse.Namespace) -> Found:
    from hf_graphfilter import GraphormerConfig, GraphormerForGraphPrediction
    from hf_graphfilter.graphs import GraphCollator, GraphDataset
    from recipes.graph_data import ZINC_SIZES, read_zinc

    data = options.shared / "data" / "zinc12k"
    common = ["--config", "graphs/small.yaml", "--task", "zinc", "--data", str(data), "--use_cpu", "true"]
    kinds = {"baseline": ["--filter", "none"], "with GFSA": []}
    folders = {n: trained(options, "graphs", f"zinc-{n}", [*common, *flags], seed=4) for n, flags in kinds.items()}
    models = {name: GraphormerForGraphPrediction.from_pretrained(folder) for name, folder in folders.items()}
    config = GraphormerConfig(**ZINC_SIZES)
    rows = pick_some(list(read_zinc(data / "zinc12k_graphs.npz")["test"]()), COUNT)
    batch = dict(GraphCollator(config)(list(GraphDataset(rows, config))))
    del batch["labels"]
    results = {name: measure(model.to(options.device), [batch]) for name, model in models.items()}
    draw(options, "zinc", depth(results))
    draw(options, "zinc-gain", gains(results, list(results)))
    draw(options, "zinc-taylor", taylor(results))
    draw(options, "zinc-singular-values", singular_values(results))
    draw(options, "zinc-curves", plot_curves(results["with GFSA"].curves))
    return results


def speech(options: argparse.Namespace) -> Found:
    from recipes.speech_data import read
    from recipes.speech_inputs import SpeechBatches, prepare

    data = options.shared / "data" / "fsdd"
    common = ["--config", "speech/small.yaml", "--task", "digits", "--data", str(data), "--use_cpu"]
    kinds = {"plain": ["--filter", "none"], "with GFSA": []}
    folders = {name: trained(options, "speech", f"digits-{name}", [*common, *flags]) for name, flags in kinds.items()}
    folders["Whisper tiny.en"] = weights("whisper-tiny.en")
    audio_settings = {"normalize": "words", "max_seconds": 30.0, "too_long": "skip", "bad_audio": "error"}
    settings = argparse.Namespace(task="digits", data=str(data), **audio_settings)
    rows = pick_some(read(settings)[0]["test"], COUNT)
    results = {}
    for name, folder in folders.items():
        extractor = AutoFeatureExtractor.from_pretrained(folder)
        collate = SpeechBatches(extractor)
        subset = rows if name in kinds else rows[:8]  # Whisper has 1,500 positions
        recordings = prepare(subset, extractor, settings, "test")[0].add_column("labels", [[0]] * len(subset))
        batches = [{"input_features": collate([row])["input_features"]} for row in recordings]  # alone: no padding
        encoder = AutoModelForSpeechSeq2Seq.from_pretrained(folder, dtype=torch.float32).get_encoder()
        results[name] = measure(encoder.to(options.device), batches)
    draw(options, "speech", depth(results))
    draw(options, "speech-gain", gains({name: results[name] for name in kinds}, list(kinds)))
    return results


def trained(options: argparse.Namespace, recipe: str, name: str, argv: list[str], seed: int = 1) -> Path:
    """Return the checkpoint of a recipe, trained now if it is not there."""
    output = options.runs / name.replace(" ", "-")
    command = [sys.executable, str(ROOT / "recipes" / f"{recipe}.py"), *argv, "--seeds", str(seed), "--output_dir"]
    subprocess.run([*command, str(output)], check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return output / f"seed-{seed}"


# ------------------------------------------------------------------------------------------------------------- figures


Lines = list[tuple[str, Any, Any]]  # what each is called, where its points are, their values


def panels(drawn: dict[str, Lines], x: str, y: str = "", *, legends: bool = False, **options: Any) -> Any:
    """Draw panels side by side by their titles, with a legend in each or in the first; ``options`` of axes."""
    from matplotlib.figure import Figure

    shared, marker = bool(y), None if y else "o"
    figure = Figure(figsize=((3.0 if y else 4.0) * len(drawn), 3.0), layout="constrained")
    axes = figure.subplots(1, len(drawn), squeeze=False, sharey=shared)[0]
    for panel, (title, lines) in zip(axes, drawn.items(), strict=True):
        for colour, (label, positions, values) in zip(COLOURS, lines, strict=False):
            panel.plot(positions, values, marker=marker, markersize=3, color=colour, label=label)
        panel.set(xlabel=x, **options)
        panel.set_title(title, fontsize=9)
        if legends or panel is axes[0]:
            panel.legend(frameon=False, fontsize=7)
    axes[0].set_ylabel(y)
    return figure


def draw(options: argparse.Namespace, name: str, figure: Any) -> None:
    file = options.figures / f"{name}.png"
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)
    print(f"drew {file}", flush=True)


def stacks(found: Found) -> Iterator[tuple[str, Measurements, str]]:
    """Yield (what to call it, the numbers, the stack) for each stack of each model."""
    for name, measured in found.items():
        stack_names = list(dict.fromkeys(layer.stack for layer in measured.smoothing.layers()))
        for stack in stack_names:
            yield (f"{name}, {stack}" if len(stack_names) > 1 else name), measured, stack


def band(measured: Measurements, stack: str, quantity: str) -> tuple[list[int], list[float]]:
    """(layers, means) of a quantity in a stack."""
    part = next(p for p in measured.parts().values() if any(name == quantity for _, name in p.bands))
    layers = [layer for layer in part.layers(stack) if (layer, quantity) in part.bands]
    return [layer.index for layer in layers], [part.bands[layer, quantity].mean.item() for layer in layers]


def depth(found: Found) -> Any:
    """Draw what becomes of the tokens, over the layers; models of different depth over the share of them."""
    lines = list(stacks(found))
    differ = len({max(band(measured, stack, "cosine")[0]) for _, measured, stack in lines}) > 1
    drawn: dict[str, Lines] = {title: [] for title in PANELS.values()}
    for (quantity, title), (name, measured, stack) in itertools.product(PANELS.items(), lines):
        layers, values = band(measured, stack, quantity)
        drawn[title].append((name, [(i + 1) / len(layers[1:]) for i in layers] if differ else layers, values))
    return panels(drawn, "share of the layers" if differ else "layer (-1: input embeddings)")


def gain(measured: Measurements, layer: Layer, quantity: str, label: str) -> tuple[str, Any, Any]:
    curve = measured.response.bands[layer, quantity].mean
    return label, torch.linspace(0, 0.5, len(curve)), curve


def frequencies(found: Found) -> Any:
    """Draw the gain of attention over the frequencies, in some layers of each stack (GFSA, Figure 2)."""
    drawn = {
        name: [
            gain(measured, layer, "attention_gain", f"layer {layer.index}")
            for layer in pick_some(measured.response.layers(stack))
        ]
        for name, measured, stack in stacks(found)
    }
    return panels(drawn, "frequency (cycles a token)", "gain of attention", legends=True, ylim=(0, 1.05))


def gains(found: Found, names: list[str]) -> Any:
    """Draw the gain of what modules apply, in some layers: filters beside what they start from."""
    layers = pick_some(found[names[0]].response.layers())
    drawn = {f"layer {x.index}": [gain(found[name], x, "gain", name) for name in names] for x in layers}
    return panels(drawn, "frequency (cycles a token)", "gain of what the module applies")


def taylor(found: Found) -> Any:
    """E_K of its bound 2K, by layer (GFSA, Figure 3)."""
    drawn: dict[str, Lines] = {}
    for name, measured, stack in stacks(found):
        drawn[name] = []
        for K in sorted({int(quantity[2:]) for _, quantity in measured.taylor.bands}):
            layers, values = band(measured, stack, f"K={K}")
            drawn[name].append((f"K = {K}", layers, [value / (2 * K) for value in values]))
    return panels(drawn, "layer", "E_K, of its bound 2K", ylim=(0, 1))


def singular_values(found: Found) -> Any:
    """Draw the singular values of the tokens (GFSA, Figures 2, 4 and 5) and of attention, in the last layer."""
    quantities = {"tokens": "singular_values", "what attention applies": "attention_singular_values"}
    drawn: dict[str, Lines] = {title: [] for title in quantities}
    for (title, quantity), (name, measured, stack) in itertools.product(quantities.items(), stacks(found)):
        curve = measured.spectrum[measured.spectrum.layers(stack)[-1], quantity].mean
        axis, ranks = measured.spectrum.grid(quantity, len(curve))
        drawn[title].append((name, ranks, curve))
    return panels(drawn, axis, "singular value (of the largest)", ylim=(0, 1.05))


# ------------------------------------------------------------------------------------------------------------- numbers


def numbers(common: dict[str, str], found: Found) -> list[dict[str, Any]]:
    """All that is one number a layer, and what filters make of 0 and 1 of A, by layer (models of one stack)."""
    rows = []
    for name, measured in found.items():
        stack = measured.smoothing.layers()[0].stack
        for (layer, curve), point in itertools.product(enumerate(measured.curves.values()), (0, 1)):
            heads = curve.response[:, (curve.at - point).abs().argmin()]
            fields = {"model": name, "stack": stack, "layer": layer, "layers": len(measured.curves)}
            fields |= {"quantity": f"response at {point}", "mean": f"{heads.mean():.5g}", "sd": f"{heads.std():.5g}"}
            rows.append({**common, **fields, "samples": len(heads)})
        for part in measured.parts().values():
            for row in part.rows():
                if "at" not in row:
                    layers = max(layer.index for layer in part.layers(row["stack"])) + 1
                    fields = {"model": name, "layers": layers, "samples": row["samples"]}
                    fields |= {key: row[key] for key in ("stack", "layer", "quantity")}
                    rows.append({**common, **fields, **{k: f"{row[k]:.5g}" for k in ("mean", "sd")}})
    return rows


CASES = {
    "MiniLM-L6, 512 texts of 128 tokens": "minilm",
    "SmolLM2-135M, 2 texts of 1,024 tokens": "smollm2",
    "DeiT-Tiny, 2 images of 1,025 tokens": "deit",
}


def analyse(options: argparse.Namespace, case: str) -> None:
    """Write a report of one of the cases, within a process of its own."""
    if case == "minilm":
        model, batches = AutoModel.from_pretrained(pretrained_path()), texts(options, pretrained_path(), 512)
    elif case == "smollm2":
        model = AutoModelForCausalLM.from_pretrained(weights(case), dtype=torch.float32)
        ids = torch.cat([batch["input_ids"].flatten() for batch in texts(options, weights(case))])
        batches = [{"input_ids": ids[: 2 * 1024].view(2, 1024)}]
    else:
        folder = options.shared / "weights" / "deit-tiny-patch16-224"
        model = AutoModelForImageClassification.from_pretrained(folder)
        small = torch.cat([batch["pixel_values"] for batch in images(options)])[:2]
        large = torch.nn.functional.interpolate(small, (512, 512), mode="bicubic")
        batches = [{"pixel_values": large, "interpolate_pos_encoding": True}]
    report(model.to(options.device), batches).to_html(options.runs / f"{case}.html")


def costs(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Of whole processes: Python, libraries, weights, the report and its page."""
    rows = []
    for name, case in CASES.items():
        command = [sys.executable, __file__, "--analyse", case, "--device", options.device, "--runs", str(options.runs)]
        start_time = time.perf_counter()
        process = subprocess.Popen([*command, "--shared", str(options.shared)])
        _, status, usage = os.wait4(process.pid, 0)
        if status:
            raise SystemExit(f"the report of {name} failed")
        seconds, peak = time.perf_counter() - start_time, usage.ru_maxrss / 1024
        rows.append({"case": name, "seconds": f"{seconds:.0f}", "peak_mb": f"{peak:.0f}"})
        print(rows[-1], flush=True)
    return rows


DATA = {
    "pretrained": "film reviews of at most 128 tokens, or images of Tiny ImageNet",
    "minilm": "film reviews of at most 128 tokens",
    "deit": "test images of CIFAR-10, 65 tokens",
    "language": "windows of 64 tokens of PTB's test part",
    "zinc": "test graphs of ZINC",
    "speech": "test recordings of digits (of Whisper 8, each padded to 30 seconds)",
}
SECTIONS = {
    "pretrained": pretrained,
    "minilm": minilm,
    "deit": deit,
    "language": language,
    "zinc": zinc,
    "speech": speech,
}


def main() -> None:
    parser = make_parser(__doc__, [*SECTIONS, "costs"], "gallery")
    parser.add_argument("--figures", type=Path, default=ROOT / "docs" / "figures", help="folder for the figures")
    parser.add_argument("--analyse", choices=CASES.values(), help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    if options.analyse:
        analyse(options, options.analyse)
        return
    common = stamp(options.device)
    for section, run in SECTIONS.items():
        if options.only in (None, section):
            rows = numbers({**common, "data": DATA[section]}, run(options))
            write(rows, options.output / f"gallery-{options.device}-{section}.csv", FIELDS)
    if options.only in (None, "costs"):
        rows = [{**common, **row} for row in costs(options)]
        write(rows, options.output / f"gallery-{options.device}-costs.csv", COSTS)


if __name__ == "__main__":
    main()
