"""Bytes of an image file to RGB pixels, for bytes that nobody has checked: sizes are read from the header before
anything is decoded, and what cannot be read is an ArgumentError of one sentence.

Everything becomes RGB once, here: EXIF rotation, palettes, CMYK, 16 bits, transparency (on white), the first frame of
an animation. Resizing is Pillow's bicubic filter, antialiased: other libraries differ from it by several grey levels.
This imports Pillow where it is needed, and no torch: an HTTP server's process reads images with it.
"""

from __future__ import annotations

import io
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError, BaguError

if TYPE_CHECKING:
    from PIL import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MAX_BYTES = 10 * 2**20
MAX_PIXELS = 4 * 10**6
MAX_SIDE = 8192
MAX_SCANS = (
    64  # of a progressive JPEG; an encoder writes about 10. Each scan passes over all pixels: 10 MB can hold 500,000
)


def open_image(data: bytes) -> Image.Image:
    """The image with its header read and its size checked; its pixels are not decoded."""
    try:
        from PIL import Image
    except ImportError as error:
        raise BaguError("images need pillow, which is missing", hint="pip install 'bagu[vision]'") from error
    if len(data) > MAX_BYTES:
        raise ArgumentError(f"an image has {len(data):,} bytes", hint=f"at most {MAX_BYTES:,}")
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except Exception as error:  # Pillow raises OSError, SyntaxError, ValueError, struct.error and others
        raise _unreadable(error) from error
    width, height = image.size
    if not 0 < width * height <= MAX_PIXELS or max(width, height) > MAX_SIDE:
        raise ArgumentError(
            f"an image has {width} × {height} pixels", hint=f"at most {MAX_PIXELS:,}, a side at most {MAX_SIDE}"
        )
    if image.format == "JPEG" and (scans := data.count(b"\xff\xda")) > MAX_SCANS:
        raise ArgumentError(f"a JPEG has {scans} scans", hint=f"at most {MAX_SCANS}")
    return image


def read_image(data: bytes, side: int | None = None) -> Image.Image:
    """The RGB image of a PNG, JPEG, WebP or GIF; with `side`, it is resized to fit a square of that side and centred on
    white. Raises ArgumentError for anything else."""
    image = open_image(data)
    from PIL import Image, ImageOps

    try:
        image.load()
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith(("I", "F")):  # 16 bits: Pillow would cut them to 8 instead of scaling
            import numpy as np

            wide = np.nan_to_num(np.asarray(image, dtype=np.float64)) / 257.0
            image = Image.fromarray(wide.clip(0, 255).astype(np.uint8), "L")
        rgba = image.convert("RGBA")
    except Exception as error:
        raise _unreadable(error) from error
    if side is not None:
        rgba = ImageOps.contain(rgba, (side, side), Image.Resampling.BICUBIC)
    ground = Image.new("RGBA", rgba.size if side is None else (side, side), "white")
    at = (0, 0) if side is None else ((side - rgba.width) // 2, (side - rgba.height) // 2)
    ground.alpha_composite(rgba, at)
    return ground.convert("RGB")


def _unreadable(error: Exception) -> ArgumentError:
    unknown = type(error).__name__ == "UnidentifiedImageError"  # its text is the address of the buffer
    reason = "its format is not known" if unknown else str(error).partition("\n")[0] or type(error).__name__
    return ArgumentError(
        f"an image cannot be read: {reason:.200}", hint=f"send one of {', '.join(FORMATS)}, whole and valid"
    )
