"""Pictures with names that every user has: the characters of matplotlib's fonts, named by `unicodedata`.

A concept is a character that all four styles of DejaVu Sans draw and whose name has a Chinese form. Its family joins
variants that differ in colour, weight, size or direction. Splits follow from a hash of the family's lowest code point,
so they are equal on every machine: a held-out family is held out in every style. Unseen styles are whole fonts.
"""

from __future__ import annotations

import hashlib
import unicodedata
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from bagu.data.pictures.chinese import chinese_name, words_of
from bagu.errors import BaguError

SANS = ("DejaVuSans", "DejaVuSans-Bold", "DejaVuSans-Oblique", "DejaVuSans-BoldOblique")
UNSEEN = ("DejaVuSerif", "DejaVuSansMono", "STIXGeneral")
CATEGORIES = ("So", "Sm", "Sc", "Po", "No", "Nl", "Pd", "Ps", "Pe", "Pi", "Pf")
_VARIANTS = (
    "BLACK WHITE HEAVY LIGHT MEDIUM SMALL LARGE LEFT RIGHT UP DOWN LEFTWARDS RIGHTWARDS UPWARDS DOWNWARDS UPPER LOWER "
    "NORTH SOUTH EAST WEST TOP BOTTOM CLOCKWISE ANTICLOCKWISE REVERSED TURNED INVERTED"
)
VARIANTS = frozenset(_VARIANTS.split())
SIDE = 64  # pixels of a stored mask
HELD_OUT = 10  # one family in so many
Language = Literal["en", "zh"]


@dataclass(frozen=True, slots=True)
class Concept:
    """A named character. `held_out` names are in no training batch, in any style."""

    char: str
    en: str
    zh: str
    family: int  # the lowest code point of the family
    held_out: bool

    def name(self, language: Language) -> str:
        return self.en if language == "en" else self.zh


def imports() -> tuple[Any, Any]:
    """(PIL.ImageFont, matplotlib), or one sentence about the extra."""
    try:
        import matplotlib
        from PIL import ImageFont
    except ImportError as error:
        raise BaguError(
            f"pictures need pillow and matplotlib, and {error.name} is missing", hint="pip install 'bagu[vision]'"
        ) from error
    return ImageFont, matplotlib


def font_path(style: str) -> Path:
    _, matplotlib = imports()
    path = Path(matplotlib.get_data_path()) / "fonts" / "ttf" / f"{style}.ttf"
    if not path.is_file():
        raise BaguError(f"matplotlib has no font {style}: {path} is missing", hint="install matplotlib again")
    return path


@cache
def characters(style: str) -> frozenset[int]:
    """The code points that a font draws."""
    font_file = font_path(style)
    from matplotlib.ft2font import FT2Font

    return frozenset(FT2Font(str(font_file)).get_charmap())


@cache
def concepts() -> tuple[Concept, ...]:
    """All concepts by code point."""
    named: dict[int, tuple[str, str]] = {}
    for code in sorted(frozenset.intersection(*map(characters, SANS))):
        char = chr(code)
        name = unicodedata.name(char, "")
        if name and unicodedata.category(char) in CATEGORIES and (zh := chinese_name(name)) is not None:
            named[code] = (name, zh)
    families: dict[tuple[str, ...], int] = {}
    for code, (name, _) in named.items():
        families.setdefault(_family(name), code)
    return tuple(
        Concept(chr(code), " ".join(words_of(name)).lower(), zh, family, held_out(family))
        for code, (name, zh) in named.items()
        for family in (families[_family(name)],)
    )


def _family(name: str) -> tuple[str, ...]:
    words = words_of(name)
    return tuple(w for w in words if w not in VARIANTS) or tuple(words)


def held_out(family: int) -> bool:
    digest = hashlib.sha256(family.to_bytes(4, "big")).digest()
    return int.from_bytes(digest[:4], "big") % HELD_OUT == 0


def in_style(style: str) -> list[Concept]:
    """The concepts that a font draws."""
    drawn = characters(style)
    return [c for c in concepts() if ord(c.char) in drawn]


@cache
def _font(style: str, em: float) -> Any:
    image_font, _ = imports()
    return image_font.truetype(str(font_path(style)), em)


@cache
def mask(char: str, style: str, side: int = SIDE) -> np.ndarray:
    """[side, side] uint8: how much of each pixel the character covers. It has its natural size on the em square, and
    is made smaller only if it does not fit: a small square stays small."""
    imports()
    from PIL import Image, ImageDraw

    em = 0.72 * side
    for _ in range(8):
        font = _font(style, em)
        image = Image.new("L", (side, side))
        pen = ImageDraw.Draw(image)
        left, top, right, bottom = pen.textbbox((side / 2, side / 2), char, font=font, anchor="mm")
        if left >= 0 and top >= 0 and right <= side and bottom <= side:
            break
        em *= 0.85
    pen.text((side / 2, side / 2), char, font=font, anchor="mm", fill=255)
    return np.asarray(image)


def masks(chars: list[str], style: str, side: int = SIDE) -> torch.Tensor:
    """[N, side, side] uint8."""
    return torch.from_numpy(np.stack([mask(c, style, side) for c in chars]))
