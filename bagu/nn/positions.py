"""Position encodings. Each acts in one of three places:

    the embedding      learned, sinusoidal          `embed(x, positions)`
    queries and keys   RoPE                          `signals(positions)` returns cos and sin, a row per token
    the scores         ALiBi, T5                     `signals(positions)` returns slopes, or a bias per distance

`signals` is called once per forward, for all layers. Tables are computed in fp64 on the CPU and kept as fp32 on the
device of the tokens. They are not buffers: casting the model to bf16 must not round them, and checkpoints do not need
them.
"""

from __future__ import annotations

import math
from typing import NamedTuple, Unpack

import torch
from torch import nn
from torch.nn import functional as F

from bagu.nn.config import Alibi, LongRopeScaling, ModelConfig, Rope, Sinusoidal, T5Relative, YarnScaling
from bagu.nn.linear import Factory, parameter
from bagu.nn.position_choices import Learned, LinearScaling, Llama3Scaling, yarn_mscale


class Signals(NamedTuple):
    """The position inputs of attention; all None if the embedding contains the positions."""

    cos: torch.Tensor | None = None  # [T, R] fp32
    sin: torch.Tensor | None = None
    rows: torch.Tensor | None = None  # [T, G] int64, for grouped queries: the row of cos and sin of each token
    slopes: torch.Tensor | None = None  # [H] fp32
    bias: torch.Tensor | None = None  # [H, 2 * distances - 1]
    other: Signals | None = None  # those of the layers in config.layer_positions


class Encoding(nn.Module):
    """No positions; also the base class of the encodings."""

    def __init__(self) -> None:
        super().__init__()
        self._tables: tuple[torch.Tensor, ...] = ()

    def make_tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The constants of this encoding on `device`, fp32 (or int64)."""
        return ()

    def tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """The tables on `device`, created once."""
        if not self._tables or self._tables[0].device != device:
            with torch.inference_mode(False):  # the tables outlive this call, and a later call may train
                self._tables = self.make_tables(device)
        return self._tables

    def skip_padding(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The positions for `embed`, if the tokens `ids` include some that have none."""
        return positions

    def embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """The embeddings x[T, D], plus positions if this encoding adds them there."""
        return x

    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        """`longest` is a host bound on the length of the sequences."""
        return Signals()


class LearnedEncoding(Encoding):
    def __init__(self, max_len: int, size: int, offset: int, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.offset = offset
        self.weight = parameter(max_len + offset, size, **factory)

    def skip_padding(self, ids: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """With an offset, the token offset - 1 is padding: it has the row before the first position, and the tokens
        after it have positions as if it were not there, as in transformers' RoBERTa."""
        if not self.offset:
            return positions
        padding = (ids == self.offset - 1).long()
        before = padding.cumsum(0) - padding  # in the whole batch; its documents begin at position 0
        start = (torch.arange(len(ids), device=ids.device) - positions).clamp(min=0)
        return torch.where(padding.bool(), -1, positions - (before - before[start]))

    def embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return x + F.embedding(positions + self.offset if self.offset else positions, self.weight)


class SinusoidalEncoding(Encoding):
    def __init__(self, max_len: int, size: int, base: float) -> None:
        super().__init__()
        self.max_len, self.size, self.base = max_len, size, base

    def make_tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (sinusoids(self.max_len, self.size, self.base).to(device),)

    def embed(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        (table,) = self.tables(x.device)
        return x * math.sqrt(self.size) + table[positions].to(x.dtype)


class RopeEncoding(Encoding):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert isinstance(config.positions, Rope)
        self.rope, self.max_len, self.dim = config.positions, config.max_len, config.rope_dim
        self.num_groups = config.num_kv_heads if 1 < config.num_kv_heads < config.num_heads else None
        self.other = None if config.layer_positions is None else config.layer_positions.positions
        self.short_len = 0 if config.longrope is None else config.longrope.original_max_len

    def make_tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        """cos and sin, then those of the layers with another RoPE, then those of LongRoPE for short sequences. On the
        meta device, for counts, they have shapes only: the cos of 131,072 positions would take 0.9 s, and a cos of meta
        tensors imports the compiler."""
        tables: list[torch.Tensor] = []
        for rope, length in ((self.rope, self.max_len), (self.other, self.max_len), (self.rope, self.short_len)):
            if isinstance(rope, Rope) and length:
                speeds, size = rope_speeds(rope, self.dim, length)
                if device.type == "meta":
                    tables += [torch.empty(length, len(speeds), device=device) for _ in range(2)]
                    continue
                angle = torch.arange(length, dtype=torch.float64).outer(speeds)
                tables += [(f(angle) * size).float().to(device) for f in (torch.cos, torch.sin)]
        return tuple(tables)

    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        rows = None
        if self.num_groups is not None:
            rows = torch.arange(positions.shape[0], device=positions.device).unsqueeze(1).repeat(1, self.num_groups)
        tables = self.tables(positions.device)
        if self.short_len:
            tables = tables[-2:] + tables[2:-2] if longest <= self.short_len else tables[:-2]
        cos, sin, *more = (table.index_select(0, positions) for table in tables)
        other = None
        if self.other is not None:
            other = Signals(cos=more[0], sin=more[1], rows=rows) if more else Signals()
        return Signals(cos=cos, sin=sin, rows=rows, other=other)


class AlibiEncoding(Encoding):
    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads

    def make_tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        return (torch.tensor(alibi_slopes(self.num_heads), dtype=torch.float32, device=device),)

    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        return Signals(slopes=self.tables(positions.device)[0])


class T5Encoding(Encoding):
    """The learned table has a value per head and bucket; attention needs one per head and distance."""

    def __init__(self, num_heads: int, config: T5Relative, *, causal: bool, **factory: Unpack[Factory]) -> None:
        super().__init__()
        self.config, self.causal = config, causal
        self.weight = parameter(num_heads, config.buckets, **factory)

    def make_tables(self, device: torch.device) -> tuple[torch.Tensor, ...]:
        far = self.config.max_distance  # all distances from here on share a bucket
        return (t5_bucket(torch.arange(-far, far + 1), self.config, causal=self.causal).to(device),)

    def signals(self, positions: torch.Tensor, longest: int) -> Signals:
        (buckets,) = self.tables(positions.device)
        return Signals(bias=self.weight.index_select(1, buckets))


def make_encoding(config: ModelConfig, **factory: Unpack[Factory]) -> Encoding:
    match config.positions:
        case Rope():
            return RopeEncoding(config)
        case Learned(offset=offset):
            return LearnedEncoding(config.max_len, config.hidden_size, offset, **factory)
        case Sinusoidal(base=base):
            return SinusoidalEncoding(config.max_len, config.hidden_size, base)
        case Alibi():
            return AlibiEncoding(config.num_heads)
        case T5Relative() as t5:
            return T5Encoding(config.num_heads, t5, causal=config.causal, **factory)
        case _:
            return Encoding()


# The formulas


def rope_speeds(rope: Rope, dim: int, max_len: int = 0) -> tuple[torch.Tensor, float]:
    """(radians per position of each of the dim / 2 pairs, fp64; the factor of cos and sin). The longest sequence
    selects the factors of LongRoPE."""
    speeds = rope.base ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    match rope.scaling:
        case LinearScaling() as s:
            return speeds / s.factor, 1.0
        case Llama3Scaling() as s:
            return _llama3(speeds, s), 1.0
        case YarnScaling() as s:
            return _yarn(speeds, rope.base, s), _yarn_size(s)
        case LongRopeScaling() as s:
            return speeds / torch.tensor(s.factors(max_len), dtype=torch.float64), _longrope_size(s)
        case _:
            return speeds, 1.0


def _llama3(speeds: torch.Tensor, s: Llama3Scaling) -> torch.Tensor:
    turns = s.original_max_len * speeds / (2 * math.pi)  # rotations of each pair over the original context
    keep = ((turns - s.low_freq_factor) / (s.high_freq_factor - s.low_freq_factor)).clamp(0, 1)
    return keep * speeds + (1 - keep) * speeds / s.factor


def _yarn(speeds: torch.Tensor, base: float, s: YarnScaling) -> torch.Tensor:
    R = len(speeds)

    def pair(turns: float) -> float:
        """The (fractional) index of the pair that rotates this many times over the original context."""
        return R * math.log(s.original_max_len / (turns * 2 * math.pi)) / math.log(base)

    low, high = pair(s.beta_fast), pair(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, 2 * R - 1)
    # If a short context makes `high` less than `low`, transformers divides by the negative width: no pair is slowed.
    slowed = ((torch.arange(R, dtype=torch.float64) - low) / ((high - low) or 1e-3)).clamp(0, 1)
    return slowed * speeds / s.factor + (1 - slowed) * speeds


def _yarn_size(s: YarnScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    if s.mscale and s.mscale_all_dim:
        return yarn_mscale(s.factor, s.mscale) / yarn_mscale(s.factor, s.mscale_all_dim)
    return yarn_mscale(s.factor)


def _longrope_size(s: LongRopeScaling) -> float:
    if s.attention_factor is not None:
        return s.attention_factor
    return math.sqrt(1 + math.log(max(s.factor, 1.0)) / math.log(s.original_max_len))


def sinusoids(length: int, size: int, base: float = 10000.0) -> torch.Tensor:
    """[length, size] fp32: sin and cos of each frequency, interleaved (https://arxiv.org/abs/1706.03762, 3.5)."""
    speeds = base ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    angle = torch.arange(length, dtype=torch.float64).outer(speeds)
    return torch.stack((angle.sin(), angle.cos()), -1).flatten(1).float()


def alibi_slopes(heads: int) -> list[float]:
    """2^(-8/n), 2^(-16/n), … for n heads if n is a power of two; else every second slope of the next power is added."""
    n = 1 << (heads.bit_length() - 1)
    slopes = [2.0 ** (-8 * (i + 1) / n) for i in range(n)]
    between = [2.0 ** (-4 * (i + 1) / n) for i in range(0, 2 * n, 2)]
    return slopes + between[: heads - n]


def t5_bucket(distance: torch.Tensor, config: T5Relative, *, causal: bool) -> torch.Tensor:
    """The bucket of (key position - query position): small distances have their own, large ones share logarithmically.

    A bidirectional model uses the upper half of the buckets for keys after the query; a causal one uses all buckets for
    keys before it.
    """
    n = config.buckets if causal else config.buckets // 2
    exact = n // 2
    far = (-distance).clamp(min=0) if causal else distance.abs()
    ratio = torch.log(far.clamp(min=1) / exact) / math.log(config.max_distance / exact)
    coarse = (exact + (ratio * (n - exact)).long()).clamp(max=n - 1)
    bucket = torch.where(far < exact, far, coarse)
    return bucket if causal else bucket + n * (distance > 0)
