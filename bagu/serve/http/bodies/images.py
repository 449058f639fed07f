"""Images in the messages of a request: parts with data URLs, and their pixels.

What an image costs is decided before it is decoded: the number of images by the context, their bytes by the body and
by a limit of each, their pixels by all headers together.
"""

import base64
import binascii
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import PrivateAttr

from bagu.errors import BaguError
from bagu.machine.image_file import open_image, read_image
from bagu.serve.http.bodies.openai import Body
from bagu.serve.http.errors import ApiError
from bagu.serve.images.prompt import ImageSpec, PromptImage, place_images
from bagu.serve.wire.messages import Ready

if TYPE_CHECKING:
    from PIL import Image

MAX_PIXELS = 16 * 10**6  # of all images of a request
DATA_URL = re.compile(r"data:([a-z]+/[a-z0-9.+-]+)?((?:;[a-z0-9=_.-]+)*?)(;base64)?,", re.IGNORECASE)
_DECODERS = threading.BoundedSemaphore(2)  # a decoder holds up to 50 MB; bodies are read in up to 32 threads


class ImageUrl(Body):
    """`url` is a data URL, or http(s) from a host that the server allows; `file_id` is an uploaded file."""

    url: str | None = None
    file_id: str | None = None
    detail: Literal["auto", "low", "high"] | None = None  # a model has one size of images


class ImagePart(Body):
    type: Literal["image_url"]
    image_url: ImageUrl
    _data: bytes | None = PrivateAttr(None)  # of a file or of a URL that was fetched

    def give(self, data: bytes) -> None:
        """The bytes of `file_id`, or of a URL that is no data URL."""
        self._data = data

    def data(self, place: str) -> bytes:
        """The bytes of the image's file. Raises 400 unless they were given, or are in the URL as base64."""
        url, file_id = self.image_url.url, self.image_url.file_id
        if self._data is not None:
            return self._data
        if url is None or file_id is not None:
            raise ApiError(
                400, f"{place} has {'two sources' if url else 'no image'}", param=place, hint="send url or file_id"
            )
        if not url.startswith("data:"):
            raise refused_url(url, place)
        head = DATA_URL.match(url[:200])
        if head is None or head[3] is None:
            raise ApiError(
                400, f"{place}.url is not a data URL with base64", param=place, hint="data:image/png;base64,…"
            )
        if head[1] is not None and not head[1].lower().startswith("image/"):
            raise ApiError(
                400, f"{place}.url has the type {head[1]:.80}", param=place, hint="image/png, jpeg, webp or gif"
            )
        try:
            return base64.b64decode(url[head.end() :].encode("ascii"), validate=True)
        except (UnicodeEncodeError, binascii.Error) as error:
            raise ApiError(400, f"{place}.url is not base64", param=place, hint="padded, without spaces") from error


def refused_url(url: str, place: str) -> ApiError:
    scheme = url.partition(":")[0][:20]
    hint = "send the image as a data URL (data:image/png;base64,…), or upload it to /v1/files and send its file_id"
    if scheme.lower() in ("http", "https"):
        hint += "; --allow-image-host NAME lets the server fetch from a host"
        return ApiError(400, f"{place}.url is at a host that this server does not fetch from", param=place, hint=hint)
    return ApiError(400, f"{place}.url has the scheme {scheme!r}", param=place, hint=hint)


def check_images(parts: Sequence[tuple[str, ImagePart]], ready: Ready) -> ImageSpec:
    """How the model takes images. Raises 400 if it takes none, or so many do not fit."""
    place = parts[-1][0]
    if ready.images is None:
        hint = "leave the image out, or ask a vision-language model"
        raise ApiError(400, f"{place} is an image, and this model takes text only", param=place, hint=hint)
    if (count := len(parts) * ready.images.tokens) >= ready.max_model_len:
        raise ApiError(
            400,
            f"{len(parts)} images are {count} tokens",
            param=place,
            code="context_length_exceeded",
            hint=f"this model's longest sequence is {ready.max_model_len} tokens",
        )
    return ready.images


def with_images(
    prompt: list[int], parts: Sequence[tuple[str, ImagePart]], ready: Ready
) -> tuple[list[int], tuple[PromptImage, ...]]:
    """The prompt with the placeholders of all images, and the images; `parts` have their places in the body. Call it in
    a thread: decoding 4 megapixels takes 0.1 s."""
    spec = check_images(parts, ready)
    files = [(place, part.data(place)) for place, part in parts]
    with _DECODERS:
        total = 0
        for place, data in files:
            width, height = _read(place, open_image, data).size
            total += width * height
            if total > MAX_PIXELS:
                hint = f"at most {MAX_PIXELS:,} in a request"
                raise ApiError(400, f"the images up to {place} have {total:,} pixels", param=place, hint=hint)
        pixels = [_read(place, lambda data: read_image(data, spec.side), data).tobytes() for place, data in files]
    try:
        tokens, placed = place_images(prompt, pixels, spec)
    except BaguError as error:
        raise ApiError(400, str(error), param="messages", hint=error.hint) from error
    return tokens, tuple(placed)


def _read(place: str, read: "Callable[[bytes], Image.Image]", data: bytes) -> "Image.Image":
    try:
        return read(data)
    except BaguError as error:
        raise ApiError(400, f"{place}: {error}", param=place, hint=error.hint) from error
