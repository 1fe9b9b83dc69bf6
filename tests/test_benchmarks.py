"""The programs beside the benchmarks: which ratio got worse, tables of several machines, all that a GPU can answer."""

import csv
import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from hf_graphfilter import parameter_groups, patch_model
from hf_graphfilter.filters.core.attached import filters_of

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
in_git = pytest.mark.skipif(not (ROOT / ".git").exists(), reason="needs the history")


@pytest.fixture(autouse=True)
def on_the_path(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)


def written(rows, file):
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        writer = csv.DictWriter(opened, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    return file.read_text()


def row(form, p10, median, p90, ratio, device="a machine", **more):
    case = {"case": "one token", "n": 8, "causal": True, "pass": "decoding", "form": form, "device": device}
    return {**case, "p10_ms": p10, "median_ms": median, "p90_ms": p90, "ratio_to_plain": ratio, **more}


def spread(low, high):
    return {"ratio_p10": low, "ratio_p90": high}


@pytest.mark.parametrize(
    ("before", "after", "is_worse"),
    [
        ((1.2, spread(1.1, 1.3)), (1.4, spread(1.35, 1.45)), True),
        ((1.2, spread(1.1, 1.3)), (1.0, spread(0.95, 1.05)), False),  # better
        ((1.2, spread(1.1, 1.3)), (1.25, spread(1.24, 1.26)), False),  # within the spread before
        ((1.2, spread(1.19, 1.21)), (1.4, spread(1.15, 1.5)), False),  # within the spread after
        ((1.2, {}), (1.4, {}), True),  # by the times: from 1.08 to 1.32, from 1.26 to 1.54
        ((1.2, {}), (1.3, {}), False),
    ],
)
def test_a_ratio_got_worse_beyond_its_spread(before, after, is_worse, tmp_path):
    from regressions import find_worse

    texts = []
    for ratio, more in (before, after):
        times = 9.8 * ratio, 10 * ratio, 10.4 * ratio
        rows = [row("plain", 9.5, 10, 10.9, 1.0, **more), row("gfsa", *times, ratio, **more)]
        texts.append(written(rows, tmp_path / "rows.csv"))
    assert [case[-2:] for case, _, _ in find_worse(*texts)] == [("gfsa", "")] * is_worse
    assert list(find_worse(texts[0], texts[1].replace("a machine", "another"))) == []


@pytest.mark.parametrize(
    ("plain", "before", "after", "is_worse"), [(40, 50, 56, True), (40, 50, 54, False), (2, 2, 3, False)]
)
def test_peak_memory_got_worse_by_more_than_a_tenth(plain, before, after, is_worse, tmp_path):
    from regressions import find_worse

    texts = [
        written(
            [row("plain", "", "", "", "", peak_mb=plain), row("gfsa", "", "", "", "", peak_mb=mb)], tmp_path / "x.csv"
        )
        for mb in (before, after)
    ]
    assert [case[-2:] for case, _, _ in find_worse(*texts)] == [("gfsa", "peak memory")] * is_worse


@in_git
@pytest.mark.slow
def test_no_ratio_got_worse_since_results_were_last_written():
    """It says which, and fails nothing: measurements are what they are."""
    from regressions import report

    if lines := report(None, None):
        pytest.xfail("\n".join(lines))


def test_where_a_kernel_won():
    from gpu import find_winners

    def rows(kernel):
        for causal in ("False", "True"):
            for n, time in kernel.items():
                common = {"device": "a GPU", "pass": "fwd+bwd", "n": str(n), "causal": causal}
                yield {**common, "form": "agf", "median_ms": "10"}
                yield {**common, "form": "kernel", "median_ms": str(time + (n == 64 and causal == "True"))}

    assert find_winners(rows({32: 9.0, 64: 9.0, 128: 9.0, 256: 8.0}), "agf") == 128
    assert find_winners(rows({32: 9.0, 64: 9.0, 128: 9.0, 256: 9.9}), "agf") is None
    assert find_winners([], "agf") is None


def gpu(*arguments, **environment):
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment}, check=False)


@pytest.mark.slow
def test_bench_gpu_needs_a_gpu():
    done = gpu(CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 1
    assert done.stderr.startswith("bench-gpu needs a CUDA device")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
def test_every_section_of_bench_gpu_runs_and_none_twice(tmp_path):
    options = ("--device", "cpu", "--smoke", "--minutes", 60, "--output", tmp_path)
    done = gpu(*options)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    rows = list(csv.DictReader((tmp_path / "gpu-cpu-sections.csv").read_text().splitlines()))
    assert [row["outcome"] for row in rows] == ["done"] * 10
    names = ("agf-cpu-attention", "decoding-cpu", "gfsa-cpu-attention", "gfsa-cpu-steps", "vision-cpu-throughput")
    names += ("sequences-cpu-steps", "menu-cpu-steps", "gfsa-cpu-compiled")
    assert {file.stem for file in tmp_path.glob("*.csv")} == {*names, "gpu-cpu-sections"}
    assert "== " not in gpu(*options).stdout


def test_the_gallery_draws_and_writes_what_is_measured():
    import gallery
    from transformers import BertConfig, BertModel, T5Config, T5Model

    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
    batches = [{"input_ids": torch.arange(20).view(2, 10)}]
    both = [{**batches[0], "decoder_input_ids": batches[0]["input_ids"]}]
    t5 = T5Model(T5Config(vocab_size=50, d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=48))
    models = {
        "plain": BertModel(BertConfig(vocab_size=50, **sizes)),
        "gfsa": patch_model(BertModel(BertConfig(vocab_size=50, **sizes)), "gfsa", w_0=-0.25, w_K=0.1),
    }
    alike = {name: gallery.measure(model, batches) for name, model in models.items()}
    found = {"BERT": alike["plain"], "T5": gallery.measure(t5, both)}
    assert [axes.get_xlabel() for axes in gallery.depth(found).axes] == ["share of the layers"] * 3
    assert len(gallery.depth(alike).axes[0].lines) == 2
    for draw in (gallery.frequencies, gallery.taylor):
        assert {axes.get_title() for axes in draw(found).axes} == {"BERT", "T5, encoder", "T5, decoder"}
    assert [axes.get_title() for axes in gallery.gains(alike, list(alike)).axes] == ["layer 0", "layer 1", "layer 2"]
    tokens, attention = gallery.singular_values(alike).axes
    assert [line.get_label() for line in tokens.lines] == ["plain", "gfsa"]
    last = alike["gfsa"].spectrum[2, "attention_singular_values"].mean
    assert attention.lines[1].get_ydata() == pytest.approx(last.numpy())
    assert tokens.lines[0].get_ydata()[0] == 1
    rows = gallery.numbers({"data": "numbers"}, found)
    assert all(set(row) <= set(gallery.FIELDS) for row in rows)
    cosines = [row for row in rows if (row["model"], row["quantity"]) == ("BERT", "cosine")]
    assert [(row["layer"], row["layers"]) for row in cosines] == [(-1, 3), (0, 3), (1, 3), (2, 3)]
    assert float(cosines[0]["mean"]) == pytest.approx(found["BERT"].smoothing[-1 - 3, "cosine"].mean.item(), rel=1e-4)
    responses = [row for row in gallery.numbers({}, alike) if row["quantity"].startswith("response")]
    assert [row["layer"] for row in responses] == [0, 0, 1, 1, 2, 2]
    assert [float(row["mean"]) for row in responses] == pytest.approx([-0.25, 0.85] * 3)
    assert {(row["model"], row["stack"], row["samples"]) for row in responses} == {("gfsa", "encoder", 4)}


def test_how_alike_two_classifiers_are(monkeypatch):
    import likeness
    from transformers import BertConfig, BertForSequenceClassification

    def build(options, training, kind, seed):
        torch.manual_seed(seed)
        sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
        model = BertForSequenceClassification(BertConfig(vocab_size=50, initializer_range=1.0, **sizes))
        return (model if kind == "softmax" else patch_model(model, kind)), lambda text, **_: {
            "input_ids": torch.tensor([[int(token) for token in text.split()]])
        }

    parts = SimpleNamespace(parts={"test": {"text_a": ["1 2 3 4", "5 6 7 8 9", "9 8 7"]}})
    monkeypatch.setattr(likeness, "load", lambda *_: parts)
    monkeypatch.setattr(likeness, "classifier", build)
    options = SimpleNamespace(shared=Path())
    rows = [likeness.compare(options, "trained", ("softmax", 1), other) for other in (("gfsa", 1), ("softmax", 2))]
    assert [row["other"] for row in rows] == ["gfsa, seed 1", "softmax, seed 2"]
    assert {rows[0][name] for name in likeness.QUANTITIES} == {"1.000"}  # gfsa starts as the attention of the same seed
    assert float(rows[1]["mean"]) < 0.9
    assert rows[1]["texts"] == 3
    assert set(rows[0]) <= set(likeness.COLUMNS)


@pytest.mark.parametrize(
    ("expression", "known"),
    [
        ("[MAX 3 [MIN 1 9 ] 5 ]", ("[MAX", "5")),
        ("[MIN [MAX 2 3 ] [SM 4 4 ] ]", ("[MIN", None)),
        ("[SM 3 4 ]", ("[SM", None)),
    ],
)
def test_digits_directly_under_the_outermost_operator(expression, known):
    from listops import read_top_digits

    assert read_top_digits(expression.split()) == known


def test_steps_by_length_add_the_losses_that_filters_declare():
    from sequences import FORMS, classifier
    from shapes import training_step

    added = {}
    for form in FORMS:
        model = classifier(form, 8, layers=1).train()
        training_step(model, {"input_ids": torch.ones(1, 8, dtype=torch.long), "labels": torch.tensor([1])})()
        added[form] = {name for _, f in filters_of(model) if f.recorder for name in f.recorder.sums}
    assert {form: names for form, names in added.items() if names} == {
        "agf": {"orthogonality"},
        "singularformer": {"orthogonality", "diagonal"},
        "kernelution": {"kernel_polynomial"},
    }


def test_filters_are_timed_as_they_train():
    from shapes import bert, patch_filter

    sizes = {"vocab_size": 50, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    build, *_ = bert(False, "cpu", **sizes, intermediate_size=48)
    coefficients = [graph_filter.coefficients() for _, graph_filter in filters_of(patch_filter(build(), "gfsa"))]
    assert len(coefficients) == 2
    for values in coefficients:
        assert not values["w_0"].any(), "it is fixed"
        assert values["w_K"].all(), "with it at 0, A would be applied only once"


def test_calls_are_timed_with_filters_off_their_start(monkeypatch):
    import overhead

    patched, patch = [], overhead.patch_filter
    monkeypatch.setattr(overhead, "patch_filter", lambda model, name: patched.append(name) or patch(model, name))
    monkeypatch.setattr(overhead, "CALLS", 1)
    overhead.time_layers(1)
    assert patched == [name for name in overhead.FORMS.values() if name]


def test_the_league_is_timed_with_all_coefficients(monkeypatch, transformers_warnings):
    import busy

    shape, built = "GPT-2 12 x 32, 32 x 64", {}
    monkeypatch.setattr(busy, "training_step", lambda model, batch: [f for _, f in filters_of(model)])
    for form in busy.LEAGUE_LAYERS:
        built[form] = busy.build_step(shape, form, compiled=False)
        assert all(c.requires_grad for f in built[form] for c in f.coefficient_tensors().values())
    transformers_warnings.clear()  # of the small vocabulary
    assert {*built} <= {*busy.list_forms(shape, compiled=False)}
    assert len(built["gfsa, all coefficients"]) == 12


def test_the_page_says_what_passive_threads_cost():
    from pages.speed import waiting_table

    body = [line.strip("| ").split(" | ") for line in waiting_table().splitlines() if "| quiet | " in line]
    steps = [[cell.strip("*") for cell in row if "**" in cell] for row in body if "`gfsa`" in row]
    longer = [[round(100 * (float(cell) - 1)) for cell in column] for column in zip(*steps, strict=True)]
    baseline, gfsa = (f"{min(column)} to {max(column)} %" for column in longer)
    assert f"{baseline} for the baseline, {gfsa} for GFSA" in (ROOT / "docs" / "benchmarks.md").read_text()


def test_the_headlines_name_what_their_variants_learn():
    from pages.leagues import read_league
    from pages.overview import ALL_LAYERS, LEARNED, THREE_LAYERS, headlines

    for name, variant in (("depth", ALL_LAYERS), *((n, THREE_LAYERS) for n in ("few", "replicated", "wide"))):
        assert read_league(name)[0].variants[variant]["filter_options"]["learn"] == ["w_0", "w_1", "w_K"]
    rows = [line for line in headlines().splitlines() if "league.md" in line]
    assert [LEARNED in row for row in rows] == [True, True, True]
    seeds = [len(read_league(name)[0].stages[-1].seeds) for name in ("depth", "few", "replicated", "wide")]
    assert [int(n) for row in rows for n in re.findall(r"(\d+) seeds", row)][:4] == seeds


def test_a_gate_that_rises_leaves_all_steps_to_a_blend(monkeypatch):
    import transfer
    from test_conversion import llama, texts

    steps, gates = [], []

    class Counted(torch.optim.AdamW):
        def step(self, *args, **options):
            steps.append(1)
            (_, graph_filter), *_ = filters_of(model)
            gates.append(None if graph_filter.gate is None else graph_filter.gate.unique().tolist())
            return super().step(*args, **options)

    monkeypatch.setattr(torch.optim, "AdamW", Counted)
    model = patch_model(llama(), "agf", init="blend")
    batches = [batch["input_ids"] for batch in texts(3)]
    rise = partial(transfer.raise_gate, model, 2)
    transfer.fit(model, batches, 5, 1e-3, parameter_groups(model, 1e-3, 0.01), rise)
    assert len(steps) == 5
    assert gates == [[0.5], [1.0], None, None, None]


def test_each_processor_has_a_bound_of_its_own(monkeypatch):
    from pages import long_texts

    def measurement(device, ratio, bound):
        values = {"converted": {"ratio_to_plain": ratio}, long_texts.BARE: {"ratio_to_plain": bound}}
        return {"what": "prefill", "tokens": 4096, "device": f"{device}, 2 threads", "values": values}

    measurements = [measurement("a CPU", 0.9, 0.8), measurement("a GPU", 0.7, 0.4)]
    models = [{"name": long_texts.SPEED[0], "measurements": measurements}]
    monkeypatch.setattr(long_texts, "read_models", lambda kind: models)
    header, _, row = (
        [cell.strip() for cell in line.strip("|").split("|")] for line in long_texts.long_ratios().splitlines()
    )
    assert dict(zip(header[2:], row[2:], strict=True)) == {
        "a CPU": "0.90",
        "a CPU, no attention": "0.80",
        "a GPU": "0.70",
        "a GPU, no attention": "0.40",
    }


@pytest.mark.slow
def test_ratios_of_several_machines_stand_side_by_side(tmp_path, monkeypatch):
    import tables
    from pages import sources

    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    common = {"date": "2026-01-01"}
    written([row("gfsa", 1, 1, 1, 1.25, **common)], tmp_path / "decoding-cpu.csv")
    assert tables.machines_tables() == "Measured on one machine so far."
    written([row("gfsa", 1, 1, 1, 1.5, "another", **common)], tmp_path / "xeon" / "decoding-cpu.csv")
    text = tables.machines_tables()
    assert "Machine 1: a machine, 2026-01-01. Machine 2: another, 2026-01-01." in text
    assert "| one token | 8 | causal | decoding | gfsa | 1.25 | 1.5 |" in text


def test_filters_are_fitted_to_one_recorded_layer():
    import single_layers

    torch.manual_seed(0)
    calls = []
    for _ in range(14):
        query, key, value = (3 * torch.randn(1, heads, 160, 8) for heads in (2, 1, 1))
        out = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        calls.append((query, key, value, torch.randn(1, 160, 16), out))
    errors = []
    for count in (3, 14):
        recorder = SimpleNamespace(calls=calls[:count], scaling=8**-0.5, causal=True)
        error, parameters = single_layers.fit("far_field", recorder, 0, 2)
        errors.append(error)
        assert parameters == (2 + 1) * 8 * 8 + 2 * (16 + 1)  # a map per head and key head, and the estimate
    assert 0 < errors[1] < errors[0] < 1


def test_a_case_of_conversion_is_played_once_and_shown(tmp_path, monkeypatch, capsys):
    import conversion
    import tables
    from pages import sources
    from test_conversion import llama, texts

    class Tiny(conversion.Task):
        """A tiny model."""

        played = 0

        def model(self):
            Tiny.played += 1
            return llama()

        def data(self):
            return texts(12)

        def measure(self, model):
            return {"layers": float(len(model.model.layers))}

    monkeypatch.setitem(conversion.TASKS, "tiny", Tiny)
    case = conversion.Case("tiny", 400, {"window": 2, "train": "lora", "holdout": 2})
    monkeypatch.setitem(conversion.CASES, "tiny-2", case)
    output = tmp_path / "conversion"
    command = ["conversion.py", "--only", "tiny-2", "--runs", str(tmp_path / "runs"), "--output", str(output)]
    for more in ([], [], ["--list"]):
        monkeypatch.setattr(sys, "argv", [*command, *more])
        conversion.main()
    assert Tiny.played == 1
    assert capsys.readouterr().out.rstrip().endswith("tiny-2 finished")
    assert (tmp_path / "runs" / "tiny-2" / "model" / "model.safetensors").is_file()
    monkeypatch.setitem(conversion.CARDS, "tiny-2", "tiny-2")
    monkeypatch.setattr(sys, "argv", [*command, "--cards", str(tmp_path / "cards")])
    conversion.main()
    card = (tmp_path / "cards" / "tiny-2" / "README.md").read_text()
    assert "| layers | 4 | 4 |" in card
    assert (tmp_path / "cards" / "tiny-2" / "figures" / "conversion.png").is_file()
    monkeypatch.setattr(sources, "RESULTS", tmp_path)
    shown = tables.conversion_tables("tiny")
    assert "**A tiny model.**" in shown
    assert "| original | 4 |" in shown
    assert "window 2; train lora" in shown
    assert tables.conversion_tables("nothing") == "Not run yet."


def test_a_step_is_approximated_as_the_results_say():
    from gibbs import ORDERS, measure

    with (BENCHMARKS / "results" / "gibbs.csv").open() as opened:
        rows = list(csv.DictReader(opened))
    kept = {(row["kernel"], int(row["K"])): row for row in rows}
    for kernel in ("dirichlet", "jackson", "lorentz"):
        found = {name: str(value) for name, value in measure(kernel, ORDERS[0]).items()}
        assert found == kept[kernel, ORDERS[0]]
    assert float(kept["dirichlet", 128]["overshoot"]) == pytest.approx(0.17898, abs=2e-4), "Wilbraham's constant"
