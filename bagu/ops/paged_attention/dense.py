"""Paged attention with all scores in memory: ordinary PyTorch on any device, without copies to the host.

Queries are laid out as [S, L, …] and keys as [S, C, …], where L and C are the host's bounds. It needs S * H * L * C
numbers, so avoid it for a plan with one long prefill and many decodes.
"""

import torch

from bagu.ops.attention.shape import Shape, segment_of
from bagu.ops.contract.signature import accumulator
from bagu.ops.paged_attention.pages import Pages


def empty(q: torch.Tensor, v_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Uninitialised out and lse."""
    T, H, _ = q.shape
    return q.new_empty(T, H, v_cache.shape[-1]), q.new_empty(T, H, dtype=accumulator(q.dtype))


def forward(
    shape: Shape, scale: float, q: torch.Tensor, pages: Pages, cu_seqlens: torch.Tensor, max_len: int
) -> tuple[torch.Tensor, torch.Tensor]:
    (T, H, _), G, C, acc = q.shape, pages.k.shape[2], pages.longest, accumulator(q.dtype)
    B, lengths, device = pages.k.shape[1], pages.lengths.long(), q.device
    token, begins = torch.arange(T, device=device), cu_seqlens[:-1].long()
    owner = segment_of(cu_seqlens, T)
    turn = token - begins[owner]  # index of a token among the new tokens of its sequence
    turns = torch.arange(max_len, device=device)
    rows = (begins.unsqueeze(1) + turns).clamp(max=T - 1)  # [S, L]
    queries = q.to(acc)[rows].transpose(1, 2)  # [S, H, L, D]

    place = torch.arange(C, device=device)
    past = place >= lengths.unsqueeze(1)  # [S, C]
    block = pages.tables.gather(1, (place // B).expand(past.shape)).long()
    slots = (block * B + place % B).masked_fill(past, 0)
    k, v = (
        x.to(acc).masked_fill(past[:, :, None, None], 0.0).transpose(1, 2).repeat_interleave(H // G, 1)
        for x in (pages.keys(slots), pages.values(slots))
    )  # [S, H, C, D] and [S, H, C, E]

    at = (lengths - cu_seqlens.diff()).unsqueeze(1) + turns  # [S, L], positions in the sequence
    distance = place - at.unsqueeze(-1)  # [S, L, C]
    scores = (queries * scale) @ k.mT
    terms = shape.terms(distance, scores)
    scores = scores if terms is None else scores + terms.transpose(0, 1)
    hidden = shape.hidden(distance)
    assert hidden is not None, "causal hides what is ahead"
    scores = scores.masked_fill(hidden.unsqueeze(1), -torch.inf)
    out, lse = scores.softmax(-1) @ v, scores.logsumexp(-1)
    return out[owner, :, turn].to(q.dtype), lse[owner, :, turn]
