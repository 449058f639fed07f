"""Paged attention on a CPU: all decodes together, prefills one sequence at a time.

With a C++ compiler, compiled.py runs the decodes. The code below is for machines without one, and for slopes, biases
and fp16.

A decode reads each key and value once and does very little arithmetic, so copying them to contiguous memory costs more
than the attention. Two kernels read rows of the pool in place: `sampled_addmm` computes q . k for a list of rows,
and `embedding_bag` a weighted sum of rows. One core, fp32, 32 sequences, 4 heads of 64, us per layer of
the kernels alone (lists of rows, softmax and the call add 200 to 300, on a machine with other load):

    tokens of each     contiguous SDPA    gathered, then SDPA    in place
    64                 212                590                    256
    128                575                1397                   655
    192                1061               2239                   1026

16-bit pools are gathered, because `sampled_addmm` does not support 16 bits. Pools whose key heads are shared by many
query heads are gathered too: in place, each query head would read the keys separately.
"""

import warnings
from functools import cache
from itertools import pairwise

import torch

from bagu.errors import ArgumentError
from bagu.ops.attention import flash
from bagu.ops.attention.pieces import pieces
from bagu.ops.attention.shape import Shape
from bagu.ops.contract.signature import accumulator
from bagu.ops.paged_attention import compiled
from bagu.ops.paged_attention.dense import empty
from bagu.ops.paged_attention.pages import Pages

IN_PLACE = 4  # most query heads per key head for which decodes read the pool in place
FEW = 3  # up to this many sequences, one call per sequence: building the lists of rows costs as much as three
# A chunk with at most this many scores per head (new tokens times context) goes to decode.cpp, each token as a decode
# of its own. One core, fp32, 4 heads of 64, 14 tokens after 100: 0.26 ms a chunk; gathered, masked, then SDPA: 0.73 ms.
SCORES = 4096

Pair = tuple[torch.Tensor, torch.Tensor]


def forward(shape: Shape, scale: float, q: torch.Tensor, pages: Pages, cu_seqlens: torch.Tensor, max_len: int) -> Pair:
    """out[T, H, E] and lse[T, H]."""
    T, S = q.shape[0], pages.tables.shape[0]
    few = 0 if _compiled(shape, q, pages) else FEW
    offsets, lengths = cu_seqlens.tolist(), pages.lengths.tolist()
    check(pages.op, offsets, lengths, T, max_len, pages.longest)
    if max_len == 1 and T == S > few:  # S sequences of at most one token have T = S tokens: every sequence has one
        return _decode(shape, scale, q, pages)
    if S == 1 and T:
        return _one(shape, scale, q, pages, 0, lengths[0])
    out, lse = empty(q, pages.v)
    spans = [(s, begin, end) for s, (begin, end) in enumerate(pairwise(offsets)) if end > begin]
    most = 0 if few else SCORES
    short = [(s, a, b) for s, a, b in spans if b - a == 1 or (b - a < lengths[s] and (b - a) * lengths[s] <= most)]
    if len(short) > few:
        who = torch.tensor([s for s, a, b in short for _ in range(a, b)])
        rows = torch.tensor([t for _, a, b in short for t in range(a, b)])
        seen = [lengths[s] - b + t + 1 for s, a, b in short for t in range(a, b)]
        some = Pages(pages.k, pages.v, pages.tables[who], torch.tensor(seen, dtype=torch.int32), max(seen))
        out[rows], lse[rows] = _decode(shape, scale, q[rows], some)
        spans = sorted({*spans} - {*short})
    for s, begin, end in spans:
        out[begin:end], lse[begin:end] = _one(shape, scale, q[begin:end], pages, s, lengths[s])
    return out, lse


def _compiled(shape: Shape, q: torch.Tensor, pages: Pages) -> bool:
    return shape.slopes is None and shape.bias is None and compiled.fits(q, pages)


def check(op: str, offsets: list[int], lengths: list[int], T: int, max_len: int, max_context: int) -> None:
    """Raise for wrong offsets or lengths. On a CPU the values can be read; other devices trust the host's plan."""
    new = [b - a for a, b in pairwise(offsets)]
    rising = offsets[0] == 0 and offsets[-1] == T and all(0 <= n <= max_len for n in new)
    if not rising or any(not n <= c <= max_context for n, c in zip(new, lengths, strict=True)):
        raise ArgumentError(
            f"{op}: cu_seqlens is {offsets} and context_lens {lengths}, with T = {T}, max_len = {max_len},"
            f" max_context = {max_context}",
            hint="cu_seqlens rises from 0 to T by at most max_len; a context holds its new tokens and max_context it",
        )


def _decode(shape: Shape, scale: float, q: torch.Tensor, pages: Pages) -> Pair:
    """out[S, H, E] and lse[S, H] of the last token of each sequence."""
    if _compiled(shape, q, pages):
        return compiled.decode(shape.window, scale, q, pages)
    slots, distance = pages.last(shape.window)
    like = q.new_empty(0, dtype=accumulator(q.dtype))
    terms = shape.terms(distance, like)
    added = like.new_zeros(distance.shape).unsqueeze(1) if terms is None else terms.transpose(0, 1)  # [S, 1 or H, C]
    added = added.masked_fill(distance.unsqueeze(1) > 0, -torch.inf)
    few = q.shape[1] <= IN_PLACE * pages.k.shape[2]
    if few and q.dtype in (torch.float32, torch.float64) and pages.k.is_contiguous() and pages.v.is_contiguous():
        return _in_place(scale, q, pages, slots, added)
    k = pages.keys(slots)
    v = k if pages.latent else pages.values(slots)
    out, lse = flash.forward(scale, q.unsqueeze(1), k, v, added.unsqueeze(2), causal=False)
    return out.squeeze(1)[..., : pages.v.shape[-1]], lse.squeeze(1)


def _in_place(scale: float, q: torch.Tensor, pages: Pages, slots: torch.Tensor, added: torch.Tensor) -> Pair:
    """The scores are a sparse matrix: one row per sequence and head, one column per row of the pool."""
    (S, H, D), G, C = q.shape, pages.k.shape[2], slots.shape[1]
    _suppress_beta_warning()
    rows = pages.k.numel() // D
    head = torch.arange(H) // (H // G)
    at = (slots.unsqueeze(1) * G + head.unsqueeze(1)).flatten()  # [S * H * C]
    begins = torch.arange(0, S * H * C + 1, C)
    start = torch.sparse_csr_tensor(begins, at, added.expand(S, H, C).flatten(), (S * H, rows), check_invariants=False)
    scores = torch.sparse.sampled_addmm(start, q.reshape(S * H, D), pages.k.view(rows, D).T, alpha=scale)
    s = scores.values().view(S * H, C)
    p = s.softmax(-1)
    # The softmax at the largest score is exp(0) / sum, so lse = max - log(softmax there), without a second exp.
    lse = s.amax(-1) - p.amax(-1).log()
    out = torch.embedding_bag(pages.v.view(rows, -1), at, begins[:-1], False, 0, False, p.flatten())[0]
    return out.view(S, H, -1), lse.view(S, H)


@cache
def _suppress_beta_warning() -> None:
    """Trigger and suppress the warning that CSR tensors are in beta, which PyTorch issues once per process."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.sparse_csr_tensor([0, 0], [], [], (1, 1))


def _one(shape: Shape, scale: float, q: torch.Tensor, pages: Pages, s: int, length: int) -> Pair:
    """out[L, H, E] and lse[L, H] of the last L tokens of sequence s."""
    L, E = q.shape[0], pages.v.shape[-1]
    begin = 0 if shape.window is None else max(0, length - L - shape.window + 1)
    k, v = (x.unsqueeze(0) for x in pages.of(s, begin, length))
    q = q.unsqueeze(0)
    seen = L == 1 and shape.slopes is None and shape.bias is None  # it attends to every key that was read
    if seen or (length == L and shape.plain):  # the kernel's causal mask does not support past tokens
        out, lse = flash.forward(scale, q, k, v, None, causal=not seen)
        return out.squeeze(0)[..., :E], lse.squeeze(0)
    found = [
        flash.forward(scale, q[:, p.queries], k[:, p.keys], v[:, p.keys], p.added, causal=False)
        for p in pieces(shape, length - L - begin, L, q.new_empty(0, dtype=accumulator(q.dtype)))
    ]
    return torch.cat([out.squeeze(0)[..., :E] for out, _ in found]), torch.cat([lse.squeeze(0) for _, lse in found])
