"""Types shared by several parts: token batches, and protocols that let parts work together without imports."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:  # the HTTP server's process imports this file, and not torch (2 s of CPU time)
    import torch

IGNORE = -100  # a target that the loss skips; the value PyTorch uses


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A packed batch of exactly T tokens: documents (or parts of them) concatenated. Attention stays in its document.

    `cu_seqlens` holds the offset of each segment in the T tokens, then T. It is padded with T to a fixed length; the
    padded segments are empty. `max_len` bounds the length of a segment. It is a host int, so that launching a kernel
    needs no read from the device. Padding tokens, if a packer needs them, form a segment of their own whose targets
    are `IGNORE`.
    """

    ids: torch.Tensor  # [T] int64
    targets: torch.Tensor  # [T] int64: the token to predict at t, or IGNORE
    positions: torch.Tensor  # [T] int64: position in the segment
    cu_seqlens: torch.Tensor  # [S + 1] int32
    max_len: int
    num_targets: int  # targets that are not IGNORE
    target_bytes: int  # bytes of text of these targets: the denominator of bits per byte
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        return self.ids.shape[0]

    @property
    def uniform(self) -> bool:
        """Whether every segment is exactly `max_len` long: only then S segments of at most max_len sum to T."""
        return (self.cu_seqlens.shape[0] - 1) * self.max_len == self.num_tokens

    def to(self, device: torch.device | str, *, non_blocking: bool = False) -> Batch:
        """A copy with the tensors on `device`."""
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
        """Whether `decode(ids)` is always the concatenated bytes of the ids, decoded as UTF-8."""
        ...

    def encode(self, text: str) -> list[int]: ...

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, plus the special tokens (such as BOS) that the model expects around a text."""
        ...

    def decode(self, ids: Sequence[int]) -> str:
        """The text of the ids, with U+FFFD for invalid UTF-8 bytes."""
        ...

    def bytes_of(self, id: int) -> bytes:
        """The bytes of one token: part of a character, several characters, or the name of a special token. Empty for an
        id without a token."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """One generated choice for one prompt."""

    prompt: int  # index of the prompt
    choice: int  # 0 to n - 1
    tokens: tuple[int, ...]
    text: str | None  # None without a tokenizer
    finish: str  # stop, length, abort or error
    stop_reason: str | int | None = None  # the stop string or stop token that ended it
    logprobs: tuple[float, ...] | None = None  # of `tokens`, before temperature, if requested
    top: tuple[tuple[tuple[int, float], ...], ...] | None = None  # the top tokens at each position, best first


SamplingT = TypeVar("SamplingT", contravariant=True)


class Generate(Protocol[SamplingT]):
    """Generates tokens from a model. The inference engine implements it; training and evaluation call it."""

    def generate(self, prompts: Sequence[Sequence[int]], sampling: SamplingT) -> list[Completion]:
        """Generate all choices of all prompts, ordered by prompt."""
        ...

    def stream(self, prompt: Sequence[int], sampling: SamplingT) -> Iterator[Completion]:
        """Generate from one prompt: yield a `Completion` per new token. The last one of a choice has its `finish`."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """Return the logprobs of ids[start:] for each sequence, each given all tokens before it. Only positions before
        `start` may come from a prefix cache. `start` is at least 1: the first token has no prediction."""
        ...
