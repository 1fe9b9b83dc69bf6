"""The pieces and blocks in which an attention matrix A is formed and multiplied on the CPU.

A piece is some sequences with all their heads, or some heads of one sequence: its intermediate results stay in the
processor's cache. A block is some rows of A and the columns that they see: under a causal mask half of A is never
formed. All layers share one ``Workspace`` per shape, as for short sequences even slicing costs time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from .scores import additive, biased_softmax, softmax_
from .scratch import LARGEST, reuse, scratch

PIECE = 1 << 20  # entries of A, or of the signals, that are handled at a time: 4 MB in float32
ROWS = 64  # in a block of a causal A
ROWS_OF_LONG = 128  # the same for more than 512 tokens, where blocks are wide enough
NARROW = 16  # features: a product with fewer columns is two to four times as fast if its result is stored by column


class Piece(NamedTuple):
    """Some sequences with all their heads, or some heads of one.

    ``shape`` is (number of sequences, number of heads). ``range`` is the slice of their matrices among the matrices of
    all sequences and heads.
    """

    sequences: slice
    heads: slice
    shape: tuple[int, int]
    range: slice


def split_rows(tokens: int, causal: bool) -> list[tuple[slice, slice]]:
    """Return the rows of the blocks of A and the columns that they see; one block without a causal mask."""
    size = (ROWS if tokens <= 512 else ROWS_OF_LONG) if causal else tokens
    ends = [(start, min(start + size, tokens)) for start in range(0, tokens, size)]
    return [(slice(start, end), slice(0, end)) for start, end in ends]


def split_batch(batch: int, heads: int, tokens: int, rows: int, width: int) -> Iterator[Piece]:
    """Yield the pieces of a batch, given the ``rows`` of a block of A and the ``width`` of all signals together."""
    heads_per_piece = max(1, PIECE // (tokens * max(rows, width)))
    if heads_per_piece < heads:
        for sequence in range(batch):
            for head in range(0, heads, heads_per_piece):
                end = min(head + heads_per_piece, heads)
                matrices = slice(sequence * heads + head, sequence * heads + end)
                yield Piece(slice(sequence, sequence + 1), slice(head, end), (1, end - head), matrices)
    else:
        for sequence in range(0, batch, heads_per_piece // heads):
            end = min(sequence + heads_per_piece // heads, batch)
            matrices = slice(sequence * heads, end * heads)
            yield Piece(slice(sequence, end), slice(0, heads), (end - sequence, heads), matrices)


def allocate(make: Callable[[tuple[int, ...]], Tensor], shape: tuple[int, ...]) -> Tensor:
    """Return a tensor (matrices, tokens, features) that ``make`` allocates, by column if it is narrow and long."""
    count, tokens, features = shape
    return make((count, features, tokens)).mT if _is_narrow(tokens, features) else make(shape)


def flatten_signal(x: Tensor) -> Tensor:
    """Return ``x`` (batch, heads, tokens, features) as (batch * heads, tokens, features), stored as by ``allocate``."""
    batch, heads, tokens, features = x.shape
    if _is_narrow(tokens, features):
        return x.mT.reshape(batch * heads, features, tokens).mT
    return x.reshape(batch * heads, tokens, features)


def _is_narrow(tokens: int, features: int) -> bool:
    return features < NARROW <= tokens


def take(x: Tensor, piece: Piece) -> Tensor:
    """Return the part of ``x`` (batch * heads, ...) that belongs to a piece."""
    matrices = piece.range
    return x if matrices.stop - matrices.start == x.shape[0] else x[matrices]


def part_of_batch(x: Tensor, piece: Piece) -> Tensor:
    """Return the part of ``x`` (batch, heads, ...) that belongs to a piece."""
    return x if x.shape[:2] == piece.shape else x[piece.sequences, piece.heads]


def by_head(x: Tensor, piece: Piece) -> Tensor:
    """Return the view of ``x`` (sequences * heads, ...) as (sequences, heads, ...)."""
    return x.view(*piece.shape, *x.shape[1:])


def cut(x: Tensor, rows: slice) -> Tensor:
    """Return some rows of ``x`` (matrices, tokens, features)."""
    return x if rows.stop - rows.start == x.shape[1] else x[:, rows]


class Block(NamedTuple):
    """Views of the memory of a ``Workspace``: what a block of A reads and writes, at its rows or the tokens seen."""

    rows: slice
    seen: slice
    hidden: Tensor | None
    matrix: Tensor
    change: Tensor
    more_change: Tensor
    last: Tensor
    g: Tensor
    grad_sum: Tensor
    grad_sum_seen: Tensor
    grads: list[Tensor]
    grads_seen: list[Tensor]
    grad_q: Tensor
    grad_k: Tensor


class Workspace:
    """The memory for one piece: a copy of its gradient, the gradients of K signals and their sum, the blocks of its A.

    ``rows`` is the number of rows of a block. It is not read here, but distinguishes workspaces in the cache of
    ``reuse``.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        tokens: int,
        features: int,
        width: int,
        K: int,
        causal: bool,
        dtype: torch.dtype,
        rows: int,
    ):
        self.shape, count = shape, shape[0] * shape[1]

        def rows_of(name: str, features: int) -> Tensor:
            return allocate(partial(scratch, name, dtype=dtype), (count, tokens, features))

        self.grad_q, self.grad_k = rows_of("grad q", features), rows_of("grad k", features)
        self.g, self.last, self.grad_sum = (rows_of(name, width) for name in ("g", "last", "grad sum"))
        self.grads = [rows_of(f"grad {step}", width) for step in range(K)]
        blocks = split_rows(tokens, causal)
        size = blocks[0][0].stop
        later = torch.full((size, size), -torch.inf, dtype=dtype, device="cpu").triu_(1)
        self.hidden = torch.cat([later.new_zeros(size, tokens), later], 1) if causal else None
        self.blocks = [self._block(rows, seen, dtype) for rows, seen in blocks]

    def _block(self, rows: slice, seen: slice, dtype: torch.dtype) -> Block:
        tokens, shape = self.g.shape[1], (self.g.shape[0], rows.stop - rows.start, seen.stop)
        matrix, change, more = (scratch(name, shape, dtype) for name in ("matrix", "change", "more change"))
        start = tokens - rows.start
        hidden = None if self.hidden is None else self.hidden[: shape[1], start : start + shape[2]]
        return Block(
            rows=rows,
            seen=seen,
            hidden=hidden,
            matrix=matrix,
            change=change,
            more_change=more,
            last=self.last[:, rows],
            g=self.g[:, rows],
            grad_sum=self.grad_sum[:, rows],
            grad_sum_seen=self.grad_sum[:, seen],
            grads=[x[:, rows] for x in self.grads],
            grads_seen=[x[:, seen] for x in self.grads],
            grad_q=self.grad_q[:, rows],
            grad_k=self.grad_k[:, seen],
        )

    def form_matrix(
        self,
        block: Block,
        q: Tensor,
        k: Tensor,
        mask: Tensor | None,
        piece: Piece,
        scale: float,
        is_kept: bool,
        empties: bool,
    ) -> Tensor:
        """Return a block of A, (sequences * heads, rows, seen), in fresh memory if the caller keeps it."""
        matrix = torch.empty_like(block.matrix) if is_kept else block.matrix
        q, k = cut(q, block.rows), cut(k, block.seen)
        if block.hidden is not None:
            torch.baddbmm(block.hidden, q, k.mT, alpha=scale, out=matrix)
            return softmax_(matrix)
        torch.baddbmm(matrix, q, k.mT, beta=0, alpha=scale, out=matrix)
        if mask is None:
            return softmax_(matrix)
        bias = additive(part_of_mask(mask, piece), matrix.dtype)
        biased_softmax(by_head(matrix, piece), bias, empties)
        return matrix


def find_workspace(
    piece: Piece, tokens: int, features: int, width: int, K: int, causal: bool, dtype: torch.dtype
) -> Workspace:
    """Return the workspace for a piece; large ones, whose buffers are not held, are made anew."""
    arguments = (piece.shape, tokens, features, width, K, causal, dtype, ROWS)
    large = tokens * max(1 if causal else tokens, K * width) > LARGEST
    return Workspace(*arguments) if large else reuse(Workspace, *arguments)


def part_of_block(x: Tensor, piece: Piece, block: Block) -> Tensor:
    """Return the part of a tensor (batch * heads, tokens, tokens) that belongs to a block."""
    return x[piece.range, block.rows, block.seen]


def write_product(target: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Write ``scale a b`` to ``target``, which may be a view of some rows (PyTorch would loop over products)."""
    if target.is_contiguous():
        torch.baddbmm(target, a, b, beta=0, alpha=scale, out=target)
    elif target.mT.is_contiguous():
        torch.baddbmm(target.mT, b.mT, a.mT, beta=0, alpha=scale, out=target.mT)
    else:
        target.copy_(_product(a, b, scale))


def add_product(target: Tensor, first: bool, a: Tensor, b: Tensor, scale: float = 1.0) -> None:
    """Add ``scale a b`` to ``target``; the first product begins the sum."""
    if first:
        write_product(target, a, b, scale)
    else:
        target += _product(a, b, scale)


def _product(a: Tensor, b: Tensor, scale: float) -> Tensor:
    shape = (a.shape[0], a.shape[1], b.shape[2])
    out = allocate(partial(scratch, "product", dtype=a.dtype), shape)
    write_product(out, a, b, scale)
    return out


def write_sum(
    target: Tensor, start: Tensor | None, factors: Sequence[Tensor | None], signals: Sequence[Tensor]
) -> None:
    """Write ``start + sum_k c_k x_k`` to ``target``, without the terms whose c_k is None.

    All are (matrices, tokens, features), factors (matrices, 1, 1). The target may be the start itself.
    """
    terms = [(c, x) for c, x in zip(factors, signals, strict=True) if c is not None]
    if not terms and start is not target:
        target.zero_() if start is None else target.copy_(start)
    for number, (c, x) in enumerate(terms):
        if number:
            target.addcmul_(x, c)
        elif start is None:
            torch.mul(x, c, out=target)
        else:
            torch.addcmul(start, x, c, out=target)


def part_of_mask(mask: Tensor, piece: Piece) -> Tensor:
    """Return the view of a mask, broadcastable to (batch, heads, tokens, tokens), that belongs to a piece."""
    mask = mask if mask.dim() == 4 else mask[(None,) * (4 - mask.dim())]
    if mask.shape[:2] == piece.shape:
        return mask
    whole = slice(None)
    return mask[piece.sequences if mask.shape[0] > 1 else whole, piece.heads if mask.shape[1] > 1 else whole]
