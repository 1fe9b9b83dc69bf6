"""What is verified of one family of timm: its smallest model, random weights, patched, against explicit matrices."""

import copy
import re
import tempfile

import timm
import torch
from check import FILTER, NotHere, Verdict, Wrong, brief, distance, judged, outputs, reached, trains
from models import turn_on
from oracle import timm_twin

from hf_graphfilter import filter_status, load_timm_model, patch_model
from hf_graphfilter.hosts.timm import find

SIZES = (
    "test",
    "atto",
    "femto",
    "pico",
    "zepto",
    "nano",
    "xxt",
    "xxs",
    "xt",
    "xs",
    "tiny",
    "mini",
    "_t",
    "small",
    "_s",
)


def smallest_models() -> list[str]:
    """``file: model`` for every file of timm and every kind of names in it; the smallest by its name."""
    found: dict[tuple[str, str], str] = {}
    for file in timm.list_modules():
        for name in sorted(timm.list_models(module=file), key=rank, reverse=True):
            found[file, name.partition("_")[0]] = f"{file}: {name}"
    return sorted(found.values())


def rank(name: str) -> tuple:
    sizes = [int(n) for n in re.findall(r"(?<!\d)(\d{3})(?!\d)", name)]
    return next((i for i, s in enumerate(SIZES) if s in name), len(SIZES)), max(sizes, default=0), len(name), name


def check_timm(model: str) -> Verdict:
    return judged(_check, Verdict(model, "verified"))


def _check(verdict: Verdict) -> None:
    name = verdict.architecture.partition(": ")[2]
    torch.manual_seed(0)
    try:
        plain = timm.create_model(name, num_classes=7).eval().double()
        given = {"x": torch.randn(1, *plain.default_cfg["input_size"], dtype=torch.float64)}
        reference = outputs(plain, given)
    except TimeoutError:
        raise
    except Exception as error:
        raise NotHere(brief(error, 120)) from error
    verdict.left_out = sorted(set(find(plain)[1].values()))
    patched = patch_model(copy.deepcopy(plain), FILTER.config)
    verdict.patched = len(filter_status(patched))
    with reached(patched) as seen:
        found = outputs(patched, given)
    verdict.reached = len(seen)
    if (far := distance(found, reference)) > 0:
        raise Wrong(f"differs from the original at the start by {far:.1e}")
    turn_on(patched)
    filtered = outputs(patched, given)
    if distance(filtered, reference) < 1e-12:
        raise Wrong("the filter does nothing")
    twin = timm_twin(copy.deepcopy(plain), patched, FILTER.formula)
    if (far := distance(filtered, outputs(twin, given))) > 1e-6:
        raise Wrong(f"differs from explicit matrices by {far:.1e}")
    for fused, backend in ((True, "sdpa"), (False, "eager")):
        for module in patched.modules():
            if hasattr(module, "fused_attn"):
                module.fused_attn = fused
        if backend in {row.backend for row in filter_status(patched)}:
            verdict.backends.append(backend)
        if (far := distance(outputs(patched, given), filtered)) > 1e-6:
            raise Wrong(f"{backend}: differs by {far:.1e}")
    trains(patched, given)
    with tempfile.TemporaryDirectory() as folder:
        timm.models.save_for_hf(patched, folder, safe_serialization=True)
        if (far := distance(outputs(load_timm_model(folder).eval().double(), given), filtered)) > 1e-4:
            raise Wrong(f"loaded again it differs by {far:.1e}")
