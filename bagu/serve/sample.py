"""From logits to tokens: a row a sequence, each by its own `Sampling`.

    logits -> bias, penalties, forbidden tokens -> / temperature -> softmax -> min-p, top-k, top-p -> draw

The draw is by inverse CDF in the order of the vocabulary: the token at height u of the stacked probabilities, where u
is a function of (seed, choice, place in the output). A row is drawn by its own numbers alone, so that a seed gives the
same text in any batch. Rows of the common kinds take a short way: greedy rows an argmax, and a sort is paid by the rows
that have top-k or top-p.

Dims: R = rows, V = vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from bagu import ops
from bagu.nn.sample import uniform
from bagu.serve.request import Sampling, TokenLogprob

__all__ = ["Row", "best", "greedy", "probabilities", "sample", "top_logprobs"]

COLDEST = 1e-6  # of a draw: below it the quotients leave fp32


class Row(NamedTuple):
    """What sampling needs to know of a sequence."""

    sampling: Sampling
    seed: int  # the request's, or one that the engine chose for it
    choice: int
    tokens: Sequence[int]  # prompt and output
    num_prompt: int
    eos_ids: Sequence[int] = ()

    @property
    def drawn(self) -> int:
        """Tokens of the output so far: the number of the one to draw now."""
        return len(self.tokens) - self.num_prompt

    @property
    def adjusted(self) -> bool:
        """Whether anything is done to the logits before the temperature."""
        s = self.sampling
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        return penalised or bool(s.logit_bias) or self.drawn < s.min_tokens

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return s.top_k is not None or s.top_p < 1.0 or s.min_p > 0.0


def greedy(rows: Sequence[Row]) -> bool:
    """Whether an argmax of the logits as they are is all that these rows want."""
    return all(r.sampling.temperature == 0.0 and not r.adjusted for r in rows)


def best(logits: torch.Tensor) -> torch.Tensor:
    """The first of the likeliest tokens of each row. On a CPU by numpy: 32 rows of 8192 take it 21 us (86 in a step,
    whose weights have been through the cache), torch 600."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A token for each row of logits[R, V], as [R] int64 on their device. The logits are left as they are."""
    if greedy(rows):
        return best(logits)
    logits = _adjust(logits, rows)
    drawn = [i for i, r in enumerate(rows) if r.sampling.temperature > 0.0]
    if not drawn:
        return best(logits)
    some = len(drawn) < len(rows)
    at = torch.tensor(drawn, device=logits.device) if some else None
    picked = [rows[i] for i in drawn]
    p = probabilities(logits if at is None else logits.index_select(0, at), picked)
    u = torch.tensor([uniform(r.seed, r.choice, r.drawn) for r in picked], dtype=p.dtype, device=p.device)
    tokens = _invert(p, u)
    return tokens if at is None else best(logits).index_copy(0, at, tokens)


def probabilities(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """[R, V] fp32: what each row draws from, not normalised where something was filtered out."""
    heat = torch.tensor([max(r.sampling.temperature, COLDEST) for r in rows], dtype=torch.float32, device=logits.device)
    p = ops.softmax(logits.float() / heat.unsqueeze(1))
    narrow = [i for i, r in enumerate(rows) if r.filtered]
    if not narrow:
        return p
    if len(narrow) == len(rows):
        return _filter(p, [r.sampling for r in rows])
    at = torch.tensor(narrow, device=p.device)
    return p.index_copy(0, at, _filter(p.index_select(0, at), [rows[i].sampling for i in narrow]))


def top_logprobs(
    logits: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor, counts: Sequence[int]
) -> list[TokenLogprob]:
    """The logprob of each row's target and its `counts[i]` likeliest tokens.

    `logprobs[R]` of the targets come from the one logprob function (ops.linear_cross_entropy); their logsumexp, and
    with it every other logprob of the row, follows from the target's logit.
    """
    k = max(counts, default=0)
    best, words = logits.float().topk(min(k, logits.shape[1])) if k else (logits[:, :0], targets.unsqueeze(1)[:, :0])
    lse = logits.float().gather(1, targets.unsqueeze(1)) - logprobs.unsqueeze(1)
    columns = zip(logprobs.tolist(), (best - lse).tolist(), words.tolist(), counts, strict=True)
    return [TokenLogprob(own, tuple(zip(w[:n], ls[:n], strict=True))) for own, ls, w, n in columns]


# --- the steps --------------------------------------------------------------------------------------------------------


def _adjust(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A copy of the logits with bias, penalties and forbidden tokens in; the logits themselves where no row has any."""
    if not any(r.adjusted for r in rows):
        return logits
    logits = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
    for x, row in zip(logits, rows, strict=True):
        if row.adjusted:
            _penalise(x, row)
            _forbid(x, row)
    return logits


def _penalise(x: torch.Tensor, row: Row) -> None:
    """In place on one row x[V]. Repetition divides a positive logit and multiplies a negative one (CTRL,
    https://arxiv.org/abs/1909.05858), over prompt and output; presence and frequency are taken off, over the output."""
    s = row.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=x.device)
        old = x[seen]
        x[seen] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    if row.drawn and (s.presence_penalty or s.frequency_penalty):
        output = torch.tensor(row.tokens[row.num_prompt :], device=x.device)
        words, counts = output.unique(return_counts=True)
        x[words] -= s.frequency_penalty * counts.to(x.dtype) + s.presence_penalty
    for token, bias in s.logit_bias.items():
        if token < len(x):
            x[token] += bias


def _forbid(x: torch.Tensor, row: Row) -> None:
    """Before min_tokens, no token that would end the output."""
    s = row.sampling
    if row.drawn < s.min_tokens:
        ends = {*s.stop_token_ids, *(() if s.ignore_eos else row.eos_ids)}
        found = [t for t in ends if t < len(x)]
        if len(found) < len(x):  # else no token would be left to draw
            x[found] = -torch.inf


def _filter(p: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """p with what min-p, top-k and top-p leave out set to 0, in this order, each over what the one before left."""
    if any(s.min_p > 0.0 for s in samplings):
        least = torch.tensor([s.min_p for s in samplings], dtype=p.dtype, device=p.device).unsqueeze(1)
        p = p.masked_fill(p < least * p.amax(-1, keepdim=True), 0.0)
    if all(s.top_k is None and s.top_p == 1.0 for s in samplings):
        return p
    V = p.shape[1]
    k = torch.tensor([V if s.top_k is None else min(s.top_k, V) for s in samplings], device=p.device).unsqueeze(1)
    share = torch.tensor([s.top_p for s in samplings], dtype=p.dtype, device=p.device).unsqueeze(1)
    ranked = _ranked(p)
    beyond = torch.arange(V, device=p.device) >= k
    height = ranked.masked_fill(beyond, 0.0).cumsum(-1)
    out = beyond | ((share < 1.0) & (height - ranked >= share * height[:, -1:]))
    out[:, 0] = False  # the likeliest stays, also where top_p is 0 in fp32
    least = ranked.gather(1, V - 1 - out.sum(-1, keepdim=True))  # the last that stays: what is out is out to the end
    return p.masked_fill(p < least, 0.0)  # tokens as likely as the last one stay with it


def _ranked(p: torch.Tensor) -> torch.Tensor:
    """Each row from the likeliest down. On a CPU by numpy, whose sort is vectorised."""
    if p.device.type != "cpu":
        return p.sort(-1, descending=True).values
    return torch.from_numpy(-np.sort(-p.numpy(), axis=-1))


def _invert(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The token at height u of the stacked probabilities; never one of probability 0."""
    height = p.cumsum(-1)
    total = height[:, -1:].contiguous()
    place = torch.searchsorted(height, u.unsqueeze(1) * total, right=True)
    # u * total may round up to the total, past the last token that has a probability
    return torch.minimum(place, torch.searchsorted(height, total)).squeeze(1)
