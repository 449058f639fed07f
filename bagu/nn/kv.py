"""The KV view: what `forward` is given when tokens have a past. It stores the new keys and values, and attends.

Training has none. `DenseKV` is the naive one: a contiguous cache of a fixed number of sequences, the reference that a
paged one is held to. A step is `kv.plan(lengths)`, then a forward, in which each layer calls `attend` once.

MLA gives `attend` its latent as one key head and no values: the values are the first `v_dim` features of the keys, so
the cache holds the latent and nothing else.

Dims: N = sequences, P = places in the cache, T = new tokens of all sequences, L = the most of one, H = heads,
G = key heads, D = features of a key, E = of a value.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from bagu.errors import BaguError
from bagu.nn.config import ModelConfig

__all__ = ["KV", "CacheError", "DenseKV"]


class CacheError(BaguError, ValueError):
    """The cache cannot hold or answer what it is asked."""


class KV(Protocol):
    """The past of the sequences in this forward."""

    @property
    def max_len(self) -> int:
        """A host bound on past plus new tokens of any sequence of this forward."""
        ...

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        v_dim: int,
        scale: float,
        window: int | None,
        slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        """Store k[T, G, D] and v[T, G, E]; return what q[T, H, D] sees of its sequence, [T, H, E], E = v_dim.

        Causal: a token sees the past, and the new ones up to itself.
        """
        ...


class DenseKV:
    """A place for every position of N sequences, in one tensor a layer."""

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        max_len: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not config.causal or config.attention == "linear":
            what = "linear attention" if config.causal else "a bidirectional model"
            raise CacheError(f"{what} has no KV cache", hint="run the whole sequence through forward, without kv")
        if not 1 <= max_len <= config.max_len:
            raise CacheError(
                f"a cache of {max_len} positions for a model of max_len {config.max_len}", hint="ask for fewer"
            )
        latent = config.mla
        G, D = (config.num_kv_heads, config.head_dim) if latent is None else (1, latent.kv_rank + latent.rope_dim)
        shape = (num_sequences, max_len, G)
        layers = range(config.num_layers)
        self.keys = [torch.zeros(*shape, D, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(*shape, D, device=device, dtype=dtype) for _ in layers] if latent is None else None
        self.past = [0] * num_sequences
        self.new = [0] * num_sequences

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in [*self.keys, *(self.values or [])])

    @property
    def max_len(self) -> int:
        return max(p + n for p, n in zip(self.past, self.new, strict=True))

    def plan(self, new: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Say how many tokens each sequence brings to the next forward (0 is none); the last ones become the past.

        Returns what forward takes: positions[T], cu_seqlens[N + 1], and the most tokens of a sequence.
        """
        self.past = [p + n for p, n in zip(self.past, self.new, strict=True)]
        self.new = list(new)
        room = self.keys[0].shape[1]
        if self.max_len > room:
            raise CacheError(f"a sequence grows to {self.max_len} tokens, and the cache has {room} places a sequence")
        device = self.keys[0].device
        spans = list(zip(self.past, self.new, strict=True))
        self.positions = torch.tensor([p + i for p, n in spans for i in range(n)], dtype=torch.int64, device=device)
        self.rows = torch.tensor([r for r, (_, n) in enumerate(spans) for _ in range(n)], device=device)
        self.turns = torch.tensor([i for _, n in spans for i in range(n)], device=device)
        ends = torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)
        return self.positions, ends, max(self.new)

    def attend(
        self,
        layer: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor | None,
        *,
        v_dim: int,
        scale: float,
        window: int | None,
        slopes: torch.Tensor | None,
        bias: torch.Tensor | None,
    ) -> torch.Tensor:
        P = self.max_len
        self.keys[layer][self.rows, self.positions] = k
        keys = self.keys[layer][:, :P]
        if v is not None:
            assert self.values is not None, "values for a cache of latents"
            self.values[layer][self.rows, self.positions] = v
        values = keys[..., :v_dim] if self.values is None else self.values[layer][:, :P]

        N, L, (_, H, D), G = len(self.new), max(self.new), q.shape, keys.shape[2]
        queries = q.new_zeros(N, L, H, D)
        queries[self.rows, self.turns] = q
        at = torch.zeros(N, L, dtype=torch.int64, device=q.device)
        at[self.rows, self.turns] = self.positions
        ahead = torch.arange(P, device=q.device) - at.unsqueeze(-1)  # [N, L, P]: key position minus query position
        seen = ahead <= 0 if window is None else (ahead <= 0) & (ahead > -window)

        acc = torch.promote_types(q.dtype, torch.float32)
        grouped = queries.to(acc).view(N, L, G, H // G, D)
        scores = torch.einsum("nlgid,npgd->ngilp", grouped, keys.to(acc)).flatten(1, 2) * scale  # [N, H, L, P]
        if slopes is not None:
            scores = scores + slopes.view(-1, 1, 1) * ahead.unsqueeze(1)
        if bias is not None:
            far = bias.shape[1] // 2
            scores = scores + bias.to(acc)[:, ahead.clamp(-far, far) + far].transpose(0, 1)
        # torch's softmax: the op's kernels would be compiled again for every power of two that P grows through
        weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1).view(N, G, H // G, L, P)
        out = torch.einsum("ngilp,npge->nlgie", weights, values.to(acc)).flatten(2, 3)
        return out[self.rows, self.turns].to(q.dtype)
