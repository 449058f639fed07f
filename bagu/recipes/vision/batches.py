"""Batches of pictures and texts for training: step s is a function of (seed, s) alone."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch

from bagu.data.pictures.glyphs import SANS, Concept, concepts, masks
from bagu.data.pictures.paint import painted
from bagu.data.pictures.read import decode, pairs_of
from bagu.data.pictures.scenes import DESCRIBE, THINGS, Scene, draw_scenes, paint_scenes
from bagu.data.tokenizer import BpeTokenizer
from bagu.train.objectives.vision_losses import Names, PictureBatch, packed_texts
from bagu.types import IGNORE

Make = Callable[[torch.Generator], PictureBatch]
IMAGE = "<|image|>"  # the placeholder of a vector of an image; a user's text cannot contain it as a token
SPECIAL = ("<|endoftext|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", IMAGE)


class PictureLoader:
    """Makes every batch when it is due, from the seed and the step."""

    def __init__(self, make: Make, seed: int) -> None:
        self.make, self.seed = make, seed

    @contextlib.contextmanager
    def prefetch(self, start: int) -> Iterator[Iterator[Sequence[PictureBatch]]]:
        yield ([self.make(torch.Generator().manual_seed(self.seed * 1_000_003 + step))] for step in _from(start))

    def cursor(self, step: int) -> dict[str, Any]:
        return {"step": step}

    def restore(self, cursor: Mapping[str, Any]) -> None:
        """Nothing is kept between steps."""


def _from(start: int) -> Iterator[int]:
    while True:
        yield start
        start += 1


def glyph_batches(tokenizer: BpeTokenizer, rows: int, size: int) -> Make:
    """One picture per family, in a style of Sans, named in English or Chinese."""
    table = torch.stack([_style_masks(style) for style in SANS])
    families: dict[int, list[tuple[int, Concept]]] = {}
    for number, concept in enumerate(concepts()):
        if not concept.held_out:
            families.setdefault(concept.family, []).append((number, concept))
    groups = list(families.values())
    encode = cache(lambda text: tuple(tokenizer.encode(text)))

    def make(stream: torch.Generator) -> PictureBatch:
        drawn = torch.randperm(len(groups), generator=stream)[:rows].tolist()
        dice = torch.randint(2**31, (len(drawn), 3), generator=stream).tolist()
        chosen = [groups[g][d[0] % len(groups[g])] for g, d in zip(drawn, dice, strict=True)]
        cover = table[[d[1] % len(SANS) for d in dice], [number for number, _ in chosen]]
        texts = [encode(c.en if d[2] % 2 else c.zh) for (_, c), d in zip(chosen, dice, strict=True)]
        return PictureBatch(images=painted(cover, size, stream), **packed_texts(texts))

    return make


@cache
def _style_masks(style: str) -> torch.Tensor:
    return masks([c.char for c in concepts()], style)


def scene_batches(tokenizer: BpeTokenizer, rows: int, *, least: int = 1, most: int = 4) -> Make:
    """Scenes, their captions, and the names in the captions, for two towers. The names of a batch are in one language,
    so that each thing has one."""
    encode = cache(lambda text: tuple(tokenizer.encode(text)))

    def make(stream: torch.Generator) -> PictureBatch:
        scenes = draw_scenes(rows, stream, least=least, most=most)
        english = torch.randint(2, (rows,), generator=stream).tolist()
        texts = [encode(s.caption("en" if e else "zh")) for s, e in zip(scenes, english, strict=True)]
        present = torch.zeros(rows, len(THINGS), dtype=torch.bool)
        for row, scene in zip(present, scenes, strict=True):
            row[list(scene.things)] = True
        word = english[0]
        names = Names(present=present, **packed_texts([encode(thing[1 - word]) for thing in THINGS.values()]))
        return PictureBatch(images=paint_scenes(scenes, stream).pictures, names=names, **packed_texts(texts))

    return make


def pair_batches(source: Path, tokenizer: BpeTokenizer, rows: int, size: int) -> Make:
    """A user's pictures and texts; a text comes once in a batch."""
    pairs = pairs_of(source)
    pixels = torch.stack([decode(p.path.read_bytes(), size) for p in pairs])
    texts = [tokenizer.encode(p.text) for p in pairs]

    def make(stream: torch.Generator) -> PictureBatch:
        seen: dict[str, int] = {}
        for i in torch.randperm(len(pairs), generator=stream).tolist():
            seen.setdefault(pairs[i].text, i)
            if len(seen) == rows:
                break
        chosen = list(seen.values())
        return PictureBatch(images=pixels[chosen], **packed_texts([texts[i] for i in chosen]))

    return make


Wanted = Literal["questions", "captions"]


def prompt_of(tokenizer: BpeTokenizer, image_tokens: int, text: str) -> list[int]:
    """The tokens of a chat with one image: as the model's chat template writes them."""
    user, assistant, end, image = (tokenizer.token_id(t) for t in ("<|user|>", "<|assistant|>", "<|end|>", IMAGE))
    return [user, *[image] * image_tokens, *tokenizer.encode(text), end, assistant]


def answer_batches(tokenizer: BpeTokenizer, rows: int, image_tokens: int) -> Make:
    """Scenes with a question, or the request for a caption, and the answer as the only target."""
    end = tokenizer.token_id("<|end|>")

    def make(stream: torch.Generator) -> PictureBatch:
        scenes = draw_scenes(rows, stream)
        dice = torch.randint(2**31, (rows, 3), generator=stream).tolist()
        texts, targets = [], []
        for scene, d in zip(scenes, dice, strict=True):
            ask, answer = asked(scene, d)
            prompt, reply = prompt_of(tokenizer, image_tokens, ask), [*tokenizer.encode(answer), end]
            texts.append([*prompt, *reply[:-1]])
            targets += [IGNORE] * (len(prompt) - 1) + reply
        learned = torch.tensor(targets)
        return PictureBatch(
            images=paint_scenes(scenes, stream).pictures,
            targets=learned,
            num_targets=int((learned != IGNORE).sum()),
            **packed_texts(texts),
        )

    return make


def asked(scene: Scene, dice: Sequence[int]) -> tuple[str, str]:
    """A question about the scene and its answer: a caption half of the time."""
    language: Literal["en", "zh"] = "en" if dice[0] % 2 else "zh"
    if dice[1] % 2:
        return DESCRIBE[language], scene.caption(language)
    found = scene.questions(language)
    question = found[dice[2] % len(found)]
    return question.ask, question.answer


def corpus_texts() -> list[str]:
    """The texts that a tokenizer of pictures is trained on."""
    stream = torch.Generator().manual_seed(0)
    scenes = draw_scenes(2000, stream)
    captions = [s.caption("en") for s in scenes] + [s.caption("zh") for s in scenes]
    asks = [q.ask + " " + q.answer for s in scenes[:500] for lang in ("en", "zh") for q in s.questions(lang)]
    names = [text for c in concepts() if not c.held_out for text in (c.en, c.zh)]
    return [*names, *captions, *asks, *DESCRIBE.values()]
