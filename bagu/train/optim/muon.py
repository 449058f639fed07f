"""Muon: momentum, then the nearest (semi-)orthogonal matrix to it, so that all directions are updated equally.

    m ← μm + (1-μ)g        O = UVᵀ of (1-μ)g + μm = UΣVᵀ        θ ← (1 - ηλ) θ - η · 0.2 √max(R, C) · O

The factor gives an update the root mean square of an AdamW update (about 0.2), so one learning rate works for the
matrices here and for the embeddings and vectors that AdamW updates. UVᵀ is computed by five steps of a quintic
Newton-Schulz iteration, which needs only matrix products; its singular values end between about 0.7 and 1.2, which is
accurate enough. bf16 is precise enough for the iteration, so it runs in bf16 or fp32, whichever is faster on this
machine.

https://kellerjordan.github.io/posts/muon, https://arxiv.org/abs/2502.16982 (the factor)
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from bagu.train.memory.flat import Segment, Slot
from bagu.train.memory.sharded import Piece
from bagu.train.optim.rules import Now

QUINTIC = (3.4445, -4.7750, 2.0315)  # steepest at zero, so that small singular values grow fastest


def muon(
    segment: Segment, p: torch.Tensor, g: torch.Tensor, velocity: torch.Tensor, now: Now, *, momentum: float,
    weight_decay: float, newton_schulz_steps: int, newton_schulz_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Update a segment of matrices (experts are many in one). Matrices of one shape run together if possible."""
    mix_momentum(p, g, velocity, now, momentum=momentum, weight_decay=weight_decay)
    for stack in _stacks(segment):
        update = orthogonalise(stack.of(g), newton_schulz_steps, newton_schulz_dtype)
        stack.of(p).add_(update, alpha=-now.lr * 0.2 * math.sqrt(max(stack.rows, stack.columns)))


def mix_momentum(
    p: torch.Tensor, g: torch.Tensor, velocity: torch.Tensor, now: Now, *, momentum: float, weight_decay: float
) -> None:
    """The elementwise part: update the velocity, replace g by (1-μ)g + μm, decay p."""
    velocity.lerp_(g, 1 - momentum)
    g.lerp_(velocity, momentum)
    if weight_decay:
        p.mul_(1 - now.lr * weight_decay)


def muon_part(
    piece: Piece,
    p: torch.Tensor,
    whole: torch.Tensor,
    now: Now,
    *,
    newton_schulz_steps: int,
    newton_schulz_dtype: torch.dtype,
) -> None:
    """Update this rank's part of matrices. `whole` is the mixed gradient of the piece's unit, from all ranks.

    A rank orthogonalises the matrices that its piece touches: a matrix that lies in the parts of two ranks is computed
    by both.
    """
    for slot in piece.slots:
        *_, rows, columns = slot.parameter.shape
        size = rows * columns
        low, high = max(slot.start, piece.start), min(slot.stop, piece.stop)
        first, last = (low - slot.start) // size, -(-(high - slot.start) // size)
        matrices = slot.of(whole, piece.unit.start).view(-1, rows, columns)[first:last]
        update = orthogonalise(matrices, newton_schulz_steps, newton_schulz_dtype).reshape(-1)
        begin = slot.start + first * size
        p[low - piece.start : high - piece.start].add_(
            update[low - begin : high - begin].to(p.device), alpha=-now.lr * 0.2 * math.sqrt(max(rows, columns))
        )


class MatrixParts(Protocol):
    """Matrices of which tensor parallelism gives each rank a part. All ranks of tp call these in the same order."""

    def whole_over_tp(self, name: str, part: torch.Tensor) -> torch.Tensor: ...
    def part_over_tp(self, name: str, whole: torch.Tensor) -> torch.Tensor: ...


def muon_over_tp(
    segment: Segment, p: torch.Tensor, g: torch.Tensor, velocity: torch.Tensor, now: Now, parts: MatrixParts, *,
    momentum: float, weight_decay: float, newton_schulz_steps: int, newton_schulz_dtype: torch.dtype,
) -> None:  # fmt: skip
    """Update a segment of matrices that are divided over tp: each is gathered, orthogonalised on every rank, cut."""
    mix_momentum(p, g, velocity, now, momentum=momentum, weight_decay=weight_decay)
    for slot in segment.slots:
        whole = parts.whole_over_tp(slot.name, slot.of(g, segment.start))
        update = _update_over_tp(slot, whole, parts, now, newton_schulz_steps, newton_schulz_dtype)
        slot.of(p, segment.start).add_(update)


def muon_part_over_tp(
    pieces: Sequence[tuple[Piece, torch.Tensor]],
    slots: Sequence[Slot],
    gradient: torch.Tensor,
    start: int,
    now: Now,
    parts: MatrixParts,
    *,
    newton_schulz_steps: int,
    newton_schulz_dtype: torch.dtype,
) -> None:
    """Update this rank's part of matrices that are divided over tp and shard.

    `pieces` are this rank's pieces of a unit with their masters, `slots` all matrices of the unit, `gradient` its mixed
    gradient over shard. Every matrix is gathered over tp, because the pieces of other ranks of tp may differ.
    """
    for slot in slots:
        whole = parts.whole_over_tp(slot.name, slot.of(gradient, start))
        for piece, p in pieces:
            low, high = max(slot.start, piece.start), min(slot.stop, piece.stop)
            if low < high:
                update = _update_over_tp(slot, whole, parts, now, newton_schulz_steps, newton_schulz_dtype)
                inside = update.reshape(-1)[low - slot.start : high - slot.start]
                p[low - piece.start : high - piece.start].add_(inside.to(p.device))


def _update_over_tp(
    slot: Slot, whole: torch.Tensor, parts: MatrixParts, now: Now, steps: int, dtype: torch.dtype
) -> torch.Tensor:
    """What is added to this rank's part of a parameter whose mixed gradient is `whole`."""
    *_, rows, columns = whole.shape
    update = orthogonalise(whole.reshape(-1, rows, columns), steps, dtype)
    mine = parts.part_over_tp(slot.name, update.reshape(whole.shape))
    return mine.to(whole.dtype) * (-now.lr * 0.2 * math.sqrt(max(rows, columns)))


class _Stack(NamedTuple):
    """Matrices of one shape at equal distances in a flat buffer, as in identical layers, as one view."""

    start: int
    number: int
    distance: int
    rows: int
    columns: int

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """[number, rows, columns]"""
        size, stride = (self.number, self.rows, self.columns), (self.distance, self.columns, 1)
        return flat.as_strided(size, stride, int(flat.storage_offset()) + self.start)


def _stacks(segment: Segment) -> list[_Stack]:
    """The matrices of a segment in as few stacks as their positions allow."""
    places: dict[tuple[int, int], list[int]] = defaultdict(list)
    for slot in segment.slots:
        *_, rows, columns = slot.parameter.shape
        first, size = slot.start - segment.start, rows * columns
        places[rows, columns] += range(first, first + slot.parameter.numel(), size)
    stacks = []
    for (rows, columns), starts in places.items():
        while starts:
            distance = starts[1] - starts[0] if len(starts) > 1 else 0
            number = next((i for i, at in enumerate(starts) if at != starts[0] + i * distance), len(starts))
            stacks.append(_Stack(starts[0], number, distance, rows, columns))
            starts = starts[number:]
    return stacks


def orthogonalise(stack: torch.Tensor, steps: int, dtype: torch.dtype) -> torch.Tensor:
    """Approximately UVᵀ of each matrix UΣVᵀ in `stack` [n, R, C], computed and returned in `dtype`."""
    a, b, c = QUINTIC
    tall = stack.shape[1] > stack.shape[2]
    x = (stack.mT if tall else stack).to(dtype)  # the Gram matrix of the short side is the smaller one
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)  # makes all singular values at most 1
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x
