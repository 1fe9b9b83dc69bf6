"""Read the results of evaluation programs, for a model card."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult

from ..errors import GraphFilterError
from ..files import DamagedFileError, read_json

LM_EVAL = {"results": dict[str, Any], "lm_eval_version": str}
MTEB = {"task_name": str, "scores": dict[str, Any], "mteb_version": str}


def read_evaluations(path: str | os.PathLike[str]) -> list[EvalResult]:
    """Return the results that lm-evaluation-harness or MTEB wrote, for ``create_model_card(results=...)``.

    Args:
        path: a file of results, or a folder to search for such files. If a folder has two results for the same task and
            metric, the one in the newer file is kept.

    Returns:
        A list of ``huggingface_hub.EvalResult``. From lm-evaluation-harness these are all metrics of each task, without
        standard errors; from MTEB, the main score of each task, part and language.

    Raises:
        GraphFilterError: there is no such file, or it holds no results of these programs.

    Example:
        >>> import json, pathlib, tempfile
        >>> file = pathlib.Path(tempfile.mkdtemp(), "results.json")
        >>> measured = {"lambada_openai": {"alias": "lambada_openai", "acc,none": 0.41, "acc_stderr,none": 0.01}}
        >>> _ = file.write_text(json.dumps({"results": measured, "lm_eval_version": "0.4.13"}))
        >>> [(result.dataset_name, result.metric_name, result.metric_value) for result in read_evaluations(file)]
        [('lambada_openai', 'acc', 0.41)]
    """
    path = Path(path)
    files = sorted(filter(Path.is_file, path.rglob("*.json")), key=os.path.getmtime) if path.is_dir() else [path]
    results: dict[tuple[Any, ...], EvalResult] = {}
    for file in files:
        for result in _read_file(file):
            names = result.dataset_type, result.dataset_config, result.dataset_split, result.metric_name
            results[names] = result
    if not results:
        raise GraphFilterError(
            f"{path} holds no results of lm_eval (results_*.json) or MTEB (TASK.json): give what they wrote with "
            "--output_path or ResultCache, or a list of huggingface_hub.EvalResult"
        )
    return [*results.values()]


def _read_file(file: Path) -> list[EvalResult]:
    """Return the results in a file; none if another program wrote it."""
    for schema, read in ((LM_EVAL, _read_lm_eval), (MTEB, _read_mteb)):
        try:
            return read(read_json(file, **schema))
        except (DamagedFileError, TypeError, AttributeError):  # entries of other types
            continue
    return []


def _read_lm_eval(content: dict[str, Any]) -> list[EvalResult]:
    results = []
    shots = content.get("n-shot") or {}
    for task, values in content["results"].items():
        for key, value in values.items():
            metric, _, extraction = key.partition(",")
            if not extraction or metric.endswith("_stderr") or not _is_finite(value):
                continue  # a name, a number of rows, or an error that could not be estimated
            if value == -1 and values.get(f"{metric}_stderr,{extraction}") == "N/A":
                continue  # RULER's mark of a length that was not asked for
            results.append(
                EvalResult(
                    task_type="text-generation",
                    dataset_type=task,
                    dataset_name=str(values.get("alias", task)).strip(" -"),
                    dataset_args={"num_few_shot": shots[task]} if task in shots else None,
                    metric_type=metric,
                    metric_name=metric if extraction == "none" else f"{metric} ({extraction})",
                    metric_value=value,
                    source_name=f"lm-evaluation-harness {content['lm_eval_version']}",
                    source_url="https://github.com/EleutherAI/lm-evaluation-harness",
                )
            )
    return results


def _read_mteb(content: dict[str, Any]) -> list[EvalResult]:
    return [
        EvalResult(
            task_type="feature-extraction",
            dataset_type=content["task_name"],
            dataset_name=content["task_name"],
            dataset_config=scores.get("hf_subset"),
            dataset_split=split,
            dataset_revision=content.get("dataset_revision"),
            metric_type="main_score",
            metric_name="main score",
            metric_value=scores["main_score"],
            source_name=f"MTEB {content['mteb_version']}",
            source_url="https://github.com/embeddings-benchmark/mteb",
        )
        for split, subsets in content["scores"].items()
        for scores in subsets
        if _is_finite(scores.get("main_score"))
    ]


def _is_finite(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
