"""Random calls of the public API: nothing but ``GraphFilterError`` comes out, on one line and in time; a failed call
leaves the model exactly as it was, and one that succeeds gives a model that is filtered and finite.

Each test runs the same few hundred examples every time; ``-m slow`` runs new ones for an hour (HYPOTHESIS_EXAMPLES sets
their number).
"""

import copy
import dataclasses
import fractions
import json
import math
import os
import re
import signal
import time
import typing
from collections import Counter
from contextlib import contextmanager
from functools import partial

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from filters import cases
from hypothesis import HealthCheck, given, settings
from models import FAMILIES
from safetensors.torch import load_file, save_file
from transformers import AutoModel, BertConfig, BertModel

from hf_graphfilter import (
    AGFConfig,
    FilterConfig,
    GFSAConfig,
    GraphFilterError,
    filter_status,
    linearize,
    load_filter,
    patch_model,
    save_filter,
    unpatch_model,
)
from hf_graphfilter.errors import LONGEST
from hf_graphfilter.files import read_state
from hf_graphfilter.fitting import load_conversion, save_conversion
from hf_graphfilter.fitting.checkpoint import EARLIER_FILE, STATE_FILE, Checkpoint
from recipes.checkpoints import last_checkpoint
from recipes.league.records import index_runs
from recipes.records import read_results
from recipes.summary import summarise

SECONDS = 10  # of CPU time, for one call; the slowest that is allowed takes a tenth of it
MANY = int(os.environ.get("HYPOTHESIS_EXAMPLES", 30_000))


outcomes = Counter()  # of the calls, by function


@pytest.fixture(autouse=True)
def recorded(record_property):
    """The numbers of calls, for ``--junitxml FILE -o junit_family=xunit1``."""
    outcomes.clear()
    yield
    for (name, outcome), number in outcomes.items():
        record_property(f"{name}: {outcome}", number)


def examples(quick):
    return pytest.mark.parametrize("count", [quick, pytest.param(MANY, marks=pytest.mark.slow, id="many")])


def fuzz(count, quick, *strategies):
    """Run the decorated function on examples of the strategies, at once."""
    options = {"database": None, "deadline": None, "suppress_health_check": list(HealthCheck)}
    return lambda run: settings(max_examples=count, derandomize=count == quick, **options)(given(*strategies)(run))()


# ---------------------------------------------------------------------------------------------------- invariants


def state_of(model, inputs):
    """All of a model that a failed call could change; the first part compares by ==, the second holds tensors."""
    modules = dict(model.named_modules())
    hooks = ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs", "_forward_hooks", "_backward_hooks")
    kept = [
        *[(name, id(m), type(m), id(getattr(m, "config", None))) for name, m in modules.items()],
        *[[list(getattr(m, hook)) for hook in hooks] for m in modules.values()],
        *[{*(getattr(m, f"_keep_in_fp32_modules{s}", None) or ())} for m in modules.values() for s in ("", "_strict")],
        *[sorted(vars(m)) for m in modules.values()],
        copy.deepcopy(vars(model.config)),
        [id(p) for p in model.parameters()],
        model.training,
    ]
    return kept, {**{k: v.clone() for k, v in model.state_dict().items()}, "output": output(model, inputs)}


def same(one, other):
    return one[0] == other[0] and all(torch.equal(x, other[1][k]) for k, x in one[1].items())


def output(model, inputs):
    with torch.no_grad():
        return model(**inputs)[0]


@contextmanager
def in_time():
    def stop(*_):
        raise AssertionError("the call hangs")

    start = time.process_time()
    alarms = hasattr(signal, "SIGALRM")  # not on Windows
    if alarms:
        earlier = signal.signal(signal.SIGALRM, stop)
        signal.alarm(12 * SECONDS)
    try:
        yield
    finally:
        if alarms:
            signal.alarm(0)
            signal.signal(signal.SIGALRM, earlier)
    assert time.process_time() - start < SECONDS


def attempt(call, *arguments, other=(), **options):
    """(whether it succeeded, what it returned); every exception but ours, and those of ``other``, is a failure."""
    name = call.__name__
    try:
        with in_time():
            found = call(*arguments, **options)
    except GraphFilterError as error:
        message = str(error)
        assert len(message) <= LONGEST
        assert message.splitlines() == [message]
        outcomes[name, "refused"] += 1
        return False, None
    except other as error:
        outcomes[name, type(error).__name__] += 1
        return False, None
    outcomes[name, "done"] += 1
    return True, found


# -------------------------------------------------------------------------------------------------------- values


class Hostile:
    """An object whose every question fails."""

    def __repr__(self):
        raise RuntimeError("no repr")

    def _repr_pretty_(self, printer, cycle):  # for hypothesis, where an example fails
        printer.text("Hostile()")

    __eq__ = __hash__ = __bool__ = __len__ = __iter__ = __index__ = __float__ = __fspath__ = __str__ = __repr__


class Unregistered(GFSAConfig):
    """Inherits a registered name."""


ODD = [
    *(None, True, False, 0, 1, -1, 7, 10**7, 10**30, -(10**30), 10**400, 10**5000, 1.0, -0.0, 1e39, -1e200, 1e-320),
    *(math.nan, math.inf, -math.inf, 1j, fractions.Fraction(1, 3), fractions.Fraction(10**400), ..., object()),
    *("", "K", "gfsa", "even", "w_K", "x" * 20_000, "a\nb\0c", "\ud800", b"\0\1", bytearray(b"\1"), memoryview(b"\0")),
    *([], [0], [1, 1], [True], ["w_K"], (), (1,), {}, {1: 2}, {0}, {"K": 3}, [[[[]]]], [math.nan], [10**5000]),
    *(range(2), range(10**9), range(10**30), slice(None), slice(0, 2, 0), slice("a"), slice(10**30), iter([0])),
    *(np.arange(3), np.zeros((2, 2)), np.array(1), np.int64(1), np.float32(0.5), np.float64(math.nan), np.bool_(True)),
    *(np.longdouble("1e4000"), np.str_("taylor"), np.datetime64("2026-01-01"), np.array(["even"])),
    *(torch.arange(2), torch.ones(2, 2), torch.tensor(1), torch.tensor(True), torch.empty(2, device="meta")),
    *(int, dict, len, print, lambda: True, lambda i: True, lambda i, name: i, lambda i, name: np.ones(2)),
    *(lambda i, name: 1 / 0, lambda i, name: torch.ones(2), lambda i, name: Hostile(), Hostile, Hostile()),
    *(GFSAConfig, GFSAConfig(), AGFConfig(window=2), FilterConfig, FilterConfig(), Unregistered()),
]
odd = st.sampled_from(range(len(ODD))).map(ODD.__getitem__)
numbers = st.floats(-2, 2).map(lambda x: round(x, 3))
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**40), 10**40) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)

CONFIGS = {entry.config.filter: type(entry.config) for _, entry in cases()}


def strategies(config_class):
    """For each option values that are valid by themselves."""
    hints = {field.name: typing.get_type_hints(config_class)[field.name] for field in dataclasses.fields(config_class)}
    by_type = {
        int: st.integers(0, 6) | st.sampled_from([1000, 2048, 1_000_000]),
        float: numbers | st.floats(-200, 200),
        bool: st.booleans(),
        tuple[str, ...]: st.lists(st.sampled_from([*hints]), max_size=3),
    }

    def valid(name, value):
        try:
            return bool(config_class(**{name: value}))
        except GraphFilterError:
            return False

    return {
        name: (by_type[hint] if hint in by_type else st.sampled_from(typing.get_args(hint))).filter(
            partial(valid, name)
        )
        for name, hint in hints.items()
    }


OPTIONS = {name: strategies(config_class) for name, config_class in CONFIGS.items()}


@st.composite
def options_of(draw, name):
    """Options of a filter: valid ones, now and then with an odd value or name among them."""
    found = draw(st.fixed_dictionaries({}, optional=OPTIONS[name]))
    if draw(st.integers(0, 4)) == 4:
        found[draw(st.sampled_from([*OPTIONS[name], "k", "cls", "self", "x" * 20_000]))] = draw(odd)
    return found


usual = [None, "even", "odd", [-1, 0], [1], slice(1, None), (1,), {0, 1}, np.arange(2), lambda i, name: i < 1]
layers = st.one_of(
    *[st.sampled_from(usual)] * 4,
    odd,
    st.lists(st.integers(-3, 4) | odd, max_size=3),
    st.builds(slice, odd, odd, odd),
    odd.map(lambda result: lambda i, name: result),
)


@st.composite
def patches(draw):
    """Arguments of ``patch_model``."""
    name = draw(st.sampled_from([*CONFIGS] * 3 + ["odd"]))
    found = {"filter": name, **draw(options_of(name))} if name != "odd" else {"filter": draw(odd | st.text(max_size=8))}
    if draw(st.booleans()):
        found["layers"] = draw(layers)
    if draw(st.integers(0, 5)) == 5:
        found["stack"] = draw(st.sampled_from(["encoder", "decoder"]) | odd)
    return found


@st.composite
def mutations(draw):
    """What is done to a JSON document: (seed of the place, change, value), once to three times."""
    change = st.sampled_from(["replace", "remove", "add", "rename", "repeat"])
    value = json_values | st.sampled_from([*CONFIGS, 1, 2, [], {}, 10**30, math.nan, 1e39, True])
    return draw(st.lists(st.tuples(st.integers(0, 99), change, value), min_size=1, max_size=3))


def mutated(document, changes):
    document = {"": copy.deepcopy(document)}
    for place, change, value in changes:
        value, places = copy.deepcopy(value), list(_places(document))
        parent, key = places[place % len(places)]
        if change == "replace":
            parent[key] = value
        elif change == "remove" and parent is not document:
            del parent[key]
        elif change == "add":
            parent[key] = {**parent[key], "new": value} if isinstance(parent[key], dict) else [parent[key], value]
        elif change == "rename" and isinstance(parent, dict) and parent is not document:
            parent[f"{key}x"] = parent.pop(key)
        elif change == "repeat" and isinstance(parent, list):
            parent.append(copy.deepcopy(parent[key]))
    return document[""]


def _places(node):
    keys = node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
    for key in keys:
        yield node, key
        yield from _places(node[key])


@st.composite
def damaged(draw):
    """What is done to the tensors of a filter: (number of the tensor, change)."""
    dtypes = [torch.int64, torch.bool, torch.complex64, torch.float64, torch.bfloat16, torch.uint8, torch.float8_e4m3fn]
    change = st.one_of(
        st.sampled_from([math.nan, math.inf, -math.inf, 1e39, 0.5]),
        st.sampled_from(dtypes),
        st.sampled_from([(), (0,), (1,), (2, 2)]),
        st.sampled_from(["remove", "rename", "add"]),
    )
    return draw(st.lists(st.tuples(st.integers(0, 9), change), max_size=2))


def damage(tensors, changes):
    tensors = dict(tensors)
    names = [k for k in sorted(tensors) if re.search(r"graph_filter\.[^.]+$", k)] or sorted(tensors)
    for number, change in changes:
        name = names[number % len(names)]
        x = tensors.get(name, torch.zeros(2))
        if isinstance(change, float):
            tensors[name] = torch.full(x.shape, change, dtype=torch.float64 if change == 1e39 else torch.float32)
        elif isinstance(change, torch.dtype):
            tensors[name] = torch.ones(x.shape).to(change)
        elif isinstance(change, tuple):
            tensors[name] = torch.ones(change)
        elif change == "add":
            tensors[f"{name}x"] = torch.ones(2)
        else:
            tensors.pop(name, None)
            tensors |= {f"y.{name}": x} if change == "rename" else {}
    return tensors


# --------------------------------------------------------------------------------------------------------- tests


@examples(50)
def test_configs(count):
    @fuzz(count, 50, st.sampled_from([*CONFIGS]).flatmap(options_of), mutations(), odd)
    def run(options, changes, value):
        for config in CONFIGS.values():
            done, made = attempt(config.from_options, **options)
            document = (made if done else config()).to_dict()
            assert not done or FilterConfig.from_dict(json.loads(json.dumps(document))) == made
            for data in (mutated(document, changes), {**document, "K": value}, {**document, 1: 2}, value):
                attempt(FilterConfig.from_dict, data)


OTHER_BASE = pytest.mark.filterwarnings("ignore:.* was trained on a base with other weights")


@OTHER_BASE
@pytest.mark.parametrize("family", ["bert", "gpt2", "t5"])
@examples(30)
def test_calls_on_a_model(family, count, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # odd paths may be relative
    (tmp_path / "file").touch()
    family = FAMILIES[family]
    inputs = family.inputs(tokens=5)
    save_filter(patch_model(family.build()), tmp_path / "saved")
    paths = st.sampled_from([None, 3, b"x", "", "file", "file/x", "a" * 5000, "a\0b", "\ud800", "new", "saved", "x/y"])
    verbs = st.one_of(
        st.tuples(st.just(patch_model), patches()),
        st.sampled_from([(unpatch_model, {}), (filter_status, {})]),
        st.tuples(st.just(save_filter), st.fixed_dictionaries({"directory": paths})),
        st.tuples(st.just(load_filter), st.fixed_dictionaries({"source": paths | odd})),
    )

    @fuzz(count, 30, st.booleans(), st.lists(verbs, min_size=1, max_size=4))
    def run(patched, calls):
        model = family.build()
        plain = before = state_of(model, inputs)
        if patched:
            before = state_of(patch_model(model, layers=[0]), inputs)
        for call, arguments in calls:
            unwritable = (OSError,) if call is save_filter else ()
            done, _ = attempt(call, model, **arguments, other=unwritable)
            after = state_of(model, inputs)
            if not done or call in (save_filter, filter_status):
                assert same(after, before)
            elif call is unpatch_model:
                assert same(after, plain)
            else:
                assert filter_status(model)
                if any(abs(v) > 1e6 for k, v in arguments.items() if k[:2] == "w_"):
                    return  # numbers that were asked for, and no sum of them need be finite
                assert after[1]["output"].isfinite().all()
            before = after


@examples(50)
def test_edited_checkpoints(count, tmp_path, transformers_warnings):
    family = FAMILIES["bert"]
    inputs = family.inputs(tokens=5)
    model = patch_model(family.build(num_hidden_layers=2), "gfsa", layers=[0], K=4)
    patch_model(model, "agf", layers=[1], window=3).save_pretrained(tmp_path)
    config, tensors = json.loads((tmp_path / "config.json").read_text()), load_file(tmp_path / "model.safetensors")

    @fuzz(count, 50, st.just([]) | mutations(), damaged())
    def run(changes, damages):
        edited = {**config, "graph_filter": mutated(config["graph_filter"], changes)}
        (tmp_path / "config.json").write_text(json.dumps(edited))
        save_file(damage(tensors, damages), tmp_path / "model.safetensors", metadata={"format": "pt"})
        done, found = attempt(AutoModel.from_pretrained, tmp_path)
        transformers_warnings.clear()  # it names the tensors
        if done:
            assert [row.module for row in filter_status(found)] == [row.module for row in filter_status(model)]
            assert output(found, inputs).isfinite().all()


@pytest.mark.filterwarnings("ignore:progress is ignored")
@examples(80)
def test_damaged_state(count, tmp_path, capfd):
    """Of a fit, a conversion, a run, a comparison and a league: the newest that is whole, or refused."""
    inputs = {"input_ids": torch.arange(20).view(2, 10)}
    config = BertConfig(vocab_size=20, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    options = {"budget": 60, "holdout": 1, "evaluations": 1, "window": 2, "progress": False, "checkpoint": tmp_path}
    model = BertModel(config)
    save_conversion(model, linearize(model, [inputs] * 3, **options), tmp_path)
    state, report = tmp_path / "attention" / STATE_FILE, tmp_path / "conversion.json"
    data, (content, tensors), reported = state.read_bytes(), read_state(state), json.loads(report.read_text())
    checkpoint = Checkpoint(state.parent, content["settings"])
    run_of = {"task": "x", "variant": "plain", "seed": 1, "rate": 1.0, "settings": {}, "metrics": {"validation/x": 1.0}}
    results = {"runs": [run_of], "variants": {"plain": {}}, "model": "x", "metric": "validation/x", "summary": {}}
    (tmp_path / "checkpoint-3").mkdir()
    kinds = {"conversion.json": reported, "results.json": results, f"attention/{EARLIER_FILE}": content}
    kinds["checkpoint-3/trainer_state.json"] = {"global_step": 3, "log_history": []}
    texts = st.sampled_from(["", "{", "[]", "nul", "[" * 100_000, "9" * 5000, "\ufeff", "\0" * 20])
    bits = st.integers(0, len(data)) | st.tuples(st.integers(0, len(data) - 1), st.binary(min_size=1, max_size=9))

    def read():
        if found := checkpoint.read():
            progress, _ = found
            assert all(0 <= progress[name] <= 10**9 for name in ("step", "earlier_steps", "stale"))
            assert progress["step"] == content["step"]

    def runs_of(file):
        found = read_results(file, metrics=dict[str, float])
        index_runs(found)
        return summarise({"variants": {}, **found, "metric": "validation/x"})  # as a comparison has it

    @fuzz(count, 80, texts | mutations(), bits)
    def run(changes, damages):
        documents = {name: mutated(x, changes) if isinstance(changes, list) else changes for name, x in kinds.items()}
        for name, document in documents.items():
            text = document if isinstance(document, str) else json.dumps(document)
            (tmp_path / name).write_text(text, encoding="utf-8")
        attempt(load_conversion, tmp_path)
        attempt(runs_of, tmp_path / "results.json")
        attempt(last_checkpoint, tmp_path)
        save_file(tensors, state)  # beside it the JSON of earlier code
        attempt(read)
        new = data[:damages] if isinstance(damages, int) else data[: damages[0]] + damages[1] + data[damages[0] + 1 :]
        state.write_bytes(new)
        (state.parent / EARLIER_FILE).unlink()
        attempt(read)
        assert new == data or checkpoint.read() is None

    capfd.readouterr()  # what was left out of runs


@OTHER_BASE
@examples(80)
def test_damaged_filter_files(count, tmp_path):
    family = FAMILIES["bert"]
    inputs = family.inputs(tokens=5)
    patched = patch_model(patch_model(family.build(), "gfsa", layers=[0, 2], K=4), "agf", layers=[1], correction=True)
    save_filter(patched, tmp_path)
    description, weights = tmp_path / "graph_filter.json", tmp_path / "graph_filter.safetensors"
    good, tensors, data = json.loads(description.read_text()), load_file(weights), weights.read_bytes()
    texts = ["", "{", "[]", "nul", "[" * 100_000, '{"a":' * 100_000, '{"version": 1}', "9" * 5000, "\ufeff"]
    documents = st.just([]) | mutations() | st.sampled_from(texts)
    header = int.from_bytes(data[:8], "little")
    files = damaged() | st.tuples(st.integers(0, header + 64), st.binary(max_size=9)) | st.integers(0, len(data))

    @fuzz(count, 80, documents, files, st.booleans())
    def run(changes, damages, onto_patched):
        description.write_text(changes if isinstance(changes, str) else json.dumps(mutated(good, changes)))
        if isinstance(damages, list):
            save_file(damage(tensors, damages), weights)
        elif isinstance(damages, tuple):
            place, new = damages
            weights.write_bytes(data[:place] + new + data[place + len(new) :])
        else:
            weights.write_bytes(data[:damages])
        model = copy.deepcopy(patched) if onto_patched else family.build()
        before = state_of(model, inputs)
        done, _ = attempt(load_filter, model, tmp_path)
        if done:
            assert len(filter_status(model)) == 3
            assert output(model, inputs).isfinite().all()
        else:
            assert same(state_of(model, inputs), before)


@pytest.mark.filterwarnings("ignore:Found missing adapter keys", "ignore:.is_gradient_checkpointing:FutureWarning")
@examples(40)
def test_damaged_adapters(count, tmp_path):
    """What an adapter says of the filter, in its configuration and in its weights."""
    peft = pytest.importorskip("peft")
    family = FAMILIES["llama"]
    inputs, base = family.inputs(tokens=5), family.build()
    options = {"target_modules": ["q_proj"], "modules_to_save": ["graph_filter"]}
    peft.get_peft_model(patch_model(copy.deepcopy(base), K=4), peft.LoraConfig(**options)).save_pretrained(tmp_path)
    config, weights = tmp_path / "adapter_config.json", tmp_path / "adapter_model.safetensors"
    good, tensors = json.loads(config.read_text()), load_file(weights)
    ours = {key: tensor for key, tensor in tensors.items() if "graph_filter" in key}
    texts = st.sampled_from(["", "[]", 3, None, {}, {"version": 1}])

    @fuzz(count, 40, texts | mutations(), damaged() | st.just([]))
    def run(changes, damages):
        record = mutated(good["graph_filter"], changes) if isinstance(changes, list) else changes
        config.write_text(json.dumps({**good, "graph_filter": record}))
        save_file({**{k: x for k, x in tensors.items() if k not in ours}, **damage(ours, damages)}, weights)
        model = copy.deepcopy(base)
        before = state_of(model, inputs)
        done, found = attempt(peft.PeftModel.from_pretrained, model, tmp_path)
        if not done:
            assert same(state_of(model, inputs), before)
        elif filter_status(found):
            assert output(found, inputs).isfinite().all()
