"""Pictures with names, without a download: glyphs of fonts, scenes made of them, and pictures that users bring."""

from bagu.data.pictures.glyphs import SANS, UNSEEN, Concept, concepts
from bagu.data.pictures.read import Pair, decode, digest, encode_png, pairs_of
from bagu.data.pictures.scenes import Scene, draw_scenes, paint_scenes

__all__ = [
    "SANS", "UNSEEN", "Concept", "Pair", "Scene", "concepts", "decode", "digest", "draw_scenes", "encode_png",
    "paint_scenes", "pairs_of",
]  # fmt: skip
