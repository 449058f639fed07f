"""The choice of blocks in plain PyTorch: the scores of all full blocks, a stable sort, and the chosen ones in order.

Decodes of all sequences are one batch; chunks of prompts are computed one sequence after the other, in pieces of
`PIECE` queries, so that the scores take little memory. In invariant mode a score is the sum of one row, whose order
does not depend on how many queries or blocks there are: a token makes the same choice in training, prefill and decode.
"""

from __future__ import annotations

import torch

from bagu.ops.call import eager
from bagu.ops.choose_blocks.spec import Args, num_chosen
from bagu.ops.contract.signature import accumulator

PIECE = 256


@torch.no_grad()
def forward(a: Args, *, rows_alone: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    (T, H, D), G = a.q.shape, a.means.shape[1]
    K, dtype = num_chosen(a.size, a.top, a.near, a.dense_below, a.max_context), accumulator(a.q.dtype)
    q = a.q.reshape(T, G, H // G, D).to(dtype).sum(2)
    columns = -(-a.max_context // a.size)
    owner = torch.searchsorted(a.cu_seqlens[1:].contiguous(), torch.arange(T, device=q.device), right=True)
    owner = owner.clamp(max=max(len(a.context_lens) - 1, 0))  # meta tensors and padding
    places = a.context_lens[owner] - a.cu_seqlens[owner + 1] + torch.arange(T, device=q.device, dtype=torch.int32)
    if len(a.context_lens) == T and a.max_len == 1:
        rows = a.block_tables[owner, :columns].clamp(min=0, max=len(a.means) - 1).long()
        return _numbers(a, _choose(a, _scores(q, a.means[rows].to(dtype), rows_alone), places, K), owner, places)
    if not eager.plain(a.q):  # traced: no loop over values
        rows = a.block_tables[:, :columns].clamp(min=0, max=len(a.means) - 1).long()
        scores = torch.einsum("tgd,sbgd->tsgb", q, a.means[rows].to(dtype))
        found = _choose(a, scores[torch.arange(T, device=q.device), owner], places, K)
        return _numbers(a, found, owner, places)
    found = a.q.new_empty(T, G, K, dtype=torch.int32)
    offsets = a.cu_seqlens.tolist()
    for s, length in enumerate(a.context_lens.tolist()):
        full = a.block_tables[s, : length // a.size].long()
        means = a.means[full].to(dtype)
        for begin in range(offsets[s], offsets[s + 1], PIECE):
            own = slice(begin, min(begin + PIECE, offsets[s + 1]))
            scores = _scores(q[own], means.unsqueeze(0), rows_alone)
            scores = torch.nn.functional.pad(scores, (0, columns - len(full)))
            found[own] = _choose(a, scores, places[own], K)
    return _numbers(a, found, owner, places)


def invariant_forward(a: Args) -> tuple[torch.Tensor, torch.Tensor]:
    return forward(a, rows_alone=True)


def _numbers(
    a: Args, blocks: torch.Tensor, owner: torch.Tensor, places: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The results of the op from the chosen blocks of tokens at `places` of the sequences `owner`."""
    there = blocks >= 0
    lengths = (there.sum(-1) - 1) * a.size + (places % a.size + 1).unsqueeze(1)
    if a.pages:
        blocks = torch.where(there, a.block_tables[owner.view(-1, 1, 1), blocks.clamp(min=0).long()], -1)
    return blocks, lengths.to(torch.int32)


def _scores(q: torch.Tensor, means: torch.Tensor, rows_alone: bool) -> torch.Tensor:
    """q[T, G, D] . means[T or 1, columns, G, D], as [T, G, columns]."""
    if rows_alone:
        return torch.stack([(q.unsqueeze(1) * means)[:, :, g].contiguous().sum(-1) for g in range(q.shape[1])], 1)
    return torch.einsum("tgd,tbgd->tgb" if len(means) == len(q) else "tgd,xbgd->tgb", q, means)


def _choose(a: Args, scores: torch.Tensor, places: torch.Tensor, K: int) -> torch.Tensor:
    """The chosen blocks [T, G, K] from the scores [T, G, columns] of queries at `places`."""
    columns = scores.shape[-1]
    j, own = torch.arange(columns, device=scores.device), (places // a.size).view(-1, 1, 1)
    local = (j >= own - a.near) | (j == 0) | (places.view(-1, 1, 1) < a.dense_below)
    chosen = (local & (j <= own)).expand(scores.shape)
    if a.top:
        scores = scores.masked_fill(local | (j > own), -torch.inf)
        ranked = scores.sort(dim=-1, descending=True, stable=True)
        best = (ranked.values > -torch.inf)[..., : a.top]
        at = ranked.indices[..., : a.top]
        chosen = chosen.scatter(-1, at, best | chosen.gather(-1, at))  # not in place: under vmap it has no batch
    listed = torch.where(chosen, j, columns).sort(-1).values[..., :K]
    return torch.where(listed == columns, -1, listed).to(torch.int32)
