"""The vectors of images in an engine: computed once per image, kept by digest within a bound of bytes, and put in place
of the embeddings of their placeholder tokens."""

from collections import OrderedDict
from collections.abc import Sequence

import torch

from bagu.errors import ArgumentError
from bagu.nn.model import Placed
from bagu.nn.vision.vlm import VLM, VisionPart
from bagu.serve.images.prompt import EncoderBudget, ImageSpec, Piece, PromptImage
from bagu.serve.request import Request

KEPT_BYTES = 256 * 2**20  # of vectors
STEP_TOKENS = 1024  # of images that a step encodes


class ImageEncoder:
    def __init__(self, model: VLM, *, kept_bytes: int = KEPT_BYTES, step_tokens: int = STEP_TOKENS) -> None:
        config = model.config
        # not the decoder: the engine may serve another form of it
        self.model = VisionPart(config, model.vit, model.up, model.down).eval()
        self.spec = ImageSpec(config.image_token, config.image_tokens, config.vit.image_size)
        self.kept_bytes = kept_bytes
        self.encoded = self.reused = 0  # images in steps whose vectors were computed, and were kept
        self._kept: OrderedDict[bytes, torch.Tensor] = OrderedDict()  # least recently used first
        self._bytes = 0
        self.budget = EncoderBudget(step_tokens, self._kept.__contains__)

    def check(self, request: Request) -> None:
        """Raise unless the images of a request are of this model's size, at placeholders."""
        spec, end = self.spec, 0
        for image in request.images:
            place = request.prompt[image.start : image.end]
            valid = (image.tokens, image.side, len(image.pixels)) == (spec.tokens, spec.side, 3 * spec.side**2)
            if not valid or image.start < end or place != (spec.token,) * spec.tokens:
                raise ArgumentError(
                    f"request {request.id!r}: the image at {image.start} has {image.tokens} tokens, {image.side} "
                    f"pixels a side and {len(image.pixels)} bytes",
                    hint=f"{spec.tokens} tokens {spec.token} in order, {spec.side} × {spec.side} pixels, 3 bytes each",
                )
            end = image.end

    def place(self, pieces: Sequence[Piece]) -> Placed:
        """The vectors of a step, at the rows of their tokens."""
        images = {piece.image.digest: piece.image for piece in pieces}
        found = {digest: kept for digest in images if (kept := self._kept.get(digest)) is not None}
        self.reused += len(found)
        missing = {digest: image for digest, image in images.items() if digest not in found}
        if missing:
            found |= zip(missing, self._encode(list(missing.values())), strict=True)
        for digest in images:
            self._keep(digest, found[digest])
        vectors = torch.cat([found[p.image.digest][p.first : p.last] for p in pieces])
        rows = torch.cat([torch.arange(p.row, p.row + p.last - p.first) for p in pieces])
        return Placed(rows.to(vectors.device), vectors)

    def clear(self) -> None:
        """Forget all vectors, after the weights changed."""
        self._kept.clear()
        self._bytes = 0

    def _encode(self, images: Sequence[PromptImage]) -> list[torch.Tensor]:
        """The vectors of each image, in a forward of its own: they do not depend on what else is in the step, so an
        image that is kept and one that is encoded again give the same bits."""
        self.encoded += len(images)
        device, found = self.model.up.weight.device, []
        for image in images:
            pixels = torch.frombuffer(bytearray(image.pixels), dtype=torch.uint8).view(1, image.side, image.side, 3)
            found += self.model.encode(pixels.permute(0, 3, 1, 2).contiguous().to(device))
        return found

    def _keep(self, digest: bytes, vectors: torch.Tensor) -> None:
        if digest in self._kept:
            self._kept.move_to_end(digest)
            return
        self._kept[digest] = vectors
        self._bytes += vectors.nbytes
        while self._bytes > self.kept_bytes:
            _, dropped = self._kept.popitem(last=False)
            self._bytes -= dropped.nbytes
