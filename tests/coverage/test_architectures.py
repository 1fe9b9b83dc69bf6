"""Every architecture of transformers and timm: none is silently wrong. ``write.py`` makes the table."""

import pytest
from check import architectures, check

try:
    from check_timm import check_timm, smallest_models
except ImportError:  # timm is optional
    smallest_models = list

QUICK = {  # status, and the filters that decode with its cache
    "gemma2": ("verified", ["GFSA"]),  # sliding windows
    "mixtral": ("verified", ["GFSA", "AGF"]),
    "qwen2_vl": ("verified", ["GFSA", "AGF"]),
    "granite_speech5_ctc": ("verified", []),  # frames stacked, norms in float32
    "t5gemma2": ("verified", ["GFSA"]),  # an encoder; its decoder attends to both at once, and is left out
    "bloom": ("refused", []),
    "gpt_oss": ("refused", []),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in architectures()],
)
def test_no_architecture_is_silently_wrong(architecture, transformers_warnings):
    verdict = check(architecture)
    transformers_warnings.clear()
    assert verdict.status != "wrong", verdict.reason
    found = verdict.status, verdict.decoding
    assert found == QUICK.get(architecture, found), verdict.reason


QUICK_TIMM = {
    "vision_transformer: test_vit": "verified",
    "beit: beit_base_patch16_224": "refused",
    "resnet: test_resnet": "refused",
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "model", [name if name in QUICK_TIMM else pytest.param(name, marks=pytest.mark.slow) for name in smallest_models()]
)
def test_no_model_of_timm_is_silently_wrong(model):
    verdict = check_timm(model)
    assert verdict.status == QUICK_TIMM.get(model, verdict.status), verdict.reason
    assert verdict.status != "wrong", verdict.reason
