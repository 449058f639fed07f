"""Scenes: one to four glyphs on a canvas of 64 × 64, composed by seed, with exact masks, a caption and questions in
English and Chinese whose answers can be checked.

The glyphs are 20 things that all fonts of the corpus draw, so a scene can be drawn in a style that was never trained
on. Things in a scene differ, and each has a cell of its own in a grid of two by two: left, right, above and below are
never in doubt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch

from bagu.data.pictures.glyphs import SANS, SIDE, Language, masks
from bagu.data.pictures.paint import colours, turned, uniform

THINGS = {
    "⌂": ("house", "房子"), "☺": ("face", "笑脸"), "♥": ("heart", "红心"), "♠": ("spade", "黑桃"),
    "♣": ("club", "梅花"), "♪": ("note", "音符"), "☼": ("sun", "太阳"), "■": ("square", "方块"),
    "▲": ("triangle", "三角"), "●": ("disk", "圆盘"), "○": ("ring", "圆环"), "◆": ("diamond", "菱形"),
    "♀": ("venus", "金星"), "♂": ("mars", "火星"), "♄": ("saturn", "土星"), "€": ("euro", "欧元"),
    "&": ("ampersand", "与号"), "∞": ("infinity", "无穷"), "→": ("arrow", "箭头"), "?": ("question", "问号"),
}  # fmt: skip
CHARS = tuple(THINGS)
CANVAS, CELL = 64, 32
COUNTS = {"en": ("zero", "one", "two", "three", "four"), "zh": ("零个", "一个", "两个", "三个", "四个")}
Kind = Literal["left", "right", "above", "below", "count", "there"]
RELATIONS = ("left", "right", "above", "below")
_ASK = {
    "en": {"left": "what is left of the {}?", "right": "what is right of the {}?", "above": "what is above the {}?",
           "below": "what is below the {}?", "count": "how many things are there?", "there": "is there {}?"},
    "zh": {"left": "{}的左边是什么？", "right": "{}的右边是什么？", "above": "{}的上面是什么？",
           "below": "{}的下面是什么？", "count": "有几个东西？", "there": "有{}吗？"},
}  # fmt: skip
DESCRIBE = {"en": "describe the picture.", "zh": "描述这张图。"}


def with_article(noun: str) -> str:
    """ "a house", "an arrow"; of the things, euro alone begins with a vowel and takes "a"."""
    return f"an {noun}" if noun[0] in "aeiou" and noun != "euro" else f"a {noun}"


class Question(NamedTuple):
    kind: Kind
    ask: str
    answer: str


@dataclass(frozen=True, slots=True)
class Scene:
    """`things[i]` is an index of CHARS, `cells[i]` its cell 0 to 3, row by row."""

    things: tuple[int, ...]
    cells: tuple[int, ...]

    def caption(self, language: Language) -> str:
        """The rows from the top, the things of a row from the left."""
        rows = [[self._name(cell, language) for cell in row if cell in self.cells] for row in ((0, 1), (2, 3))]
        beside, above = (" left of ", " above ") if language == "en" else ("在左，右边是", "；下面是")
        return above.join(beside.join(row) for row in rows if row)

    def _name(self, cell: int, language: Language) -> str:
        english, chinese = THINGS[CHARS[self.things[self.cells.index(cell)]]]
        return with_article(english) if language == "en" else chinese

    def questions(self, language: Language) -> list[Question]:
        """Every question about this scene that has one answer."""
        word = 0 if language == "en" else 1
        names = {cell: THINGS[CHARS[t]][word] for t, cell in zip(self.things, self.cells, strict=True)}
        ask = _ASK[language]
        found = [Question("count", ask["count"], COUNTS[language][len(self.things)])]
        for cell, name in names.items():
            beside, over = cell ^ 1, cell ^ 2
            if beside in names:
                kind: Kind = "left" if beside < cell else "right"
                found.append(Question(kind, ask[kind].format(name), names[beside]))
            if over in names:
                kind = "above" if over < cell else "below"
                found.append(Question(kind, ask[kind].format(name), names[over]))
        yes, no = ("yes", "no") if language == "en" else ("有", "没有")
        absent = next(i for i in range(len(CHARS)) if (i + self.things[0]) % len(CHARS) not in self.things)
        other = THINGS[CHARS[(absent + self.things[0]) % len(CHARS)]][word]
        for name, answer in ((names[self.cells[0]], yes), (other, no)):
            asked = ask["there"].format(with_article(name) if language == "en" else name)
            found.append(Question("there", asked, answer))
        return found


def draw_scenes(count: int, stream: torch.Generator, *, least: int = 1, most: int = 4) -> list[Scene]:
    """Random scenes of `least` to `most` things."""
    scenes = []
    for number in torch.randint(least, most + 1, (count,), generator=stream).tolist():
        things = torch.randperm(len(CHARS), generator=stream)[:number].tolist()
        cells = torch.randperm(4, generator=stream)[:number].tolist()
        scenes.append(Scene(tuple(things), tuple(cells)))
    return scenes


class Drawn(NamedTuple):
    pictures: torch.Tensor  # [N, 3, 64, 64] uint8
    labels: torch.Tensor  # [N, 64, 64] uint8: 0 the ground, 1 + i the pixels of the scene's thing i


def paint_scenes(scenes: list[Scene], stream: torch.Generator, *, styles: tuple[str, ...] = SANS) -> Drawn:
    """Each thing in a style, size and place of its own. A scene has one foreground and one background colour: colour
    separates glyphs from the background, and not one glyph from another."""
    table = torch.stack([masks(list(CHARS), style, SIDE) for style in styles])
    owner = torch.tensor([i for i, scene in enumerate(scenes) for _ in scene.things])
    place = torch.tensor([k for scene in scenes for k in range(len(scene.things))])
    thing = torch.tensor([t for scene in scenes for t in scene.things])
    cell = torch.tensor([c for scene in scenes for c in scene.cells])
    style = torch.randint(len(styles), thing.shape, generator=stream)
    covers = turned(table[style, thing], CELL, stream)
    ink, ground = colours(len(scenes), stream)
    pictures = ground[:, :, None, None].expand(-1, -1, CANVAS, CANVAS).clone()
    labels = torch.zeros(len(scenes), CANVAS, CANVAS, dtype=torch.uint8)
    for i in range(len(thing)):
        n, y, x = int(owner[i]), int(cell[i]) // 2 * CELL, int(cell[i]) % 2 * CELL
        view = pictures[n, :, y : y + CELL, x : x + CELL]
        view.copy_(covers[i] * ink[n, :, None, None] + (1 - covers[i]) * view)
        labels[n, y : y + CELL, x : x + CELL][covers[i] > 0.5] = int(place[i]) + 1
    noise = uniform((1,), 0.01, 0.03, stream) * torch.randn(pictures.shape, generator=stream)
    return Drawn(((pictures + noise).clamp(0, 1) * 255).round().to(torch.uint8), labels)
