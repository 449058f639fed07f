"""`bagu data pictures`: look at the built-in pictures, and bring others."""

from __future__ import annotations

import json
import unicodedata
from pathlib import Path

import torch

from bagu.config import write_atomic
from bagu.data.pictures.glyphs import SANS, UNSEEN, Language, characters, concepts, imports, masks
from bagu.data.pictures.paint import painted
from bagu.data.pictures.read import decode, encode_png, pairs_of
from bagu.data.pictures.scenes import draw_scenes, paint_scenes
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder

LANGUAGES: tuple[Language, ...] = ("en", "zh")
SHOWN = 8  # concepts, one row each
FONTS = (".ttf", ".otf", ".ttc")
FONT_SIZES = (109, 128, 136, 64)  # bitmap fonts have one: Noto Color Emoji 109


def show(words: str, out: Path, *, seed: int = 0) -> list[str]:
    """Draw the concepts whose name has `words` in every style, or some scenes for "scenes"; return their names. For
    "scene" it is one, to ask a model about: its questions and answers are returned."""
    stream = torch.Generator().manual_seed(seed)
    if words in ("scene", "scenes"):
        one = words == "scene"
        scenes = draw_scenes(1, stream, least=3) if one else draw_scenes(SHOWN, stream)
        out.write_bytes(encode_png(torch.cat(list(paint_scenes(scenes, stream).pictures), 2)))
        if one:
            return [f"{q.ask} {q.answer}" for language in LANGUAGES for q in scenes[0].questions(language)]
        return [f"{s.caption('en')} · {s.caption('zh')}" for s in scenes]
    wanted = words.lower()
    found = [c for c in concepts() if wanted in c.en or wanted in c.zh or wanted == c.char][:SHOWN]
    if not found:
        raise BaguError(f"no picture has {words!r} in its name", hint="for example arrow, 星, or scenes")
    rows = []
    for concept in found:
        styles = [s for s in (*SANS, *UNSEEN) if ord(concept.char) in characters(s)]
        drawn = painted(torch.cat([masks([concept.char], s) for s in styles]), 64, stream)
        row = torch.cat(list(drawn), 2)
        rows.append(torch.nn.functional.pad(row, (0, 64 * (len(SANS) + len(UNSEEN)) - row.shape[2]), value=255))
    out.write_bytes(encode_png(torch.cat(rows, 1)))
    return [f"{c.char} {c.en} · {c.zh}{' (held out)' if c.held_out else ''}" for c in found]


def add(source: Path, name: str | None = None) -> tuple[Path, int]:
    """Check pictures with texts (a folder, JSON lines, a font) and write JSON lines of them to the cache; return the
    file and the number of pairs."""
    folder = cache_folder() / "pictures" / (name or source.stem)
    if source.suffix.lower() in FONTS:
        rows = _font_rows(source, folder)
    else:
        rows = []
        for pair in pairs_of(source):
            if not pair.path.is_file():
                raise BaguError(f"{source} names {pair.path}, which does not exist", hint="mend the path")
            decode(pair.path.read_bytes())
            rows.append({"image": str(pair.path.resolve()), "text": pair.text})
    file = folder / "pairs.jsonl"
    write_atomic(file, "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
    return file, len(rows)


def _font_rows(font: Path, folder: Path) -> list[dict[str, str]]:
    """Every named symbol of a font as a PNG, in its colours if it has some."""
    image_font, _ = imports()
    from matplotlib.ft2font import FT2Font
    from PIL import Image, ImageDraw

    for size in FONT_SIZES:
        try:
            face = image_font.truetype(str(font), size)
            break
        except OSError:
            continue
    else:
        raise BaguError(f"{font} is no font that Pillow can draw", hint="give a TrueType or OpenType font")
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for code in sorted(FT2Font(str(font)).get_charmap()):
        label = unicodedata.name(chr(code), "")
        if not label or unicodedata.category(chr(code)) != "So":
            continue
        image = Image.new("RGBA", (size + size // 4,) * 2, "white")
        ImageDraw.Draw(image).text((0, 0), chr(code), font=face, fill="black", embedded_color=True)
        path = folder / f"{code:05x}.png"
        image.convert("RGB").save(path)
        rows.append({"image": str(path), "text": label.lower()})
    if not rows:
        raise BaguError(f"{font} has no named symbol", hint="give a font with symbols or emoji")
    return rows
