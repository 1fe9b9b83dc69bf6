"""The real weights and data that benchmarks share: film reviews, WikiText-2, images of Tiny ImageNet."""

from __future__ import annotations

import argparse
import math
import os
import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn


def weights(name: str) -> Path:
    """Folder of real weights that were made on this machine."""
    folder = Path(os.environ.get("HF_GRAPHFILTER_WEIGHTS", Path.home() / ".cache" / "hf-graphfilter-weights"))
    return folder / name


def reviews(options: argparse.Namespace, tokenizer: object, tokens: int = 128, batch: int = 8) -> list[dict]:
    """Batches of real text, whole windows of film reviews."""
    files = sorted((options.shared / "data" / "imdb-subset").rglob("*.txt"))
    random.Random(0).shuffle(files)
    windows = []
    for file in files:
        ids = tokenizer(file.read_text(errors="ignore"), truncation=True, max_length=512)["input_ids"][1:-1]
        size = tokens - 2
        windows += [
            [tokenizer.cls_token_id, *ids[i : i + size], tokenizer.sep_token_id]
            for i in range(0, len(ids) - size + 1, size)
        ]
    random.Random(1).shuffle(windows)
    return [{"input_ids": part} for part in torch.tensor(windows).split(batch)]


def windows(tokenizer: object, file: Path, tokens: int) -> Tensor:
    """(windows, tokens): a text cut into pieces, the rest left out."""
    ids = torch.tensor(tokenizer(file.read_text(), verbose=False)["input_ids"])
    return ids[: len(ids) // tokens * tokens].view(-1, tokens)


def wikitext(options: argparse.Namespace, tokenizer: object, part: str, tokens: int, batch: int) -> list[Tensor]:
    return list(windows(tokenizer, options.shared / "data" / "wikitext-2" / f"{part}.txt", tokens).split(batch))


@torch.no_grad()
def perplexity(model: nn.Module, batches: list[Tensor]) -> float:
    """Over separate windows: every token but the first of its window is predicted."""
    model.eval()
    losses = [model(ids.to(model.device), labels=ids.to(model.device), use_cache=False).loss.item() for ids in batches]
    return math.exp(sum(losses) / len(losses))


class TinyImages:
    """Twenty classes of Tiny ImageNet, which the thousand of a pretrained head hold too."""

    def __init__(self, shared: Path, label_of: dict[int, str]):
        from torchvision import transforms
        from torchvision.datasets import ImageFolder

        data = shared / "data" / "tiny-imagenet-subset"
        names = dict(line.split("\t") for line in (data / "classes.txt").read_text().splitlines())
        known = {
            label.split(",")[0].lower(): i for i, label in label_of.items()
        }  # ties of a name are to its first words
        prepare = transforms.Compose(
            [
                transforms.Resize(224),
                transforms.ToTensor(),
                transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
            ]
        )
        self.parts = {part: ImageFolder(data / part, prepare) for part in ("train", "val")}
        self.classes = torch.tensor([known[names[wnid].split(",")[0].lower()] for wnid in self.parts["train"].classes])

    def batches(self, part: str, size: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        images = self.parts[part]
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0)).tolist()
        for i in range(0, min(len(order), size * count), size):
            pairs = [images[j] for j in order[i : i + size]]
            yield torch.stack([p for p, _ in pairs]), self.classes[[c for _, c in pairs]]

    @torch.no_grad()
    def accuracy(self, model: nn.Module, count: int = 500) -> float:
        """Of these twenty, on so many images."""
        model.eval()
        hits = [
            model(x.to(model.device)).logits.cpu()[:, self.classes].argmax(-1)
            == (y[:, None] == self.classes).int().argmax(-1)
            for x, y in self.batches("val", 50, count // 50)
        ]
        return torch.cat(hits).float().mean().item()
