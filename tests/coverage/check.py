"""What is verified of one architecture: a tiny random model, patched, against explicit matrices."""

import copy
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import tiny
import torch
from filters import FILTERS
from models import turn_on, use
from oracle import NAME as ORACLE
from oracle import dense_twin
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from hf_graphfilter import FilterConfig, GraphFilter, GraphFilterError, filter_parameters, filter_status, patch_model
from hf_graphfilter.hosts.transformers import find
from hf_graphfilter.hosts.transformers.cache import NAME as CACHE

SECONDS = 180
FILTER = FILTERS["gfsa"]
DECODED = {"GFSA": FILTER, "AGF": FILTERS["agf"]}  # rows of each token in the cache, a state


@dataclass
class Verdict:
    """status: verified, refused (with the reason), not built (here), or wrong."""

    architecture: str
    status: str
    reason: str = ""
    patched: int = 0
    reached: int = 0
    backends: list[str] = field(default_factory=list)
    decoding: list[str] = field(default_factory=list)  # filters with which a cache gives what a whole pass does
    left_out: list[str] = field(default_factory=list)  # why other attention modules are


class NotHere(Exception):
    """The model itself, unpatched, could not be made or run."""


class Wrong(Exception):
    """The patched model does something else than it should."""


def architectures() -> list[str]:
    """The model types that have a base model; by name, as to look them up imports six hundred configurations."""
    named = {"converter", *MODEL_MAPPING_NAMES} & set(CONFIG_MAPPING)
    return sorted(named - {"evolla"})  # whose configuration AutoModel does not take


def check(architecture: str) -> Verdict:
    return judged(_check, Verdict(architecture, "verified"))


def judged(run: Callable[[Verdict], None], verdict: Verdict) -> Verdict:
    """``verdict`` after ``run`` has filled it in or stopped."""
    try:
        with limit(SECONDS):
            run(verdict)
    except NotHere as error:
        verdict.status, verdict.reason = "not built", str(error)
    except GraphFilterError as error:
        verdict.status, verdict.reason = "refused", str(error)
    except Wrong as error:
        verdict.status, verdict.reason = "wrong", str(error)
    except TimeoutError:
        verdict.status, verdict.reason = "not built", f"takes more than {SECONDS} s"
    except Exception as error:
        verdict.status, verdict.reason = "wrong", brief(error, 300)
    return verdict


def brief(error: Exception, length: int) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:length]}"


def _check(verdict: Verdict) -> None:
    models = {}
    for backend in ("sdpa", "eager"):
        try:
            model = tiny.build(verdict.architecture, backend).double()
            given = {k: v.double() if v.is_floating_point() else v for k, v in tiny.inputs(model).items()}
            reference = outputs(model, given)
        except TimeoutError:
            raise
        except Exception as error:
            if backend == "eager" and not models:
                raise NotHere(brief(error, 120)) from error
            continue
        if any(x.isfinite().any() for x in reference):  # else the original itself gives nothing but NaN there
            models[backend] = model, given, reference
    if not models:
        raise NotHere("no output")
    filtered = {}
    for backend, (plain, given, reference) in models.items():
        verdict.left_out = sorted(set(find(plain)[1].values()))
        try:
            patched = patch_model(copy.deepcopy(plain), FILTER.config)
        except GraphFilterError as error:
            verdict.reason = str(error)
            continue
        verdict.patched = len(filter_status(patched))
        with reached(patched) as seen:
            try:
                found = outputs(patched, given)
            except GraphFilterError as error:
                if "use_cache=False" not in str(error):
                    raise
                given["use_cache"], verdict.reason = False, f"without a cache only: {error}"
                found = outputs(patched, given)
        verdict.reached = len(seen)
        if not seen:
            raise NotHere("the inputs made here reach no patched module")
        tolerance = 0.0 if backend == "sdpa" else 1e-6  # eager functions may do their softmax in float32
        if (far := distance(found, reference)) > tolerance:
            raise Wrong(f"{backend}: differs from the original at the start by {far:.1e}")
        turn_on(patched)
        filtered[backend] = patched, outputs(patched, given)
        if distance(filtered[backend][1], reference) < 1e-6:
            raise Wrong(f"{backend}: the filter does nothing")
        verdict.backends.append(backend)
    if not filtered:
        raise GraphFilterError(verdict.reason)
    compare(verdict, models, filtered)
    backend = verdict.backends[0]
    patched, expected = filtered[backend]
    trains(patched, models[backend][1])
    saves(patched, models[backend][1], expected)
    decodes(verdict, *models[backend][:2])


def compare(verdict: Verdict, models: dict, filtered: dict) -> None:
    """Every backend with explicit matrices, where these give the plain model's output; else backend with backend."""
    backend = verdict.backends[-1]  # eager: what SDPA cannot do (soft-capping) is there
    plain, given, reference = models[backend]
    if distance(outputs(use(copy.deepcopy(plain), ORACLE), given), reference) < 1e-4:
        expected = outputs(dense_twin(copy.deepcopy(plain), filtered[backend][0], FILTER.formula), given)
    elif len(filtered) > 1:
        expected = filtered[backend][1]
    else:
        raise NotHere("one backend only, and explicit matrices do not give the unpatched model")
    for name, (_, found) in filtered.items():
        if (far := distance(found, expected)) > 1e-4:
            raise Wrong(f"{name}: differs from explicit matrices by {far:.1e}")


def trains(model: nn.Module, given: dict) -> None:
    with reached(model) as seen:
        loss = sum(x.double().square().sum() for x in floats(model(**given)) if x.requires_grad)
    loss.backward()
    parameters = [p for f in seen for p in f.parameters()]
    if any(p.grad is None or not p.grad.isfinite().all() for p in parameters):
        raise Wrong("a filter coefficient gets no finite gradient")
    model.zero_grad()


def saves(model: nn.Module, given: dict, expected: list) -> None:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        loaded = AutoModel.from_pretrained(folder, dtype=torch.float64, attn_implementation=backend_of(model))
        loaded = tiny.plain_experts(loaded.eval())
    if getattr(loaded, "_keep_in_fp32_modules_strict", None):  # whatever dtype is asked for
        loaded.double()
    if len([*filter_parameters(model)]) != len([*filter_parameters(loaded)]):
        raise Wrong("loaded again it has other filters")
    if (far := distance(outputs(loaded, given), expected)) > 1e-5:
        raise Wrong(f"loaded again it differs by {far:.1e}")


def decodes(verdict: Verdict, plain: nn.Module, given: dict) -> None:
    """Each filter, by the cache that the model itself decodes with."""
    try:
        if distance(*last_token(plain, given)) > 1e-6:
            return
    except Exception:  # it keeps no cache, or needs more than the inputs made here
        return
    for name, entry in DECODED.items():
        try:
            far = distance(*last_token(turn_on(patched_where_it_can(plain, entry.config)), given))
        except GraphFilterError:
            continue
        if far > 1e-4:
            raise Wrong(f"{name}: a token decoded with the cache differs by {far:.1e} from that of a whole pass")
        verdict.decoding.append(name)


def patched_where_it_can(plain: nn.Module, config: FilterConfig) -> nn.Module:
    """A copy, patched whole, or in its decoder where its encoder (of images) cannot be."""
    try:
        return patch_model(copy.deepcopy(plain), config)
    except GraphFilterError:
        return patch_model(copy.deepcopy(plain), config, stack="decoder")


@torch.no_grad()
def last_token(model: nn.Module, given: dict) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The outputs of the last token, decoded in three passes and in one."""
    name = "decoder_input_ids" if "decoder_input_ids" in given else "input_ids"
    output, past = None, None
    for ids in given[name].split([given[name].shape[1] - 2, 1, 1], dim=1):
        output = model(**{**given, name: ids, CACHE: past, "use_cache": True})
        past = output[CACHE]
    whole = model(**{**given, "use_cache": False})
    return [floats(output)[0][:, -1]], [floats(whole)[0][:, -1]]


def backend_of(model: nn.Module) -> str:
    return filter_status(model)[0].backend


@torch.no_grad()
def outputs(model: nn.Module, given: dict) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return floats(model(**given))


def floats(output: object) -> list[torch.Tensor]:
    """The floating-point tensors in an output; not those of a cache."""
    if isinstance(output, torch.Tensor):
        return [output] if output.is_floating_point() else []
    if hasattr(output, "items"):
        output = [value for key, value in output.items() if CACHE not in key]
    return [x for part in output for x in floats(part)] if isinstance(output, (list, tuple)) else []


def distance(found: list[torch.Tensor], expected: list[torch.Tensor]) -> float:
    """The largest difference, relative to the largest entry."""
    if [x.shape for x in found] != [x.shape for x in expected] or not found:
        return float("inf")
    worst = 0.0
    for a, b in zip(found, expected, strict=True):
        same = (a == b) | (a.isnan() & b.isnan())
        scale = b[b.isfinite()].abs().max().clamp(min=1e-3) if b.isfinite().any() else 1.0
        worst = max(worst, ((a - b).masked_fill(same, 0).abs().max() / scale).item() if a.numel() else 0.0)
    return worst if worst == worst else float("inf")


@contextmanager
def reached(model: nn.Module) -> Iterator[set]:
    """The filters that run within the block."""
    seen: set[nn.Module] = set()
    filters = [m for m in model.modules() if isinstance(m, GraphFilter)]
    hooks = [f.register_forward_pre_hook(lambda module, args: seen.add(module)) for f in filters]
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextmanager
def limit(seconds: int) -> Iterator[None]:
    def stop(*_: object) -> None:
        raise TimeoutError

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
