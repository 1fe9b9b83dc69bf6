"""The batches on their way into a model: device, size, errors, and the mask of their tokens."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import GraphFilterError, shown
from ..filters import AttentionSite

ENTRIES = 1 << 24  # of attention matrices held at a time: 64 MB in float32
MISTAKES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)  # of a forward pass
_FORBIDDEN = -1e4  # additive masks hold 0 and the lowest number of their dtype


def check_batches(batches: Any) -> Any:
    """Return the batches unchanged, if they are a list or an iterator of batches.

    Raises:
        GraphFilterError: ``batches`` is a single batch, or cannot be iterated over.
    """
    if isinstance(batches, (Tensor, Mapping)):
        raise GraphFilterError("batches must be a list or an iterator of batches, got one batch: put it into a list")
    if not hasattr(batches, "__iter__") and not hasattr(batches, "__getitem__"):
        raise GraphFilterError(f"batches must be a list or an iterator of batches, got {shown(batches)}")
    return batches


def longest_text(model: Any) -> int | None:
    """Return the number of tokens for which a model of transformers has positions, or None without a limit."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    table = position_table(model)
    if table is not None and table.num_embeddings == longest:
        return count_places(table)
    return longest if isinstance(longest, int) else None


def position_table(model: nn.Module) -> nn.Embedding | None:
    """Return the learned positions of an encoder, or None if it has no table of them."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Embedding) and name.endswith("position_embeddings"):
            return module
    return None


def count_places(table: nn.Embedding) -> int:
    """Return for how many tokens a table has positions; those of RoBERTa's kind begin after that of padding."""
    return table.num_embeddings - (0 if table.padding_idx is None else table.padding_idx + 1)


def to_device(batch: Any, device: torch.device) -> Any:
    """Return the batch with its tensors on the device.

    Raises:
        GraphFilterError: the batch is neither a dict nor a tensor, or a dict without tensors.
    """
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        non_tensors = [name for name, x in batch.items() if isinstance(x, list | tuple) or hasattr(x, "__array__")]
        if non_tensors and not any(isinstance(y, Tensor) for x in batch.values() for y in (x, *_first(x))):
            raise GraphFilterError(
                f"{non_tensors[0]} of a batch holds no tensor: call the tokenizer with return_tensors='pt'"
            )
        return {name: x.to(device) if isinstance(x, Tensor) else x for name, x in batch.items()}
    texts = isinstance(batch, str) or (isinstance(batch, list | tuple) and any(isinstance(x, str) for x in batch))
    hint = ": hf_graphfilter.fitting.text_batches makes batches of texts" if texts else ""
    raise GraphFilterError(f"a batch is a dict of the model's arguments or a tensor, got {type(batch).__name__}{hint}")


def _first(x: Any) -> list[Any]:
    return list(x[:1]) if isinstance(x, list | tuple) else []


def cut_batch(batch: Any, heads: int, seen: Callable[[], int]) -> Iterator[Any]:
    """Yield the batch in pieces of sequences, so that the matrices of one layer fit into memory.

    For 0 heads the batch stays whole. The number of tokens of an image or an audio clip is only known when a module has
    ``seen`` one, so the first piece is then a single sequence.
    """
    tensors = [batch] if isinstance(batch, Tensor) else [x for x in batch.values() if isinstance(x, Tensor) and x.dim()]
    if not tensors or not tensors[0].numel():
        raise GraphFilterError("a batch holds no tokens: remove it, or check what makes it")
    rows, start = len(tensors[0]), 0
    if any(len(x) != rows for x in tensors):  # texts and images that do not come in pairs
        yield batch
        return
    longest = max((max(x.shape[1:]) for x in tensors if x.dim() in (2, 3) and not x.is_floating_point()), default=0)
    has_float_inputs = any(x.dim() > 1 and x.is_floating_point() for x in tensors)
    while start < rows:
        count = rows
        if heads:
            tokens = longest  # do not count longer texts of earlier batches
            if has_float_inputs:
                tokens = max(longest, seen()) if seen() else 0
            count = max(1, ENTRIES // (heads * tokens**2)) if tokens else 1
        part = slice(start, start + count)
        start += count
        if isinstance(batch, Tensor):
            yield batch[part]
        else:
            yield {k: x[part] if isinstance(x, Tensor) and x.dim() and len(x) == rows else x for k, x in batch.items()}


@contextlib.contextmanager
def evaluate(model: nn.Module) -> Iterator[None]:
    """Put a model into evaluation mode inside the ``with`` block; afterwards each module has its former mode."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextlib.contextmanager
def name_mistakes(model: nn.Module) -> Iterator[None]:
    """Turn an error of the model's forward pass inside the ``with`` block into one that names the shapes of its batch.

    Raises:
        GraphFilterError: the model raised an error of Python or PyTorch. Out-of-memory errors are not changed.
    """
    inputs: list[Mapping[str, Any]] = []  # the arguments of a forward pass that has not ended, or ended in a mistake

    def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs[:] = [{"a tensor": args[0] if args else None, **kwargs}]

    def end(*_: Any) -> None:
        if not isinstance(sys.exception(), MISTAKES):  # blocks of layers leave the forward pass by one of their own
            inputs.clear()

    hooks = [
        model.register_forward_pre_hook(begin, with_kwargs=True),
        model.register_forward_hook(end, always_call=True),
    ]
    try:
        yield
    except (GraphFilterError, torch.OutOfMemoryError):
        raise
    except MISTAKES as error:
        if not inputs:
            raise
        shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in inputs[-1].items() if isinstance(x, Tensor))
        text = " ".join(str(error).split())[:200]
        if "index out of range" in text:
            text += " (an id beyond the vocabulary, or more tokens than the model has positions)"
        raise GraphFilterError(
            f"{type(model).__name__} does not run on {shapes or 'a batch without tensors'}: {text}"
        ) from error
    finally:
        for hook in hooks:
            hook.remove()


def mask_of(batch: Mapping[str, Any], stack: str) -> Tensor | None:
    """Return the mask of a stack: ``"encoder"``, ``"decoder"``, or ``""`` for a model with only one."""
    for name in ("src_key_padding_mask", "key_padding_mask"):  # PyTorch's masks: True or -inf for padding
        if isinstance(padding := batch.get(name), Tensor) and stack != "decoder":
            return ~padding if padding.dtype == torch.bool else padding == 0
    mask: Tensor | None = batch.get("decoder_attention_mask" if stack == "decoder" else "attention_mask")
    if stack != "decoder" or mask is not None:
        return mask
    labels, ids = batch.get("labels"), batch.get("decoder_input_ids")
    if isinstance(labels, Tensor) and labels.dim() == 2 and (ids is None or ids.shape == labels.shape):
        return labels != -100  # the model or a collator makes the decoder's tokens from the labels
    if ids is None and batch.get("decoder_inputs_embeds") is None and "input_ids" in batch:
        return batch.get("attention_mask")  # BART makes the decoder's tokens from input_ids
    return None


class Padding:
    """The masks of one batch, as the layers of its model read them.

    Args:
        model: the model that reads the batch.
        sites: the attention modules of the model. If only some of them read texts (as in CLIP), the mask is that of the
            texts.
        batch: arguments of the model, or a tensor.
    """

    def __init__(self, model: nn.Module, sites: list[AttentionSite], batch: Any):
        self.model, self.batch = model, batch if isinstance(batch, Mapping) else {}
        self.encoder_decoder = bool(getattr(getattr(model, "config", None), "is_encoder_decoder", False))
        self.texts = any(_reads_texts(site) for site in sites)
        self.unread: dict[str, Tensor] = {}
        self.read: set[str] = set()

    def find_tokens(self, site: AttentionSite, batch: int, tokens: int, device: torch.device) -> Tensor:
        """Return which tokens of the stack of ``site`` are no padding, bool (batch, tokens)."""
        stack = site.stack if self.encoder_decoder else ""
        mask = mask_of(self.batch, stack) if _reads_texts(site) or not self.texts else None
        if isinstance(mask, Tensor) and mask.dim() == 4:
            is_visible = mask > _FORBIDDEN if mask.is_floating_point() else mask.bool()
            mask = is_visible.flatten(1, 2).any(1).expand(batch, -1)
        elif isinstance(mask, Tensor) and mask.shape != (batch, tokens) and stack != "decoder":
            frames = getattr(self.model, "_get_feature_vector_attention_mask", None)  # for masks of audio samples
            mask = mask if frames is None or mask.shape[1] < tokens else frames(tokens, mask)
            if (prefix := getattr(self.model, "first_tokens", 0)) and mask.shape == (batch, tokens - prefix):
                mask = torch.nn.functional.pad(mask, (prefix, 0), value=1)
        if isinstance(mask, Tensor) and mask.shape == (batch, tokens):
            self.read.add(stack)
            return mask.to(device).bool()
        if isinstance(mask, Tensor):
            self.unread[stack] = mask
        return torch.ones(batch, tokens, dtype=torch.bool, device=device)

    def check(self) -> None:
        """Check, after the model has run, that every mask was read by a layer.

        Raises:
            GraphFilterError: a mask that hides tokens fits no layer of the model.
        """
        for stack, mask in self.unread.items():
            if stack not in self.read and not mask.bool().all():
                raise GraphFilterError(
                    f"the batch's mask {tuple(mask.shape)} hides tokens, and no layer of {type(self.model).__name__} "
                    "has as many, so that padding cannot be left out: pass batches of texts of one length and no mask"
                )


def _reads_texts(site: AttentionSite) -> bool:
    return hasattr(getattr(site.module, "config", None), "vocab_size")
