"""Two processes over gloo: DDP, FSDP2, tensor parallelism give what one process gives. The work is distributed.py's."""

from pathlib import Path

import pytest
from filters import cases
from processes import run_two

SCRIPT = Path(__file__).with_name("distributed.py")
MODES = {
    "gradients": "Distributed: DDP and FSDP2, gradients as in one process",
    "ddp": "Distributed: Trainer under DDP, resumed",
    "fsdp2": "Distributed: Trainer under FSDP2, resumed",
    "deepspeed": "Distributed: Trainer under DeepSpeed ZeRO-3, resumed",
    "tensor_parallel": "Distributed: tensor parallel plans",
}


@pytest.mark.parametrize(
    ("mode", "name"),
    [
        pytest.param(
            mode,
            name,
            marks=[pytest.mark.feature(title), *[pytest.mark.slow] * (mode != "gradients" or entry.replaces)],
        )
        for mode, title in MODES.items()
        for name, entry in cases()
        if mode != "tensor_parallel" or not entry.encoders_only
    ],
)
def test_two_processes(mode, name, tmp_path, record_property):
    if mode == "deepspeed":
        pytest.importorskip("deepspeed")
    run_two(SCRIPT, mode, name, tmp_path, DS_ACCELERATOR="cpu")
    if (refused := tmp_path / "refused").exists():
        record_property("refused", refused.read_text())


def test_two_processes_read_what_coefficients_are_made_of(tmp_path):
    run_two(SCRIPT, "coefficients", "", tmp_path)


@pytest.mark.slow
def test_two_processes_of_the_converter_model(tmp_path):
    run_two(SCRIPT, "converter", "", tmp_path)
