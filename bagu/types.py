"""What crosses the parts: batches of tokens, and the protocols by which parts meet without importing each other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, TypeVar

import torch

__all__ = ["IGNORE", "Batch", "Completion", "Generate", "Tokenizer"]

IGNORE = -100  # a target that does not count


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """T tokens, always full: documents (or pieces of them) one after another, which never see each other.

    `cu_seqlens` are the T-offsets at which segments begin, and T; it is padded with T to a fixed length, so a padded
    segment is empty. `max_len` bounds the length of a segment and is a host int: nothing has to be read back from the
    device to launch a kernel. Padding tokens, where a packer needs them, are a segment of their own whose targets
    are `IGNORE`.
    """

    ids: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [T] int64: what token t is to predict, or IGNORE
    positions: torch.Tensor  # [T] int64: place inside the segment
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_len: int
    num_targets: int  # targets that count
    target_bytes: int  # bytes of text those targets stand for: what bits per byte divides by
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def uniform(self) -> bool:
        """Whether all segments are exactly `max_len` long: S segments of at most max_len make T only then."""
        return (self.cu_seqlens.shape[0] - 1) * self.max_len == self.num_tokens

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """The same batch with its tensors on `device`."""
        names = ("ids", "targets", "positions", "cu_seqlens")
        return replace(self, **{n: getattr(self, n).to(device, non_blocking=non_blocking) for n in names})


class Tokenizer(Protocol):
    """Text to ids and back. `decode(encode(text)) == text` for any text."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def eos_id(self) -> int:
        """The token that ends a document."""
        ...

    @property
    def byte_level(self) -> bool:
        """Whether `decode(ids)` is always the bytes of the ids one after another, read as UTF-8."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, with the control tokens that the model was trained to see around a text, if any."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids; U+FFFD for bytes that are no character."""
        ...

    def bytes_of(self, id: int) -> bytes:
        """The bytes of text one token stands for: a part of a character, several of them, or a control token's name.
        None for an id without a token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What was generated from one prompt, as one choice of it."""

    prompt: int  # which of the prompts
    choice: int  # 0 to n - 1
    tokens: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish: str  # stop, length, abort or error
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    logprobs: tuple[float, ...] | None = None  # of `tokens`, before temperature, where they were asked for
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None  # the likeliest tokens at each place, best first


SamplingT = TypeVar("SamplingT", contravariant=True)


class Generate(Protocol[SamplingT]):
    """What draws tokens from a model: the serving engine, or anything a trainer or an evaluation puts in its place."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingT) -> list[Completion]:
        """All choices of all prompts, prompt by prompt."""
        ...

    def stream(self, prompt: Sequence[int], sampling: SamplingT) -> Iterator[Completion]:
        """The same as it grows: a `Completion` of what each token added, the last of a choice with its finish."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """For each sequence the logprobs of ids[start:], each given all before it. Only positions before `start` may
        come from a prefix cache; start is 1 or more, since the first token has nothing before it."""
        ...
