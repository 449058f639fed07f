"""Pictures of others: files to pixels, and folders or JSON lines of pictures with texts."""

from __future__ import annotations

import hashlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from bagu.data.pictures.glyphs import imports
from bagu.errors import BaguError
from bagu.machine.image_file import read_image

ENDINGS = (".png", ".jpg", ".jpeg", ".webp", ".gif")


@dataclass(frozen=True, slots=True)
class Pair:
    """A picture and its text."""

    path: Path
    text: str


def decode(data: bytes, size: int | None = None) -> torch.Tensor:
    """[3, H, W] uint8 of an image file (machine/image_file.py); with `size`, resized to fit a square of that side and
    centred on white. Raises ArgumentError if it cannot be read."""
    return torch.from_numpy(np.array(read_image(data, size))).permute(2, 0, 1).contiguous()


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
