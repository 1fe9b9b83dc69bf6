"""Peak memory and errors of a linearization of all layers at once, and block by block from weights on disk.

    python benchmarks/blocks.py --model ~/models/SmolLM2-135M --blocks 6

Each way runs the stage "attention" on the same random texts, in a separate process. The peak is the memory beyond that
of the process after a small model of the same kind was fitted the same way (imported libraries and their caches).
"""

import argparse
import multiprocessing
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from measure import RESULTS, stamp, write
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils import logging

from hf_graphfilter import linearize
from hf_graphfilter.fitting.memory import begin_peak_memory, peak_memory

CPU = torch.device("cpu")


def measure(model: str, blocks: int, budget: int, tokens: int, pipe: Any) -> None:
    """Send the peak in MB, the seconds and the errors by layer; blocks of 0 are the whole model in memory."""
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        config = AutoConfig.from_pretrained(model)
        config.update(
            {"num_hidden_layers": 2, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
        )
        AutoModelForCausalLM.from_config(config).save_pretrained(f"{folder}/small")
        run(f"{folder}/small", f"{folder}/first", min(blocks, 2), tokens, tokens)
        pipe.send(run(model, f"{folder}/second", blocks, budget, tokens))


def run(model: str, folder: str, blocks: int, budget: int, tokens: int) -> dict[str, Any]:
    start_mb = begin_peak_memory(CPU) or 0.0
    torch.manual_seed(0)
    placement = {"device_map": {"": "disk"}, "offload_folder": f"{folder}/weights"} if blocks else {}
    loaded = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, **placement)
    size = loaded.config.get_text_config().vocab_size
    data = [{"input_ids": torch.randint(5, size, (1, tokens))} for _ in range(budget // tokens + 4)]
    if blocks:  # the weights were read once, to be written elsewhere
        begin_peak_memory(CPU)
    options: dict[str, Any] = {"blocks": blocks, "checkpoint": f"{folder}/progress"} if blocks else {}
    start_time = time.monotonic()
    report = linearize(
        loaded,
        data,
        budget=budget,
        window=tokens // 4,
        stages={"attention": 1},
        holdout=2,
        evaluations=2,
        progress=False,
        **options,
    )
    return {"mb": peak_memory(CPU) - start_mb, "seconds": time.monotonic() - start_time, "errors": report.after}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--blocks", type=int, default=6)
    parser.add_argument("--budget", type=int, default=4096, help="tokens of the stage")
    parser.add_argument("--tokens", type=int, nargs="+", default=[128, 256], help="of a text; a quarter is the window")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder")
    options = parser.parse_args()
    rows = [measure_both(options, tokens) for tokens in options.tokens]
    write(rows, options.output / "linearize-blocks-cpu.csv", [*rows[0]])


def measure_both(options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Return what the two ways take, with the largest difference of their errors."""
    context, results = multiprocessing.get_context("spawn"), {}
    for name, blocks in {"whole": 0, "blocks": options.blocks}.items():
        receiver, sender = context.Pipe()
        process = context.Process(target=measure, args=(options.model, blocks, options.budget, tokens, sender))
        process.start()
        sender.close()
        results[name] = receiver.recv()
        process.join()
        print(f"{name}: {results[name]['mb']:.0f} MB, {results[name]['seconds']:.0f} s", flush=True)
    errors = [results[name].pop("errors") for name in results]
    difference = max(abs(errors[0][layer] - errors[1][layer]) for layer in errors[0])
    row = {**stamp("cpu", "torch"), "model": Path(options.model).name, "blocks": options.blocks}
    row |= {"tokens": tokens, "budget": options.budget, "difference": f"{difference:.1e}"}
    return row | {f"{name} {quantity}": round(value) for name in results for quantity, value in results[name].items()}


if __name__ == "__main__":
    main()
