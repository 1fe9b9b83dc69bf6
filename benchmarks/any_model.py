"""Train models with PyTorch's own attention in a custom loop, without and with GFSA.

``text``: an ``nn.TransformerEncoder`` from scratch, which tells good from bad reviews among the film-review snippets of
the package. ``images``: torchvision's ``VisionTransformer`` with the weights of DeiT-tiny, fine-tuned on folders of
images at 64 x 64 pixels. A seed is a pair: both models begin with the same weights and see the same batches.

    python benchmarks/any_model.py text
    python benchmarks/any_model.py images --weights FOLDER --data FOLDER    # of a ViT; with train/ and test/
"""

from __future__ import annotations

import csv
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections import Counter
from pathlib import Path

import torch
from measure import RESULTS, stamp, write
from torch import Tensor, nn

from hf_graphfilter import filter_status, parameter_groups, patch_model
from hf_graphfilter.demo import load_snippets

FIELDS = ["date", "device", "torch", "task", "seed", "model", "accuracy", "loss", "train", "test", "epochs", "lr"]
WORDS, LENGTH, BATCH = 6000, 48, 32
Data = tuple[Tensor, Tensor]


class Classifier(nn.Module):
    """Words, an encoder of PyTorch, and the mean of its tokens."""

    def __init__(self, depth: int = 4, width: int = 64):
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, width, padding_idx=0), nn.Embedding(LENGTH, width)
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.1, batch_first=True)
        self.encoder, self.head = nn.TransformerEncoder(layer, depth), nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        padding = ids == 0
        x = self.words(ids) + self.places.weight[: ids.shape[1]]
        x = self.encoder(x, src_key_padding_mask=padding)
        return self.head(x.masked_fill(padding[..., None], 0.0).sum(1) / (~padding).sum(1, keepdim=True))


def read_text() -> tuple[Data, Data]:
    """Return training and test data: word ids, and whether the rating is positive."""
    rows = [(re.findall(r"[a-z']+", text.lower())[:LENGTH], rating > 0) for rating, text in load_snippets() if rating]
    rows = [(words, label) for words, label in rows if words]
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0)).tolist()
    rows = [rows[i] for i in order]
    test, train = rows[:1500], rows[1500:]
    common = Counter(word for words, _ in train for word in words).most_common(WORDS - 2)
    number = {word: i for i, (word, _) in enumerate(common, 2)}
    ids = [torch.tensor([number.get(word, 1) for word in words]) for words, _ in rows]
    padded, labels = nn.utils.rnn.pad_sequence(ids, batch_first=True), torch.tensor([int(y) for _, y in rows])
    return (padded[len(test) :], labels[len(test) :]), (padded[: len(test)], labels[: len(test)])


def read_images(folder: Path) -> tuple[Data, Data]:
    """Return training and test data: images as DeiT takes them, and the numbers of their classes."""
    from torchvision import datasets, transforms

    steps = [transforms.Resize((64, 64)), transforms.ToTensor()]
    normal = transforms.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225])
    parts = []
    for part in ("train", "test"):
        files = datasets.ImageFolder(folder / part, transforms.Compose([*steps, normal]))
        images, labels = zip(*files, strict=True)
        parts.append((torch.stack(images), torch.tensor(labels)))
    return parts[0], parts[1]


def vision_transformer(weights: Path, classes: int, size: int = 64) -> nn.Module:
    """Return torchvision's ViT with weights of transformers' ViT, for images of ``size`` x ``size`` pixels."""
    from safetensors.torch import load_file
    from torchvision.models import VisionTransformer
    from torchvision.models.vision_transformer import interpolate_embeddings

    saved = {name.removeprefix("vit."): x for name, x in load_file(weights / "model.safetensors").items()}
    width, depth = saved["layernorm.weight"].shape[0], len([n for n in saved if n.endswith("output.dense.bias")]) // 2
    sizes = {"patch_size": 16, "num_layers": depth, "num_heads": width // 64, "hidden_dim": width}
    model = VisionTransformer(image_size=size, **sizes, mlp_dim=4 * width, num_classes=classes)
    state = {
        "class_token": saved["embeddings.cls_token"],
        "encoder.pos_embedding": saved["embeddings.position_embeddings"],
        "conv_proj.weight": saved["embeddings.patch_embeddings.projection.weight"],
        "conv_proj.bias": saved["embeddings.patch_embeddings.projection.bias"],
    }
    parts = {
        "self_attention.out_proj": "attention.output.dense",
        **{"mlp.0": "intermediate.dense", "mlp.3": "output.dense"},
        **{"ln_1": "layernorm_before", "ln_2": "layernorm_after"},
    }
    for kind in ("weight", "bias"):
        state[f"encoder.ln.{kind}"] = saved[f"layernorm.{kind}"]
        for i in range(depth):
            target, source = f"encoder.layers.encoder_layer_{i}", f"encoder.layer.{i}"
            projections = [saved[f"{source}.attention.attention.{name}.{kind}"] for name in ("query", "key", "value")]
            state[f"{target}.self_attention.in_proj_{kind}"] = torch.cat(projections)
            state |= {f"{target}.{part}.{kind}": saved[f"{source}.{name}.{kind}"] for part, name in parts.items()}
    missing = model.load_state_dict(interpolate_embeddings(size, 16, state), strict=False)
    assert missing.missing_keys == ["heads.head.weight", "heads.head.bias"]
    assert not missing.unexpected_keys
    return model


def train(model: nn.Module, data: Data, epochs: int, lr: float, seed: int) -> None:
    groups = parameter_groups(model, lr=lr, filter_lr=1e-2, weight_decay=0.0) if filter_status(model) else None
    optimizer = torch.optim.AdamW(groups or model.parameters(), lr=lr, weight_decay=0.0)
    x, y = data
    g = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)  # dropout
    model.train()
    for _ in range(epochs):
        for part in torch.randperm(len(x), generator=g).split(BATCH):
            loss = nn.functional.cross_entropy(model(x[part]), y[part])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()


@torch.inference_mode()
def test(model: nn.Module, data: Data) -> tuple[float, float]:
    """Return (accuracy, loss)."""
    model.eval()
    logits = torch.cat([model(x) for x in data[0].split(100)])
    accuracy = (logits.argmax(-1) == data[1]).float().mean().item()
    return accuracy, nn.functional.cross_entropy(logits, data[1]).item()


def main() -> None:
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=["text", "images"])
    parser.add_argument("--weights", type=Path, help="folder of a ViT of transformers")
    parser.add_argument("--data", type=Path, help="folder with train/CLASS/*.png and test/CLASS/*.png")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--rows", type=int, help="of the training data, drawn at random; all by default")
    options = parser.parse_args()
    torch.set_num_threads(1)
    text = options.task == "text"
    epochs, lr = options.epochs or (3 if text else 1), options.lr or (1e-3 if text else 1e-4)
    training, held_out = read_text() if text else read_images(options.data)
    if options.rows:
        indices = torch.randperm(len(training[0]), generator=torch.Generator().manual_seed(0))[: options.rows]
        training = training[0][indices], training[1][indices]
    output, rows = RESULTS / "any-model-cpu.csv", []
    common = stamp("cpu", "torch") | {"task": options.task, "train": len(training[0]), "test": len(held_out[0])}
    for seed in range(options.seeds):
        for name in ("baseline", "gfsa"):
            torch.manual_seed(seed)
            model = Classifier() if text else vision_transformer(options.weights, int(training[1].max()) + 1)
            if name == "gfsa":
                patch_model(model, "gfsa", K=3)
            train(model, training, epochs, lr, seed)
            accuracy, loss = test(model, held_out)
            print(f"{options.task} seed {seed} {name:8} accuracy {accuracy:.4f} loss {loss:.4f}", flush=True)
            result = {"seed": seed, "model": name, "accuracy": round(accuracy, 4), "loss": round(loss, 4)}
            rows.append(common | result | {"epochs": epochs, "lr": lr})
    other_rows = [row for row in read_rows(output) if (row["task"], float(row["lr"])) != (options.task, lr)]
    write([*other_rows, *rows], output, FIELDS)


def read_rows(file: Path) -> list[dict]:
    return list(csv.DictReader(file.open())) if file.exists() else []


if __name__ == "__main__":
    main()
