"""Position encodings, and how RoPE is scaled to longer contexts. config.py combines them with the other options."""

import math
from dataclasses import dataclass, field
from typing import Literal

from bagu.nn.choices import NEWER, at_least, refuse


@dataclass(frozen=True, kw_only=True)
class LinearScaling:
    """All frequencies are divided by `factor` (position interpolation, https://arxiv.org/abs/2306.15595)."""

    kind: Literal["linear"] = "linear"
    factor: float

    def __post_init__(self) -> None:
        _check_factor(self.factor)


@dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
    """Low-frequency pairs are divided by `factor`, high-frequency pairs kept, those between interpolated (Llama
    3.1)."""

    kind: Literal["llama3"] = "llama3"
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 8192

    def __post_init__(self) -> None:
        _check_scaling(self)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            refuse(
                f"low_freq_factor = {self.low_freq_factor} is not above 0 or not below high_freq_factor = "
                f"{self.high_freq_factor}",
                "Llama 3.1 uses 1 and 4",
            )


@dataclass(frozen=True, kw_only=True)
class YarnScaling:
    """YaRN (https://arxiv.org/abs/2309.00071): the frequencies of pairs that rotate less than `beta_slow` times over
    `original_max_len` are divided by `factor`, those of pairs that rotate more than `beta_fast` times are kept, and the
    rest are interpolated with a ramp.

    The softmax is sharpened for long contexts: cos and sin are multiplied by `attention_factor` if it is given, else by
    0.1 * ln(factor) + 1. `mscale` and `mscale_all_dim` are DeepSeek's form of this: the first scales cos and sin
    (relative to the second), the second scales the softmax of MLA.
    """

    kind: Literal["yarn"] = "yarn"
    factor: float
    original_max_len: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # the ends of the ramp are rounded to integers

    def __post_init__(self) -> None:
        _check_scaling(self)
        if not 0 < self.beta_slow <= self.beta_fast:
            refuse(
                f"beta_slow = {self.beta_slow} and beta_fast = {self.beta_fast}: expected 0 < beta_slow <= beta_fast",
                "the paper uses 1 and 32, Kimi K2 uses 1 and 1",
            )


@dataclass(frozen=True, kw_only=True)
class LongRopeScaling:
    """LongRoPE (https://arxiv.org/abs/2402.13753): each frequency is divided by a factor of its own, from
    `long_factors` for contexts longer than `original_max_len`, otherwise from `short_factors`.

    A forward without a cache uses the list for its longest sequence, as transformers does. Keys in a cache cannot
    change their factors, so with one the `max_len` of the model decides, as in vLLM (`Transformer.for_length`). cos and
    sin are multiplied by `attention_factor` if it is given, else by sqrt(1 + ln(factor) / ln(original_max_len)), with
    either list.
    """

    kind: Literal["longrope"] = "longrope"
    factor: float  # the longest context over the original one
    original_max_len: int
    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    attention_factor: float | None = None

    def __post_init__(self) -> None:
        _check_factor(self.factor)
        at_least(self, 2, "original_max_len")
        for name in ("short_factors", "long_factors"):
            factors = getattr(self, name)
            if not factors or not all(type(f) in (int, float) and 0 < f < math.inf for f in factors):
                refuse(f"{name} = {factors}", "use a number above 0 for each pair of features")

    def factors(self, max_len: int) -> tuple[float, ...]:
        return self.long_factors if max_len > self.original_max_len else self.short_factors


def yarn_mscale(factor: float, weight: float = 1.0) -> float:
    """The factor by which YaRN sharpens attention if the context grows by `factor`."""
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0


def _check_scaling(scaling: Llama3Scaling | YarnScaling) -> None:
    at_least(scaling, 1, "original_max_len")
    _check_factor(scaling.factor)


def _check_factor(factor: float) -> None:
    if not factor > 0:
        refuse(f"factor = {factor}; expected more than 0", "a context four times as long has a factor of 4")


@dataclass(frozen=True, kw_only=True)
class Rope:
    """Queries and keys are rotated by their position, so attention depends on the distance."""

    kind: Literal["rope"] = "rope"
    base: float = 10000.0
    dim: int | None = None  # number of features of a head to rotate, from the first; None is all
    layout: Literal["half", "interleaved"] = "half"
    scaling: LinearScaling | Llama3Scaling | YarnScaling | LongRopeScaling | None = None

    def __post_init__(self) -> None:
        if not self.base > 0 or (self.base == 1 and isinstance(self.scaling, YarnScaling)):
            refuse(f"the base of RoPE is {self.base}", "use a base above 0, and not 1 with YaRN; 10000 is common")


@dataclass(frozen=True, kw_only=True)
class Learned:
    """One learned vector per position, added to the embedding."""

    kind: Literal["learned"] = "learned"
    # the vector of position p is row p + offset; token offset - 1 is padding without one (RoBERTa)
    offset: int = field(default=0, metadata=NEWER)

    def __post_init__(self) -> None:
        at_least(self, 0, "offset")


@dataclass(frozen=True, kw_only=True)
class Sinusoidal:
    """Sines and cosines added to the embedding, which is first multiplied by sqrt(hidden_size), as in the paper."""

    kind: Literal["sinusoidal"] = "sinusoidal"
    base: float = 10000.0


@dataclass(frozen=True, kw_only=True)
class Alibi:
    """Scores decrease with the distance, with a different slope per head (https://arxiv.org/abs/2108.12409)."""

    kind: Literal["alibi"] = "alibi"


@dataclass(frozen=True, kw_only=True)
class T5Relative:
    """A learned bias per head and distance bucket, added to the scores; all layers share one table."""

    kind: Literal["t5"] = "t5"
    buckets: int = 32
    max_distance: int = 128

    def __post_init__(self) -> None:
        if self.buckets < 4 or self.buckets % 4 or self.max_distance <= self.buckets // 2:
            refuse(
                f"positions.buckets = {self.buckets} with max_distance = {self.max_distance}",
                "buckets must be a multiple of 4 and max_distance more than half of it; T5 uses 32 and 128",
            )


@dataclass(frozen=True, kw_only=True)
class NoPositions:
    """No position encoding: a causal model can still infer the order from the causal mask."""

    kind: Literal["none"] = "none"


Positions = Rope | Learned | Sinusoidal | Alibi | T5Relative | NoPositions


@dataclass(frozen=True, kw_only=True)
class LayerPositions:
    """Layers that differ from the others in their positions: another RoPE (Gemma 3), or none (SmolLM3)."""

    layers: tuple[int, ...]
    positions: Rope | NoPositions
