"""The page about a model: what it says and shows, in a browser too; its verb; and the callback."""

import copy
import csv
import html
import json
import re
import shutil
import subprocess
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch
from PIL import Image
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    BertModel,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
    ViTConfig,
    ViTImageProcessorFast,
    ViTModel,
)
from typer.testing import CliRunner

from hf_graphfilter import (
    GraphFilterError,
    SmoothingCallback,
    create_model_card,
    filter_optimizer,
    linearize,
    patch_model,
)
from hf_graphfilter.analysis.report import report
from hf_graphfilter.analysis.report.scale import load_references
from hf_graphfilter.cli import app
from hf_graphfilter.cli.inputs import Images, texts_of

ROOT = Path(__file__).parents[1]
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)


def bert(layers=2):
    torch.manual_seed(0)
    return BertModel(BertConfig(vocab_size=50, **{**SIZES, "num_hidden_layers": layers}))


@pytest.fixture(scope="module")
def batches():
    torch.manual_seed(1)
    return [{"input_ids": torch.randint(5, 50, (3, 12))} for _ in range(2)]


@pytest.fixture(scope="module")
def reported(batches):
    return report(patch_model(bert(), "gfsa", w_K=0.3), batches, bert(), title="A <model> & more")


class Page(HTMLParser):
    def __init__(self):
        super().__init__()
        self.tags, self.ids, self.links = [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.ids += [value for name, value in attrs if name == "id"]
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]


def test_the_page_is_whole_by_itself(reported, tmp_path):
    text = reported.to_html(tmp_path / "out" / "report.html").read_text()
    page = Page()
    page.feed(text)
    charts = [axes for figure in reported.figures().values() for axes in figure.axes]
    bars = len(reported.figures()["coefficients"].axes) // 2  # a colour bar is on the chart that it belongs to
    assert page.tags.count("svg") == len(charts) - bars
    assert page.tags.count("figcaption") == page.tags.count("svg")
    assert "script" not in page.tags
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in page.links), "nothing is loaded"
    assert len(page.ids) == len(set(page.ids))
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert "A &lt;model&gt; &amp; more" in text
    assert "#010203" not in text
    for sentence in reported.summary():
        assert re.search(r"\d", sentence)


def test_the_words_are_the_numbers(reported):
    last = reported.measured.smoothing[-1, "cosine"].mean.item()
    other = reported.reference.smoothing[-1, "cosine"].mean.item()
    assert reported.summary()[0] == reported.verdict
    assert f" {last:.2f} (reference: {other:.2f})" in reported.verdict
    content = json.loads(json.dumps(reported.to_dict()))
    assert content["summary"] == reported.summary()
    assert {row["quantity"] for row in content["reference"]["smoothing"]["rows"]} == {
        "cosine",
        "high_frequency",
        "dirichlet",
    }


def test_the_verdict_has_the_scale_of_the_gallery(reported, tmp_path):
    """The values in the package are those of the benchmark, and an unusual model is called that."""
    with (ROOT / "benchmarks" / "results" / "gallery-cpu-pretrained.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["quantity"] == "cosine"]
    last = [row for row in rows if int(row["layer"]) == int(row["layers"]) - 1]
    assert [value.cosine for value in load_references()] == [float(row["mean"]) for row in last]
    page = reported.to_html(tmp_path / "report.html").read_text()
    for value, row in zip(load_references(), last, strict=True):
        assert value.model.startswith(row["model"])
        assert f"{value.model} {float(row['mean']):.2f}" in reported.verdict
        assert f"<td>{value.model}</td>" in page
    measured, words = reported.measured.smoothing, {0.1: "less than usual", 0.5: "usual", 0.9: "more than usual"}
    for cosine, usual in words.items():
        key = (measured.layers()[-1], "cosine")
        bands = measured.bands | {key: replace(measured.bands[key], mean=torch.tensor(cosine))}
        changed = replace(reported.measured, smoothing=replace(measured, bands=bands))
        assert f", which is {usual}: MiniLM" in replace(reported, measured=changed).verdict


def test_the_page_says_what_was_measured(batches, tmp_path):
    padded = [batch | {"attention_mask": torch.ones(3, 12).long().tril(8)} for batch in batches]
    text = report(bert(), padded, title="Mine", max_length=12).to_html(tmp_path / "report.html").read_text()
    assert "6 texts, 60 tokens (at most 11 each); cut at 12 tokens" in text
    assert f"torch {torch.__version__.partition('+')[0]}" in text
    assert "<h1>Mine</h1>" in text


def test_inputs_that_are_neither_texts_nor_images_are_called_inputs():
    layer = torch.nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    assert str(report(model, [torch.randn(2, 5, 32)]).measured.inputs) == "2 inputs, 10 tokens (at most 5 each)"


def test_charts_of_gfsa_are_of_gfsa_alone(reported, batches):
    assert "taylor" in reported.figures()
    assert any("GFSA" in line for line in reported.summary())
    for model in (bert(), patch_model(bert(), "gated")):
        other = report(model, batches)
        assert "taylor" not in other.figures()
        assert not any("GFSA" in line for line in other.summary())


def test_figures_are_png(reported, tmp_path):
    files = reported.save_figures(tmp_path)
    names = ["smoothing", "response", "spectrum", "taylor", "curves", "coefficients"]
    assert [file.stem for file in files] == names
    for file in files:
        with Image.open(file) as image:
            assert min(image.size) > 300


def test_a_card_has_findings_and_three_figures(reported, tmp_path):
    model = patch_model(bert(), "gfsa", w_K=0.3)
    create_model_card(model, report=reported, description="Trained.").save(tmp_path / "README.md")
    text = (tmp_path / "README.md").read_text()
    assert all(f"- {line}" in text for line in reported.summary())
    shown = re.findall(r"!\[.*\]\((.*)\)", text)
    assert len(shown) == 3
    assert all((tmp_path / file).is_file() for file in shown)
    create_model_card(model, description="Trained again.").save(tmp_path / "README.md")
    assert reported.summary()[0] in (tmp_path / "README.md").read_text(), "its own earlier section stays"


def test_what_cannot_be_reported_is_one_sentence(reported, batches, tmp_path):
    with pytest.raises(GraphFilterError, match=r"has 3 layers of the encoder, BertModel has 2 layers of the"):
        report(bert(), batches, bert(3))
    (tmp_path / "file").write_text("")
    with pytest.raises(GraphFilterError, match="has no figure 'smooting'; it has smoothing, "):
        reported.save_figures(tmp_path, ["smooting"])
    with pytest.raises(GraphFilterError, match="cannot be written"):
        reported.to_html(tmp_path / "file" / "report.html")


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_browser_shows_every_figure(width, reported, tmp_path):
    """The page itself measures: each figure's box, and whether anything is wider than the window."""
    page = reported.to_html(tmp_path / "report.html")
    probe = """<script>addEventListener('load', () => {
      const boxes = [...document.querySelectorAll('figure svg')].map(s => s.getBoundingClientRect());
      const texts = [...document.querySelectorAll('figure svg text')].filter(t => t.getBoundingClientRect().width > 0);
      document.title = JSON.stringify({figures: boxes.map(b => [b.width, b.height, b.left]), texts: texts.length,
        wide: document.documentElement.scrollWidth, window: innerWidth});
      document.body.innerHTML = '<pre id=out>' + document.title + '</pre>'; })</script>"""
    (tmp_path / "frame.html").write_text(page.read_text().replace("</body>", probe + "</body>"))
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom"]
    # a window of Chromium has a least width, a frame has none
    outer = tmp_path / "outer.html"
    outer.write_text(
        f"<iframe id=f width={width} height=800 src=frame.html></iframe><script>addEventListener('message', () => 0);"
        "addEventListener('load', () => setTimeout(() => {"
        "document.title = f.contentDocument.title; document.body.innerText = f.contentDocument.title }, 500))</script>"
    )
    command = [CHROMIUM, *options, "--allow-file-access-from-files", "--virtual-time-budget=5000"]
    done = subprocess.run(
        [*command, "--enable-logging=stderr", outer.as_uri()], capture_output=True, text=True, timeout=120, check=True
    )
    found = json.loads(re.search(r"\{\"figures.*?\}", done.stdout)[0])
    assert len(found["figures"]) == page.read_text().count("<svg")
    assert all(box[0] > 300 and box[1] > 100 for box in found["figures"])
    assert len({box[2] for box in found["figures"]}) == (1 if width == 390 else 3), "columns"
    assert found["texts"] > 50
    assert found["wide"] <= width
    assert "CONSOLE" not in done.stderr


def invoke(*arguments):
    return CliRunner().invoke(app, ["report", *map(str, arguments)], catch_exceptions=False)


def test_what_is_in_the_way_is_said_first(tmp_path):
    (tmp_path / "texts").write_text("w1 w2")
    for output in ("texts.html", "folder.html"):
        (tmp_path / "folder.html").mkdir(exist_ok=True)
        with pytest.raises(GraphFilterError, match=r"(texts|folder\.html) is in the way"):
            invoke(tmp_path / "nowhere", "--text", tmp_path / "texts", "--output", tmp_path / output)


def checkpoint(folder, **options):
    bert().save_pretrained(folder)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(49)} | {"[PAD]": 49}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    options = {"pad_token": "[PAD]", "unk_token": "w0", **options}
    PreTrainedTokenizerFast(tokenizer_object=words, **options).save_pretrained(folder)
    return folder


def test_what_a_conversion_cost_is_on_the_page(batches, tmp_path):
    model = bert()
    cost = linearize(model, batches, window=2, budget=40, evaluations=1, holdout=1, progress=False)
    reported = report(model, batches, bert(), conversion=cost)
    text = reported.to_html(tmp_path / "report.html").read_text()
    assert "What the conversion cost" in text
    assert reported.verdict.startswith(cost.verdict)
    assert f"<p class=verdict>{html.escape(cost.verdict)}</p>" in text
    for name, (header, *_) in cost.tables().items():
        assert f"<h3>{name}</h3>" in text
        assert f"<th>{header[-1]}</th>" in text
    assert reported.to_dict()["conversion"]["error"] == cost.error
    assert "conversion" in reported.figures()


def test_the_verb_writes_a_page_with_numbers_and_figures(tmp_path):
    plain = checkpoint(tmp_path / "plain")
    patch_model(BertModel.from_pretrained(plain), "gfsa", w_K=0.2).save_pretrained(tmp_path / "patched")
    shutil.copy(plain / "tokenizer.json", tmp_path / "patched")
    shutil.copy(plain / "tokenizer_config.json", tmp_path / "patched")
    (tmp_path / "texts.txt").write_text("w1 w2 w3 w4\n\nw5 w6 w7\n")
    page = tmp_path / "out" / "report.html"
    done = invoke(tmp_path / "patched", "--text", tmp_path / "texts.txt", "--against", plain, "--output", page)
    assert done.exit_code == 0
    assert "reference" in done.output
    assert page.is_file()
    assert len(list((tmp_path / "out" / "report").glob("*.png"))) == 6
    assert json.loads(page.with_suffix(".json").read_text())["title"] == "patched"


@pytest.mark.slow
def test_the_verb_reads_images(tmp_path):
    ViTModel(ViTConfig(image_size=32, patch_size=8, **SIZES)).save_pretrained(tmp_path / "vit")
    ViTImageProcessorFast(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "vit")
    (tmp_path / "images" / "cats").mkdir(parents=True)
    Image.new("RGB", (40, 30), (200, 100, 0)).save(tmp_path / "images" / "cats" / "1.png")
    Image.effect_noise((40, 30), 50).save(tmp_path / "images" / "cats" / "2.png")
    page = tmp_path / "report.html"
    assert invoke(tmp_path / "vit", "--images", tmp_path / "images", "--output", page).exit_code == 0
    assert "coefficient" not in page.read_text()
    assert "2 images, 34 tokens (at most 17 each)" in page.read_text()


@pytest.mark.parametrize("count", [1, 30, 64, 99, 100, 200])
def test_images_of_a_report_are_of_all_subfolders(count, tmp_path):
    ViTImageProcessorFast().save_pretrained(tmp_path)
    for number in range(100):
        file = tmp_path / "images" / f"class-{number // 10}" / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    files = Images(str(tmp_path), tmp_path / "images", 8, count).files
    assert len({*files}) == len(files) == min(count, 100)
    by_class = Counter(file.parent.name for file in files)
    assert len(by_class) == min(count, 10)
    assert max(by_class.values()) - min(by_class.values()) <= 1


def test_texts_of_a_report_have_a_mask_also_where_the_tokenizer_names_none(tmp_path):
    folder = checkpoint(tmp_path, model_input_names=["input_ids"])
    (tmp_path / "texts.txt").write_text("w1 w2 w3\nw4\n")
    (batch,) = texts_of(str(folder), [tmp_path / "texts.txt"], 8, 16, 8)
    assert batch["attention_mask"].sum(1).tolist() == [3, 1]


def test_a_tokenizer_that_cannot_pad_is_one_sentence(tmp_path):
    folder = checkpoint(tmp_path, pad_token=None)
    (tmp_path / "texts.txt").write_text("w1 w2 w3\n")
    with pytest.raises(GraphFilterError, match="neither pad_token nor eos_token, so that texts cannot be batched"):
        texts_of(str(folder), [tmp_path / "texts.txt"], 8, 16, 8)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "either --text FILE or --images DIR"),
        (["--text", "{empty}"], "holds no texts"),
        (["--images", "{empty}"], "there is no folder"),
        (["--text", "{empty}", "--output", "page.txt"], "name a page, NAME.html"),
    ],
)
def test_the_verb_says_what_is_wrong(options, message, tmp_path):
    folder = checkpoint(tmp_path / "plain")
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(GraphFilterError, match=message):
        invoke(folder, *[option.format(empty=tmp_path / "empty") for option in options])


def test_the_callback_logs_by_layer_at_its_steps(tmp_path, batches):
    torch.manual_seed(0)
    model = patch_model(BertForSequenceClassification(BertConfig(vocab_size=50, **SIZES)), "gfsa")
    rows = [{"input_ids": torch.randint(5, 50, (8,)), "labels": i % 2} for i in range(16)]
    settings = {"max_steps": 6, "logging_steps": 1, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    args = TrainingArguments(tmp_path, per_device_train_batch_size=4, disable_tqdm=True, **settings)
    callbacks, optimizer = [SmoothingCallback(batches, every=3)], filter_optimizer(args)
    trainer = Trainer(model, args, train_dataset=rows, callbacks=callbacks, optimizer_cls_and_kwargs=optimizer)
    trainer.train()
    logged = {entry["step"]: entry for entry in trainer.state.log_history if "cosine/encoder/1" in entry}
    assert [*logged] == [1, 4]
    assert {name.partition("/")[0] for name in logged[1]} >= {"cosine", "high_frequency", "effective_rank", "loss"}
    assert 1 <= logged[4]["effective_rank/encoder/0"] <= 12


def test_a_model_that_is_patched_in_part_has_the_stacks_of_its_base(batches):
    plain = BertModel(BertConfig(vocab_size=50, **SIZES))
    model = patch_model(copy.deepcopy(plain), layers=[0])
    report(model, batches, plain)
