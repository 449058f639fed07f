"""Compressed gradients with and without error feedback, by the encoder of the parameter server.

Four workers descend a quadratic. What the encoder leaves out of a worker's gradient is dropped, or kept and added to
the next one.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from bagu.lab.core import Claim, Row, Setting, Verdict, listed, number, say, share_met, where
from bagu.lab.plot import Bars, Panel
from bagu.parallel.server.compress import Compressor, Method, encoded_bytes

METHODS: tuple[Method, ...] = ("int8", "topk")
SIZE, WORKERS, HARM = 4096, 4, 1.01


def final_loss(method: Method, feedback: bool, steps: int, seed: int) -> float:
    """The loss after descent with gradients that differ between workers, over that without compression's scale."""
    rng = np.random.default_rng(seed)
    curvature = np.logspace(-2, 0, SIZE).astype(np.float32)
    shifts = rng.standard_normal((WORKERS, SIZE)).astype(np.float32)  # workers pull in different directions
    shifts -= shifts.mean(0)
    w, compressors = np.ones(SIZE, np.float32), [Compressor(method) for _ in range(WORKERS)]
    for _ in range(steps):
        total = np.zeros_like(w)
        for shift, compressor in zip(shifts, compressors, strict=True):
            gradient = curvature * (w + shift)
            sent = compressor.decoded(0, gradient)
            if not feedback:
                compressor.residual.clear()
            total += sent
        w -= 0.5 * total / WORKERS
    return float((curvature * w * w).sum() / curvature.sum())


def run(setting: Setting) -> Iterator[Row]:
    steps, seeds = (100, 1) if setting.quick else (600, 3)
    for seed in setting.track(range(seeds)):
        base = final_loss("none", True, steps, seed)
        for method in METHODS:
            share = encoded_bytes(method, SIZE, np.dtype(np.float32)) / (4 * SIZE)
            for feedback in (True, False):
                excess = final_loss(method, feedback, steps, seed) - base  # of a first loss of 1
                name = f"{method}, {'feedback' if feedback else 'dropped'}"
                yield {
                    "method": method,
                    "feedback": feedback,
                    "name": name,
                    "seed": seed,
                    "bytes_share": share,
                    "excess_loss": max(excess, 1e-9),
                }


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if each method ends within 1 % of the first loss with feedback, and not when what is left out is dropped."""
    met, said = [], []
    for method in METHODS:
        kept, dropped = (
            max(number(r, "excess_loss") for r in where(rows, method=method, feedback=f)) for f in (True, False)
        )
        met.append(kept <= HARM - 1 < dropped)
        said.append(
            say(
                "{m} at {b:.3f} of the bytes: {k:.2g} with feedback, {d:.2g} when it is dropped",
                "{m}（字节数 {b:.3f}）：有反馈 {k:.2g}，丢弃 {d:.2g}",
                m=method,
                b=number(where(rows, method=method)[0], "bytes_share"),
                k=kept,
                d=dropped,
            )
        )
    return Verdict.say(
        share_met(met),
        "Loss above that of whole gradients, of a first loss of 1: {said}.",
        "与完整梯度相比多出的损失（初始为 1）：{said}。",
        said=listed(said, "; ", "；"),
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    shown = where(rows, seed=0)
    bars = Bars([number(r, "excess_loss") for r in shown], colour="each", text="{:.2g}")
    names = [str(r["name"]) for r in shown]
    return [Panel([bars], "Loss above that of whole gradients", y="of the first loss", xnames=names)]


LAB = Claim(
    title_en="Error feedback",
    title_zh="误差反馈",
    claim_en="Compressed gradients train as well as whole ones if, and only if, what is left out is added to the next.",
    claim_zh="压缩的梯度与完整梯度训练得一样好，当且仅当把丢掉的部分加到下一次。",
    regime=f"A quadratic of {SIZE} dimensions, condition number 100, {WORKERS} workers whose gradients differ, fp32.",
    varies="int8 in groups of 256, the largest tenth as fp16; feedback or not.",
    measures="Loss after the last step above that of whole gradients, of a first loss of 1. As well: within 0.01.",
)
