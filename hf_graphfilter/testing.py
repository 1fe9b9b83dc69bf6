"""``check_filter``: whether a filter, of this package or anybody's, does all that the package promises of filters.

It runs on tiny models with random weights, made here: an encoder, a causal decoder with grouped keys, an
encoder-decoder and a vision model. Nothing is downloaded.
"""

from __future__ import annotations

import contextlib
import copy
import json
import pickle
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn
from torch.autograd.gradcheck import GradcheckError
from torch.func import functional_call
from transformers.utils import logging as transformers_logging

from .checkpoints.filter_file import load_filter, save_filter
from .errors import GraphFilterError
from .filters import AttentionSite, FilterConfig, GraphFilter, as_config
from .filters.attached import patched_modules
from .filters.build import build_filter
from .patching import patch_model, unpatch_model
from .shift import AttentionShift, DenseShift, repeat_heads
from .status import filter_parameters, text_table
from .training.blend import set_blend

# Models run in float64, but a filter may compute in float32: its rounding, grown over two layers of attention far from
# uniform. What the checks look for changes outputs in the first digits.
TOLERANCE = 1e-5
TOKENS = 9


@dataclass(frozen=True)
class CheckRow:
    """One check: its name, how it ended, and in one sentence why it failed or does not apply."""

    check: str
    outcome: Literal["passed", "failed", "does not apply"]
    detail: str = ""


class FilterReport(list[CheckRow]):
    """Rows of ``check_filter``; prints as a table."""

    @property
    def failures(self) -> list[CheckRow]:
        return [row for row in self if row.outcome == "failed"]

    def __str__(self) -> str:
        return text_table(["check", "outcome", "detail"], [[row.check, row.outcome, row.detail] for row in self])


def check_filter(
    filter: str | FilterConfig,
    *,
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor] | None = None,
    only: Collection[str] | None = None,
    raise_on_failure: bool = True,
    **options: Any,
) -> FilterReport:
    """Run a filter through models, explicit matrices, decoding, files, copies and the compiler: some seconds.

    Random numbers are afterwards as they were; what ``torch.compile`` has compiled so far is forgotten.

    Args:
        filter: name of a registered filter, or its config object.
        formula: the filter as an explicit matrix, ``formula(A, coefficients) -> H``: A and H (batch, heads, tokens,
            tokens) in float64, coefficients as ``GraphFilter.coefficients`` gives them. The filter must then compute
            ``H @ value``.
        only: names of checks to run; ``config``, ``patching`` and ``forward``, which all others build on, are always
            run.
        raise_on_failure: raise if a check fails.
        **options: options of the filter, when it is given by name.

    Returns:
        ``FilterReport``, a row for each check: passed, failed, or does not apply, and why.

    Raises:
        GraphFilterError: an unknown filter, option or check; a check failed (all are named).

    Example:
        >>> report = check_filter("gfsa", K=2, only=["causality"])
        >>> report[-1]
        CheckRow(check='causality', outcome='passed', detail='')
    """
    config = as_config(filter, **options)
    if unknown := {*(only or ())} - {check.name for check in _CHECKS}:
        raise GraphFilterError(
            f"no check {min(unknown)!r}; the checks are {', '.join(check.name for check in _CHECKS)}"
        )
    report = FilterReport()
    with _undisturbed(), tempfile.TemporaryDirectory() as folder:
        trial = _Trial(config, formula, Path(folder))
        stopped = ""
        for check in _CHECKS:
            if stopped:
                report.append(CheckRow(check.name, "does not apply", f"not run, since {stopped} failed"))
            elif check.basic or only is None or check.name in only:
                report.append(trial.run(check))
                stopped = check.name if check.basic and report[-1].outcome == "failed" else ""
    if report.failures and raise_on_failure:
        found = "; ".join(f"{row.check} ({row.detail})" for row in report.failures)
        raise GraphFilterError(f"{type(config).__name__} fails {len(report.failures)} of {len(report)} checks: {found}")
    return report


# -------------------------------------------------------------------------------------------------------- models


@dataclass(frozen=True)
class _Family:
    """A tiny model; kind: encoder, decoder, encoder-decoder or vision."""

    name: str
    kind: str
    model_class: Any
    config: Any

    def build(self, dtype: torch.dtype = torch.float64) -> Any:
        """The model, the same at each call."""
        torch.manual_seed(0)
        model = self.model_class(copy.deepcopy(self.config)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(4)  # attention far from uniform, so that errors show
        return model.to(dtype)

    def inputs(self, dtype: torch.dtype = torch.float64, tokens: int = TOKENS) -> dict[str, Tensor]:
        g = torch.Generator().manual_seed(1)
        if self.kind == "vision":
            return {"pixel_values": torch.randn(2, 3, 16, 16, generator=g).to(dtype)}
        ids = torch.randint(5, 99, (2, TOKENS), generator=g)[:, :tokens]
        given = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        return {**given, "decoder_input_ids": ids.flip(1)} if self.kind == "encoder-decoder" else given


def _families() -> list[_Family]:
    t = transformers
    sizes: Any = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
    no_dropout: Any = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    bart: Any = {"vocab_size": 99, "d_model": 32, "dropout": 0.0, "attention_dropout": 0.0}
    for stack in ("encoder", "decoder"):
        bart |= {f"{stack}_layers": 2, f"{stack}_attention_heads": 4, f"{stack}_ffn_dim": 48}
    return [
        _Family("BERT", "encoder", t.BertModel, t.BertConfig(vocab_size=99, **sizes, **no_dropout)),
        _Family("Llama", "decoder", t.LlamaModel, t.LlamaConfig(vocab_size=99, **sizes, num_key_value_heads=2)),
        _Family("BART", "encoder-decoder", t.BartModel, t.BartConfig(**bart)),
        _Family("ViT", "vision", t.ViTModel, t.ViTConfig(**sizes, **no_dropout, image_size=16, patch_size=4)),
    ]


def _output(model: Any, inputs: dict[str, Tensor], **further: Any) -> Tensor:
    with torch.no_grad():
        return model(**inputs, **further).last_hidden_state  # type: ignore[no-any-return]


def _filters(model: nn.Module) -> list[GraphFilter]:
    return [module.graph_filter for _, module in patched_modules(model)]


def _turn_on(module: nn.Module, scale: float = 0.3) -> None:
    """Move all parameters of filters away from their start values."""
    g = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for part in module.modules():
            if isinstance(part, GraphFilter):
                for parameter in part.parameters():
                    parameter.add_(torch.randn(parameter.shape, generator=g, dtype=torch.float32) * scale)
    with contextlib.suppress(GraphFilterError):  # no blend
        set_blend(module, 0.5)


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """Random numbers and progress bars are afterwards as they were."""
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        if bars:
            transformers_logging.enable_progress_bar()


@contextlib.contextmanager
def _memory_holds_nan() -> Iterator[None]:
    """What ``torch.empty`` gives."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


# -------------------------------------------------------------------------------------------------------- running


class _Failed(Exception):
    """The message says in a sentence what is wrong."""


class _DoesNotApply(Exception):
    """The message says why."""


@dataclass(frozen=True)
class _Check:
    name: str
    run: Callable[[_Trial, _Family], str | None]
    kinds: tuple[str, ...]  # of models; none: it needs no model
    basic: bool


_CHECKS: list[_Check] = []
_ALL = ("encoder", "decoder", "encoder-decoder", "vision")
_DECODERS = ("decoder", "encoder-decoder")


def _check(name: str, *kinds: str, basic: bool = False) -> Callable[[Any], Any]:
    def register(run: Any) -> Any:
        _CHECKS.append(_Check(name, run, kinds, basic))
        return run

    return register


@dataclass
class _Trial:
    config: FilterConfig
    formula: Callable[[Tensor, dict[str, Tensor]], Tensor] | None
    folder: Path
    families: list[_Family] = field(default_factory=_families)
    refused: dict[str, str] = field(default_factory=dict)

    def patched(self, family: _Family, dtype: torch.dtype = torch.float64, scale: float = 0.3) -> Any:
        model = patch_model(family.build(dtype), self.config)
        _turn_on(model, scale)
        return model

    def run(self, check: _Check) -> CheckRow:
        families = [f for f in self.families if f.kind in check.kinds or not check.kinds]
        details, reasons = [], []
        for family in families[: None if check.kinds else 1]:
            prefix = f"{family.name}: " if check.kinds else ""
            try:
                details.append(check.run(self, family))
            except _DoesNotApply as error:
                reasons.append(str(error))
            except (_Failed, GraphFilterError) as error:
                return CheckRow(check.name, "failed", prefix + _one_line(error))
            except Exception as error:
                return CheckRow(check.name, "failed", f"{prefix}{type(error).__name__}: {_one_line(error)}")
        if details:
            return CheckRow(check.name, "passed", "; ".join(dict.fromkeys(d for d in details if d)))
        return CheckRow(check.name, "does not apply", reasons[0] if reasons else "no model of this kind takes it")


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _equal(found: Tensor, expected: Tensor, complaint: str, tolerance: float = TOLERANCE) -> None:
    """Fail with ``complaint`` where the largest difference, relative to the largest entry, exceeds ``tolerance``."""
    error = ((found - expected).abs().max() / expected.abs().max()).item()
    if not error <= tolerance:  # NaN too
        raise _Failed(f"{complaint} (relative difference {error:.1e}, allowed {tolerance:.0e})")


def _state(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of all filters."""
    return {
        f"{name}.{key}": tensor
        for name, module in patched_modules(model)
        for key, tensor in (*module.graph_filter.named_parameters(), *module.graph_filter.named_buffers())
    }


def _fill(model: nn.Module) -> None:
    for tensor in _state(model).values():
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)


def _all_set(model: nn.Module, complaint: str) -> None:
    for name, tensor in _state(model).items():
        if not tensor.isfinite().all():
            raise _Failed(f"{complaint} {name.split('graph_filter.')[-1].rpartition('.')[2]}, at {name}")


# --------------------------------------------------------------------------------------------------------- checks


@_check("config", basic=True)
def _config(trial: _Trial, _: _Family) -> None:
    config = trial.config
    try:
        written = json.dumps(config.to_dict())
    except TypeError as error:
        raise _Failed(f"its options cannot be written as JSON: {error}") from error
    if FilterConfig.from_dict(json.loads(written)) != config:
        raise _Failed(f"{config!r} is not what is read back from {written}")


@_check("patching", basic=True)
def _patching(trial: _Trial, _: _Family) -> str:
    refused: dict[str, Exception] = {}
    for family in trial.families:
        try:
            patch_model(family.build(), trial.config)
        except GraphFilterError as error:
            refused[family.name] = error
    if len(refused) == len(trial.families):
        raise next(iter(refused.values()))
    trial.families = [f for f in trial.families if f.name not in refused]
    return "; ".join(f"not in {name}: {_one_line(error)}" for name, error in refused.items())


@_check("start values", *_ALL)
def _start_values(trial: _Trial, family: _Family) -> None:
    with _memory_holds_nan():
        model = patch_model(family.build(), trial.config)
    _all_set(model, "__init__ leaves uninitialised memory (call reset_parameters at its end) in")
    _fill(model)
    for graph_filter in _filters(model):
        graph_filter.reset_parameters()
    _all_set(model, "reset_parameters does not set")


@_check("meta", *_ALL)
def _meta(trial: _Trial, family: _Family) -> None:
    """As ``from_pretrained`` builds a model."""
    with torch.device("meta"):
        model = patch_model(family.model_class(copy.deepcopy(family.config)), trial.config)
    expected, found = {*_state(patch_model(family.build(), trial.config))}, {*_state(model)}
    if expected != found:
        raise _Failed(
            f"built on the meta device the filter has other parameters and buffers: {sorted(expected ^ found)}"
        )
    model.to_empty(device="cpu")
    _fill(model)
    for graph_filter in _filters(model):
        graph_filter.reset_parameters()
    _all_set(model, "after it was built on the meta device, reset_parameters does not set")


@_check("forward", *_ALL, basic=True)
def _forward(trial: _Trial, family: _Family) -> None:
    model = trial.patched(family)
    versions: list[int] = []
    for graph_filter in _filters(model):
        graph_filter.register_forward_pre_hook(lambda _, args: versions.append(args[1]._version))
        graph_filter.register_forward_hook(lambda _, args, out: versions.append(args[1]._version))
    if not _output(model, family.inputs()).isfinite().all():
        raise _Failed("its output is not finite")
    if versions[::2] != versions[1::2]:
        raise _Failed("forward changes the value in place, which the model and its cache hold too")


@_check("starts as the original", *_ALL)
def _starts_as_original(trial: _Trial, family: _Family) -> None:
    if not trial.config.starts_as_original:
        raise _DoesNotApply("its config says that it does not (starts_as_original)")
    found = _output(patch_model(family.build(), trial.config), family.inputs())
    _equal(found, _output(family.build(), family.inputs()), "right after patching the model is not the original")


def _observe(trial: _Trial, family: _Family, see: Callable[[GraphFilter, DenseShift, Tensor, Tensor], None]) -> None:
    """Call ``see(filter, the shift as an explicit matrix, value, output)`` at each layer of a padded batch."""

    def hook(graph_filter: GraphFilter, args: tuple[AttentionShift, Tensor], out: Tensor) -> None:
        shift, value = args
        if isinstance(shift, DenseShift):  # called by ``see``
            return
        dense = shift.dense()
        seen = ("hidden", "query", "key", "scaling", "visible", "state")
        vars(dense).update({name: getattr(shift, name) for name in seen})
        see(graph_filter, dense, value, out)

    model, inputs = trial.patched(family), family.inputs()
    if "attention_mask" in inputs:
        inputs["attention_mask"][1, 6:] = 0
    for graph_filter in _filters(model):
        graph_filter.register_forward_hook(hook)  # type: ignore[arg-type]
    _output(model, inputs)


@_check("explicit matrix", *_ALL)
def _explicit_matrix(trial: _Trial, family: _Family) -> None:
    def compare(graph_filter: GraphFilter, dense: DenseShift, value: Tensor, out: Tensor) -> None:
        _equal(out, _on_matrix(graph_filter, dense, value), "S through the model's attention and S as a matrix differ")

    _observe(trial, family, compare)


def _on_matrix(graph_filter: GraphFilter, dense: DenseShift, value: Tensor) -> Tensor:
    try:
        return graph_filter(dense, value)
    except (GraphFilterError, AttributeError) as error:  # its forward on an AttentionShift did not raise
        raise _DoesNotApply(f"the filter is no function of a matrix: {_one_line(error)}") from error


@_check("formula", *_ALL)
def _formula(trial: _Trial, family: _Family) -> None:
    formula = trial.formula
    if formula is None:
        raise _DoesNotApply("no formula was given")

    def compare(graph_filter: GraphFilter, dense: DenseShift, value: Tensor, out: Tensor) -> None:
        expected = formula(dense.matrix, graph_filter.coefficients()) @ repeat_heads(value, graph_filter.heads)
        _equal(out, expected, "forward and formula differ")

    _observe(trial, family, compare)


@_check("values a head", "encoder")
def _values_a_head(trial: _Trial, family: _Family) -> None:
    """As tensor parallelism splits the heads."""
    if not trial.config.module.per_head:
        raise _DoesNotApply("it names none (per_head), and tensor parallelism will refuse it")

    def compare(graph_filter: GraphFilter, dense: DenseShift, value: Tensor, out: Tensor) -> None:
        _on_matrix(graph_filter, dense, value)
        dense.matrix = dense.matrix[:, 2:]
        own = {name: getattr(graph_filter, name)[2:] for name in graph_filter.per_head}
        found = functional_call(graph_filter, own, (dense, value[:, 2:]))
        _equal(
            found, out[:, 2:], "half of the heads with half of the values of per_head do not give half of the output"
        )

    _observe(trial, family, compare)


@_check("gradients", *_ALL)
def _gradients(trial: _Trial, family: _Family) -> None:
    model = trial.patched(family)
    if not any(p.requires_grad for p in filter_parameters(model)):
        raise _DoesNotApply("it has no parameters")
    out = model(**family.inputs()).last_hidden_state
    out.backward(torch.randn(out.shape, dtype=out.dtype))
    learns: dict[str, bool] = {}
    for graph_filter in _filters(model):  # a decoder's layer may be without influence, all together are not
        for name, p in graph_filter.named_parameters():
            if p.grad is not None and not p.grad.isfinite().all():
                raise _Failed(f"the gradient of {name} is not finite")
            if p.requires_grad:
                learns[name] = learns.get(name, False) or (p.grad is not None and bool(p.grad.any()))
    if not all(learns.values()):
        raise _Failed(f"{', '.join(n for n, found in learns.items() if not found)} gets no gradient")


@_check("finite differences")
def _finite_differences(trial: _Trial, _: _Family) -> None:
    heads, tokens, features = 2, 4, 3
    width = heads * features
    place = nn.Linear(width, width)
    site = AttentionSite("small", place, heads, False, "encoder", "", 0, hidden_size=width, head_dim=features)
    graph_filter = build_filter(trial.config, site).double().eval()
    _turn_on(graph_filter)
    torch.manual_seed(0)
    signals = [torch.randn(1, heads, tokens, features, dtype=torch.float64) for _ in range(3)]
    inputs = [*signals, torch.randn(1, tokens, width, dtype=torch.float64)]
    names = [name for name, p in graph_filter.named_parameters() if p.requires_grad]
    values = [p.detach().clone() for p in graph_filter.parameters() if p.requires_grad]

    def run(query: Tensor, key: Tensor, value: Tensor, hidden: Tensor, *parameters: Tensor) -> Tensor:
        matrix = (query @ key.mT).softmax(-1)
        shift = AttentionShift(lambda _, signal: ((matrix @ signal).transpose(1, 2), matrix), query, key)
        shift.hidden = hidden
        return functional_call(graph_filter, dict(zip(names, parameters, strict=True)), (shift, value))  # type: ignore[no-any-return]

    try:
        torch.autograd.gradcheck(run, [x.requires_grad_() for x in (*inputs, *values)], fast_mode=True)
    except GradcheckError as error:
        raise _Failed(f"its gradients are not those of its output in float64: {_one_line(error)[:120]}") from error


@_check("causality", *_DECODERS)
def _causality(trial: _Trial, family: _Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    changed = {**inputs, name: inputs[name].clone()}
    changed[name][:, 5:] = (changed[name][:, 5:] + 7) % 90 + 5
    found = _output(model, changed)[:, :5]
    _equal(found, _output(model, inputs)[:, :5], "a later token changes the output at an earlier one")


@_check("padding", "encoder", "decoder", "encoder-decoder")
def _padding(trial: _Trial, family: _Family) -> None:
    model, padded, short = trial.patched(family), family.inputs(), family.inputs(tokens=6)
    padded["attention_mask"][:, 6:] = 0
    if "decoder_input_ids" in padded:
        padded["decoder_input_ids"] = short["decoder_input_ids"]
    found, expected = _output(model, padded), _output(model, short)
    _equal(found[:, : expected.shape[1]], expected, "padding changes the output at other tokens")


@_check("cached decoding", *_DECODERS)
def _cached_decoding(trial: _Trial, family: _Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    name = "decoder_input_ids" if "decoder_input_ids" in inputs else "input_ids"
    ids, others = inputs[name], {k: v for k, v in inputs.items() if k not in (name, "attention_mask")}
    expected = _output(model, {**others, name: ids}, use_cache=False)
    for how, ends in (("token by token", range(1, TOKENS + 1)), ("in pieces", (4, 7, 8, TOKENS))):
        past, start, found = None, 0, []
        for end in ends:
            with torch.no_grad():
                step = model(**others, **{name: ids[:, start:end]}, past_key_values=past, use_cache=True)
            found.append(step.last_hidden_state)
            past, start = step.past_key_values, end
        _equal(torch.cat(found, 1), expected, f"decoding {how} with a cache differs from decoding without")


@_check("half precision", *_ALL)
def _half_precision(trial: _Trial, family: _Family) -> None:
    def loss(model: Any) -> float:
        expected = _output(model, family.inputs(torch.float32))
        found = _output(model.to(torch.bfloat16), family.inputs(torch.bfloat16)).float()
        return 1 - nn.functional.cosine_similarity(found.flatten(), expected.flatten(), dim=0).item()

    plain, model = loss(family.build(torch.float32)), trial.patched(family, torch.float32, scale=0.1)
    patched = loss(model)
    if not patched < 0.02 + 4 * plain:
        raise _Failed(f"in bfloat16 its output loses {patched:.3f} of 1, the plain model's {plain:.3f}")


@_check("save and load", *_ALL)
def _save_and_load(trial: _Trial, family: _Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    folder = trial.folder / family.name
    model.save_pretrained(folder)
    loaded = family.model_class.from_pretrained(folder)
    half = family.model_class.from_pretrained(folder, dtype=torch.bfloat16)
    for again in (loaded, half):
        for name, expected in _state(model).items():
            found = _state(again).get(name)
            if found is None or not torch.equal(found, expected.to(found.dtype)):
                raise _Failed(f"{name} is not what was saved")
    twin = copy.deepcopy(loaded)  # read from a file, tensors lie at addresses where kernels may round differently
    _equal(_output(twin, inputs), _output(model, inputs), "the loaded model is not the one that was saved", 0)


@_check("filter file", *_ALL)
def _filter_file(trial: _Trial, family: _Family) -> None:
    model, inputs = trial.patched(family, torch.float32), family.inputs(torch.float32)
    loaded = load_filter(family.build(torch.float32), save_filter(model, trial.folder / f"{family.name}-filter"))
    _equal(_output(loaded, inputs), _output(model, inputs), "load_filter does not give what save_filter saved", 0)


@_check("unpatching", *_ALL)
def _unpatching(trial: _Trial, family: _Family) -> None:
    plain, model, inputs = family.build(), trial.patched(family), family.inputs()
    _output(model, inputs)
    unpatch_model(model)
    if [*model.state_dict()] != [*plain.state_dict()]:
        raise _Failed("unpatch_model leaves other parameters than the model had")
    _equal(_output(model, inputs), _output(plain, inputs), "unpatch_model does not give the original again", 0)


@_check("copies", *_ALL)
def _copies(trial: _Trial, family: _Family) -> None:
    model, inputs = trial.patched(family), family.inputs()
    expected = _output(model, inputs)
    for how, twin in (("deepcopy", copy.deepcopy(model)), ("pickle", pickle.loads(pickle.dumps(model)))):
        _equal(_output(twin, inputs), expected, f"a copy made by {how} gives other outputs", 0)
        with torch.no_grad():
            for parameter in filter_parameters(twin):
                parameter.add_(1)
        _equal(_output(model, inputs), expected, f"a copy made by {how} shares its parameters with the model", 0)


@_check("compiling", "encoder")
def _compiling(trial: _Trial, family: _Family) -> str | None:
    model, inputs, note = trial.patched(family), family.inputs(), None
    expected = _output(model, inputs)
    torch.compiler.reset()
    try:
        found = _output(torch.compile(model, backend="eager", fullgraph=True), inputs)
    except torch._dynamo.exc.Unsupported as error:
        note = f"in more than one graph: {str(error).splitlines()[0]}"
        torch.compiler.reset()
        found = _output(torch.compile(model, backend="eager"), inputs)
    _equal(found, expected, "the compiled model gives other outputs")
    return note
