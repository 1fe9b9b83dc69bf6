"""Every architecture of transformers: none is silently wrong. ``python tests/coverage/write.py`` writes the table."""

import pytest
from check import architectures, check

QUICK = ("gemma2", "mixtral", "qwen2_vl", "bloom", "gpt_oss")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "architecture",
    [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in architectures()],
)
def test_no_architecture_is_silently_wrong(architecture, transformers_warnings):
    verdict = check(architecture)
    transformers_warnings.clear()
    assert verdict.status != "wrong", verdict.reason
    if architecture in QUICK:
        assert verdict.status == ("refused" if architecture in ("bloom", "gpt_oss") else "verified"), verdict.reason
