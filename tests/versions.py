"""Run the quick suite on every supported release of torch and Python, and write the table of docs/compatibility.md.

``make test-versions`` starts it, with nothing but Python. Each row of ``ROWS`` has an environment of its own, which the
Makefile makes. A row that passed with the same code is not run again, so an interrupted run resumes. ``ROW=torch-2.12``
chooses rows. A chosen row always runs, and it is an error if it cannot.

Environment variables: VENVS, the folder of the environments, and PYTHON313, the Python 3.13 to use. Without
it ``python3.13`` is looked for on PATH. A row whose interpreter is missing is "not run".
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

ROOT = Path(__file__).parents[1]
VERSIONS = ROOT / "docs" / "versions.json"
WRITE_PAGE = "import compatibility; compatibility.write_page()"
SEEN = "import platform, torch, transformers as t; print(platform.python_version(), torch.__version__, t.__version__)"
CODE = ("*.py", "*.pyi", "*.toml", "*.yaml", "README.md")

# the oldest that are supported, and the numpy and trl of that time
OLDEST = "accelerate==1.10.0 huggingface_hub==1.5.0 safetensors==0.8.0 numpy==2.3.* trl==1.0.* timm==1.0.26"


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
    Row("2.11", "5.17", further=OLDEST),
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


def interpreter(version: str) -> str | None:
    """Return the path of a Python of that version, or None where it is missing or does not start."""
    found = os.environ.get("PYTHON" + version.replace(".", "")) or shutil.which(f"python{version}")
    starts = found and not subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode
    return found if starts else None


def run(row: Row, venvs: Path) -> dict[str, Any]:
    """Return what is known of a row after its suite ran."""
    if not (python := interpreter(row.python)):
        return {"outcome": "not run", "why": f"no python{row.python} here"}
    folder = venvs / row.name
    made = [f"{folder}/installed-test", f"VENV={folder}", f"PYTHON={python}", f"PINS={row.pins}"]
    if subprocess.run(["make", *made], cwd=ROOT, check=False).returncode:
        return {"outcome": "not run", "why": "its dependencies do not install"}
    report = folder / "report.xml"
    suite = ["-m", "pytest", "-q", "-n", "2", "-m", "not slow and not gpu", f"--junitxml={report}"]
    report.unlink(missing_ok=True)
    begun = time.monotonic()
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "MAKEFLAGS", "MAKELEVEL")}
    status = subprocess.run([folder / "bin" / "python", *suite], cwd=ROOT, env=environment, check=False).returncode
    counts = ElementTree.parse(report).getroot()[0] if report.exists() else ElementTree.Element("testsuite")
    failed = [f"{c.get('classname')}::{c.get('name')}" for c in counts if {x.tag for x in c} & {"failure", "error"}]
    if status and not failed:  # interrupted, or a process died
        failed = [f"pytest ended with {status}"]
    total, skipped, *bad = (int(counts.get(kind, 0)) for kind in ("tests", "skipped", "failures", "errors"))
    seen = subprocess.run([folder / "bin" / "python", "-c", SEEN], capture_output=True, text=True, check=True).stdout
    return {
        "outcome": "failed" if failed else "passed",
        "passed": total - skipped - sum(bad),
        "skipped": skipped,
        "failed": failed,
        "minutes": round((time.monotonic() - begun) / 60, 1),
        "seen": seen.splitlines()[-1].split(),
        "machine": f"{os.cpu_count()} cores, {platform.system()} {platform.machine()}",
        "date": date.today().isoformat(),
    }


def main() -> None:
    """Run the rows that have not passed with this code, or those that the arguments name."""
    venvs = Path(os.environ.get("VENVS") or ROOT / ".venvs").absolute()
    kept = json.loads(VERSIONS.read_text()) if VERSIONS.exists() else {}
    wanted, code, bad = sys.argv[1:], fingerprint(), []
    for row in ROWS:
        old = kept.get(row.name, {})
        passed = (old.get("outcome"), old.get("code")) == ("passed", code)
        if not any(text in row.name for text in wanted) if wanted else passed:
            continue
        print(f"{row.name}: {row.pins}", flush=True)
        new = kept[row.name] = {**run(row, venvs), "code": code}
        if new["outcome"] == "failed" or (wanted and new["outcome"] == "not run"):
            bad.append(f"{row.name}: {', '.join(new.get('failed') or [new['why']])}")
        VERSIONS.write_text(json.dumps({r.name: kept[r.name] for r in ROWS if r.name in kept}, indent=1) + "\n")
        for installed in sorted(venvs.glob("*/installed-test"))[-1:]:
            subprocess.run([installed.parent / "bin" / "python", "-c", WRITE_PAGE], cwd=ROOT / "tests", check=True)
    sys.exit("\n".join(bad) or 0)


if __name__ == "__main__":
    main()
