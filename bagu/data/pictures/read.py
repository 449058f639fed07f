"""Pictures of others: bytes to pixels with limits, and folders or JSON lines of pictures with texts.

Everything is turned into RGB once, here: EXIF rotation, palettes, CMYK, 16 bits, transparency (on white). Resizing is
Pillow's bicubic filter, antialiased: other libraries differ from it by several grey levels.
"""

from __future__ import annotations

import hashlib
import io
import json
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bagu.data.pictures.glyphs import imports
from bagu.errors import ArgumentError, BaguError

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")
MAX_BYTES = 10 * 2**20
MAX_PIXELS = 4 * 10**6
MAX_SIDE = 8192


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and its text."""

    path: Path
    text: str


def decode(data: bytes, size: int | None = None) -> torch.Tensor:
    """[3, H, W] uint8 of a PNG, JPEG, WebP or GIF (its first frame); with `size`, the picture is resized to fit a
    square of that side and centred on white. Raises ArgumentError for anything else. The header is checked before
    pixels are decoded."""
    imports()
    from PIL import Image, ImageOps

    if len(data) > MAX_BYTES:
        raise ArgumentError(f"an image has {len(data):,} bytes", hint=f"at most {MAX_BYTES:,}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # Pillow warns of a decompression bomb before it raises
            image: Image.Image = Image.open(io.BytesIO(data), formats=FORMATS)
            width, height = image.size
            if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_SIDE:
                raise ArgumentError(
                    f"an image has {width} × {height} pixels", hint=f"at most {MAX_PIXELS:,}, a side at most {MAX_SIDE}"
                )
            image.load()
            image = ImageOps.exif_transpose(image)
    except ArgumentError:
        raise
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error and others
        reason = type(error).__name__ if isinstance(error, Image.UnidentifiedImageError) else error
        raise ArgumentError(
            f"an image cannot be read: {reason}", hint=f"send one of {', '.join(FORMATS)}, whole and valid"
        ) from error
    if image.mode.startswith(("I", "F")):  # 16 bits: Pillow would cut them to 8 instead of scaling
        wide = np.asarray(image, dtype=np.float64)
        image = Image.fromarray((np.nan_to_num(wide) / 257.0).clip(0, 255).astype(np.uint8), "L")
    rgba = image.convert("RGBA")
    if size is not None:
        rgba = ImageOps.contain(rgba, (size, size), Image.Resampling.BICUBIC)
    ground = Image.new("RGBA", rgba.size if size is None else (size, size), "white")
    at = (0, 0) if size is None else ((size - rgba.width) // 2, (size - rgba.height) // 2)
    ground.alpha_composite(rgba, at)
    return torch.from_numpy(np.array(ground.convert("RGB"))).permute(2, 0, 1).contiguous()


def digest(pixels: torch.Tensor) -> str:
    """SHA-256 of the pixels and their shape: equal pictures have equal digests, however they were encoded."""
    head = str(tuple(pixels.shape)).encode()
    return hashlib.sha256(head + pixels.contiguous().numpy().tobytes()).hexdigest()


def encode_png(pixels: torch.Tensor) -> bytes:
    """A PNG of [3, H, W] uint8."""
    imports()
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(out, "PNG")
    return out.getvalue()


def pairs_of(source: Path) -> list[Pair]:
    """The pairs of JSON lines with `image` (a path beside the file) and `text`, or of a folder of images, whose texts
    are in a .txt file of the same name or else the file's name."""
    if source.is_dir():
        files = sorted(p for p in source.rglob("*") if p.suffix.lower() in ENDINGS)
        found = [Pair(path, _text_of(path)) for path in files]
    elif source.is_file():
        found = [
            _row(source, number, line) for number, line in enumerate(source.open(encoding="utf-8"), 1) if line.strip()
        ]
    else:
        raise BaguError(f"{source} does not exist", hint="give a folder of images, or JSON lines of image and text")
    if not found:
        raise BaguError(f"{source} has no images", hint=f"files that end in {', '.join(ENDINGS)}, or JSON lines")
    return found


def _text_of(path: Path) -> str:
    beside = path.with_suffix(".txt")
    return beside.read_text("utf-8").strip() if beside.is_file() else path.stem.replace("_", " ").replace("-", " ")


def _row(source: Path, number: int, line: str) -> Pair:
    try:
        row = json.loads(line)
        image, text = row["image"], row["text"]
    except (ValueError, KeyError, TypeError) as error:
        raise BaguError(
            f"{source}:{number}: expected an object with image and text", hint='{"image": "cat.png", "text": "a cat"}'
        ) from error
    if not isinstance(image, str) or not isinstance(text, str):
        raise BaguError(f"{source}:{number}: image and text must be strings", hint='{"image": "a.png", "text": "a"}')
    return Pair(source.parent / image, text)
