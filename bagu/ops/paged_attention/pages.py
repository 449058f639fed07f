"""Where the tokens of a sequence are in the pool.

A pool is k[N, B, G, D] and v[N, B, G, E]; its N * B positions, numbered consecutively, are slots. The positions of the
last block past the end of a sequence hold whatever the block's last owner wrote, possibly NaN. A weight of 0 does not
hide a NaN (0 * NaN is NaN), so those positions are never used in a product: they are replaced by a position in use.
"""

from dataclasses import dataclass

import torch

from bagu.errors import BackendError
from bagu.ops.kv_write.quantize import dequantize


@dataclass(frozen=True)
class Pages:
    k: torch.Tensor  # [N, B, G, D]
    v: torch.Tensor  # [N, B, G, E]
    tables: torch.Tensor  # [S, P] int32
    lengths: torch.Tensor  # [S] int32, new tokens included
    longest: int
    op: str = "paged_attention"  # the op that was called, for error messages

    @property
    def latent(self) -> bool:
        """Whether the values are the first features of the keys (MLA): one read gives both."""
        return self.v.data_ptr() == self.k.data_ptr() and self.v.stride() == self.k.stride()

    def last(self, window: int | None) -> tuple[torch.Tensor, torch.Tensor]:
        """The keys that each sequence's last token attends to: (slots[S, C] int64, distance[S, C], 0 or below).

        C is the largest number of keys of a sequence. Columns past a sequence's end have a positive distance, and the
        slot of a key that the token attends to.
        """
        B, device = self.k.shape[1], self.k.device
        lengths = self.lengths.unsqueeze(1)
        if window is not None and window < self.longest:  # columns begin at the window's start
            place = torch.arange(window, device=device) + (lengths - window).clamp(min=0)
            inside = torch.minimum(place, lengths - 1)
            return self.tables.gather(1, inside // B).long() * B + inside % B, place - (lengths - 1)
        blocks = -(-self.longest // B)
        slots = (self.tables[:, :blocks].long().unsqueeze(2) * B + torch.arange(B, device=device)).flatten(1)
        distance = torch.arange(self.longest, device=device) - (lengths - 1)
        return torch.where(distance <= 0, slots[:, : self.longest], slots[:, :1]), distance

    def of(self, s: int, begin: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """k[C, G, D] and v[C, G, E] of positions begin … end of sequence s on a CPU; views of consecutive blocks.

        Blocks are often consecutive: a pool allocates its blocks in order, and a prompt allocates all of its blocks at
        once. Otherwise whole blocks are copied, in half the time of single rows (2112 positions of 4 heads of 64: 75
        us, against 136).
        """
        B = self.k.shape[1]
        first = begin // B
        table = self.tables[s, first : -(-end // B)]
        blocks = table.tolist()
        if self.k.is_contiguous() and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
            k, v = (x[blocks[0] : blocks[-1] + 1] for x in (self.k, self.v))
        else:
            k = self.k.index_select(0, table)
            v = k[..., : self.v.shape[-1]] if self.latent else self.v.index_select(0, table)
        at = slice(begin - first * B, end - first * B)
        return k.flatten(0, 1)[at], v.flatten(0, 1)[at]

    def keys(self, slots: torch.Tensor) -> torch.Tensor:
        """k at slots[…] as […, G, D]."""
        return _rows(self.k, slots)

    def values(self, slots: torch.Tensor) -> torch.Tensor:
        """v at slots[…] as […, G, E]."""
        return _rows(self.v, slots)


def _rows(pool: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    B = pool.shape[1]
    if not pool.is_contiguous():
        return pool[slots // B, slots % B]
    return pool.flatten(0, 1).index_select(0, slots.flatten()).view(*slots.shape, *pool.shape[2:])


def check_invariant(k_scale: torch.Tensor | None) -> None:
    """Raise for an 8-bit cache in invariant mode."""
    if k_scale is not None:
        raise BackendError(
            "paged_attention: an 8-bit cache has no invariant mode: the training forward rounds no keys and values",
            hint="use a cache in the model's dtype, or leave bagu.ops.invariant()",
        )


def used_blocks(tables: torch.Tensor, longest: int, pool: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The blocks of all tables as one list, and the tables that refer to this list instead of the pool."""
    used = tables[:, : -(-longest // pool.shape[1])]
    blocks = used.clamp(0, pool.shape[0] - 1).flatten()  # an entry that no query attends to may be any number
    return blocks, torch.arange(blocks.numel(), dtype=torch.int32, device=tables.device).view(used.shape)


def dequantized(pool: torch.Tensor, scale: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """These blocks of an 8-bit pool, in the dtype of the scales."""
    rows = pool.view(torch.int8).index_select(0, blocks).view(pool.dtype)  # PyTorch has no index_select of fp8
    return dequantize(rows, scale.index_select(0, blocks))
