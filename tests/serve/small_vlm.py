"""A small vision-language model with random weights, its tokenizer, and images for it."""

from __future__ import annotations

import base64
import io
from typing import Any

import numpy as np
import torch
from PIL import Image

from bagu.data.chat import ChatEncoder
from bagu.data.tokenizer import BpeTokenizer
from bagu.nn.config import ModelConfig
from bagu.nn.vision.towers import init_vision
from bagu.nn.vision.vit import ViTConfig
from bagu.nn.vision.vlm import VLM, VLMConfig
from bagu.recipes.vision.batches import IMAGE, SPECIAL
from bagu.recipes.vision.run import CHAT

SIDE, TOKENS = 16, 4
VOCABULARY = 300


def small_vlm(seed: int = 0, max_len: int = 512, **decoder: Any) -> VLM:
    vit = ViTConfig(
        image_size=SIDE, patch_size=4, hidden_size=32, num_layers=1, num_heads=2, intermediate_size=64, standardize=True
    )
    config = ModelConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=max_len, **decoder,
    )  # fmt: skip
    model = VLM(VLMConfig(vit=vit, decoder=config, image_token=SPECIAL.index(IMAGE), shuffle=2))
    init_vision(model, seed)
    with torch.no_grad():  # vectors as long as embeddings, so that the answer depends on the image
        for table in (model.down.weight, model.up.weight, model.decoder.embedding.weight):
            table.mul_(8)
    return model.eval()


def small_tokenizer() -> BpeTokenizer:
    corpus = ["what is left of the umbrella? describe the picture. ", "你好，世界 🙂 "] * 4
    return BpeTokenizer.train(corpus, vocab_size=VOCABULARY, special_tokens=SPECIAL, chat_template=CHAT)


def loaded() -> tuple[Any, Any, Any]:
    tokenizer = small_tokenizer()
    return small_vlm(), tokenizer, ChatEncoder(tokenizer)


def picture(seed: int = 0, size: tuple[int, int] = (SIDE, SIDE)) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def file_of(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def data_url(data: bytes, kind: str = "image/png") -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"
