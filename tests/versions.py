"""Run the quick suite on every supported release of torch and Python, and write the table of docs/compatibility.md.

``make test-versions`` starts it. Each row of ``ROWS`` has an environment of its own, which the Makefile makes. A row
that passed with the same code is not run again, so an interrupted run resumes. ``ROW=torch-2.12`` chooses rows.

Environment variables: VENVS, the folder of the environments. Interpreters are found on PATH as ``python3.13``; a row
whose interpreter is missing is "not run".
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from compatibility import ROOT, VERSIONS, write_page

SEEN = "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
CODE = ("*.py", "*.pyi", "*.toml", "*.yaml", "README.md")


@dataclass(frozen=True)
class Row:
    """Releases that are tested together."""

    torch: str
    transformers: str
    python: str = "3.11"
    further: str = ""  # pins of the other dependencies

    @property
    def name(self) -> str:
        return f"torch-{self.torch}-python-{self.python}"

    @property
    def pins(self) -> str:
        return f"torch=={self.torch}.* transformers=={self.transformers}.* {self.further}".strip()


ROWS = [
    Row("2.11", "5.17", further="accelerate==1.10.0 huggingface_hub==1.5.0 safetensors==0.8.0"),  # the oldest of all
    Row("2.12", "5.19"),
    Row("2.13", "5.21"),
    Row("2.14", "5.24"),
    Row("2.15", "5.24"),
    Row("2.15", "5.24", python="3.13"),
    Row("2.15", "5.24", python="3.14"),
]


def fingerprint() -> str:
    """Return a hash of the code that a run depends on."""
    files = subprocess.run(["git", "ls-files", "-z", *CODE], cwd=ROOT, capture_output=True, check=True).stdout
    found = hashlib.sha256()
    for name in sorted(filter(None, files.decode().split("\0"))):
        found.update(name.encode() + (ROOT / name).read_bytes() if (ROOT / name).exists() else b"")
    return found.hexdigest()[:16]


def run(row: Row, venvs: Path) -> dict[str, Any]:
    """Return what is known of a row after its suite ran."""
    if not (python := shutil.which(f"python{row.python}")):
        return {"outcome": "not run", "why": f"no python{row.python} here"}
    folder = venvs / row.name
    made = [f"{folder}/installed-test", f"VENV={folder}", f"PYTHON={python}", f"PINS={row.pins}"]
    if subprocess.run(["make", *made], cwd=ROOT, check=False).returncode:
        return {"outcome": "not run", "why": "its dependencies do not install"}
    report = folder / "report.xml"
    suite = ["-m", "pytest", "-q", "-n", "2", "-m", "not slow and not gpu", f"--junitxml={report}"]
    begun = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")}
    subprocess.run([folder / "bin" / "python", *suite], cwd=ROOT, env=environment, check=False)
    (counts,) = ElementTree.parse(report).getroot()
    failed = [f"{c.get('classname')}::{c.get('name')}" for c in counts if {x.tag for x in c} & {"failure", "error"}]
    total, skipped = int(counts.get("tests", 0)), int(counts.get("skipped", 0))
    seen = subprocess.run([folder / "bin" / "python", "-c", SEEN], capture_output=True, text=True, check=True).stdout
    return {
        "outcome": "failed" if failed else "passed",
        "passed": total - skipped - len(failed),
        "skipped": skipped,
        "failed": failed,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "seen": seen.splitlines()[-1].split(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "date": date.today().isoformat(),
    }


def main() -> None:
    """Run the rows that have not passed with this code; the names of some may be given."""
    venvs = Path(os.environ.get("VENVS") or ROOT / ".venvs").absolute()
    kept = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {}
    wanted, code = sys.argv[1:], fingerprint()
    for row in ROWS:
        old = kept.get(row.name, {})
        if (wanted and not any(text in row.name for text in wanted)) or (
            (old.get("outcome"), old.get("code")) == ("passed", code)
        ):
            continue
        print(f"{row.name}: {row.pins}", flush=True)
        kept[row.name] = {**run(row, venvs), "code": code}
        VERSIONS.write_text(json.dumps({r.name: kept[r.name] for r in ROWS if r.name in kept}, indent=1) + "\n")
        write_page()
    failed = {name: row["failed"] for name, row in kept.items() if row["outcome"] == "failed"}
    sys.exit("\n".join(f"{name}: {', '.join(tests)}" for name, tests in failed.items()) or 0)


if __name__ == "__main__":
    main()
