"""Check every architecture, write docs/coverage.md and coverage-timm.md: ``python tests/coverage/write.py [timm]``."""

import os
import re
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from datetime import date
from importlib import metadata
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(Path(__file__).parent)]

import torch  # noqa: E402
import transformers  # noqa: E402
from check import Verdict, architectures, check  # noqa: E402
from check_timm import check_timm, smallest_models  # noqa: E402
from huggingface_hub.utils import tqdm  # noqa: E402

from hf_graphfilter.tables import markdown_table  # noqa: E402

INTRODUCTIONS = {
    "transformers": """# Architectures of transformers

This page says which architectures of transformers work with a filter. A program checks them all and writes this page
(`python tests/coverage/write.py`).

It makes a tiny random model of every architecture from its config class alone, patches it with GFSA, and compares in
float64:

- the outputs are identical at the start;
- with the filter on, they equal explicit matrices, on SDPA and eager attention (or each other, where the matrices do
  not give the unpatched model's output);
- the gradients of every coefficient are finite;
- the same holds again after saving and loading.

The column "decoding" names the filters with which decoding with the cache gives the same tokens as one pass over the
whole text. This is checked only where it holds for the unpatched model on these inputs.

The inputs are the main input and those without a default. For multimodal models this is the text part, so "run" may be
less than "patched modules"; their vision towers have their own rows. The families in [What works](compatibility.md) are
also tested there, with every filter.
""",
    "timm": """# Models of timm

This page says which models of timm work with a filter. A program checks them and writes this page
(`python tests/coverage/write.py timm`).

It takes the smallest model of every file of timm and of every kind of names in it, with random weights, patches it with
GFSA, and compares in float64:

- the outputs are identical at the start;
- with the filter on, they equal explicit matrices, with fused and unfused attention;
- the gradients of every coefficient are finite;
- the same holds again after saving and loading.
""",
}
PAGES = {
    "transformers": (architectures, check, "coverage.md"),
    "timm": (smallest_models, check_timm, "coverage-timm.md"),
}
NO_ATTENTION = "Attention found: none"
TEXT = """{introduction}
{summary}

## Verified

{verified}

## Refused

`patch_model` raises a `GraphFilterError` with this reason, so nothing is silently unfiltered.

{refused}

## Not tested here

The unpatched model cannot be made or run here: it needs special inputs or a backbone to download, or is too large.

{absent}
"""


def quiet() -> None:
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(1)


def main() -> None:
    wrong = []
    for library in sys.argv[1:] or INTRODUCTIONS:
        verdicts = run(library)
        (ROOT / "docs" / PAGES[library][2]).write_text(page(library, verdicts))
        wrong += of(verdicts, "wrong")
    for verdict in wrong:
        print(f"WRONG {verdict.architecture}: {verdict.reason}")
    sys.exit(bool(wrong))


def run(library: str) -> list[Verdict]:
    names, judge, _ = PAGES[library]
    found = names()
    with ProcessPoolExecutor(os.cpu_count(), initializer=quiet) as pool:
        return [*tqdm(pool.map(judge, found), total=len(found))]


def page(library: str, verdicts: list[Verdict]) -> str:
    without = [v for v in of(verdicts, "refused") if NO_ATTENTION in v.reason]
    refused = [v for v in of(verdicts, "refused") if v not in without]
    counts = Counter(v.status for v in verdicts)
    summary = (
        f"**{counts['verified']} verified, {len(refused)} refused, {counts['not built']} not tested here**, of "
        f"{len(verdicts)}; {len(without)} have no attention. {library} {metadata.version(library)}, torch "
        f"{torch.__version__}, {date.today()}."
    )
    print(summary)
    rows = [
        [
            v.architecture,
            v.patched,
            v.reached,
            ", ".join(v.backends),
            *([", ".join(v.decoding)] if library == "transformers" else []),
            escaped("; ".join(filter(None, [*v.left_out, v.reason]))),
        ]
        for v in of(verdicts, "verified")
    ]
    reasons = ["architecture", "reason"]
    decoding = ["decoding"] if library == "transformers" else []
    header = ["architecture", "patched modules", "run", "attention", *decoding, "left out"]
    return TEXT.format(
        introduction=INTRODUCTIONS[library],
        summary=summary,
        verified=markdown_table(header, rows),
        refused=markdown_table(reasons, [[v.architecture, why(v)] for v in refused]),
        absent=markdown_table(reasons, [[v.architecture, why(v)] for v in of(verdicts, "not built")]),
    )


def of(verdicts: list[Verdict], status: str) -> list[Verdict]:
    return [v for v in verdicts if v.status == status]


def why(verdict: Verdict) -> str:
    """The reason without what the row says already."""
    return escaped(verdict.reason.partition("Attention found: ")[2] or verdict.reason)


def escaped(text: str) -> str:
    """As a cell of a table, without paths of this machine."""
    return re.sub(r"/\w[^ ']*/", "", text).replace("|", "\\|")


if __name__ == "__main__":
    main()
