"""An image in a prompt: where its placeholder tokens are, its pixels, and the numbers that stand for them in the keys
of the prefix cache.

A key is a hash of tokens, and the placeholders of all images are one token. So in keys every placeholder is a number
made of the image's digest and its place: two images share no block, equal ones do, and the text before an image is
shared whatever follows. This file imports no torch.
"""

import hashlib
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bagu.errors import ArgumentError

NO_TOKEN = 1 << 62  # in every number of a placeholder: no token id has this bit


class ImageSpec(NamedTuple):
    """How a model takes images: `tokens` placeholders `token` for pixels of `side` × `side`."""

    token: int
    tokens: int
    side: int


class PromptImage(NamedTuple):
    """Pixels [side, side, 3] uint8 for the placeholders at `start` to `start + tokens` of a prompt. `digest` is of all
    that the encoder computes from: pixels, size and number of tokens."""

    start: int
    tokens: int
    side: int
    pixels: bytes
    digest: bytes

    @classmethod
    def of(cls, start: int, pixels: bytes, spec: ImageSpec) -> "PromptImage":
        digest = hashlib.sha256(b"%d %d " % (spec.side, spec.tokens) + pixels).digest()
        return cls(start, spec.tokens, spec.side, pixels, digest)

    @property
    def end(self) -> int:
        return self.start + self.tokens


def place_images(
    prompt: Sequence[int], images: Sequence[bytes], spec: ImageSpec
) -> tuple[list[int], list[PromptImage]]:
    """The prompt with `spec.tokens` placeholders for each one that the chat template wrote, and the images there."""
    written = sum(token == spec.token for token in prompt)
    if written != len(images):
        raise ArgumentError(
            f"the chat template writes {written} images, and the messages have {len(images)}",
            hint="serve the model with its own chat template",
        )
    tokens: list[int] = []
    placed: list[PromptImage] = []
    for token in prompt:
        if token == spec.token:
            placed.append(PromptImage.of(len(tokens), images[len(placed)], spec))
            tokens += [token] * spec.tokens
        else:
            tokens.append(token)
    return tokens, placed


def keyed(prompt: Sequence[int], images: Sequence[PromptImage]) -> list[int]:
    """The prompt for the keys of the prefix cache."""
    found = list(prompt)
    for image in images:
        digest = image.digest
        for i in range(image.tokens):
            word = hashlib.sha256(digest + i.to_bytes(4, "big")).digest()[:8]
            found[image.start + i] = int.from_bytes(word, "big") >> 2 | NO_TOKEN
    return found


class Piece(NamedTuple):
    """Vectors `first` to `last` of an image, for the tokens of a step from `row` on."""

    image: PromptImage
    first: int
    last: int
    row: int


def pieces(images: Sequence[PromptImage], start: int, end: int, row: int) -> Iterator[Piece]:
    """The parts of images in positions `start` to `end` of a prompt, whose first token is `row` of the step."""
    for image in images:
        first, last = max(image.start, start), min(image.end, end)
        if first < last:
            yield Piece(image, first - image.start, last - image.start, row + first - start)


class EncoderBudget:
    """How many tokens of images a step may encode, besides the tokens of the decoder: an encoder runs before the
    forward of the step, and decodes wait for it. The first image of a step is always taken, so that every prompt
    advances."""

    def __init__(self, tokens: int, known: Callable[[bytes], bool]) -> None:
        """`known`: whether the vectors of a digest are kept."""
        self.tokens, self.known = tokens, known
        self.begin()

    def begin(self) -> None:
        """A new step."""
        self._left, self._taken = self.tokens, set[bytes]()

    def cut(self, images: Sequence[PromptImage], start: int, length: int) -> int:
        """How many of `length` positions from `start` on a slice may have: up to the first image that is too much."""
        for piece in pieces(images, start, start + length, 0):
            digest = piece.image.digest
            if digest in self._taken or self.known(digest):
                continue
            if self._taken and piece.image.tokens > self._left:
                return piece.row
            self._taken.add(digest)
            self._left -= piece.image.tokens
        return length
