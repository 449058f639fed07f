"""Compression for a parameter server: what zlib makes of weights, gradients and keys.

A worker of a parameter server sends (key, value) pairs. Values are fp32 numbers with a nearly random mantissa; keys of
a dense layer are consecutive, and sorted sparse keys have small gaps.
"""

import zlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from bagu import ops
from bagu.lab.core import Claim, Row, Setting, Verdict, column, listed, names_in, number, share_met
from bagu.lab.parts.library_models import CONTEXT, new_model, read_library, train
from bagu.lab.plot import Bars, Panel

STEPS, SPARSE = 100, 0.1  # training steps of the model, and the share of keys that a sparse push has
WELL = 0.5  # of the bytes: compresses well


def payloads(*, quick: bool, device: str) -> dict[str, tuple[str, np.ndarray]]:
    """What is sent, by name: its sort and its numbers."""
    library, model = read_library(quick=True), new_model(width=64, seed=0, device=device)
    train(model, library.train_tokens, steps=3 if quick else STEPS, seed=0)
    ids = torch.from_numpy(library.train_tokens.tokens(0, 0, CONTEXT + 1).astype("int64")).to(device)
    ends, positions = torch.tensor([0, len(ids) - 1], dtype=torch.int32), torch.arange(len(ids) - 1)
    hidden = model(ids[:-1], positions.to(device), ends.to(device), len(ids) - 1).hidden
    ops.token_losses(*ops.linear_cross_entropy(hidden, model.head_weight, ids[1:])).loss.mean().backward()
    blocks = [p for p in model.blocks.parameters() if p.grad is not None]
    weights, gradients = (
        torch.cat([t.detach().flatten() for t in some]).cpu().numpy()
        for some in (blocks, [p.grad for p in blocks if p.grad is not None])
    )
    keys = np.arange(len(weights), dtype=np.uint64)
    chosen = np.sort(np.random.default_rng(0).choice(keys, int(SPARSE * len(keys)), replace=False))
    planes = weights.view(np.uint8).reshape(-1, 4).T.copy()  # bytes of equal significance side by side
    return {
        "weights": ("values", weights),
        "weights, byte planes": ("values", planes),
        "gradients": ("values", gradients),
        "dense keys": ("keys", keys),
        "sparse keys": ("keys", chosen),
        "sparse keys, gaps": ("keys", np.diff(chosen, prepend=chosen[:1])),
    }


def run(setting: Setting) -> Iterator[Row]:
    for name, (sort, data) in setting.track(list(payloads(quick=setting.quick, device=setting.device).items())):
        packed = len(zlib.compress(data.tobytes(), 6))
        yield {"sent": name, "sort": sort, "bytes": data.nbytes, "packed_bytes": packed, "left": packed / data.nbytes}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if all values compress well and no keys do."""
    met = [(number(r, "left") <= WELL) == (r["sort"] == "values") for r in rows]
    return Verdict.say(
        share_met(met),
        "Left of the bytes after zlib: {each}. Values compress badly, because a mantissa is nearly random; keys well.",
        "zlib 之后剩余的字节比例：{each}。数值难压缩，因为尾数近乎随机；键则容易。",
        each=listed(f"{r['sent']} {number(r, 'left'):.3g}" for r in rows),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    bars = Bars([100 * v for v in column(rows, "left")], colour="each", text="{:.1f}")
    return [Panel([bars], "After zlib", y="% of the bytes", xnames=names_in(rows, "sent"))]


LAB = Claim(
    title_en="Compression for a parameter server",
    title_zh="参数服务器的压缩",
    claim_en="In a parameter server the weights compress well and the keys hardly do.",
    claim_zh="参数服务器里，权重容易压缩，键则几乎压缩不了。",
    regime=f"The blocks of a decoder of width 64 after {STEPS} steps on the standard library (quick: 3), in fp32; keys "
    f"of 64 bits, dense or {SPARSE:.0%} of them, sorted.",
    varies="What is sent: weights, weights as byte planes, gradients of one sequence, dense and sparse keys, gaps.",
    measures=f"Bytes after zlib (level 6) over the bytes before. Well: at most {WELL:g}.",
)
