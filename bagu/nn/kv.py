"""The KV view: an argument of `forward` if tokens have a past. It stores the new keys and values, and attends.

Training uses none. `DenseKV` is the simple one: a contiguous cache for a fixed number of sequences, and the reference
for a paged cache. A step is `kv.plan(lengths)`, then a forward in which each layer calls `attend` once, after `write`
if it has a fused QKV projection.

MLA passes its latent to `attend` as one KV head without values: the values are the first `v_dim` features of the keys,
so the cache holds only the latent.

Dims: N = sequences, P = cache positions, T = new tokens of all sequences, L = maximum new tokens of one sequence,
H = heads, G = KV heads, D = key dim, E = value dim.
"""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch

from bagu import ops
from bagu.errors import BaguError
from bagu.nn.config import ModelConfig


class CacheError(BaguError, ValueError):
    """The cache is too small, or does not support the model."""


class HeadTransform(NamedTuple):
    """RoPE and QK norm of a layer, in the argument names of `ops.rope_kv_write`. None: the model does not have it."""

    cos: torch.Tensor | None  # [T, R]
    sin: torch.Tensor | None
    layout: str  # of RoPE's pairs of features
    q_weight: torch.Tensor | None  # [D], of the QK norm
    k_weight: torch.Tensor | None
    eps: float


class Scores(NamedTuple):
    """How a layer turns q · k into attention scores."""

    scale: float
    window: int | None  # positions that a token attends to, itself included
    slopes: torch.Tensor | None  # [H], ALiBi
    bias: torch.Tensor | None  # [H, 2 * distances - 1], T5
    sinks: torch.Tensor | None  # [H], in the denominators


class KV(Protocol):
    """The past of the sequences in this forward."""

    @property
    def max_len(self) -> int:
        """A host bound on past plus new tokens of any sequence in this forward."""
        ...

    def write(self, layer: int, qkv: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
        """Transform the queries and keys of qkv[T, G, H / G + 2, D], store keys and values, and return the queries
        [T, H, D], as `ops.rope_kv_write` does. `attend` without k follows."""
        ...

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, v_dim: int, scores: Scores
    ) -> torch.Tensor:
        """Store k[T, G, D] and v[T, G, E]; return the attention of q[T, H, D] to its sequence, [T, H, E], E = v_dim.

        Causal: a token attends to the past, and to the new tokens up to itself. Without k, `write` has stored both.
        """
        ...


class DenseKV:
    """A contiguous cache for every position of N sequences, one tensor per layer."""

    def __init__(
        self,
        config: ModelConfig,
        num_sequences: int,
        max_len: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        if not config.causal or config.attention != "softmax":
            what = f"attention = {config.attention!r}" if config.causal else "a bidirectional model"
            raise CacheError(f"{what} has no dense KV cache", hint="run the full sequence through forward, without kv")
        if not 1 <= max_len <= config.max_len:
            raise CacheError(
                f"a cache of {max_len} positions for a model of max_len {config.max_len}", hint="use fewer positions"
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
        """Set the number of new tokens of each sequence in the next forward (0 is none); earlier ones become the past.

        Returns the arguments of forward: positions[T], cu_seqlens[N + 1], and the maximum tokens of a sequence.
        """
        self.past = [p + n for p, n in zip(self.past, self.new, strict=True)]
        self.new = list(new)
        room = self.keys[0].shape[1]
        if self.max_len > room:
            raise CacheError(f"a sequence grows to {self.max_len} tokens, but the cache has space for {room}")
        device = self.keys[0].device
        spans = list(zip(self.past, self.new, strict=True))
        self.positions = torch.tensor([p + i for p, n in spans for i in range(n)], dtype=torch.int64, device=device)
        self.rows = torch.tensor([r for r, (_, n) in enumerate(spans) for _ in range(n)], device=device)
        self.turns = torch.tensor([i for _, n in spans for i in range(n)], device=device)
        ends = torch.tensor([0, *new]).cumsum(0).to(device, torch.int32)
        return self.positions, ends, max(self.new)

    def write(self, layer: int, qkv: torch.Tensor, transform: HeadTransform) -> torch.Tensor:
        assert self.values is not None, "the cache of an MLA model stores no values"
        slots = self.rows * self.keys[layer].shape[1] + self.positions  # a sequence is a block
        return ops.rope_kv_write(qkv, slots, self.keys[layer], self.values[layer], **transform._asdict())

    def attend(
        self, layer: int, q: torch.Tensor, k: torch.Tensor | None, v: torch.Tensor | None, v_dim: int, scores: Scores
    ) -> torch.Tensor:
        P, (scale, window, slopes, bias, sinks) = self.max_len, scores
        if k is not None:
            self.keys[layer][self.rows, self.positions] = k
        keys = self.keys[layer][:, :P]
        if v is not None:
            assert self.values is not None, "the cache of an MLA model stores no values"
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
        logits = torch.einsum("nlgid,npgd->ngilp", grouped, keys.to(acc)).flatten(1, 2) * scale  # [N, H, L, P]
        if slopes is not None:
            logits = logits + slopes.view(-1, 1, 1) * ahead.unsqueeze(1)
        if bias is not None:
            far = bias.shape[1] // 2
            logits = logits + bias.to(acc)[:, ahead.clamp(-far, far) + far].transpose(0, 1)
        logits = logits.masked_fill(~seen.unsqueeze(1), -torch.inf)
        if sinks is not None:  # one more key, which has no value
            logits = torch.cat((logits, sinks.to(acc).view(-1, 1, 1).expand(N, H, L, 1)), -1)
        # torch's softmax: our op would compile its kernels again for every power of two of P
        weights = logits.softmax(-1)[..., :P].view(N, G, H // G, L, P)
        out = torch.einsum("ngilp,npge->nlgie", weights, values.to(acc)).flatten(2, 3)
        return out[self.rows, self.turns].to(q.dtype)
