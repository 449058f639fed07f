"""What an image costs an engine: its tokens in prefill and cache, and the encoder once.

Three prompts of equal length on one vision-language model with random weights: text alone, an image that the engine has
not seen, and one that it has. Each has new text around it, so that the prefix cache finds nothing but the image's
vectors.
"""

import time
from collections.abc import Iterator, Sequence

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Text, Verdict, number, share_met, where
from bagu.lab.plot import Line, Panel
from bagu.nn.config import ModelConfig
from bagu.nn.vision.towers import init_vision
from bagu.nn.vision.vit import ViTConfig
from bagu.nn.vision.vlm import VLM, VLMConfig
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.images.prompt import place_images
from bagu.serve.request import Request, Sampling

SIDES = (64, 128, 256)
PATCH, SHUFFLE, WIDTH, LAYERS = 8, 2, 128, 4
TEXT = 32  # tokens of text beside the image
IMAGE, VOCABULARY = 5, 1024
DEAR = 1.3  # time to the first token, relative to text of as many tokens
ROUNDS = 9
YES = {True: Text("yes", "是"), False: Text("no", "否")}


def model(side: int, device: str) -> VLM:
    vit = ViTConfig(
        image_size=side,
        patch_size=PATCH,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        intermediate_size=4 * WIDTH,
    )
    decoder = ModelConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        num_layers=LAYERS,
        num_heads=4,
        num_kv_heads=4,
        head_dim=32,
        intermediate_size=3 * WIDTH,
        max_len=2048,
        tie_embeddings=True,
    )
    made = VLM(VLMConfig(vit=vit, decoder=decoder, image_token=IMAGE, shuffle=SHUFFLE), device=device)
    init_vision(made, 0)
    return made


def first_token(engine: Engine, request: Request) -> tuple[float, int]:
    """Milliseconds to the first token, and the blocks that the prompt took."""
    before = engine.stats()
    began = time.perf_counter()
    engine.submit(request)
    while engine.has_work:
        engine.step()
    spent = time.perf_counter() - began
    after = engine.stats()
    taken = after.blocks_used + after.blocks_cached - before.blocks_used - before.blocks_cached
    return 1e3 * spent, taken


def measure(side: int, rounds: int, device: str) -> Iterator[Row]:
    engine = Engine(model(side, device), None, EngineConfig(num_blocks=4096, block_size=16, max_num_seqs=2))
    encoder = engine.images
    assert isinstance(encoder, ImageEncoder)
    spec, stream = encoder.spec, np.random.default_rng(side)
    seen = stream.bytes(3 * side * side)
    for number_ in range(-2, rounds):  # two rounds warm up
        for kind in ("text", "image", "seen"):
            words = [*stream.integers(6, VOCABULARY, TEXT).tolist()]
            pixels = [seen if kind == "seen" else stream.bytes(3 * side * side)]
            tokens, images = place_images([words[0], IMAGE, *words[1:]], pixels, spec)
            if kind == "text":
                tokens, images = stream.integers(6, VOCABULARY, len(tokens)).tolist(), []
            sampling = Sampling(max_tokens=1, temperature=0.0, ignore_eos=True)
            name = f"{kind}-{number_}"
            request = Request(id=name, prompt=tuple(tokens), images=tuple(images), sampling=sampling)
            encoded = encoder.encoded
            time_ms, blocks = first_token(engine, request)
            if number_ >= 0:
                yield {
                    "side_pixels": side,
                    "kind": kind,
                    "tokens": len(tokens),
                    "time_ms": time_ms,
                    "blocks": blocks,
                    "encoded_images": encoder.encoded - encoded,
                }


def run(setting: Setting) -> Iterator[Row]:
    for side in setting.track(SIDES[:1] if setting.quick else SIDES):
        yield from measure(side, 3 if setting.quick else ROUNDS, setting.device)


def middle(rows: Sequence[Row], **wanted: str | int) -> float:
    return float(np.median([number(row, "time_ms") for row in where(rows, **wanted)]))


def verdict(rows: Sequence[Row]) -> Verdict:
    """Three parts: as many blocks as text; a seen image is not encoded; a new one takes at most 1.3 times as long."""
    sides = sorted({int(number(row, "side_pixels")) for row in rows})
    blocks = {kind: [number(r, "blocks") for r in where(rows, kind=kind)] for kind in ("text", "image", "seen")}
    same = max(blocks["image"]) <= max(blocks["text"])
    once = all(number(row, "encoded_images") == 0 for row in where(rows, kind="seen"))
    new = {
        side: middle(rows, side_pixels=side, kind="image") / middle(rows, side_pixels=side, kind="text")
        for side in sides
    }
    old = {
        side: middle(rows, side_pixels=side, kind="seen") / middle(rows, side_pixels=side, kind="text")
        for side in sides
    }
    return Verdict.say(
        share_met([same, once, max(new.values()) <= DEAR]),
        "Time to the first token, relative to text of as many tokens: new images {new}, images seen before {old} "
        "(sides of {sides} pixels). Blocks are as many as for text: {same}; a seen image is encoded again: {again}.",
        "首 token 时间与等长文本之比：新图 {new}，见过的图 {old}（边长 {sides} 像素）。占用的块与文本一样多：{same}；"
        "见过的图再次编码：{again}。",
        new=", ".join(f"{v:.2f}" for v in new.values()),
        old=", ".join(f"{v:.2f}" for v in old.values()),
        sides=", ".join(map(str, sides)),
        same=YES[same],
        again=YES[not once],
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    lines = []
    for kind in ("text", "image", "seen"):
        means: list[Row] = [
            {"tokens": number(part[0], "tokens"), "time_ms": float(np.median([number(r, "time_ms") for r in part]))}
            for side in sorted({int(number(row, "side_pixels")) for row in rows})
            for part in [where(rows, side_pixels=side, kind=kind)]
        ]
        lines.append(Line.of(means, "tokens", "time_ms", kind))
    return [Panel(lines, "Time to the first token", "tokens of the prompt", "ms", "log2", "log2")]


LAB = Claim(
    title_en="What an image costs an engine",
    title_zh="一张图片对引擎的代价",
    claim_en="An image costs what as many tokens of text cost, in prefill and in the cache; its encoder runs once and "
    "is cheap beside them.",
    claim_zh="一张图片的代价等于同样多的文本 token：预填充如此，缓存也如此；编码器只跑一次，相比之下便宜。",
    regime="A decoder and a ViT of 4 layers and 128 features with random weights, patches of 8, four of them a token; "
    "32 tokens of text around the image.",
    varies="The side of the image; text instead of it, a new image, one that the engine has seen.",
    measures="Time to the first token, medians, alternating; blocks of the cache; images encoded. Met if the blocks "
    f"are those of text, a seen image is not encoded, and a new one takes at most {DEAR} times the time of text.",
    evidence="timing",
)
