"""Train an image classifier with a graph filter to distinguish vertical stripes from horizontal ones.

    pip install .
    python examples/vision.py                                     # a small ViT from scratch: seconds
    python examples/vision.py facebook/deit-tiny-patch16-224

The recipe recipes/imagenet.py trains on folders of images, with models of transformers or timm.
"""

import argparse

import torch
from transformers import AutoModelForImageClassification, ViTConfig, ViTForImageClassification

from hf_graphfilter import filter_status, parameter_groups, patch_model

parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("model", nargs="?", help="Hub id or folder of an image classifier")
parser.add_argument("--steps", type=int, default=40)
parser.add_argument("--output", default="runs/examples/vision")
options = parser.parse_args()

torch.manual_seed(0)
if options.model:
    model = AutoModelForImageClassification.from_pretrained(options.model, num_labels=2, ignore_mismatched_sizes=True)
else:
    shape = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 128}
    model = ViTForImageClassification(ViTConfig(**shape, image_size=32, patch_size=8, num_labels=2))
side = model.config.image_size


def images(count: int) -> dict[str, torch.Tensor]:
    """Return noisy images of stripes; the label is 1 where the stripes are vertical."""
    labels = torch.arange(count) % 2
    at = torch.arange(side) / side * torch.randint(2, 6, (count, 1)) + torch.rand(count, 1)
    stripes = (6.28 * at).sin()[:, None, None, :].expand(count, 3, side, side)
    stripes = torch.where(labels.bool()[:, None, None, None], stripes, stripes.transpose(2, 3))
    return {"pixel_values": stripes + torch.randn(count, 3, side, side), "labels": labels}


@torch.no_grad()
def accuracy() -> float:
    model.eval()
    return (model(**test).logits.argmax(-1) == test["labels"]).float().mean().item()


test = images(64)
patch_model(model, "gfsa", K=3)
before = accuracy()
optimizer = torch.optim.AdamW(parameter_groups(model, lr=1e-3 if options.model is None else 1e-4, filter_lr=1e-2))
for _ in range(options.steps):
    model.train()
    model(**images(16)).loss.backward()
    optimizer.step()
    optimizer.zero_grad()

print(filter_status(model))
print(f"accuracy on {len(test['labels'])} other images: {before:.2f} before, {accuracy():.2f} after")
model.save_pretrained(options.output)
AutoModelForImageClassification.from_pretrained(options.output)  # patched again
print(f"saved in {options.output}")
