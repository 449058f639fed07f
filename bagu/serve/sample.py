"""Sampling: logits to tokens, one row per sequence, each with its own `Sampling` parameters.

    logits -> bias, penalties, masked stop tokens -> / temperature -> softmax -> min-p, top-k, top-p -> sample

A token is sampled by inverse CDF over the vocabulary: the first token whose cumulative probability exceeds u, where u
depends only on (seed, choice, position in the output). A row uses no number of another row, so a seed gives the same
text in any batch. Greedy rows need only an argmax, and only rows with top-k or top-p are sorted.

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

__all__ = ["Row", "RowLogprobs", "argmax", "greedy", "probabilities", "sample", "top_logprobs"]

MIN_TEMPERATURE = 1e-6  # smaller ones overflow fp32 in logits / temperature


class Row(NamedTuple):
    """The state of a sequence that sampling needs."""

    sampling: Sampling
    seed: int  # the request's seed, or the one that the engine chose
    choice: int
    tokens: Sequence[int]  # prompt and output
    num_prompt: int
    eos_ids: Sequence[int] = ()

    @property
    def num_output(self) -> int:
        """Number of output tokens so far, which is the position of the token to sample."""
        return len(self.tokens) - self.num_prompt

    @property
    def adjusted(self) -> bool:
        """Whether bias, penalties or masked tokens change the logits of this row."""
        s = self.sampling
        penalised = s.repetition_penalty != 1.0 or s.presence_penalty != 0.0 or s.frequency_penalty != 0.0
        return penalised or bool(s.logit_bias) or self.num_output < s.min_tokens

    @property
    def filtered(self) -> bool:
        s = self.sampling
        return s.top_k is not None or s.top_p < 1.0 or s.min_p > 0.0


def greedy(rows: Sequence[Row]) -> bool:
    """Whether every row is the argmax of its unmodified logits."""
    return all(r.sampling.temperature == 0.0 and not r.adjusted for r in rows)


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """The first largest logit of each row. On a CPU with numpy: 32 rows of 8192 take 21 us (86 us inside a step, after
    the weights have evicted them from the CPU's caches); torch takes 600 us."""
    if logits.device.type != "cpu":
        return logits.argmax(-1)
    return torch.from_numpy(logits.float().numpy().argmax(-1))


def sample(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Sample a token for each row of logits[R, V]: [R] int64 on their device. Does not change `logits`."""
    if greedy(rows):
        return argmax(logits)
    logits = _adjust(logits, rows)
    random = [i for i, r in enumerate(rows) if r.sampling.temperature > 0.0]
    if not random:
        return argmax(logits)
    at = torch.tensor(random, device=logits.device) if len(random) < len(rows) else None
    picked = [rows[i] for i in random]
    p = probabilities(logits if at is None else logits.index_select(0, at), picked)
    u = torch.tensor([uniform(r.seed, r.choice, r.num_output) for r in picked], dtype=p.dtype, device=p.device)
    tokens = _inverse_cdf(p, u)
    return tokens if at is None else argmax(logits).index_copy(0, at, tokens)


def probabilities(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """[R, V] fp32: the distribution of each row, not normalised after min-p, top-k or top-p."""
    temperatures = [max(r.sampling.temperature, MIN_TEMPERATURE) for r in rows]
    p = ops.softmax(logits.float() / torch.tensor(temperatures, dtype=torch.float32, device=logits.device).unsqueeze(1))
    filtered = [i for i, r in enumerate(rows) if r.filtered]
    if not filtered:
        return p
    if len(filtered) == len(rows):
        return _filter(p, [r.sampling for r in rows])
    at = torch.tensor(filtered, device=p.device)
    return p.index_copy(0, at, _filter(p.index_select(0, at), [rows[i].sampling for i in filtered]))


class RowLogprobs(NamedTuple):
    """Logprobs of R rows on the device of the logits: of each target, and of the most probable tokens if some are
    needed. Reading them (`lists`) waits for the device."""

    own: torch.Tensor  # [R] fp32
    counts: Sequence[int]  # of top tokens, for each row
    top: torch.Tensor | None = None  # [R, k] fp32
    ids: torch.Tensor | None = None  # [R, k]

    def to_host(self) -> RowLogprobs:
        """Start copies to the host. They are complete after an event that is recorded next on the stream."""
        top, ids = (None if t is None else t.to("cpu", non_blocking=True) for t in (self.top, self.ids))
        return RowLogprobs(self.own.to("cpu", non_blocking=True), self.counts, top, ids)

    def lists(self) -> list[TokenLogprob]:
        own = self.own.tolist()
        if self.top is None or self.ids is None:
            return [TokenLogprob(value, ()) for value in own]
        columns = zip(own, self.top.tolist(), self.ids.tolist(), self.counts, strict=True)
        return [TokenLogprob(value, tuple(zip(i[:n], ls[:n], strict=True))) for value, ls, i, n in columns]


def top_logprobs(
    logits: torch.Tensor, logprobs: torch.Tensor, targets: torch.Tensor, counts: Sequence[int]
) -> RowLogprobs:
    """The logprob of each row's target, and its `counts[i]` most probable tokens with their logprobs.

    `logprobs[R]` are those of the targets, from ops.linear_cross_entropy. The target's logit minus its logprob is the
    row's logsumexp, which gives the other logprobs.
    """
    k = max(counts, default=0)
    if not k:
        return RowLogprobs(logprobs, counts)
    top, ids = logits.float().topk(min(k, logits.shape[1]))
    lse = logits.gather(1, targets.unsqueeze(1)).float() - logprobs.unsqueeze(1)
    return RowLogprobs(logprobs, counts, top - lse, ids)


# --- the stages -------------------------------------------------------------------------------------------------------


def _adjust(logits: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """A copy of the logits with bias, penalties and masked stop tokens; `logits` itself if no row has any of them."""
    if not any(r.adjusted for r in rows):
        return logits
    logits = logits.float().clone() if logits.dtype == torch.float32 else logits.float()
    for x, row in zip(logits, rows, strict=True):
        if row.adjusted:
            _apply_penalties(x, row)
            _mask_stop_tokens(x, row)
    return logits


def _apply_penalties(x: torch.Tensor, row: Row) -> None:
    """In place on one row x[V]. The repetition penalty divides a positive logit and multiplies a negative one (CTRL,
    https://arxiv.org/abs/1909.05858), for tokens of prompt and output; presence and frequency penalties are subtracted,
    for tokens of the output."""
    s = row.sampling
    if s.repetition_penalty != 1.0:
        seen = torch.tensor(sorted(set(row.tokens)), device=x.device)
        old = x[seen]
        x[seen] = torch.where(old > 0, old / s.repetition_penalty, old * s.repetition_penalty)
    if row.num_output and (s.presence_penalty or s.frequency_penalty):
        output = torch.tensor(row.tokens[row.num_prompt :], device=x.device)
        ids, counts = output.unique(return_counts=True)
        x[ids] -= s.frequency_penalty * counts.to(x.dtype) + s.presence_penalty
    for token, bias in s.logit_bias.items():
        if token < len(x):
            x[token] += bias


def _mask_stop_tokens(x: torch.Tensor, row: Row) -> None:
    """Before min_tokens, set the logits of tokens that would end the output to -inf."""
    s = row.sampling
    if row.num_output < s.min_tokens:
        ends = {*s.stop_token_ids, *(() if s.ignore_eos else row.eos_ids)}
        found = [t for t in ends if t < len(x)]
        if len(found) < len(x):  # otherwise no token would be left to sample
            x[found] = -torch.inf


def _filter(p: torch.Tensor, samplings: Sequence[Sampling]) -> torch.Tensor:
    """p with tokens outside min-p, top-k and top-p set to 0. The filters apply in this order, each to the result of the
    previous one."""
    if any(s.min_p > 0.0 for s in samplings):
        least = torch.tensor([s.min_p for s in samplings], dtype=p.dtype, device=p.device).unsqueeze(1)
        p = p.masked_fill(p < least * p.amax(-1, keepdim=True), 0.0)
    if all(s.top_k is None and s.top_p == 1.0 for s in samplings):
        return p
    V = p.shape[1]
    k = torch.tensor([V if s.top_k is None else min(s.top_k, V) for s in samplings], device=p.device).unsqueeze(1)
    share = torch.tensor([s.top_p for s in samplings], dtype=p.dtype, device=p.device).unsqueeze(1)
    ranked = _sort_descending(p)
    beyond_k = torch.arange(V, device=p.device) >= k
    cumulative = ranked.masked_fill(beyond_k, 0.0).cumsum(-1)
    out = beyond_k | ((share < 1.0) & (cumulative - ranked >= share * cumulative[:, -1:]))
    out[:, 0] = False  # keep the most probable token, also if top_p rounds to 0 in fp32
    least = ranked.gather(1, V - 1 - out.sum(-1, keepdim=True))  # the smallest kept: `out` is False, then True
    return p.masked_fill(p < least, 0.0)  # tokens as probable as the last one kept are kept too


def _sort_descending(p: torch.Tensor) -> torch.Tensor:
    """Each row in descending order. On a CPU with numpy, whose sort is vectorised."""
    if p.device.type != "cpu":
        return p.sort(-1, descending=True).values
    return torch.from_numpy(-np.sort(-p.numpy(), axis=-1))


def _inverse_cdf(p: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    """The first token whose cumulative probability exceeds u times the total; never one of probability 0."""
    cumulative = p.cumsum(-1)
    total = cumulative[:, -1:].contiguous()
    token = torch.searchsorted(cumulative, u.unsqueeze(1) * total, right=True)
    # u * total may round up to the total, which would select a token after the last one with a probability above 0
    return torch.minimum(token, torch.searchsorted(cumulative, total)).squeeze(1)
