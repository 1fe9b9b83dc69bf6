"""The numbers of the configurations against the tables of the papers, typed here from the papers a second time."""

import itertools
import re
from pathlib import Path

import pytest
import torch
from transformers import BertConfig, BertModel

from hf_graphfilter import patch_model
from hf_graphfilter.analysis import response_curves
from hf_graphfilter.console import parse_options
from hf_graphfilter.filters.core.attached import filters_of
from hf_graphfilter.functional import gfsa
from recipes import compare, glue, imagenet, language_modeling, paper_table, sequences, source_code
from recipes.settings import Settings

ROOT = Path(__file__).parent.parent
RECIPES = {
    "glue": glue.RECIPE,
    "language_modeling": language_modeling.RECIPE,
    "code": source_code.RECIPE,
    "imagenet": imagenet.RECIPE,
    "sequences": sequences.RECIPE,
}


def rows(columns, text):
    """Return the rows of a table as printed: the first word names the row, the others are numbers."""
    lines = [line.split() for line in text.strip().splitlines()]
    return {name: dict(zip(columns.split(), map(float, numbers), strict=True)) for name, *numbers in lines}


UEA = """
EthanolConcentration 6 0.1 1.5 -1.5
FaceDetection 9 0.1 2.0 0.5
Handwriting 3 0.01 1.0 0.2
Heartbeat 6 0.01 -0.5 -0.5
JapaneseVowels 4 0.01 0.0 0.0
PEMS-SF 5 0.1 1.5 2.0
SelfRegulationSCP1 9 0.1 1.5 2.0
SelfRegulationSCP2 7 0.1 2.0 1.5
SpokenArabicDigits 4 0.1 1.0 0.0
UWaveGestureLibrary 10 0.1 2.0 1.5
"""  # AGF, Table 10
LRA = """
imdb 5 0.001 1.0 1.0 5e-5
image 7 0.01 2.0 -1.0 1e-3
retrieval 5 0.1 1.0 1.0 5e-4
listops 5 0.1 1.5 1.0 1e-3
pathfinder 3 0.0001 1.5 -1.0 1e-4
"""  # AGF, Table 11
CONVERTER = """
listops 32 128 2 0.001 128 0.001 0.001
imdb 64 256 2 0.001 128 0.001 0.001
retrieval 64 256 2 0.001 256 0.001 0.001
image 64 256 2 0.01 128 0.001 0.001
pathfinder 64 256 2 0.001 256 0.0002 0.0002
longdoc 128 512 2 0.1 4 0.001 0.001
ensembl-bs 128 512 2 0.1 32 0.001 0.001
ensembl-mr 128 512 2 0.1 32 0.001 0.001
"""  # Converter, Table 8
SINGULARFORMER = {
    "hidden_size": 384,
    "num_hidden_layers": 6,
    "num_attention_heads": 6,
    "gamma_orthogonal": 0.01,
    "gamma_diagonal": 0.01,
    "residual": True,
    "per_device_train_batch_size": 64,
    "learning_rate": 1e-4,
    "num_train_epochs": 256,
    "positions": "sinusoidal",
    "embedding_dropout": 0.2,
}  # Table 2, sections 3.1 and 4.2
BATCH = "per_device_train_batch_size"
TUNED = {"num_train_epochs": 5, BATCH: 32, "learning_rate": 2e-5, "weight_decay": 0, "lr_scheduler_type": "linear"}
CODE = {BATCH: 16, "early_stopping_patience": 2, "warmup_steps": 1000}
DEFECT = CODE | {"num_train_epochs": 10, "learning_rate": 2e-5, "max_length": 512}
CLONE = CODE | {"num_train_epochs": 1, "learning_rate": 5e-5, "max_length": 400, "pairs": "apart"}
DEIT = {"epochs": 300, "batch_size": 1024, "learning_rate": 1e-3, "weight_decay": 0.05, "warmup_epochs": 5}

CASES = {
    **{("sequences", "agf-uea", task): row for task, row in rows("K gamma a b", UEA).items()},
    **{("sequences", "agf-lra", task): row for task, row in rows("K gamma a b learning_rate", LRA).items()},
    **{
        ("sequences", "converter", task): row
        for task, row in rows(
            f"hidden_size intermediate_size K eta {BATCH} learning_rate weight_decay", CONVERTER
        ).items()
    },
    ("sequences", "singularformer", "r8"): SINGULARFORMER | {"max_length": 141},
    ("sequences", "singularformer", "bbc"): SINGULARFORMER | {"max_length": 664},
    ("sequences", "singularformer", "20newsgroups"): SINGULARFORMER | {"max_length": 700},
    ("sequences", "singularformer", "imdb"): SINGULARFORMER | {"max_length": 539},
    ("sequences", "singularformer", "mimic-iii-50"): SINGULARFORMER | {"max_length": 1024},
    ("sequences", "singularformer", "scope40"): SINGULARFORMER | {"max_length": 337},
    ("sequences", "singularformer", "scope95"): SINGULARFORMER | {"max_length": 328},
    **{("glue", name, "rte"): TUNED for name in ("bert", "albert", "roberta")},  # GFSA, E.1
    ("language_modeling", "gpt2", "ptb"): {"num_train_epochs": 15, BATCH: 4, "learning_rate": 5e-5, "K": 7},
    ("language_modeling", "gpt2", "wikitext-2"): {"num_train_epochs": 10, BATCH: 4, "learning_rate": 5e-5, "K": 9},
    ("language_modeling", "gpt2", "wikitext-103"): {"num_train_epochs": 4, BATCH: 4, "learning_rate": 5e-5, "K": 3},
    **{
        ("code", name, task): numbers  # GFSA, J.1 and K.1, and the code of Wang et al. that these follow
        for name in ("codebert", "codet5-base", "codet5-small", "plbart", "roberta")
        for task, numbers in {"defect": DEFECT, "clone": CLONE}.items()
    },
    ("imagenet", "deit-s-12", "imagenet-1k"): DEIT | {"K": 3, "drop": 0, "drop_path": 0.1},  # GFSA, G.1, Table 10
    ("imagenet", "deit-s-24", "imagenet-1k"): DEIT | {"depth": 24, "drop": 0.2, "drop_path": 0.1},
    ("imagenet", "deit-s-16", "imagenet-1k"): DEIT | {"depth": 16, "K": 2},  # Table 13
    ("imagenet", "deit-t", "imagenet-100"): DEIT | {"K": 5},
    ("imagenet", "cait-s24", "imagenet-1k"): {"epochs": 300, "K": 4},  # Table 11
    ("imagenet", "swin-s", "imagenet-1k"): {"epochs": 300},
    ("imagenet", "deit-s-agf", "imagenet-1k"): DEIT | {"gamma": 1e-3, "layers": "-1"},  # AGF, H.3
}
GRIDS = {
    ("sequences", "agf-uea"): {
        "K": [2, 3, 4, 5],
        "gamma": [1e-1, 1e-2, 1e-3, 1e-4],
        "a": [1.0, 1.5, 2.0],
        "b": [-2.0, -1.5, -1.0, -0.5, 0.0, 0.5, 1.0, 1.5, 2.0],
    },  # AGF, H.1
    ("sequences", "agf-lra"): {
        "K": [2, 3, 4, 5],
        "gamma": [1e-1, 1e-2, 1e-3, 1e-4],
        "learning_rate": [1e-3, 5e-4, 1e-4, 5e-5],
    },  # AGF, H.2
    ("imagenet", "deit-s-agf"): {"K": [3, 4], "gamma": [1e-3, 1e-4]},  # AGF, H.3
    **{("glue", name): {"K": [*range(2, 11)]} for name in ("bert", "albert", "roberta")},  # GFSA, E.2
    ("language_modeling", "gpt2"): {"K": [*range(2, 10)]},  # GFSA, Table 8
    ("imagenet", "deit-s-12"): {"K": [2, 3, 4, 5]},  # GFSA, Table 10
    ("imagenet", "cait-s24"): {"K": [2, 3, 4]},  # GFSA, Table 11
}


def parse(recipe, config, task):
    return Settings(RECIPES[recipe]).parse(["--config", f"{recipe}/{config}", "--task", task])


@pytest.mark.parametrize("case", CASES, ids="-".join)
def test_a_configuration_has_the_numbers_of_its_paper(case):
    values, _ = parse(*case)
    nested = {k: v for name in ("filter_options", "from_scratch", "model_options") for k, v in options(values, name)}
    found = values | nested
    assert {name: found.get(name) for name in CASES[case]} == CASES[case]


def options(values, name):
    return parse_options(values.get(name) or []).items()


@pytest.mark.parametrize("file", GRIDS, ids="-".join)
def test_a_sweep_holds_the_grid_of_its_paper(file):
    task = next(task for recipe, config, task in CASES if (recipe, config) == file)
    sweep = {axis: [float(x) for x in grid] for axis, grid in parse(*file, task)[1]["sweep"].items()}
    assert {axis: sweep.get(axis) for axis in GRIDS[file]} == GRIDS[file]


@pytest.mark.parametrize(
    ("K", "coefficients", "matrix"),
    [
        (1, (0.0, 1.0, 0.0), lambda A: A),
        (1, (0.3, 0.5, 0.2), lambda A: 0.3 * torch.eye(5) + 0.7 * A),
        (2, (0.3, 0.5, -0.2), lambda A: 0.3 * torch.eye(5) + 0.5 * A - 0.2 * A @ A),
    ],
    ids=["gcn", "chebnet", "gpr-gnn"],
)
def test_graph_networks_are_special_cases_of_gfsa(K, coefficients, matrix):
    draw = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 1, 5, 4, generator=draw)
    A = (query @ key.mT / 2).softmax(-1)
    found = gfsa(query, key, value, *coefficients, K)
    torch.testing.assert_close(found, matrix(A) @ value)


def test_the_page_of_the_papers_names_files_and_commands_that_exist(monkeypatch):
    monkeypatch.chdir(ROOT)
    page = ROOT / "docs" / "papers.md"
    text = page.read_text()
    targets = [target.partition("#")[0] for target in re.findall(r"\]\(([^)]*)\)", text)]
    local = [target for target in targets if target and not target.startswith("http")]
    assert len(local) > 40
    assert [target for target in local if not (page.parent / target).is_file()] == []
    for line in re.findall(r"`python recipes/compare.py ([^`]*)`", text):
        if line.startswith("table "):
            assert not paper_table.arguments().parse_known_args(line.split()[1:])[1]
            continue
        options, rest = compare.arguments().parse_known_args(line.split())
        settings = Settings(RECIPES[options.recipe])
        values, sections = settings.parse(rest)
        assert len(compare.choose_variants(settings, values, sections, options.sweep)) > 2
    for row in re.findall(r"^\| .* \|$", text, re.M):
        assert all(cell.strip() for cell in row.strip("|").split("|")), row


def test_repeated_attention_keeps_the_mean_token_only():
    """Theorem 1 of AGF: the part off the mean token vanishes beside the mean token, for the softmax of any matrix."""
    scores, x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    attention, shares = scores.softmax(-1), []
    for _ in range(40):
        x = attention @ x
        low = x.mean(0, keepdim=True).expand_as(x)
        shares.append(((x - low).norm() / low.norm()).item())
    assert shares[0] > 0.1
    assert shares[-1] < 1e-8
    assert all(later < earlier for earlier, later in itertools.pairwise(shares[:20]))


@pytest.mark.parametrize("coefficients", [[0.1, 0.2, 0.3, 0.4], [(-0.5) ** k for k in range(16)]], ids=["low", "high"])
def test_the_coefficients_of_agf_pass_low_or_high_singular_values(coefficients):
    """Theorem 2 of AGF: of sum 1 and not negative, and the powers of a negative number."""
    config = BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    K = len(coefficients) - 1
    model = patch_model(BertModel(config), "agf", K=K, basis="monomial", constrain_theta=False)
    ((_, graph_filter),) = filters_of(model)
    with torch.no_grad():
        graph_filter.theta.copy_(torch.tensor(coefficients))
    (curve,) = response_curves(model).values()
    assert curve.at[-1] == 1
    gains = (curve.response / curve.response[:, -1:]).abs()[:, :-1]
    assert (gains < 1).all() if min(coefficients) > 0 else (gains > 1).all()
