"""Generation without an engine: a batch of prompts, a DenseKV, one token per prompt and step. Used for samples during
training, and as the reference for the inference engine.

The random number for token t of prompt i is a function of (seed, i, t), independent of the rest of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.change import evaluating
from bagu.nn.kv import DenseKV
from bagu.nn.model import Transformer


@torch.no_grad()
def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
    seed: int = 0,
    eos_id: int | None = None,
) -> list[list[int]]:
    """The new tokens of each prompt, up to `max_new_tokens` or eos (not included). Temperature 0 is greedy."""
    _check(model, prompts, max_new_tokens, temperature, top_k, top_p)
    with evaluating(model):
        return _generate(model, prompts, max_new_tokens, temperature, top_k, top_p, seed, eos_id)


def _generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    seed: int,
    eos_id: int | None,
) -> list[list[int]]:
    table = model.embedding.weight
    longest = max(map(len, prompts)) + max_new_tokens - 1  # the last generated token is not an input
    model = model.for_length(longest)
    kv = DenseKV(model.config, len(prompts), longest, device=table.device, dtype=table.dtype)

    def forward(t: int, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int) -> Any:
        return model(ids, positions, cu_seqlens, max_len, kv).hidden

    def choose(t: int, alive: list[int], hidden: torch.Tensor) -> torch.Tensor:
        u = torch.tensor([uniform(seed, i, t) for i in alive], device=table.device)
        return pick(model.logits(hidden), u, temperature=temperature, top_k=top_k, top_p=top_p)

    return decode(prompts, max_new_tokens, eos_id, kv, forward, choose)


def decode(
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    eos_id: int | None,
    kv: DenseKV,
    forward: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, int], torch.Tensor],
    choose: Callable[[int, list[int], torch.Tensor], torch.Tensor],
) -> list[list[int]]:
    """The loop of `generate`. `forward(t, ids, positions, cu_seqlens, max_len)` returns hidden states, and
    `choose(t, alive, hidden)` the next tokens of the prompts `alive` from their last hidden states, in step t."""
    new: list[list[int]] = [list(p) for p in prompts]  # the input tokens of each sequence in the next forward
    found: list[list[int]] = [[] for _ in prompts]
    for t in range(max_new_tokens):
        positions, cu_seqlens, max_len = kv.plan([len(n) for n in new])
        ids = torch.tensor([i for n in new for i in n], device=positions.device)
        hidden = forward(t, ids, positions, cu_seqlens, max_len)
        alive = [i for i, n in enumerate(new) if n]
        drawn = choose(t, alive, hidden[cu_seqlens[1:].long()[alive] - 1]).tolist()
        new = [[] for _ in prompts]
        for i, token in zip(alive, drawn, strict=True):
            if token != eos_id:
                found[i].append(token)
                new[i] = [token]
        if not any(new):
            break
    return found


def pick(
    logits: torch.Tensor,
    u: torch.Tensor,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> torch.Tensor:
    """Sample a token per row of logits[N, V] with its random number u[N] in [0, 1), by inverting the cumulative
    distribution, most likely first, over the `top_k` tokens inside `top_p` (the fewest that reach it)."""
    if temperature == 0.0:
        return logits.argmax(-1)
    ranked, tokens = logits.float().sort(dim=-1, descending=True, stable=True)
    p = ops.softmax(ranked, 1.0 / temperature)
    if top_k is not None:
        p = p.masked_fill(torch.arange(p.shape[-1], device=p.device) >= top_k, 0.0)
    if top_p is not None:
        p = p / p.sum(-1, keepdim=True)
        p = p.masked_fill(p.cumsum(-1) - p >= top_p, 0.0)
    height = p.cumsum(-1)
    place = (height <= u.to(height).unsqueeze(-1) * height[:, -1:]).sum(-1)
    last = (p > 0).sum(-1) - 1  # u * total may round up to the total
    return tokens.gather(-1, torch.minimum(place, last).unsqueeze(-1)).squeeze(-1)


def uniform(*key: int) -> float:
    """A number in [0, 1) computed from the key: splitmix64 over its parts."""
    x = 0
    for part in key:
        x = (x + part + 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
        x ^= x >> 31
    return (x >> 11) / 2**53


def _check(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> None:
    if not prompts or not all(prompts):
        raise ArgumentError("generate: there is an empty prompt, or none", hint="a prompt needs at least one token")
    longest = max(map(len, prompts)) + max_new_tokens
    if max_new_tokens < 1 or longest > model.config.max_len:
        raise ArgumentError(
            f"generate: {max_new_tokens} new tokens make {longest} in total, but the model has {model.config.max_len}",
            hint="generate 1 or more that fit, or shorten the prompt",
        )
    wrong_p = top_p is not None and not 0.0 < top_p <= 1.0
    if temperature < 0.0 or (top_k is not None and top_k < 1) or wrong_p:
        raise ArgumentError(
            f"generate: temperature = {temperature}, top_k = {top_k}, top_p = {top_p}",
            hint="temperature must be 0 or more, top_k 1 or more, top_p above 0 and at most 1",
        )
