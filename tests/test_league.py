"""The league: what is run next, tuning and stages, resuming, refusals, and what the numbers say."""

import copy
import dataclasses
import itertools
import json
import math
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import yaml
from deaths import deaths, some
from filelock import FileLock
from rich.console import Console
from transformers import BertConfig, BertModel

from hf_graphfilter import GraphFilterError, available_filters, filter_parameters, patch_model
from hf_graphfilter.filters import get_filter
from hf_graphfilter.training.optimizer import coefficient_ids
from recipes import compare, identities, language_modeling, records
from recipes.data import split_holdout
from recipes.image_data import hold_out
from recipes.league import figures, play, standings
from recipes.league.plan import HELD_OUT, LONGER, TUNING_SEED, League
from recipes.league.records import Run, index_runs, round_score

ROOT = Path(__file__).parents[1]
DATA = ROOT.parent / "shared" / "data"
FILE = {
    "tasks": {
        "reviews": {"recipe": "glue", "config": "glue/minilm.yaml", "task": "cola", "data": "glue"},
        "ptb": {"recipe": "language_modeling", "config": "language_modeling/deep.yaml", "data": "ptb"},
    },
    "variants": {"gfsa": {"filter_options": {"K": 2}}, "gated": None, "neutreno": None},
    "rates": {"learning_rate": [1, 2], "filter_lr": [1e-3, 1e-2]},
    "stages": [{"seeds": [1, 2, 3]}, {"seeds": [4, 5, 6, 7], "best": 1, "tasks": ["ptb"]}],
    "longer": 3,
}
TRAIN = play.train
HELPS = {"plain": 0.0, LONGER: 0.3, "gfsa": 0.1, "gated": -0.2}  # in accuracy; a tenth of it in rates


@pytest.fixture
def trained(monkeypatch, tmp_path):
    """The runs that were asked for, (values, seed); training is a formula, and neutreno is refused by one task."""
    seen = []

    class Threads(ThreadPoolExecutor):
        def __init__(self, workers, context, begin, arguments):
            super().__init__(workers)

    def train(recipe, values, seed, folder):
        seen.append((values, seed, folder))
        name = LONGER if values.get("max_steps", 0) > 2500 else values["filter"].replace("none", "plain")
        if name == "neutreno" and recipe == "glue":
            return {"refused": "no layers before", "settings": identities.identity(values)}
        rate = values["learning_rate"] if name in ("plain", LONGER) else values.get("filter_lr")
        good = HELPS.get(name, 0) + 0.01 * (rate in (1e-2, 2e-4, 4e-2)) + 0.001 * ((seed * 7919 + len(name)) % 13) / 13
        if recipe == "glue":
            metrics = {"validation/matthews_correlation": good}
        else:
            metrics = {"validation/perplexity": 99 - good, "test/perplexity": 100 - good}
        seconds = 30.0 if name == "gfsa" else 20.0
        made = {
            "metrics": metrics,
            "train_seconds": seconds,
            "steps": 9,
            "settings": identities.identity(values),
            "moved": {},
        }
        return {"recipe": recipe, "task": values["task"], "seed": seed, **made}

    monkeypatch.setattr(play, "ProcessPoolExecutor", Threads)
    monkeypatch.setattr(play, "train", train)
    monkeypatch.chdir(tmp_path)
    return seen


def league(**changes):
    return League({**copy.deepcopy(FILE), **changes}, "small", Path("data"))


def played(trained, workers=2, **changes):
    console = Console(quiet=True)
    return play.play(league(**changes), Path("runs/league/small.json"), Path("runs/league/small"), workers, console)


def name_run(training):
    _, seed, folder = training
    task, variant, rate = folder.parts[-4:-1]
    return Run(task, variant.replace("-", " "), seed, float(rate))


def test_plain_is_tuned_first_then_filters_then_seeds_and_stages(trained):
    found = played(trained, workers=1)
    order = [run for run in map(name_run, trained) if run.task == "ptb"]
    assert order[:2] == [Run("ptb", "plain", TUNING_SEED, rate) for rate in (1, 2)]
    assert {(run.variant, run.rate) for run in order[2:8]} == set(
        itertools.product(("gfsa", "gated", "neutreno"), (1e-3, 1e-2))
    )
    assert [run[1:3] for run in order[8:12]] == [("plain", 1), ("gfsa", 1), ("gated", 1), ("neutreno", 1)]
    assert {(run.variant == "plain", run.rate) for run in order[8:20]} == {(True, 2.0), (False, 1e-2)}
    assert [run[1:3] for run in order[20:28]] == [(v, seed) for seed in (4, 5, 6, 7) for v in ("plain", "gfsa")]
    assert order[28:] == [Run("ptb", LONGER, 1, 2)]
    values = {(seed, v["filter"]): v for v, seed, _ in trained if v["task"] == "cola"}
    assert values[0, "gfsa"]["held_out"] == HELD_OUT
    assert "held_out" not in values[1, "gfsa"]
    assert {values[1, name]["learning_rate"] for name in ("none", "gfsa")} == {2e-4}, "plain's best"
    assert [*league().list_runs({run: found[run] for run in found if run not in order[27:]})] == order[27:], "beside it"
    del found[Run("ptb", "plain", TUNING_SEED, 1)]
    assert {run for run in league().list_runs(found) if run.task == "ptb"} == {Run("ptb", "plain", TUNING_SEED, 1)}
    longer = next(v for v, _, folder in trained if LONGER.replace(" ", "-") in folder.parts and v["task"] == "ptb")
    assert longer["max_steps"] == 7500


def test_a_refused_filter_is_left_out_of_the_task_and_said(trained, capsys):
    found = played(trained)
    refused = [r for r in found.values() if "refused" in r]
    assert {(r["task"], r["variant"], r["seed"]) for r in refused} == {("reviews", "neutreno", 0)}
    assert len(refused) <= 2, "both rates can be on their way"
    own = league()
    header, rows = standings.overview(own, found, own.stages[0])
    assert header == ["", "reviews, matthews correlation ↑", "ptb, perplexity ↓", "mean rank"]
    assert next(row for row in rows if row[0] == "neutreno")[1] == "refused"
    stages = [FILE["stages"][0], {"seeds": [4, 5, 6, 7], "best": 1}]
    own, found = league(stages=stages), played(trained, stages=stages)
    rows = standings.overview(own, found, own.stages[1])[1]
    assert {row[0] for row in rows} == {"baseline", "gfsa"}, "who does not play a stage is not shown in it"


def test_a_refusal_is_forgotten_when_what_was_refused_changes(trained):
    one_task = {"tasks": {"reviews": FILE["tasks"]["reviews"]}, "stages": FILE["stages"][:1], "longer": None}
    played(trained, **one_task)
    count = len(trained)
    played(trained, **one_task)
    assert len(trained) == count
    again = played(trained, **one_task, variants={**FILE["variants"], "neutreno": {"layers": "even"}})
    asked = [v for v, *_ in trained[count:]]
    assert {(v["task"], v["filter"], v["layers"]) for v in asked} == {("cola", "neutreno", "even")}
    assert [r["settings"]["layers"] for r in again.values() if "refused" in r] == ["even"] * len(asked)


def test_the_same_command_goes_on(trained):
    found = played(trained)
    count, file = len(trained), Path("runs/league/small.json")
    whole = json.loads(file.read_text())
    assert index_runs(whole) == found
    lost = copy.deepcopy(whole)
    lost["runs"] = [r for r in lost["runs"] if (r["task"], r["variant"], r["seed"]) != ("ptb", "gfsa", 5)]
    file.write_text(json.dumps(lost))
    again = played(trained)
    assert len(trained) == count + 1
    assert again.keys() == found.keys()
    assert json.loads(file.read_text())["runs"] == whole["runs"], "in the same order"


def test_a_file_that_changed_under_finished_runs_is_refused(trained):
    played(trained)
    with pytest.raises(
        GraphFilterError, match=r"gfsa on (reviews|ptb), seed 0, was run with other settings \(filter_options"
    ):
        played(trained, variants={**FILE["variants"], "gfsa": {"filter_options": {"K": 3}}})
    count = len(trained)
    more = played(trained, variants={**FILE["variants"], "xsa": None})
    assert {v["filter"] for v, *_ in trained[count:]} == {"xsa"}, "a variant more leaves the others as they are"
    assert len(more) > count


def test_ranks_and_comparisons_are_those_of_the_numbers(trained):
    own, found = league(), played(trained)
    assert own.ranks(found, own.stages[0]) == {"gfsa": 1.0, "plain": 2.0, "neutreno": 3.5, "gated": 3.5}
    made = {(c.task, c.variant): c for c in standings.comparisons(own, found, own.stages[1])}
    assert [*made] == [("ptb", "gfsa")]
    gfsa = made["ptb", "gfsa"]
    assert gfsa.paired.mean == pytest.approx(-0.1, abs=1e-3)
    assert gfsa.better
    assert gfsa.is_significant
    assert gfsa.paired.pairs == 4
    text = standings.verdict(own, found)
    assert text.startswith(
        "1 comparison with the baseline over 4 seeds, Holm-corrected at 5%: Better than the baseline: `gfsa` on ptb"
    )
    assert text.endswith("None is worse.")
    _, rows = standings.compare_filters(own, found, own.stages[0])
    assert [row[0] for row in rows] == ["`gated` - `gfsa`", "`neutreno` - `gfsa`", "`neutreno` - `gated`"]
    assert rows[0][2] == "+0.3, 3", "a difference, equal in three seeds"
    assert rows[1][1] == "", "refused"
    details = {row[1]: row for row in standings.details(own, found, own.stages[1])[1]}
    assert details["`gfsa`"][2:4] == ["0.01 of the filter", "4"]
    assert standings.levels(own, found)[1][1][-1] == "99.69"
    rates = {tuple(row[:2]): row[2:] for row in standings.tuning(own, found)[1]}
    assert rates["reviews", "`baseline`"][1].startswith("0.0002: **0.01")
    assert ("reviews", "`neutreno`") not in rates
    fewer = league(variants={name: value for name, value in FILE["variants"].items() if name != "gfsa"})
    left = [row for row in standings.tuning(fewer, found)[1] if row[0] == "reviews"]
    assert left[-1][1] == "`gfsa`", "tuned, and not in the league: last, and no rate is marked"
    assert left[-1][2:] == [cell.replace("**", "") for cell in rates["reviews", "`gfsa`"]]
    assert standings.verdict(own, {}) == "Nothing can be said yet."
    del found[Run("ptb", LONGER, 1, 2.0)]
    assert standings.verdict(own, found) == f"Not finished yet, but these comparisons are. {text}"
    names = [file.name for file in figures.draw(own, found, Path("runs"))]
    assert names == ["league-small-ranks.png", "league-small-critical-difference.png"]
    assert all(Path("runs", n).is_file() for n in names)


def test_holm_is_its_definition():
    """Reject while p_(i) < level / (m - i): the corrected value is the smallest level that rejects."""
    p = [0.001, 0.2, 0.013, 0.012, 0.04]

    def rejected(level):
        out = set()
        for i, k in enumerate(sorted(range(len(p)), key=p.__getitem__)):
            if p[k] > level / (len(p) - i):
                break
            out.add(k)
        return out

    for k, corrected in enumerate(standings.holm(p)):
        assert k in rejected(corrected * 1.0001)
        assert k not in rejected(corrected * 0.9999)


@pytest.mark.parametrize(("k", "n", "expected"), [(2, 10, 0.620), (5, 30, 1.114), (10, 14, 3.620)])
def test_critical_difference_is_that_of_the_tables(k, n, expected):
    """q of Demsar (2006), Table 5: 1.960, 2.728, 3.164."""
    assert figures.critical_difference(k, n) == pytest.approx(expected, abs=0.002)


@pytest.mark.parametrize(
    ("scores", "expected"),
    [
        ([[3, 2, 1]] * 2, False),  # p = 0.135
        ([[3, 2, 1]] * 4, True),  # p = 0.018
        ([[3, 2, 1], [1, 2, 3]] * 5, False),
        ([[1, 1, -math.inf]] * 4, True),
        ([[1, 1, 1]] * 4, False),
        ([[1, 2], [2, 1]], True),  # left to Nemenyi's test
    ],
)
def test_friedman_is_asked_before_ranks_are_compared_in_pairs(scores, expected):
    named = {f"task {i}": dict(zip("abc", values, strict=False)) for i, values in enumerate(scores)}
    assert figures.ranks_differ(named) == expected


def test_a_run_that_diverged_is_no_number(trained, monkeypatch):
    whole = play.train

    def train(recipe, values, seed, folder):
        record = whole(recipe, values, seed, folder)
        if values["filter"] == "gated" and "metrics" in record:
            record["metrics"] = dict.fromkeys(record["metrics"], float("nan"))
        return record

    monkeypatch.setattr(play, "train", train)
    own, found = league(), played(trained)
    stage = own.stages[0]
    gated = [c for c in standings.comparisons(own, found, stage) if c.variant == "gated"]
    assert [(c.task, c.paired, c.diverged, c.is_significant) for c in gated] == [
        (task, None, 3, False) for task in ("reviews", "ptb")
    ]
    assert [*own.ranks(found, stage)][-1] == "gated"
    rows = {row[0]: row[1:] for row in standings.overview(own, found, stage)[1]}
    assert rows["gated"][:2] == ["3 diverged", "3 diverged"]
    assert [row[4] for row in standings.details(own, found, stage)[1] if row[1] == "`gated`"] == ["3 of 3 diverged"] * 2
    assert next(row for row in standings.tuning(own, found)[1] if row[1] == "`gated`")[3] == "0.01: 1 of 1 diverged"


def test_one_seed_that_diverged_is_never_better(trained):
    own, found = league(), played(trained)
    stage = own.stages[1]
    found[Run("ptb", "gfsa", 4, 1e-2)]["metrics"]["test/loss"] = float("nan")
    (gfsa,) = standings.comparisons(own, found, stage)
    assert (gfsa.paired.pairs, gfsa.diverged, gfsa.is_significant) == (3, 1, False)
    assert standings.verdict(own, found).endswith("None is better. None is worse. Diverged: `gfsa` on ptb, 1 seeds.")


@pytest.mark.parametrize("diverged", [{"test/loss": math.nan}, {"test/loss": 800.0, "test/perplexity": math.inf}])
def test_nothing_is_claimed_where_plain_diverged(trained, diverged):
    own, found = league(), played(trained)
    found[Run("ptb", "plain", 4, 2.0)]["metrics"] |= diverged
    (gfsa,) = standings.comparisons(own, found, own.stages[1])
    assert (gfsa.paired.pairs, gfsa.diverged, gfsa.unpaired, gfsa.is_significant) == (3, 0, 1, False)
    assert standings.verdict(own, found).endswith("Diverged: the baseline on ptb, 1 seeds.")


def test_nothing_is_claimed_before_its_seeds_are_there_and_all_planned_comparisons_count(trained):
    own, found = league(), played(trained)
    stage = own.stages[0]
    for seed in stage.seeds:
        found[Run("reviews", "gfsa", seed, 1e-2)]["metrics"]["validation/matthews_correlation"] += 0.001 * seed
    whole = {(c.task, c.variant): c for c in standings.comparisons(own, found, stage)}
    assert len(whole) == 5
    found = {run: r for run, r in found.items() if run.task == "reviews" or run.seed in (TUNING_SEED, 1, 2)}
    part = {(c.task, c.variant): c for c in standings.comparisons(own, found, stage)}
    assert {c.missing for c in part.values() if c.task == "ptb"} == {1}
    assert not any(c.is_significant for c in part.values() if c.task == "ptb")
    found = {run: r for run, r in found.items() if run.task == "reviews" or run.seed == TUNING_SEED}
    alone = {(c.task, c.variant): c for c in standings.comparisons(own, found, stage)}
    assert {task for task, _ in alone} == {"reviews"}
    smallest = min(alone.values(), key=lambda c: c.p)
    assert smallest.corrected == pytest.approx(5 * smallest.p), "five are planned"
    assert {*own.scores(found, stage)} == {"reviews"}
    assert own.ranks(found, stage) == {"gfsa": 1.0, "plain": 2.0, "gated": 3.0, "neutreno": 4.0}
    assert len(figures.draw(own, found, Path("runs"))) == 2
    found = {run: r for run, r in found.items() if run.variant != "gated" or run.seed == TUNING_SEED}
    assert own.ranks(found, stage) == {}
    assert figures.draw(own, found, Path("runs")) == []
    assert [row[0] for row in standings.overview(own, found, stage)[1]][:2] == ["baseline", "gfsa"]


def test_runs_at_rates_that_are_no_longer_asked_for_are_not_counted(trained):
    found = played(trained)
    own = league(rates={"learning_rate": [1, 2], "filter_lr": [1e-3, 3e-3]})
    assert standings.read_values(own, found, "ptb", "gfsa", (1, 2, 3)) == {}
    assert Run("ptb", "gfsa", TUNING_SEED, 3e-3) in [*own.list_runs(found)]


def test_other_rates_of_the_model_under_finished_runs_of_filters_are_said(trained):
    """Which cannot be known before plain is tuned among them."""
    filters = FILE["rates"]["filter_lr"]
    played(trained, rates={"learning_rate": [1, 0.25], "filter_lr": filters})
    with pytest.raises(GraphFilterError, match=r"was run with other settings \(learning_rate differ"):
        played(trained, rates={"learning_rate": [1, 2], "filter_lr": filters})


def test_means_of_the_same_right_answers_are_level():
    one, other = 0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1
    assert one != other
    assert round_score(one) == round_score(other)


def test_a_task_that_refuses_all_is_left_out(trained):
    found, own = played(trained), league()
    found = {run: {"refused": "no"} if run.task == "ptb" else record for run, record in found.items()}
    assert [*own.scores(found, own.stages[0])] == ["reviews"]


def test_of_equal_rates_the_one_of_the_lower_loss_is_taken(trained):
    found = played(trained)
    rates = league().rates[league().tune["gfsa"]]
    for rate, loss in zip(rates, (3.0, 2.0, 4.0), strict=False):
        metrics = found[Run("reviews", "gfsa", TUNING_SEED, rate)]["metrics"]
        metrics |= {"validation/matthews_correlation": 0.4, "held_out/matthews_correlation": 0.4}
        metrics |= {"validation/loss": loss, "held_out/loss": loss}
    assert league().choose_rate(found, "reviews", "gfsa") == rates[1]


def test_what_can_claim_nothing_spares_the_others_no_correction(trained):
    variants = {"gfsa": None, "xsa": None}
    own, found = league(variants=variants), played(trained, variants=variants)
    metric = own.metric("reviews")
    for seed in (1, 2, 3):
        plain = found[Run("reviews", "plain", seed, 2.0)]["metrics"][metric]
        for variant, more in (("gfsa", 0.1 + 0.01 * seed), ("xsa", 0.2 + 1e-5 * seed)):
            found[Run("reviews", variant, seed, 1e-2)]["metrics"][metric] = plain + more
    del found[Run("reviews", "xsa", 3, 1e-2)]
    found = {run: record for run, record in found.items() if run.task == "reviews"}
    gfsa, xsa = standings.comparisons(own, found, own.stages[0])
    assert xsa.p < gfsa.p
    assert xsa.missing
    assert gfsa.corrected == pytest.approx(4 * gfsa.p), "two variants on two tasks are planned"


def test_plain_trained_longer_is_shown_whatever_the_seeds(trained):
    stages = [{"seeds": [11, 12, 13]}]
    own, found = league(stages=stages), played(trained, stages=stages)
    assert {run.seed for run in found if run.variant == LONGER} == {11}
    header, rows = standings.levels(own, found)
    assert header[-1] == "baseline, 3 times as long"
    assert all(row[-1] for row in rows)
    assert standings.levels(league(longer=None), played(trained))[0][-1] == "baseline"
    league(stages=stages, longer=None).check(found)  # they are kept, and not counted
    tasks = {"ptb": {**FILE["tasks"]["ptb"], "settings": {"max_steps": -1, "num_train_epochs": 2}}}
    own = league(tasks=tasks, stages=[{"seeds": [1]}])
    values = own.values(Run("ptb", LONGER, 1, 1), {})
    assert (values["max_steps"], values["num_train_epochs"]) == (-1, 6)


def test_a_part_to_tune_on_is_asked_for(trained, monkeypatch):
    whole = play.train

    def train(*arguments):
        record = whole(*arguments)
        return {**record, "metrics": {k: v for k, v in record["metrics"].items() if k.startswith("test")}}

    monkeypatch.setattr(play, "train", train)
    with pytest.raises(GraphFilterError, match="the task 'ptb' has no validation part to measure perplexity on"):
        played(trained, tasks={"ptb": FILE["tasks"]["ptb"]}, stages=[{"seeds": [1]}])


def test_equal_differences_are_no_certainty():
    paired, p = standings.compare_pairs([0.5, 0.25], [0.6, 0.35])
    assert paired.sd == pytest.approx(0)
    assert p == 0.5


def test_a_filter_without_coefficients_has_the_rate_of_the_model_tuned(trained):
    found = played(trained, variants={"gated": {"tune": "learning_rate"}})
    gated = {(seed, v["learning_rate"]) for v, seed, _ in trained if v["filter"] == "gated" and v["task"] == "cola"}
    assert {rate for seed, rate in gated if seed == TUNING_SEED} == {2e-4, 4e-4}, "times plain's best"
    assert {run.rate for run in found if run.variant == "gated"} == {1, 2}


def test_a_single_rate_is_taken_without_tuning(trained):
    found = played(trained, rates={"learning_rate": [1], "filter_lr": [1e-2]})
    assert TUNING_SEED not in {run.seed for run in found}
    assert {run.rate for run in found if run.variant == "gfsa"} == {1e-2}


def test_a_mistake_is_no_refusal(tmp_path, monkeypatch):
    """Of data that are not there, as of a network that is not: the filter would be out of the task for good."""
    monkeypatch.chdir(tmp_path)
    own = League(play.read_league("league/depth.yaml"), "depth", tmp_path / "nowhere")
    run = Run("ptb, 12 layers", "gfsa", 1, 1e-2)
    with pytest.raises(GraphFilterError, match="there is no folder"):
        play.train("language_modeling", own.values(run, {}), 1, tmp_path / "run")


def test_an_interrupted_league_keeps_what_is_finished(trained, monkeypatch):
    whole = play.train

    def train(*arguments):
        if len(trained) >= 5:
            raise KeyboardInterrupt
        return whole(*arguments)

    monkeypatch.setattr(play, "train", train)
    with pytest.raises(KeyboardInterrupt):
        played(trained, workers=1)
    assert len(json.loads(Path("runs/league/small.json").read_text())["runs"]) == 5
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@some(3)
def test_a_league_that_dies_at_a_write_ends_the_same(points, trained, tmp_path, monkeypatch):
    def run(args, training):
        good = (training.seed + training.learning_rate) * (2 if args.filter == "none" else 1)
        metrics = {"validation/perplexity": 100 - good, "test/perplexity": 101 - good}
        return {"metrics": metrics, "moved": {}, "train_seconds": 1.0, "steps": 9}

    monkeypatch.setattr(play, "train", TRAIN)
    monkeypatch.setattr(language_modeling, "RECIPE", dataclasses.replace(language_modeling.RECIPE, run=run))
    small = {"tasks": {"ptb": FILE["tasks"]["ptb"]}, "stages": [{"seeds": [1]}], "variants": {"gfsa": None}}

    def command(folder):
        played = league(**small, rates={"learning_rate": [1], "filter_lr": [1e-2]}, longer=2)
        file = folder / "small.json"
        found = play.play(played, file, folder / "small", 1, Console(quiet=True))
        assert index_runs(json.loads(file.read_text())) == found
        return found

    for folder, expected in deaths(tmp_path, points, command):
        assert command(folder) == expected, folder


PARENT = """
import multiprocessing, time
from concurrent.futures import ProcessPoolExecutor
from recipes.league.play import begin

if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, context, begin, (1, context.Value("i", 0)))
    pool.submit(print, "begun", flush=True).result()
    pool.submit(time.sleep, 100)
    time.sleep(100)
"""


@pytest.mark.slow
def test_a_worker_ends_with_its_parent(tmp_path):
    """Also where that is killed, and can end nothing: the output is closed when the last of them has ended."""
    (tmp_path / "parent.py").write_text(PARENT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen([sys.executable, tmp_path / "parent.py"], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout.readline() == b"begun\n"
    parent.kill()
    parent.communicate(timeout=20)


def test_runs_of_other_commands_are_left_to_them(trained, monkeypatch, capsys):
    """One is finished elsewhere while this command trains, one is given up there: nothing is trained twice."""
    whole, file, others = play.train, Path("runs/league/small.json"), {}

    def train(recipe, values, seed, folder):
        attempts = others[folder] = others.get(folder, 0) + 1
        if len(others) not in (2, 4) or attempts > 1:
            return whole(recipe, values, seed, folder)
        if len(others) == 2:  # the other command finishes it
            run = name_run((values, seed, folder))
            with records.updating(file) as content:
                content["runs"].append({**whole(recipe, values, seed, folder), **run._asdict()})
        return None

    monkeypatch.setattr(play, "train", train)
    monkeypatch.setattr(records, "WAIT", 0.1)
    found = play.play(league(), file, Path("runs/league/small"), 1, Console())
    folders = [folder for *_, folder in trained]
    assert len(folders) == len({*folders}) == len(found)
    assert max(others.values()) == 2


@pytest.mark.parametrize(
    ("visible", "count", "chosen"),
    [(None, 0, [None, None]), (None, 1, [None, None]), (None, 2, ["0", "1", "0"]), ("3,5", 2, ["3", "5", "3"])],
)
def test_each_worker_has_a_gpu(visible, count, chosen, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
    if visible is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [play.choose_gpu(number) for number in range(len(chosen))] == chosen


def test_two_commands_on_one_league(trained, capsys):
    file, one = Path("tiny.yaml"), ["--workers", "1"]  # of several, some have begun when a filter is refused
    file.write_text(yaml.safe_dump(FILE))
    compare.main(["league", "--config", str(file), *one])
    before = Path("runs/league/tiny.json").read_text()
    run = Path("runs/league/tiny/ptb/gfsa/0.01/seed-1")
    run.mkdir(parents=True)
    with FileLock(run / ".lock"), pytest.raises(SystemExit):
        compare.main(["league", "--config", str(file), *one, "--fresh"])
    assert f"another command is playing this league: {run}/.lock is locked" in capsys.readouterr().err
    assert Path("runs/league/tiny.json").read_text() == before, "nothing is moved from under it"
    played = len(trained)
    compare.main(["league", "--config", str(file), "--show"])
    assert len(trained) == played
    assert "Better than the baseline: `gfsa` on ptb by 0.1 (perplexity)" in capsys.readouterr().out
    assert Path("runs/league/league-tiny-ranks.png").is_file()
    other = copy.deepcopy(FILE)
    other["tasks"]["ptb"]["settings"] = {"weight_decay": 0.5}
    file.write_text(yaml.safe_dump(other))
    compare.main(["league", "--config", str(file), "--show"])
    assert "the file has changed since: plain on ptb, seed 0, was run with other settings (weight_decay" in (
        " ".join(capsys.readouterr().out.split())
    )
    file.write_text(yaml.safe_dump(FILE))
    with pytest.raises(SystemExit):
        compare.main(["league", "--config", str(file), "--show", "--fresh"])
    compare.main(["league", "--config", str(file), *one, "--fresh"])
    assert len(trained) == 2 * played
    assert Path("runs/league/tiny.json.1").is_file()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": {}}, "the league small needs 'tasks', a dict, found {}"),
        ({"task": {}}, "the league small has no 'task' .did you mean 'tasks'?"),
        ({"rates": {"learning_rate": [1], "filter_lr": [1, 2]}}, "must give the baseline and filters as many rates"),
        (
            {
                "rates": {"learning_rate": [0.5], "filter_lr": [1]},
                "variants": {"longer": {"filter": "none", "max_steps": 9, "tune": "learning_rate"}},
            },
            "the learning_rate 0.5 would apply twice",
        ),
        ({"rates": {"learning_rate": [1]}}, "rates needs 'filter_lr', a list, found None"),
        ({"longer": 1}, "`longer` is how many times as long, above 1: 1"),
        ({"longer": "4"}, "`longer` is how many times as long, above 1: '4'"),
        ({"stages": [{"seeds": [0, 1]}]}, "the seeds of a stage are different ones, and none 0"),
        ({"stages": [{"seeds": [1], "best": 2}]}, "the first stage plays all variants"),
        ({"stages": [{"seeds": [1, 2]}, {"seeds": [2, 3], "best": 1}]}, "with seeds of their own, which chose nothing"),
        (
            {"variants": {"longer": {"tune": "learning_rate", "learning_rate": 1e-3}}},
            "'longer' sets learning_rate, which it tunes",
        ),
        ({"variants": {"gated": {"tune": "weight_decay"}}}, "'gated' tunes one of learning_rate, filter_lr"),
        ({"stages": [{"seeds": [1], "tasks": ["ptp"]}]}, "a stage has no task 'ptp' .did you mean 'ptb'?"),
        ({"tasks": {"ptb": ["language_modeling"]}}, "the task 'ptb' must be given as NAME: VALUE"),
        ({"tasks": {"ptb": {"recipe": "lm", "config": "x"}}}, "the task 'ptb' has no recipe 'lm'; recipes are glue"),
        (
            {"tasks": {"ptp": {**FILE["tasks"]["ptb"]}}, "stages": [{"seeds": [1]}]},
            "has no task 'ptp' .did you mean 'ptb'?",
        ),
        ({"variants": {"plain": {"filter": "gfsa"}}}, "the league small plays 'plain' by itself: give the variant an"),
        ({"variants": {"baseline": {"filter": "gfsa"}}}, "the league small plays 'baseline' by itself: give the"),
        ({"variants": {"gfsa": 3}}, "variants are given as NAME: VALUE, rates as numbers"),
        ({"variants": {"gfsa": {"layers": "evn"}}}, "layers='evn': a text is 'all'"),
        ({"rates": {"learning_rate": ["a"], "filter_lr": [1]}}, "variants are given as NAME: VALUE, rates as numbers"),
        ({"stages": [{"seeds": ["a"]}]}, "the seeds of a stage are whole numbers from 0"),
        ({"rates": {"learning_rate": [1], "filter_lr": [0]}}, "rates of a league are numbers above 0"),
        ({"variants": {"gfsa": {"tune": ["x"]}}}, "tunes one of learning_rate, filter_lr"),
        (
            {
                "tasks": {
                    "ptb": {"recipe": "language_modeling", "config": "language_modeling/deep.yaml", "settings": [1]}
                }
            },
            "the task 'ptb' has 'settings' as a dict",
        ),
        ({"stages": [{"seeds": [1], "tasks": 3}]}, "a stage has .tasks. as a list, found 3"),
        ({"variants": {"gfsb": None}}, "unknown filter 'gfsb' .did you mean 'gfsa'"),
        ({"variants": {"gfsa": {"filter_optoins": {}}}}, "unknown setting 'filter_optoins' of the variant 'gfsa'"),
    ],
)
def test_league_files_are_refused_before_anything_is_run(changes, message, trained):
    with pytest.raises(GraphFilterError, match=message):
        played(trained, **changes)
    assert not trained


def test_held_out_rows_are_fixed_and_apart():
    kept, out = split_holdout(50, 0.1)
    assert (kept, out) == split_holdout(50, 0.1)
    assert sorted(kept + out) == [*range(50)]
    assert len(out) == 5
    for share in (-0.1, 0.001, 1.0):
        with pytest.raises(GraphFilterError, match="--held_out"):
            split_holdout(50, share)


def test_held_out_images_have_a_transform_of_their_own():
    class Numbers(torch.utils.data.Dataset):
        transform = None

        def __len__(self):
            return 10

        def __getitem__(self, index):
            return index, self.transform

    train, val = hold_out(Numbers(), 0.3)
    train.transform, val.transform = "flipped", "as they are"
    assert [train[0][1], val[0][1]] == ["flipped", "as they are"]
    assert sorted([x for x, _ in train] + [x for x, _ in val]) == [*range(10)]


@pytest.mark.parametrize("name", sorted(file.stem for file in (ROOT / "recipes/league/configs").glob("*.yaml")))
def test_shipped_leagues_can_be_played(name):
    content = play.read_league(f"{name}.yaml")
    own = League(content, name, DATA)
    own.check({})
    if name == "small":
        own_filters = {n for n in available_filters() if get_filter(n).__module__.startswith("hf_graphfilter.")}
        later = {"far_field", "linear_transformer", "performer"}  # were written after this league was played
        assert {overrides.get("filter", v) for v, overrides in own.variants.items()} == own_filters - later
        for variant, overrides in own.variants.items():
            model = BertModel(BertConfig(hidden_size=8, num_hidden_layers=2, num_attention_heads=2))
            patch_model(model, overrides.get("filter", variant), **overrides.get("filter_options", {}))
            has_rate = any(id(p) in coefficient_ids(model) for p in filter_parameters(model))
            assert has_rate == (own.tune[variant] == "filter_lr"), f"all runs of tuning {variant} would be the same"


@pytest.mark.parametrize("file", sorted((ROOT / "recipes" / "league" / "results").glob("*.json")), ids=lambda f: f.stem)
def test_shipped_standings_are_those_of_the_shipped_leagues(file, monkeypatch):
    """So that the same command goes on with them, on a machine like theirs, which computed in bf16."""
    monkeypatch.setattr("recipes.settings.bf16_pays", lambda use_cpu: True)
    content = json.loads(file.read_text())
    own = League(play.read_league(f"{file.stem}.yaml"), file.stem, DATA)
    assert content["league"] == own.content
    own.check(index_runs(content))


TINY = {
    "tasks": {
        "ptb": {
            "recipe": "language_modeling",
            "config": "language_modeling/deep.yaml",
            "data": "ptb",
            "settings": {"max_steps": 2, "warmup_steps": 0, "max_eval_samples": 8, "from_scratch": {"n_layer": 2}},
        }
    },
    "variants": {"gfsa": None, "kernelution": None},
    "rates": {"learning_rate": [1], "filter_lr": [1e-2]},
    "stages": [{"seeds": [1, 2]}],
}


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "ptb").is_dir(), reason="needs the Penn Treebank")
def test_a_real_league_is_played_interrupted_and_gone_on_with(tmp_path):
    (tmp_path / "tiny.yaml").write_text(yaml.safe_dump(TINY))
    command = [
        sys.executable,
        str(ROOT / "recipes" / "compare.py"),
        "league",
        "--config",
        "tiny.yaml",
        "--data",
        str(DATA),
    ]
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    file = tmp_path / "runs" / "league" / "tiny.json"
    while not file.is_file() and process.poll() is None:
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert "compare.py: interrupted; finished seeds and checkpoints are kept" in process.communicate()[1]
    assert process.returncode == 130
    before = len(json.loads(file.read_text())["runs"])
    out = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True).stdout
    assert f"{before} runs at hand" in out
    assert "1 comparison with the baseline over 2 seeds" in out
    assert "kernelution, rate 0.01, tuning: refused: " in out


@pytest.mark.slow
@pytest.mark.skipif(not (DATA / "ptb").is_dir(), reason="needs the Penn Treebank")
def test_two_commands_that_share_a_folder_play_one_league(tmp_path):
    """One of them is killed on its way: the other trains what it leaves, and the file is that of a single command."""
    league = {**TINY, "stages": [{"seeds": [1, 2, 3]}]}
    command = [sys.executable, str(ROOT / "recipes" / "compare.py"), "league", "--config", "tiny.yaml"]
    command += ["--data", str(DATA), "--workers", "1"]
    read = {}
    for name, commands in {"one": 1, "two": 2, "jobs": 1}.items():
        folder = tmp_path / name
        folder.mkdir()
        (folder / "tiny.yaml").write_text(yaml.safe_dump(league))
        file = folder / "runs" / "league" / "tiny.json"
        shared = [*command, "--jobs", "2"] if name == "jobs" else command
        started = [subprocess.Popen(shared, cwd=folder, stdout=subprocess.PIPE, text=True) for _ in range(commands)]
        while commands == 2 and not file.is_file():
            time.sleep(0.1)
        for process in started[1:]:
            process.kill()
        assert "1 comparison with the baseline over 3 seeds" in started[0].communicate()[0]
        for process in started[1:]:
            process.communicate()
        content = json.loads(file.read_text())
        read[name] = content["league"], [(*index_runs({"runs": [r]}), r.get("metrics")) for r in content["runs"]]
    assert read["one"] == read["two"] == read["jobs"]


def test_rates_are_not_chosen_on_the_test_part(tmp_path):
    tasks = {"bbc": {"recipe": "sequences", "config": "sequences/small.yaml"}}
    for validation, expected in (("test", HELD_OUT), ("fold", None)):
        tasks["bbc"]["settings"] = {"validation": validation}
        played = league(tasks=tasks, stages=[{"seeds": [1]}])
        values = [played.values(Run("bbc", "plain", seed, 1.0), {}) for seed in (TUNING_SEED, 1)]
        assert [x.get("held_out") for x in values] == [expected, None]
