"""Tiny models around ``torch.nn.MultiheadAttention``, with inputs, and their twins with explicit matrices."""

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from oracle import live_coefficients, live_weights
from torch import nn

TOKENS = 9
SIZES = {"d_model": 32, "nhead": 4, "dim_feedforward": 48, "dropout": 0.0}
CAUSAL = nn.Transformer.generate_square_subsequent_mask(TOKENS)


def encoder(batch_first, **options):
    layer = nn.TransformerEncoderLayer(**SIZES, batch_first=batch_first, **options)
    return nn.TransformerEncoder(layer, 3, enable_nested_tensor=batch_first)


def vision_transformer():
    torchvision = pytest.importorskip("torchvision")
    sizes = {"image_size": 16, "patch_size": 4, "num_layers": 3, "num_heads": 4, "hidden_dim": 32, "mlp_dim": 48}
    model = torchvision.models.VisionTransformer(**sizes, num_classes=5)
    nn.init.normal_(model.heads.head.weight)  # zero, as it comes
    return model


class DetectionLayer(nn.Module):
    """A decoder layer as DETR has it: positions are added to queries and keys, and not to values."""

    def __init__(self):
        super().__init__()
        self.self_attn, self.multihead_attn = (nn.MultiheadAttention(32, 4) for _ in range(2))
        self.linear, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)

    def forward(self, target, memory, positions):
        query = key = target + positions
        target = target + self.self_attn(query, key, value=target)[0]
        target = target + self.multihead_attn(target + positions, memory, value=memory)[0]
        return self.norm(target + self.linear(target).relu())


class Detector(nn.Module):
    """Layers as DETR has them, over an encoder of PyTorch."""

    def __init__(self):
        super().__init__()
        self.encoder = encoder(False)
        self.decoder = nn.ModuleDict({"layers": nn.ModuleList(DetectionLayer() for _ in range(2))})
        self.positions, self.start = (nn.Parameter(torch.randn(6, 1, 32)) for _ in range(2))

    def forward(self, src):
        memory = self.encoder(src)
        target = self.start.expand(-1, src.shape[1], -1)
        for layer in self.decoder["layers"]:
            target = layer(target, memory, self.positions)
        return target


class Graph(nn.Module):
    """A layer as PyG's GPSConv has it: messages of neighbours, beside attention over the whole graph."""

    def __init__(self):
        super().__init__()
        self.message, self.attn = nn.Linear(32, 32), nn.MultiheadAttention(32, 4, batch_first=True)
        self.norm = nn.LayerNorm(32)

    def forward(self, x, adjacency, mask):
        seen = self.attn(x, x, x, key_padding_mask=~mask, need_weights=False)[0]
        return self.norm(x + (adjacency @ self.message(x)).relu() + seen)


class GraphNetwork(nn.Module):
    """Two such layers."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(Graph() for _ in range(2))

    def forward(self, x, adjacency, mask):
        for conv in self.convs:
            x = conv(x, adjacency, mask)
        return x * mask[..., None]


@dataclass(frozen=True)
class Family:
    make: object
    inputs: object  # of a generator and a dtype
    patched: int
    left_alone: int = 0

    def build(self):
        torch.manual_seed(0)
        model = self.make().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.mul_(2)  # attention far from uniform
        return model


def padding():
    return torch.arange(TOKENS) >= torch.tensor([[TOKENS], [6]])


def batch(g, dtype):
    return {"src": torch.randn(2, TOKENS, 32, generator=g, dtype=dtype)}


def turned(g, dtype):
    return {"src": batch(g, dtype)["src"].transpose(0, 1)}


def graphs(g, dtype):
    edges = (torch.rand(2, TOKENS, TOKENS, generator=g) < 0.3).to(dtype)
    return {"x": batch(g, dtype)["src"], "adjacency": edges, "mask": ~padding()}


def pair(g, dtype):
    tgt = torch.randn(2, 5, 32, generator=g, dtype=dtype)
    return {**batch(g, dtype), "tgt": tgt, "tgt_mask": CAUSAL[:5, :5].to(dtype), "tgt_is_causal": True}


FAMILIES = {
    "encoder": Family(lambda: encoder(True), batch, 3),
    "encoder-padded": Family(
        lambda: encoder(True),
        lambda g, dtype: {**batch(g, dtype), "src_key_padding_mask": padding()},
        3,
    ),
    "encoder-causal": Family(
        lambda: encoder(True, activation="gelu"),
        lambda g, dtype: {**batch(g, dtype), "mask": CAUSAL.to(dtype), "is_causal": True},
        3,
    ),
    "tokens-first": Family(lambda: encoder(False), turned, 3),
    "tokens-first-padded": Family(
        lambda: encoder(False),
        lambda g, dtype: {
            **turned(g, dtype),
            "mask": CAUSAL.bool(),
            "src_key_padding_mask": padding(),
        },
        3,
    ),
    "transformer": Family(lambda: nn.Transformer(32, 4, 2, 2, 48, 0.0, batch_first=True), pair, 4, left_alone=2),
    "torchvision-vit": Family(
        vision_transformer, lambda g, dtype: {"x": torch.randn(2, 3, 16, 16, generator=g, dtype=dtype)}, 3
    ),
    "detr": Family(Detector, turned, 5, left_alone=2),
    "gps": Family(GraphNetwork, graphs, 2),
}
IS_CAUSAL = ("encoder-causal", "tokens-first-padded", "transformer")


def inputs(family, dtype=torch.float32):
    return FAMILIES[family].inputs(torch.Generator().manual_seed(1), dtype)


class Explicit(nn.Module):
    """``nn.MultiheadAttention`` as matrices, with a formula of A in the place of A."""

    def __init__(self, module, graph_filter, formula):
        super().__init__()
        self.module, self.filter, self.formula = module, [graph_filter], formula
        self.batch_first, self.num_heads = module.batch_first, module.num_heads
        self.in_proj_bias, self._qkv_same_embed_dim = module.in_proj_bias, module._qkv_same_embed_dim
        self.in_proj_weight, self.out_proj = module.in_proj_weight, module.out_proj

    def forward(self, query, key, value, key_padding_mask=None, need_weights=True, attn_mask=None, **_):
        m, f = self.module, self.filter[0]
        x, v = (t if m.batch_first else t.transpose(0, 1) for t in (query, value))
        (batch, n, size), heads = x.shape, m.num_heads
        w_q, w_k, w_v = m.in_proj_weight.chunk(3)
        b_q, b_k, b_v = m.in_proj_bias.chunk(3)
        q, k, v = (
            (s @ w.T + b).unflatten(-1, (heads, -1)).transpose(1, 2)
            for s, w, b in ((x, w_q, b_q), (x, w_k, b_k), (v, w_v, b_v))
        )
        allowed = torch.ones(batch, heads, n, n, dtype=torch.bool)
        for mask in (attn_mask, None if key_padding_mask is None else key_padding_mask[:, None, None]):
            if mask is not None:
                allowed = allowed & (~mask if mask.dtype == torch.bool else mask == 0)
        scale = (size // heads) ** -0.5
        scores = q @ k.mT * scale
        A = scores.masked_fill(~allowed, -torch.inf).softmax(-1)
        seen = SimpleNamespace(
            query=q, key=k, scores=scores, allowed=allowed, hidden=x, scaling=scale, weights=live_weights(f), groups=1
        )
        H = self.formula(A, live_coefficients(f), f.config, seen)
        out = (H(v) if callable(H) else H @ v).transpose(1, 2).flatten(2) @ m.out_proj.weight.T + m.out_proj.bias
        return (out if m.batch_first else out.transpose(0, 1)), None


def explicit_twin(plain, patched, formula):
    """A copy of ``plain`` whose attention is explicit, with the coefficients of ``patched``."""
    twin = copy.deepcopy(plain)
    for module in twin.modules():
        if hasattr(module, "use_nested_tensor"):
            module.use_nested_tensor = False
    for name, module in patched.named_modules():
        if "graph_filter" in module._modules:
            owner, _, attribute = name.rpartition(".")
            explicit = Explicit(twin.get_submodule(name), module.graph_filter, formula)
            explicit.register_forward_hook(lambda *_: None)  # without the fast path of the layer around it
            setattr(twin.get_submodule(owner), attribute, explicit)
    return twin
