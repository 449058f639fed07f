"""How a model's parameters are divided over ranks: a table of names, and functions that apply it to a state dict.

    Replicated   every rank has all of it
    Split        a rank has a range of one dimension; with `blocks`, a range of each of that many equal parts of it
    First        rank 0 has it, and the others have zeros: the bias of a product that is summed over ranks

`TENSOR` divides the inside of attention and of the feed-forward network (https://arxiv.org/abs/1909.08053): qkv and
gate_up by their outputs, out and down by their inputs, and the vocabulary. `EXPERTS` divides experts. A name that no
row matches is replicated. Names of the form of `blocks.3.ffn.down.weight` are the same on one rank and on many, so a
checkpoint has full tensors and does not depend on the number of ranks: a `Placement` cuts and joins them.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

from bagu.nn.config import ModelConfig, T5Relative
from bagu.parallel.collectives import ALL_GATHER


@dataclass(frozen=True)
class Replicated:
    def cut(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        return full

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0]


@dataclass(frozen=True)
class First:
    def cut(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        return full if rank == 0 else torch.zeros_like(full)

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return parts[0]


@dataclass(frozen=True)
class Split:
    """If the ranks do not divide the dimension, some have one row more than others (a vocabulary; heads and features
    are refused before)."""

    dim: int
    blocks: int = 1

    def cut(self, full: torch.Tensor, rank: int, ranks: int) -> torch.Tensor:
        return torch.cat(
            [block.tensor_split(ranks, self.dim)[rank] for block in full.chunk(self.blocks, self.dim)], self.dim
        )

    def join(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        blocks = zip(*(part.chunk(self.blocks, self.dim) for part in parts), strict=True)
        return torch.cat([piece for block in blocks for piece in block], self.dim)


class Division(NamedTuple):
    """A `Split` as one of several ranks has it."""

    dim: int
    blocks: int
    rank: int
    ranks: int


def divided_shape(shape: Sequence[int], divisions: Sequence[Division]) -> torch.Size:
    """The shape of the part that the divisions, one after the other, cut out of a tensor."""
    part = torch.empty(tuple(shape), device="meta")
    for each in divisions:
        part = Split(each.dim, each.blocks).cut(part, each.rank, each.ranks)
    return part.shape


def put(full: torch.Tensor, part: torch.Tensor, divisions: Sequence[Division]) -> None:
    """Copy a part to the places of `full` from which the divisions cut it."""
    if not divisions:
        full.copy_(part)
        return
    (dim, blocks, rank, ranks), *rest = divisions
    for block, piece in zip(full.chunk(blocks, dim), part.chunk(blocks, dim), strict=True):
        put(block.tensor_split(ranks, dim)[rank], piece, rest)


Placement = Replicated | First | Split
Table = Sequence[tuple[str, Placement]]

_OUT = r"\.(weight|weight_scale|bias|lora_b)"  # the tensors of a Linear that have its outputs as rows
_IN = r"\.(weight|lora_a)"  # those that have its inputs as columns
TENSOR: Table = (
    (r"(embedding|head)\.weight|mlm\.bias", Split(0)),
    (r".*\.attention\.(qkv|q|q_b|kv_b)" + _OUT, Split(0)),
    (r".*\.attention\.out" + _IN, Split(1)),
    (r".*\.attention\.sinks", Split(0)),
    (r".*\.ffn(\.shared)?\.gate_up" + _OUT, Split(0, blocks=2)),
    (r".*\.ffn(\.shared)?\.up" + _OUT, Split(0)),
    (r".*\.ffn(\.shared)?\.down" + _IN, Split(1)),
    (r".*\.(attention\.out|ffn\.down|ffn\.shared\.down)\.bias", First()),
    (r".*\.ffn\.gate_up", Split(1, blocks=2)),  # experts: [E, 2F, D], [E, F, D] and [E, D, F]
    (r".*\.ffn\.up", Split(1)),
    (r".*\.ffn\.down", Split(2)),
    (r".*\.ffn\.down_bias", First()),
)
T5: Table = ((r"positions\.weight", Split(0)),)  # a row per head
EXPERTS: Table = ((r".*\.ffn\.(gate_up|up|down|into_bias|down_bias)", Split(0)),)


def placements(names: Sequence[str], table: Table, config: ModelConfig) -> dict[str, Placement]:
    """The placement of each parameter by name; the first row of `table` that matches the whole name decides."""
    rows = [*table]
    if table is TENSOR:
        rows += T5 if isinstance(config.positions, T5Relative) else ()
        rows.append((r".*\.ffn\.into_bias", Split(1, blocks=2 if config.gated else 1)))
    return {name: next((p for pattern, p in rows if re.fullmatch(pattern, name)), Replicated()) for name in names}


def gather_full(
    state: Mapping[str, torch.Tensor],
    places: Mapping[str, Placement],
    group: dist.ProcessGroup | None,
    *,
    first: bool = False,
) -> dict[str, torch.Tensor]:
    """The full state dict on every rank of `group` (None is one rank), one tensor at a time; or on its `first` rank
    alone, and the others keep their parts.

    Works for all tensors in the shapes of the parameters: weights, gradients, moments of an optimizer.
    """
    if group is None:
        return dict(state)
    return {name: _gathered(x.detach(), places.get(name, Replicated()), group, first) for name, x in state.items()}


def _gathered(x: torch.Tensor, place: Placement, group: dist.ProcessGroup, first: bool) -> torch.Tensor:
    if isinstance(place, Replicated):
        return x
    shapes = [torch.empty(x.ndim, dtype=torch.int64, device=x.device) for _ in range(group.size())]
    dist.all_gather(shapes, torch.tensor(x.shape, device=x.device), group=group)
    sizes = [torch.Size(shape.tolist()) for shape in shapes]
    longest = max(size.numel() for size in sizes)
    flat = x.reshape(-1)
    if len(flat) < longest:  # Gloo gathers equal sizes only
        flat = torch.nn.functional.pad(flat, (0, longest - len(flat)))
    if first and group.rank():
        dist.send(flat, group=group, group_dst=0)
        return x
    parts = flat.new_empty(len(sizes), longest)  # one tensor: for a list, Gloo would make a second copy
    if first:
        parts[0] = flat
        for rank in range(1, len(sizes)):
            dist.recv(parts[rank], group=group, group_src=rank)
    else:
        ALL_GATHER(parts.view(-1), flat, group=group)
    return place.join([part[: size.numel()].view(size) for part, size in zip(parts, sizes, strict=True)])
