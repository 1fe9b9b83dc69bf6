"""Graphormer: the model against a slow computation of its equations, its graphs, and its recipe."""

import copy
import gzip
import itertools
import json
import math
import shutil
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from filters import FILTERS
from models import FAMILIES, checkpointed, output, random_graph, turn_on
from torch._dynamo.testing import CompileCounter
from torch.utils.data import DataLoader
from transformers import AutoConfig, AutoModel, Trainer, TrainingArguments
from typer.testing import CliRunner

from hf_graphfilter import (
    GraphFilterError,
    GraphormerConfig,
    GraphormerForGraphPrediction,
    GraphormerModel,
    create_model_card,
    filter_status,
    patch_model,
)
from hf_graphfilter.analysis import branch_report, smoothing
from hf_graphfilter.cli import app
from hf_graphfilter.graphs import GraphCollator, GraphDataset, from_smiles, prepare_graph

FAMILY = FAMILIES["graphormer"]
SHARED = Path(__file__).parents[2] / "shared"
ZINC = {"node_feature_sizes": [28], "edge_feature_sizes": [4]}
CHAIN = {"node_features": [6, 6, 8], "edge_index": [[0, 1], [1, 2]], "edge_features": [1, 2], "labels": 0.5}


def config_with(**changes):
    fields = {name: value for name, value in FAMILY.config.to_dict().items() if name not in ("id2label", "label2id")}
    return GraphormerConfig(**{**fields, **changes})


def build(config, model_class=GraphormerModel):
    model = model_class(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)
    return model


def test_a_large_number_of_kinds_of_edges():
    config = GraphormerConfig(node_feature_sizes=[3], edge_feature_sizes=[50_000])
    graph = {"node_features": [0, 1], "edge_index": [[0], [1]], "edge_features": [40_000]}
    assert np.asarray(prepare_graph(graph, config)["kind_edges"]).max() >= 40_000


# ----------------------------------------------------------------------------------- the equations, written out


def shortest_paths(graph, config):
    """All shortest paths of every pair, by going through all sequences of edges; the first in dictionary order."""
    nodes, found = len(graph["node_features"]), {}
    ends, features = np.asarray(graph["edge_index"]), np.asarray(graph["edge_features"])
    edges = [(a, b, tuple(f)) for (a, b), f in zip(ends.T.tolist(), features.tolist(), strict=True)]
    edges += [] if config.directed else [(b, a, f) for a, b, f in edges]
    for start in range(nodes):
        found[start, start] = []
        frontier = {start: [[]]}
        while frontier:
            ahead = {}
            for node, paths in frontier.items():
                for path, (a, b, f) in itertools.product(paths, edges):
                    if a == node and (start, b) not in found:
                        ahead.setdefault(b, []).append([*path, f])
            found |= {(start, node): min(paths) for node, paths in ahead.items()}
            frontier = ahead
    return found


def written_out(model, graph):
    """Graphormer's equations 5 to 9 for one graph, node by node."""
    config, w = model.config, dict(model.named_parameters())
    nodes, heads = len(graph["node_features"]), config.num_attention_heads
    paths = shortest_paths(graph, config)
    ends = np.asarray(graph["edge_index"])
    offsets = [sum(config.node_feature_sizes[:i]) for i in range(len(config.node_feature_sizes))]
    edge_offsets = [sum(config.edge_feature_sizes[:i]) for i in range(len(config.edge_feature_sizes))]
    rows = [w["embeddings.virtual_node.weight"][0]]
    for node, features in enumerate(graph["node_features"]):
        row = sum(w["embeddings.features.weight"][o + int(f)] for o, f in zip(offsets, features, strict=True))
        into, out = (ends[1] == node).sum(), (ends[0] == node).sum()
        into, out = (into, out) if config.directed else (into + out, into + out)
        rows.append(row + w["embeddings.in_degree.weight"][into] + w["embeddings.out_degree.weight"][out])
    h = torch.stack(rows)
    bias = torch.zeros(heads, nodes + 1, nodes + 1, dtype=h.dtype)
    bias[:, 0, :] = bias[:, :, 0] = w["position_bias.virtual_distance.weight"][0][:, None]
    for i, j in itertools.product(range(nodes), repeat=2):
        path = paths.get((i, j))
        distance = config.max_distance + 1 if path is None else min(len(path), config.max_distance)
        total = w["position_bias.distance.weight"][distance]
        seen = (path or [])[: config.max_hops]
        if config.edge_encoding == "direct":
            seen = seen if path is not None and len(path) == 1 else []
        for hop, features in enumerate(seen if config.edge_encoding != "none" else []):
            edge = sum(w["position_bias.edges.weight"][o + f] for o, f in zip(edge_offsets, features, strict=True))
            edge = edge / len(features)
            if config.edge_encoding == "path":
                edge = edge @ w["position_bias.hops"][hop] / len(seen)
            total = total + edge
        bias[:, i + 1, j + 1] = total
    norm = torch.nn.functional.layer_norm
    for n in range(config.num_hidden_layers):

        def linear(x, name, n=n):
            return x @ w[f"layers.{n}.{name}.weight"].T + w[f"layers.{n}.{name}.bias"]

        def normed(x, name, n=n):
            return norm(x, x.shape[-1:], w[f"layers.{n}.{name}.weight"], w[f"layers.{n}.{name}.bias"])

        x = normed(h, "self_attn_layer_norm")
        q, k, v = (linear(x, f"self_attn.{p}_proj").unflatten(-1, (heads, -1)).transpose(0, 1) for p in "qkv")
        a = (q @ k.mT / math.sqrt(q.shape[-1]) + bias).softmax(-1)
        h = h + linear((a @ v).transpose(0, 1).flatten(1), "self_attn.out_proj")
        h = h + linear(torch.nn.functional.gelu(linear(normed(h, "final_layer_norm"), "fc1")), "fc2")
    return norm(h, h.shape[-1:], w["norm.weight"], w["norm.bias"])


@pytest.mark.parametrize("encoding", ["path", "direct", "none"])
@pytest.mark.parametrize("directed", [False, True])
def test_equals_the_equations(encoding, directed):
    """Also in a batch with a larger graph, and with unconnected parts."""
    config = config_with(edge_encoding=encoding, directed=directed)
    model = build(config)
    graphs = [random_graph(n, config, seed, connect) for n, seed, connect in ((7, 0, 1.2), (9, 1, 1.6), (5, 2, 0.4))]
    found = model(**GraphCollator(config)(graphs)).last_hidden_state
    for graph, row in zip(graphs, found, strict=True):
        expected = written_out(model, graph)
        torch.testing.assert_close(row[: len(expected)], expected, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("name", [None, "gfsa"])
def test_the_order_of_nodes_and_edges_does_not_matter(name):
    """Rings have several shortest paths between opposite nodes, with different edges."""
    config = FAMILY.config
    model = build(config)
    if name:
        turn_on(patch_model(model, name, K=3))
    ring = {
        "node_features": np.array([[i % 4, i % 3] for i in range(6)]),
        "edge_index": np.array([[0, 1, 2, 3, 4, 5], [1, 2, 3, 4, 5, 0]]),
        "edge_features": np.array([[0, 0], [1, 1], [2, 0], [3, 1], [1, 0], [0, 1]]),
    }
    order = np.array([3, 1, 4, 0, 5, 2])  # new place -> old node
    place = order.argsort()
    moved = {
        "node_features": ring["node_features"][order],
        "edge_index": place[ring["edge_index"]][:, ::-1],
        "edge_features": ring["edge_features"][::-1],
    }
    found, expected = (model(**GraphCollator(config)([graph])).last_hidden_state[0] for graph in (moved, ring))
    torch.testing.assert_close(found[1:], expected[1:][order], atol=1e-12, rtol=1e-12)
    torch.testing.assert_close(found[0], expected[0], atol=1e-12, rtol=1e-12)


# ----------------------------------------------------------------------------------------------------- the model


def test_it_is_an_ordinary_model_of_transformers(tmp_path):
    config = config_with(num_labels=2, label_mean=[1.0, -1.0], label_std=[2.0, 0.5])
    model = build(config, GraphormerForGraphPrediction)
    batch = GraphCollator(config)([random_graph(n, config, n) for n in (4, 6)])
    out = model(**batch, output_hidden_states=True)
    assert out.logits.shape == (2, 2)
    assert len(out.hidden_states) == config.num_hidden_layers + 1
    errors = (out.logits - batch["labels"]) / torch.tensor([2.0, 0.5], dtype=torch.float64)
    torch.testing.assert_close(out.loss, 1.25 * errors.abs().mean())
    patch_model(model, "gfsa", K=3).save_pretrained(tmp_path)
    loaded = GraphormerForGraphPrediction.from_pretrained(tmp_path, dtype=torch.float64).eval()
    assert torch.equal(loaded(**batch).logits, out.logits)
    assert type(AutoConfig.from_pretrained(tmp_path)) is GraphormerConfig
    model.graphormer.save_pretrained(tmp_path / "base")
    assert type(AutoModel.from_pretrained(tmp_path / "base")) is GraphormerModel


def test_half_precision_keeps_the_digits_of_standardized_targets():
    """Adding the mean in bfloat16 would round to steps of 2 here, a fifth of the standard deviation."""
    torch.manual_seed(0)
    plain = GraphormerForGraphPrediction(config_with()).bfloat16().eval()
    scaled = GraphormerForGraphPrediction(config_with(label_mean=[-400.0], label_std=[10.0])).bfloat16().eval()
    scaled.load_state_dict(plain.state_dict())
    batch = GraphCollator(plain.config)([random_graph(5, plain.config, 0)])
    expected = plain(**batch).logits.float() * 10 - 400
    torch.testing.assert_close(scaled(**batch).logits, expected, rtol=0, atol=1e-3)


def test_autocast_keeps_the_digits_of_predictions():
    """The head would round them to steps of 2 here, eight times their standard deviation."""
    torch.manual_seed(0)
    config = config_with(initializer_range=0.1)
    model, collate = GraphormerForGraphPrediction(config).eval(), GraphCollator(config)
    torch.nn.init.constant_(model.classifier.bias, 400.0)
    batch = collate([random_graph(n, config, n) for n in range(2, 18)])
    with torch.no_grad():
        expected = model(**batch).logits
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(**batch).logits
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, expected, rtol=0, atol=0.1 * expected.std().item())


@pytest.mark.parametrize("loss", ["l1", "mse"])
def test_what_is_learned_of_several_targets_does_not_depend_on_their_units(loss):
    gradients = []
    for unit in (1.0, 1e3):
        torch.manual_seed(0)
        config = config_with(num_labels=2, loss=loss, label_mean=[1.0, 3.0 * unit], label_std=[0.5, 2.0 * unit])
        model = build(config, GraphormerForGraphPrediction)
        batch = GraphCollator(config)([random_graph(n, config, n) for n in (4, 6)])
        batch["labels"] = torch.tensor([[1.0, 2.0 * unit], [2.0, math.nan]])
        model(**batch).loss.backward()
        gradient = model.classifier.weight.grad
        gradients.append(gradient / gradient.norm())
    torch.testing.assert_close(*gradients)


def test_the_command_line_keeps_the_head(tmp_path):
    """No auto class has it, so that the name in the config must lead to it."""
    model = patch_model(GraphormerForGraphPrediction(FAMILY.config), "gfsa", K=3)
    model.save_pretrained(tmp_path / "patched")
    done = CliRunner().invoke(app, ["unpatch", str(tmp_path / "patched"), str(tmp_path / "plain")])
    assert done.exit_code == 0, done.output
    loaded = GraphormerForGraphPrediction.from_pretrained(tmp_path / "plain")
    assert torch.equal(loaded.classifier.weight, model.classifier.weight)
    card = str(create_model_card(model))
    assert "from hf_graphfilter import GraphormerForGraphPrediction" in card
    assert "transformers does not know this kind of model" in card
    assert "other implementations" not in card


def test_attention_matrices_gradient_checkpointing_and_bfloat16():
    model = FAMILY.build("eager").train()
    batch = FAMILY.inputs()
    plain = model(**batch, output_attentions=True)
    assert plain.attentions[0].shape == (2, 4, 9, 9)
    out = checkpointed(model, reentrant=False)(**batch).last_hidden_state
    torch.testing.assert_close(out, plain.last_hidden_state)
    out.sum().backward()
    assert model.position_bias.hops.grad.abs().sum() > 0
    low = FAMILY.build().bfloat16()(**batch).last_hidden_state
    assert low.dtype == torch.bfloat16
    assert low.isfinite().all()


def test_training_lowers_the_loss(tmp_path):
    """With the ordinary Trainer, raw graphs, a filter, and LoRA's usual targets among the module names."""
    torch.manual_seed(0)
    config = GraphormerConfig(**ZINC, num_hidden_layers=2, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    graphs = [CHAIN | {"node_features": [6, 6, kind], "labels": float(kind == 8)} for kind in (7, 8) * 16]
    model = patch_model(GraphormerForGraphPrediction(config), "gfsa", K=3)
    args = TrainingArguments(
        str(tmp_path),
        num_train_epochs=15,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        remove_unused_columns=False,
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(model, args, train_dataset=graphs, eval_dataset=graphs, data_collator=GraphCollator(config))
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    assert trainer.evaluate()["eval_loss"] < 0.25 * before


@pytest.mark.parametrize(
    ("problem", "labels", "loss"),
    [
        ("single_label_classification", [2, 0], torch.nn.functional.cross_entropy),
        ("multi_label_classification", [[1.0, 0, 1], [0, 1, 1]], torch.nn.functional.binary_cross_entropy_with_logits),
    ],
)
def test_classification(problem, labels, loss):
    config = config_with(num_labels=3, problem_type=problem)
    graphs = [random_graph(4, config) | {"labels": label} for label in labels]
    model, batch = build(config, GraphormerForGraphPrediction), GraphCollator(config)(graphs)
    out = model(**batch)
    torch.testing.assert_close(
        out.loss, loss(out.logits, torch.tensor(labels, dtype=batch["labels"].dtype)).double(), check_dtype=False
    )


def test_a_missing_target_is_left_out_of_the_loss():
    config = config_with(num_labels=2, loss="mse", pooling="mean")
    graphs = [random_graph(4, config) | {"labels": labels} for labels in ([1.0, math.nan], [math.nan, 2.0])]
    out = build(config, GraphormerForGraphPrediction)(**GraphCollator(config)(graphs))
    expected = ((out.logits[0, 0] - 1).square() + (out.logits[1, 1] - 2).square()) / 2
    torch.testing.assert_close(out.loss, expected)


# ---------------------------------------------------------------------------------------------------- the graphs


class Data:
    """A graph in the layout of PyTorch Geometric."""

    def __init__(self):
        self.x, self.edge_index = torch.tensor([[6], [6], [8]]), torch.tensor([[0, 1, 1, 2], [1, 0, 2, 1]])
        self.edge_attr, self.y = torch.tensor([[1], [1], [2], [2]]), torch.tensor([0.5])


OGB = {
    "node_feat": [[6], [6], [8]],
    "edge_index": [[0, 1, 1, 2, 0], [1, 0, 2, 1, 0]],
    "edge_feat": [[1], [1], [2], [2], [3]],
}


def test_all_layouts_and_prepared_graphs_give_the_same_batch(tmp_path):
    config = GraphormerConfig(**ZINC)
    collate = GraphCollator(config)
    expected = collate([CHAIN, CHAIN])
    kept = GraphDataset([CHAIN, Data()], config)
    kept.save(tmp_path / "graphs.safetensors")
    kept = GraphDataset.load(tmp_path / "graphs.safetensors").shuffle(0).select([0, 1])
    as_lists = json.loads(json.dumps({k: np.asarray(v).tolist() for k, v in prepare_graph(CHAIN, config).items()}))
    for graphs in ([Data(), OGB | {"y": 0.5}], [prepare_graph(CHAIN, config), as_lists], list(kept)):
        batch = collate(graphs)
        assert all(torch.equal(batch[name], expected[name]) for name in expected)
    loader = DataLoader(kept, batch_size=2, collate_fn=collate)
    assert all(torch.equal(next(iter(loader))[name], x) for name, x in expected.items())
    assert kept.sizes.tolist() == [3, 3]
    yes_no = GraphCollator(GraphormerConfig(**ZINC, num_labels=2, problem_type="multi_label_classification"))
    assert yes_no([CHAIN | {"labels": [1, None]}])["labels"].isnan().tolist() == [[False, True]]
    with pytest.raises(GraphFilterError, match=r"graph 0 of the batch has the labels \[5.0, nan\]: yes is 1, no is 0"):
        yes_no([CHAIN | {"labels": [5, math.nan]}])


def test_graphs_are_prepared_by_datasets(tmp_path):
    """As ``datasets.map`` does it, with its cache."""
    datasets = pytest.importorskip("datasets")
    config = GraphormerConfig(**ZINC)
    other = {"node_features": [7, 8], "edge_index": [[0], [1]], "edge_features": [2], "labels": 1.0}
    rows = datasets.Dataset.from_list([CHAIN, other])
    made = rows.map(prepare_graph, fn_kwargs={"config": config}, remove_columns=rows.column_names)
    expected, found = (GraphCollator(config)(graphs) for graphs in ([CHAIN, other], list(made)))
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")  # PEFT asks by it
def test_adapters_hold_the_filter(tmp_path):
    peft = pytest.importorskip("peft")
    config = GraphormerConfig(**ZINC, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    base, batch = GraphormerForGraphPrediction(config).eval(), GraphCollator(config)([CHAIN])
    lora = peft.LoraConfig(r=2, target_modules="all-linear", modules_to_save=["graph_filter"])
    model = peft.get_peft_model(patch_model(copy.deepcopy(base), "gfsa"), lora)
    turn_on(model)
    model(**batch).loss.backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if "lora_B" in n)
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(patch_model(base, "gfsa"), tmp_path)
    torch.testing.assert_close(again.eval()(**batch).logits, model.eval()(**batch).logits)


def test_small_and_unconnected_graphs():
    config = GraphormerConfig(**ZINC)
    atom = {"node_features": [6], "edge_index": []}
    parts = {"node_features": [6, 7], "edge_index": [[], []], "edge_features": []}
    batch = GraphCollator(config)([atom, parts, {k: v for k, v in CHAIN.items() if k != "labels"}])
    distances = batch["kind_distances"][1][batch["pair_kinds"][1, :2, :2]]
    assert distances.tolist() == [[0, -1], [-1, 0]]
    assert GraphormerModel(config).eval()(**batch).last_hidden_state.isfinite().all()


@pytest.mark.parametrize("entry", [None, FILTERS["gfsa"]], ids=["baseline", "gfsa"])
def test_batches_of_any_size_are_compiled_once(entry):
    model = FAMILY.build().double()
    if entry is not None:
        turn_on(FAMILY.patch(model, entry))
    counter = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(model, backend=counter, dynamic=True)
    for batch, tokens in ((3, 8), (5, 11), (8, 17)):
        inputs = FAMILY.inputs(torch.float64, batch=batch, tokens=tokens)
        torch.testing.assert_close(output(compiled, inputs), output(model, inputs), atol=1e-12, rtol=1e-12)
    assert counter.frame_count == 1


BAD = {
    "empty": ({"node_features": [], "edge_index": []}, "the graph is empty"),
    "no nodes": ({"edge_index": []}, "no node_features"),
    "unknown atom": (CHAIN | {"node_features": [6, 28, 8]}, r"feature 0 of node 1 is 28, .* allows 0 to 27"),
    "unknown bond": (CHAIN | {"edge_features": [1, -1]}, r"feature 0 of edge 1 is -1"),
    "fractions": (CHAIN | {"node_features": [6, 6.5, 8]}, "node_features must hold 64-bit integers, found 6.5"),
    "huge": (CHAIN | {"node_features": [6, 1e30, 8]}, r"node_features must hold 64-bit integers, found 1e\+30"),
    "features": (CHAIN | {"node_features": [[6, 1]] * 3}, r"shape \(nodes, 1\)"),
    "words": (CHAIN | {"node_features": ["C", "C", "O"]}, "table of numbers"),
    "ragged": (CHAIN | {"node_features": [[6], [6, 1], [8]]}, "node_features must be a rectangular table"),
    "label": (CHAIN | {"labels": "toxic"}, "labels must be a rectangular table of numbers: could not convert"),
    "no edges": ({"node_features": [6, 8], "edges": [[0], [1]]}, "has no edge_index: give"),
    "edge shape": (CHAIN | {"edge_index": [[0, 1, 2]]}, r"shape \(2, edges\)"),
    "edge rows": (CHAIN | {"edge_features": [1]}, "has 2 edges, and edge_features has 1"),
    "no such node": (CHAIN | {"edge_index": [[0, 1], [1, 3]]}, "names node 3"),
    "too large": ({"node_features": [6] * 9, "edge_index": []}, "9 nodes, and max_nodes is 8"),
    "mixed": (
        CHAIN | {"edge_index": [[0, 1, 1], [1, 0, 2]], "edge_features": [1, 1, 2]},
        "2 edges in both .* and 1 in",
    ),
    "twice": (
        CHAIN | {"edge_index": [[0, 0], [1, 1]], "edge_features": [1, 2]},
        "from node 0 to node 1 is given twice",
    ),
    "differ": (CHAIN | {"edge_index": [[0, 1], [1, 0]], "edge_features": [1, 2]}, "two directions .* directed=True"),
    "nan": (CHAIN | {"labels": math.nan}, r"has the label \[nan\]"),
    "infinite": (CHAIN | {"labels": math.inf}, "has the label"),
    "labels": (CHAIN | {"labels": [1.0, 2.0]}, "has 2 labels, and the model takes 1"),
}


@pytest.mark.parametrize(("graph", "message"), BAD.values(), ids=BAD)
def test_bad_graphs_are_refused_in_one_sentence(graph, message):
    with pytest.raises(GraphFilterError, match=f"^graph 1 of the batch:? .*{message}|^graph 1 of the batch {message}"):
        GraphCollator(GraphormerConfig(**ZINC, max_nodes=8))([CHAIN, graph])


@pytest.mark.parametrize(
    "other",
    [
        {"node_feature_sizes": [28, 30]},
        {"edge_feature_sizes": [2]},
        {"node_feature_sizes": [7]},
        {"max_hops": 2},
        {"directed": True},
    ],
)
def test_graphs_prepared_with_another_config_are_refused(other):
    prepared = prepare_graph(CHAIN, GraphormerConfig(**ZINC))
    config = GraphormerConfig(**{**ZINC, **other})
    fitting = {"node_features": [[1] * len(config.node_feature_sizes)], "edge_index": []}
    with pytest.raises(GraphFilterError, match=r"^graph 1 of the batch was prepared with another config"):
        GraphCollator(config)([prepare_graph(fitting, config), prepared])
    with pytest.raises(GraphFilterError, match="a batch needs one graph or more"):
        GraphCollator(config)([])


def test_a_trainer_refuses_directed_graphs_for_another_model(tmp_path):
    """By default a Trainer drops what ``forward`` does not take, and so the entry ``directed``."""
    graphs = GraphDataset([CHAIN] * 2, GraphormerConfig(**ZINC, directed=True))
    config = GraphormerConfig(**ZINC, num_hidden_layers=1, hidden_size=16, num_attention_heads=2, intermediate_size=16)
    args = TrainingArguments(str(tmp_path), max_steps=1, report_to=[], disable_tqdm=True, use_cpu=True)
    model = GraphormerForGraphPrediction(config)
    trainer = Trainer(model, args, train_dataset=graphs, data_collator=GraphCollator(config))
    with pytest.raises(GraphFilterError, match=r"^graph 0 of the batch was prepared with another config"):
        trainer.train()


@pytest.mark.parametrize("name", ["node_features", "in_degree", "kind_edges"])
@pytest.mark.parametrize("kept", [True, False])
def test_prepared_graphs_without_a_part_are_refused(name, kept):
    """``datasets`` keeps a column that only some graphs have, with None in the others."""
    config = GraphormerConfig(**ZINC)
    prepared = prepare_graph(CHAIN, config)
    partial = {key: x for key, x in prepared.items() if key != name} | ({name: None} if kept else {})
    with pytest.raises(GraphFilterError, match=f"^graph 1 of the batch: it is a prepared graph without {name}: prep"):
        GraphCollator(config)([prepared, partial])


@pytest.mark.parametrize("used", [{"edge_encoding": "direct"}, {"max_hops": 1}])
def test_graphs_prepared_without_edge_features_are_refused(used):
    prepared = prepare_graph(CHAIN, GraphormerConfig(**ZINC, edge_encoding="none"))
    collator = GraphCollator(GraphormerConfig(**ZINC, **used))
    with pytest.raises(GraphFilterError, match="was prepared with another config"):
        collator([prepared])
    collator([{"node_features": [6, 6], "edge_index": [[], []]}])  # has none


def test_bad_graphs_can_be_left_out():
    config = GraphormerConfig(**ZINC)
    bad = [CHAIN | {"labels": math.nan}, CHAIN | {"node_features": [6, 28, 8]}]
    with pytest.raises(GraphFilterError, match=r"^graph 0: it has the labels \[inf, 1.0\]"):
        GraphDataset([CHAIN | {"labels": [math.inf, 1.0]}], GraphormerConfig(**ZINC, num_labels=2))
    with pytest.raises(GraphFilterError, match="on_error='Skip': use 'raise' or 'skip'"):
        GraphDataset(bad, config, on_error="Skip")
    kept = GraphDataset([*bad, CHAIN], config, on_error="skip")
    assert (len(kept), [number for number, _ in kept.skipped]) == (1, [0, 1])
    assert "2 left out (0: it has no label (NaN); 1: feature 0" in kept.describe_skipped()
    with pytest.raises(GraphFilterError, match=r"^graph 0: it has no label"):
        GraphDataset(bad, config)
    with pytest.raises(GraphFilterError, match=r"^no graph could be read, 2 left out"):
        GraphDataset(bad, config, on_error="skip")


def test_graphs_are_selected_by_place_or_by_a_mask():
    config = GraphormerConfig(**ZINC)
    graphs = GraphDataset([{"node_features": [6] * n, "edge_index": [[], []]} for n in (1, 2, 3)], config)
    assert graphs.select(graphs.sizes > 1).sizes.tolist() == [2, 3]
    assert graphs.select([2, 0]).sizes.tolist() == [3, 1]
    assert len(graphs.select([])) == 0
    with pytest.raises(GraphFilterError, match="selected by whole numbers"):
        graphs.select([0.0, 1.0, 1.0])
    assert len(graphs.select([])) == 0


def test_labels_and_inputs_that_do_not_fit():
    config = GraphormerConfig(**ZINC)
    unlabelled = {k: v for k, v in CHAIN.items() if k != "labels"}
    with pytest.raises(GraphFilterError, match="graph 1 of the batch has 0 labels"):
        GraphCollator(config)([CHAIN, unlabelled])
    others = [unlabelled, CHAIN | {"labels": [0.5, 1.0]}, CHAIN | {"node_features": [6, 28, 8]}]
    messages = ("it has no label, and other", "it has 2 labels, and most graphs have 1", "feature 0 of node 1 is 28")
    for other, message in zip(others, messages, strict=True):
        with pytest.raises(GraphFilterError, match=f"^graph 1: {message}"):
            GraphDataset([CHAIN, other, CHAIN], config)
    kept = GraphDataset([*others, CHAIN, CHAIN], config, on_error="skip")
    assert (kept.labels.tolist(), [number for number, _ in kept.skipped]) == ([[0.5], [0.5]], [0, 1, 2])
    batch = GraphCollator(config)([unlabelled])
    assert "labels" not in batch
    from_table = {**prepare_graph(unlabelled, config), "labels": None}  # as datasets.map writes it
    assert "labels" not in GraphCollator(config)([from_table])
    model = GraphormerForGraphPrediction(config)
    with pytest.raises(GraphFilterError, match=r"make the batch with .*GraphCollator"):
        model(batch["node_features"])
    with pytest.raises(GraphFilterError, match=r"1 graphs of 3 nodes need pair_kinds of shape \(1, 3, 3\)"):
        model(**{**batch, "pair_kinds": batch["pair_kinds"][:, :2]})
    with pytest.raises(GraphFilterError, match="prepared with 5 hops, and the model has max_hops=2"):
        GraphormerModel(GraphormerConfig(**ZINC, max_hops=2))(**batch)


def test_batches_of_another_config_are_refused_by_the_model():
    """Without this, features of another kind would read the embeddings of this one."""
    bond = {"node_features": [[0] * 9] * 2, "edge_index": [[0], [1]], "edge_features": [[0] * 3]}
    batch = GraphCollator(GraphormerConfig())([bond])
    model = GraphormerForGraphPrediction(GraphormerConfig(**ZINC)).eval()
    with pytest.raises(GraphFilterError, match=r"node_features was made for another config .*sizes=\[28\]"):
        model(**batch)
    batch = GraphCollator(GraphormerConfig(node_feature_sizes=[28], edge_feature_sizes=[9]))([CHAIN])
    model(**batch)
    batch["kind_edges"][0, 2, 0] = 8
    with pytest.raises(GraphFilterError, match=r"kind_edges was made for another config .*edge_feature_sizes=\[4\]"):
        model(**batch)
    batch = GraphCollator(model.config)([CHAIN])
    for changes, message in (
        ({"node_features": batch["node_features"].short()}, r"must hold 64-bit integers, got torch.int16: .*data_coll"),
        ({"kind_distances": batch["kind_distances"].short()}, "kind_distances must hold 64-bit integers"),
        ({"attention_mask": batch["attention_mask"][:, :2]}, r"need attention_mask of shape \(1, 3\), got \(1, 2\)"),
        ({"labels": torch.zeros(2)}, r"1 graphs need labels of shape \(1, 1\), got \(2,\)"),
    ):
        with pytest.raises(GraphFilterError, match=message):
            model(**{**batch, **changes})
    classes = GraphormerConfig(**ZINC, num_labels=3, problem_type="single_label_classification")
    with pytest.raises(GraphFilterError, match=r"the number of each graph's class, got torch\.float32"):
        GraphormerForGraphPrediction(classes)(**{**batch, "labels": torch.tensor([1.7])})


def test_what_is_no_graph_and_no_config_is_named(tmp_path):
    config = GraphormerConfig(**ZINC)
    model = GraphormerForGraphPrediction(config)
    for make in (GraphCollator, partial(GraphDataset, [CHAIN]), partial(prepare_graph, CHAIN)):
        with pytest.raises(
            GraphFilterError, match=r"must be a GraphormerConfig, such as model\.config, got Graphormer"
        ):
            make(model)
    with pytest.raises(GraphFilterError, match="got the text 'CCO': read a molecule with from_smiles"):
        GraphCollator(config)(["CCO"])
    with pytest.raises(GraphFilterError, match="is a folder"):
        GraphDataset([CHAIN], config).save(tmp_path)
    model.save_pretrained(tmp_path)
    with pytest.raises(GraphFilterError, match=r"holds no prepared graphs: name a file of GraphDataset\.save"):
        GraphDataset.load(tmp_path / "model.safetensors")


def test_batches_of_geometric_and_pairs_of_ogb():
    config = GraphormerConfig(**ZINC)
    collate = GraphCollator(config)
    geometric = SimpleNamespace(to_data_list=lambda: [CHAIN, CHAIN])
    assert collate(geometric)["labels"].tolist() == [[0.5], [0.5]]
    with pytest.raises(GraphFilterError, match="got a Batch of graphs: give its to_data_list"):
        collate([geometric])
    ogb = {"node_feat": [[6], [6], [8]], "edge_index": CHAIN["edge_index"], "edge_feat": [[1], [2]]}
    for name, value in collate([(ogb, np.array([0.5]))]).items():
        assert value.equal(collate([CHAIN])[name])


def test_an_error_of_a_worker_has_its_message_alone():
    collate = GraphCollator(GraphormerConfig(**ZINC))
    loader = DataLoader([CHAIN | {"node_features": [6, 28, 8]}], collate_fn=collate, num_workers=1)
    with pytest.raises(GraphFilterError, match=r"^graph 0 of the batch: feature 0 of node 1 is 28"):
        next(iter(loader))
    repeated = GraphFilterError("the call failed:\nhf_graphfilter.errors.GraphFilterError: other")
    assert str(repeated).startswith("the call failed: "), "of a worker alone"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"edge_encoding": "paths"}, "did you mean 'path'"),
        ({"pooling": "max"}, "use one of 'virtual', 'mean'"),
        ({"hidden_act": "gellu"}, "did you mean 'gelu'"),
        ({"max_hops": 0}, "max_hops must be an integer >= 1"),
        ({"num_labels": 0}, "num_labels must be an integer >= 1"),
        ({"num_labels": "3"}, "num_labels must be an integer >= 1, got '3'"),
        ({"loss": "mae"}, "loss='mae': use one of 'l1', 'mse'"),
        ({"node_feature_sizes": []}, "node_feature_sizes must list"),
        ({"node_feature_sizes": 28}, "node_feature_sizes must list the number of values of each feature, got 28"),
        ({"edge_feature_sizes": 4}, "edge_feature_sizes must list the number of values of each feature, got 4"),
        ({"node_feature_sizes": np.array([28, 4])}, "node_feature_sizes must list the number of values"),
        ({"hidden_size": 81}, "no multiple of num_attention_heads"),
        ({"initializer_range": -1.0}, "initializer_range must be a number >= 0, got -1"),
        ({"initializer_range": "x"}, "initializer_range must be a number >= 0, got 'x'"),
        ({"directed": "no"}, "directed must be True or False, got 'no'"),
        ({"attention_dropout": 1.0}, r"must be in \[0, 1\)"),
        ({"label_std": [0.0]}, "above 0"),
        ({"label_mean": [0.0, 1.0]}, "a list of 1 finite number, one per target"),
        ({"label_mean": 0.5}, "a list of 1 finite number, one per target; got 0.5"),
        (
            {"label_mean": [0.5], "problem_type": "multi_label_classification"},
            "label_mean needs problem_type=.regression., got .multi_label",
        ),
    ],
)
def test_bad_configs_are_refused(options, message):
    with pytest.raises(GraphFilterError, match=message):
        GraphormerConfig(**options)


def test_a_graph_without_edges_in_any_container():
    """``datasets`` gives empty lists as arrays of objects in NumPy's format."""
    config = GraphormerConfig(**ZINC)
    alone = {"node_features": [6], "edge_index": np.zeros((2, 0)), "edge_features": []}
    expected = prepare_graph(alone, config)
    for empty in (np.array([], dtype=object), np.zeros((0, 1), dtype=object)):
        ready = prepare_graph({**alone, "edge_features": empty}, config)
        assert all(np.array_equal(ready[name], value) for name, value in expected.items())


def test_overrides_of_a_checkpoint_are_checked_together(tmp_path, transformers_warnings):
    config = GraphormerConfig(**ZINC, num_hidden_layers=1, label_mean=[5.0], label_std=[3.0])
    GraphormerForGraphPrediction(config).save_pretrained(tmp_path)
    load = GraphormerForGraphPrediction.from_pretrained
    for options, message in (
        ({"loss": "mae"}, "loss='mae'"),
        ({"pooling": "max"}, "pooling='max'"),
        ({"problem_type": "multi_label_classification"}, "label_mean needs problem_type=.regression."),
    ):
        with pytest.raises(GraphFilterError, match=message):
            load(tmp_path, **options)
    assert load(tmp_path, loss="mse").config.loss == "mse"
    without = {"label_mean": None, "label_std": None}
    three = load(tmp_path, num_labels=3, **without, ignore_mismatched_sizes=True)
    assert len(transformers_warnings) == 2  # of transformers, on the number of labels and the new head
    transformers_warnings.clear()
    assert (three.config.num_labels, three.config.label_mean, three.classifier.out_features) == (3, None, 3)
    loaded, unused = AutoConfig.from_pretrained(tmp_path, loss="mse", other=1, return_unused_kwargs=True)
    assert (loaded.loss, unused) == ("mse", {"other": 1})

    class Own(GraphormerConfig):
        extra: int = 1

    assert Own.from_dict(config.to_dict(), extra=2).extra == 2
    with pytest.raises(GraphFilterError, match="loss='mae'"):
        Own.from_dict(config.to_dict(), loss="mae")


def test_the_parts_of_filters_are_measured_per_label():
    """However many targets of a graph are missing, and however graphs are put into batches."""
    config = GraphormerConfig(**ZINC, num_hidden_layers=1, initializer_range=0.3, num_labels=2)
    model = patch_model(build(config, GraphormerForGraphPrediction), "gfsa", w_K=0.1)
    collate = GraphCollator(config)
    labels = ([1.0, 2.0], [math.nan, 50.0], [3.0, 0.0], [4.0, math.nan])
    graphs = [random_graph(n + 2, config, n) | {"labels": y} for n, y in enumerate(labels)]
    together, alone = (branch_report(model, b) for b in ([collate(graphs)], [collate([graph]) for graph in graphs]))
    assert [part.value for part in alone] == pytest.approx([part.value for part in together], rel=1e-5)


def test_analysis_leaves_padding_out():
    """Also of the virtual node, which is in no mask."""
    config = FAMILY.config
    model, collate = build(config), GraphCollator(config)
    graphs = [random_graph(n, config, n) for n in (4, 7)]
    together = smoothing(model, [collate(graphs)])
    alone = smoothing(model, [collate([graph]) for graph in graphs])
    assert alone.bands.keys() == together.bands.keys()
    for key, band in alone.bands.items():
        torch.testing.assert_close(together.bands[key].mean, band.mean)


@pytest.mark.parametrize("name", ["agf", "far_field", "hedgehog"])
def test_replacement_filters_say_why_not(name):
    model = GraphormerModel(FAMILY.config)
    with pytest.raises(GraphFilterError, match="learned bias of positions"):
        patch_model(model, name)
    patch_model(model, name, position_bias="drop")(**FAMILY.inputs())


# ------------------------------------------------------------------------------------------------- the molecules


def test_molecules_from_smiles():
    pytest.importorskip("rdkit")
    benzene = from_smiles("c1ccccc1")
    assert benzene["node_features"].shape == (6, 9)
    assert benzene["edge_index"].shape == (2, 12)
    ready = prepare_graph(benzene, GraphormerConfig())
    assert ready["kind_distances"][ready["pair_kinds"]].max() == 3
    assert len(ready["kind_distances"]) == 5  # all bonds are alike: no path, 0, 1, 2, 3
    for text in ("C1CC", "", None, "not a molecule"):
        with pytest.raises(GraphFilterError, match="reads no molecule from"):
            from_smiles(text)
    assert from_smiles("[Na+].[Cl-]")["edge_index"].shape == (2, 0)


@pytest.mark.parametrize("silenced", [False, True])
def test_reading_molecules_leaves_the_logs_of_rdkit_as_they_were(silenced):
    pytest.importorskip("rdkit")
    from rdkit import RDLogger, rdBase

    try:
        if silenced:
            RDLogger.DisableLog("rdApp.*")
        before = rdBase.LogStatus()
        from_smiles("CCO")
        for unreadable in ("no molecule", "\udc80"):
            with pytest.raises(GraphFilterError):
                from_smiles(unreadable)
        assert rdBase.LogStatus() == before
    finally:
        for level in ("warning", "error"):
            RDLogger.EnableLog(f"rdApp.{level}")


# --------------------------------------------------------------------------------------------------------- the recipe

TINY = "--from_scratch hidden_size=16 num_attention_heads=2 intermediate_size=16 num_hidden_layers=1 --max_steps 2"
BEST = "--eval_strategy steps --eval_steps 1 --save_strategy steps --save_steps 1 --load_best_model_at_end true "
BEST += "--metric_for_best_model mae --disable_tqdm true --use_cpu true --filter gfsa"
QUIET = "--eval_strategy no --save_strategy no --load_best_model_at_end false --disable_tqdm true --use_cpu true"


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Run the recipe in a folder and with a cache of its own, and return the record."""
    from recipes import graphs, runs  # which import scikit-learn

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")

    def run(*argv):
        options = [*TINY.split(), *QUIET.split(), "--output_dir", str(tmp_path / "out")]
        runs.main(graphs.RECIPE, ["--config", "graphs/small.yaml", *map(str, argv), *options])
        return json.loads((tmp_path / "out" / "seed-1" / "record.json").read_text())

    return run


def test_recipe_of_graphs_in_json_lines(recipe, tmp_path, capsys):
    """Without edge features in some graphs, with two targets of which one is missing; paths are cached."""
    from recipes import graph_data

    config = config_with(num_labels=2)
    for part in ("train", "valid", "test"):
        graphs = [random_graph(nodes, config, nodes) for nodes in (3, 4, 5)]
        graphs[0]["labels"][1] = np.nan
        lines = [{k: v.tolist() for k, v in graph.items()} for graph in graphs]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    record = recipe("--task", "graphs", "--data", tmp_path)
    assert (record["rows"], record["split"]) == ({"train": 3, "validation": 3, "test": 3}, "given")
    of_targets = [record["metrics"][f"test/target_{i}_mae"] for i in (1, 2)]
    assert record["metrics"]["test/mae"] == pytest.approx(np.mean(of_targets))
    assert {"test/rmse", "validation/mae"} <= record["metrics"].keys()
    assert record["moved"]
    cached = sorted((tmp_path / "cache" / "hf_graphfilter").iterdir())
    assert len(cached) == 3
    cached[0].write_bytes(cached[0].read_bytes()[:-9])
    shutil.rmtree(tmp_path / "out")
    graph_data._prepare.cache_clear()
    assert recipe("--task", "graphs", "--data", tmp_path)["metrics"]["test/mae"] == record["metrics"]["test/mae"]
    assert f"ignored: {cached[0]} cannot be read" in capsys.readouterr().err


def test_a_graph_run_keeps_its_best_checkpoint(recipe, tmp_path, transformers_warnings):
    from recipes import graphs, runs
    from recipes.models import model_config

    assert model_config(SimpleNamespace(model="graphormer", from_scratch=[]), scratch=True).num_hidden_layers > 1
    config = config_with(num_labels=1)
    for part in ("train", "valid", "test"):
        lines = [{k: v.tolist() for k, v in random_graph(n, config, n).items()} for n in (3, 4, 5)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    argv = ["--task", "graphs", "--data", str(tmp_path), *TINY.split(), "--output_dir", str(tmp_path / "out")]
    argv += [*BEST.split(), "--save_total_limit", "4", "--max_steps", "4", "--learning_rate", "0.1"]
    runs.main(graphs.RECIPE, argv)
    transformers_warnings.clear()  # of checkpoints within one second
    folder = tmp_path / "out" / "seed-1"
    state = json.loads((folder / "checkpoint-4" / "trainer_state.json").read_text())
    errors = [row["eval_mae"] for row in state["log_history"] if "eval_mae" in row]
    assert state["best_metric"] == min(errors) < errors[-1], "the best one is not the last one"
    record = json.loads((folder / "record.json").read_text())
    assert record["metrics"]["validation/mae"] == pytest.approx(min(errors), abs=1e-5)
    assert len(filter_status(GraphormerForGraphPrediction.from_pretrained(folder))) == 1
    card = (folder / "README.md").read_text()
    assert "graph-ml" in card
    assert "mae" in card


def test_recipe_of_graphs_leaves_out_what_cannot_be_read(recipe, tmp_path, capsys):
    def write(folder, rows):
        folder.mkdir()
        for part in ("train", "valid", "test"):
            (folder / f"{part}.jsonl").write_text("\n".join(map(json.dumps, rows)))

    good = {"node_features": [1, 2, 1], "edge_index": [[0, 1], [1, 2]], "labels": [0.5, math.nan]}
    bad = ([[1], [1, 2]], [1, 2, math.nan], [1, 2, 10**12], [1, 1e30, 1], [[1, 2]] * 3, 7)
    rows = [{**good, "labels": 0.5}] * 4 + [{**good, "node_features": nodes} for nodes in bad]
    rows += [{**good, "labels": None}, {**good, "labels": [0.5, 1.0]}]
    write(tmp_path / "ragged", rows)
    record = recipe("--task", "graphs", "--data", tmp_path / "ragged", "--held_out", "0.25")
    assert (record["rows"], record["left_out"]) == ({"train": 3, "validation": 1}, {"train": 8})
    assert "8 left out (4: node_features must be" in capsys.readouterr().err
    write(tmp_path / "none", [{**good, "node_features": nodes} for nodes in (["C"] * 3, [])])
    shutil.rmtree(tmp_path / "out")
    with pytest.raises(SystemExit):
        recipe("--task", "graphs", "--data", tmp_path / "none")
    assert "no graph has usable node_features: give whole numbers from 0 to 1,048,575" in capsys.readouterr().err
    write(tmp_path / "unlabelled", [good] * 3)
    with pytest.raises(SystemExit):
        recipe("--task", "graphs", "--data", tmp_path / "unlabelled")
    assert "target 2 has no number in the training part" in capsys.readouterr().err


def test_a_smoke_test_prepares_no_more_graphs_than_it_needs(recipe, tmp_path):
    rows = [{"node_features": [1, n % 3], "edge_index": [[0], [1]], "labels": n} for n in range(30)]
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join(map(json.dumps, [*rows, {"node_features": []}])))
    limits = ("--max_train_samples", "2", "--max_eval_samples", "1", "--filter", "none")
    for options, prepared, left_out in ((["--smoke"], 20, {}), ([], 30, {"train": 1, "validation": 1, "test": 1})):
        shutil.rmtree(tmp_path / "out", ignore_errors=True)
        shutil.rmtree(tmp_path / "cache", ignore_errors=True)
        record = recipe("--task", "graphs", "--data", tmp_path, *limits, *options)
        assert (record["rows"], record["left_out"]) == ({"train": 2, "validation": 1, "test": 1}, left_out)
        cached = (tmp_path / "cache" / "hf_graphfilter").iterdir()
        assert {len(GraphDataset.load(file)) for file in cached} == {prepared}


def test_a_target_that_cannot_be_scored_is_left_out():
    from recipes.graphs import score

    labels = np.array([[1, 1], [0, 1], [np.nan, 1]])
    predictions = np.array([[2.0, 1.0], [-1.0, 2.0], [0.0, 3.0]])
    found = SimpleNamespace(predictions=predictions, label_ids=labels)
    assert score(("roc_auc",), found) == {"roc_auc": 1.0}
    for without in (
        SimpleNamespace(predictions=predictions, label_ids=labels * 0 + 1),
        SimpleNamespace(predictions=predictions * np.nan, label_ids=labels),  # of a model that diverged
    ):
        assert math.isnan(score(("roc_auc",), without)["roc_auc"])


def test_molecules_of_one_scaffold_stay_in_one_part(tmp_path):
    pytest.importorskip("rdkit")
    pd = pytest.importorskip("pandas")
    from recipes.molecules import split_rows

    rings = [f"C1{'C' * n}{end}" for n in range(1, 6) for end in ("C1", "N1")]
    smiles = [chain + ring for chain in ("", "C", "CC") for ring in rings]
    for split in ("random", "scaffold"):
        parts, _ = split_rows(pd.DataFrame({"smiles": smiles}), smiles, split, (), tmp_path)
        assert {part: len(rows) for part, rows in parts.items()} == {"train": 24, "validation": 3, "test": 3}
    assert all(len({row % len(rings) for row in rows}) == len(rows) / 3 for rows in parts.values())
    table = pd.DataFrame({"smiles": smiles, "split": ["train"] * 10 + ["valid"] * 10 + ["test"] * 9 + ["Test"]})
    with pytest.raises(GraphFilterError, match="split is 'Test' in a row, expected train, validation"):
        split_rows(table, smiles, "given", (), tmp_path)
    with pytest.raises(
        GraphFilterError, match="3 rows split by scaffold leave none for the train part: use --split random"
    ):
        split_rows(pd.DataFrame({"smiles": smiles[::10]}), smiles[::10], "scaffold", (), tmp_path)


def test_molecules_that_are_left_out_have_the_row_of_the_table(tmp_path):
    """The rows of a part are in another order."""
    pytest.importorskip("rdkit")
    from recipes.molecules import read_molecules

    rows = ["smiles,y,split", "CO,1,train", "C(,1,train", "CC,,train", "CCO,inf,train", "C,1,valid", "C,1,test"]
    (tmp_path / "mine.csv").write_text("\n".join(rows))
    parts, _ = read_molecules(tmp_path / "mine.csv", "y", "given", (), False)
    kept = GraphDataset(parts["train"](), GraphormerConfig(), on_error="skip")
    assert len(kept) == 1
    reasons = ("2 of the table, 'C(': RDKit reads no", "3 of the table, 'CC': it has no label", "4 of the table, 'CCO'")
    for reason in reasons:
        assert f"row {reason}" in kept.describe_skipped()


@pytest.mark.parametrize("split", ["random", "scaffold"])
def test_recipe_of_a_table_of_molecules(recipe, tmp_path, split, capsys):
    pytest.importorskip("rdkit")
    rings = ("c1ccccc1", "C1CCCCC1", "c1ccncc1", "C1CCCC1", "c1ccoc1")
    rows = [f"{'C' * n}{end},{n % 2}" for n in range(1, 11) for end in ("O", "N", rings[n % 5])]
    (tmp_path / "mine.csv").write_text("\n".join(["smiles,active", *rows, "no molecule,1", ",0", "CCF,"]))
    arguments = ("--task", "molecule-classes", "--data", tmp_path / "mine.csv", "--split", split)
    for wrong, message in (
        ([], "needs --target"),
        (["--target", "activ"], "has no column 'activ'; its columns are 'smiles', 'active'"),
        (["--target", "active", "--bad_graphs", "error"], "--bad_graphs skip leaves such graphs out"),
    ):
        with pytest.raises(SystemExit):
            recipe(*arguments, *wrong)
        assert message in capsys.readouterr().err
    record = recipe(*arguments, "--target", "active", "--filter", "none")
    assert sum(record["rows"].values()) == 30
    assert record["split"] == f"80/10/10, {split}"
    assert "test/roc_auc" in record["metrics"]
    assert "reads no molecule from 'no molecule'" in capsys.readouterr().err


def test_targets_that_are_no_numbers_are_named(recipe, tmp_path, capsys):
    pytest.importorskip("rdkit")
    rows = [f"{'C' * n},{n},{'>9' if n % 4 == 3 else n},active" for n in range(1, 41)]
    (tmp_path / "mine.csv").write_text("\n".join(["smiles,y,z,state", *rows]))
    arguments = ("--task", "molecules", "--data", tmp_path / "mine.csv", "--split", "random", "--target")
    said = "column z: 10 of 40 values are no numbers, the first '>9'"
    for targets, more, message in (
        ("y,state", [], "column state: 40 of 40 values are no numbers, the first 'active': a target is a number"),
        ("y,z", ["--bad_graphs", "error"], said),
    ):
        with pytest.raises(SystemExit):
            recipe(*arguments, targets, *more)
        assert message in capsys.readouterr().err
    recipe(*arguments, "y,z", "--filter", "none")
    assert f"{said}: they count as missing" in capsys.readouterr().err


def test_a_part_with_one_class_is_named(recipe, tmp_path, capsys):
    pytest.importorskip("rdkit")
    parts = ["train"] * 6 + ["valid"] * 2 + ["test"] * 2
    rows = [f"{'C' * n},{int(n in (1, 10))},{part}" for n, part in enumerate(parts, 1)]
    (tmp_path / "mine.csv").write_text("\n".join(["smiles,y,split", *rows]))
    record = recipe("--task", "molecule-classes", "--data", tmp_path / "mine.csv", "--target", "y")
    assert record["split"] == "split of the table"
    said = capsys.readouterr().err
    assert "the validation part has graphs of one class only, and so no ROC-AUC" in said
    assert "the test part" not in said


@pytest.mark.parametrize("part", ["train", "validation", "test"])
def test_a_wrong_class_in_any_part_is_named_before_training(recipe, tmp_path, part, capsys, monkeypatch):
    from recipes import graphs

    pytest.importorskip("rdkit")
    monkeypatch.setattr(graphs, "fit", lambda *arguments, **options: pytest.fail("was trained"))
    parts = ["train"] * 4 + ["validation"] * 4 + ["test"] * 4
    labels = [2 if name == part and n % 4 == 3 else n % 2 for n, name in enumerate(parts)]
    rows = [f"{'C' * (n + 1)},{label},{name}" for n, (label, name) in enumerate(zip(labels, parts, strict=True))]
    (tmp_path / "mine.csv").write_text("\n".join(["smiles,y,split", *rows]))
    with pytest.raises(SystemExit):
        recipe("--task", "molecule-classes", "--data", tmp_path / "mine.csv", "--target", "y")
    assert f"the {part} part has the label 2: yes is 1, no is 0" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("last", "message"),
    [
        ([1], "the test part has 1 labels per graph, and the train part 2"),
        (None, "the test part: these graphs have no labels; without them it cannot be evaluated"),
    ],
)
def test_parts_with_other_numbers_of_labels_are_named_before_training(recipe, tmp_path, capsys, last, message):
    for part, labels in {"train": [1, 0], "valid": [1, 0], "test": last}.items():
        graph = {"node_features": [1, 2], "edge_index": [[0], [1]], "labels": labels}
        (tmp_path / f"{part}.jsonl").write_text("\n".join([json.dumps(graph)] * 3))
    with pytest.raises(SystemExit):
        recipe("--task", "graphs", "--data", tmp_path)
    assert message in capsys.readouterr().err


def test_a_warm_up_that_takes_all_steps_is_named(recipe, tmp_path, capsys):
    from recipes import graphs, runs

    graph = {"node_features": [1, 2], "edge_index": [[0], [1]], "labels": 0.5}
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join([json.dumps(graph)] * 2))
    flags = ["--config", "graphs/small.yaml", *QUIET.split(), "--max_steps", "1"]
    with pytest.raises(SystemExit):
        runs.main(graphs.RECIPE, ["--task", "graphs", "--data", str(tmp_path), *flags])
    assert "--warmup_steps 0.06 leaves no step after the warm-up" in capsys.readouterr().err


def test_a_broken_line_of_json_is_named(recipe, tmp_path, capsys):
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.jsonl").write_text(f"{json.dumps(CHAIN)}\n{{")
    with pytest.raises(SystemExit):
        recipe("--task", "graphs", "--data", tmp_path)
    assert "train.jsonl cannot be read as jsonl: line 2, Expecting property name" in capsys.readouterr().err


def test_the_card_says_that_the_model_was_trained_from_scratch(recipe, tmp_path):
    """Also of the default sizes, for which no flag says so."""
    from recipes import graphs, runs

    graph = {"node_features": [1, 2], "edge_index": [[0], [1]], "labels": 0.5}
    for part in ("train", "valid", "test"):
        (tmp_path / f"{part}.jsonl").write_text("\n".join([json.dumps(graph)] * 2))
    flags = [*QUIET.split(), "--save_strategy", "steps", "--max_steps", "1", "--output_dir", "out"]
    runs.main(graphs.RECIPE, ["--task", "graphs", "--data", str(tmp_path), *flags])
    card = (tmp_path / "out" / "seed-1" / "README.md").read_text()
    assert "Trained from scratch on graphs" in card
    assert "base_model" not in card


def test_a_part_of_an_official_table_is_refused(recipe, tmp_path, capsys):
    pytest.importorskip("rdkit")
    (tmp_path / "data.csv.gz").write_bytes(gzip.compress(b"smiles,homolumogap" + b"\nCC,1" * 20))
    with pytest.raises(SystemExit):
        recipe("--task", "pcqm4mv2", "--data", tmp_path)
    assert "data.csv.gz has 20 rows, and the official split needs 3,452,151: is it the whole" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["zinc12k_graphs.npz", "hiv.csv.gz"])
def test_damaged_files_are_named(recipe, tmp_path, name, capsys):
    pytest.importorskip("rdkit")
    whole = gzip.compress(b"smiles,y" + b"\nC,1" * 1000)
    (tmp_path / name).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SystemExit):
        recipe("--task", name.split(".")[0].split("1")[0], "--data", tmp_path)
    assert f"{name} " in (said := capsys.readouterr().err)
    assert "cannot be read as a table" in said or "is damaged or holds something else" in said


def test_molecules_without_rdkit_say_what_to_install(recipe, tmp_path, monkeypatch, capsys):
    (tmp_path / "mine.csv").write_text("smiles,y\nC,1\n")
    monkeypatch.setitem(sys.modules, "rdkit", None)
    with pytest.raises(SystemExit):
        recipe("--task", "molecules", "--data", tmp_path / "mine.csv", "--target", "y")
    assert "pip install 'hf-graphfilter[graphs]'" in capsys.readouterr().err


@pytest.mark.slow
def test_zinc_is_read_from_its_folder(recipe):
    folder = SHARED / "data" / "zinc12k"
    if not folder.is_dir():
        pytest.skip("ZINC is not here")
    record = recipe("--task", "zinc", "--data", folder, "--max_train_samples", "8", "--max_eval_samples", "4")
    assert record["rows"] == {"train": 8, "validation": 4, "test": 4}


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (("--model", "bert"), "this recipe trains graphormer"),
        (("--split", "half"), "it is one of given, random, scaffold"),
        (("--bad_graphs", "drop"), "it is skip or error"),
        (("--split", "random"), "the parts of zinc are given"),
        (("--target", "gap"), "zinc has one target, y"),
        ((), "--task zinc needs --data, the folder of zinc12k_graphs.npz"),
        (("--task", "pcqm4mv2"), "it is at https://ogb.stanford.edu"),
        (("--task", "zinc-full", "--data", "here"), "read from the Hub: leave out --data"),
        (("--from_scratch", "problem_type=single_label_classification"), "multi_label_classification"),
        (("--from_scratch", "problem_type=multi_label_classification"), "graph-classes have yes/no targets"),
    ],
)
def test_recipe_refuses_what_it_cannot_do(argv, message, capsys):
    from recipes import graphs, runs

    with pytest.raises(SystemExit):
        runs.main(graphs.RECIPE, ["--model", "graphormer", "--task", "zinc", *argv])
    assert message in capsys.readouterr().err
