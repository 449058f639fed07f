"""The table of the rows that long_context.py writes: loss and recall of each arm, and those over dense attention."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bagu.eval.intervals import estimate


def rows_of(file: Path) -> Iterator[dict[str, Any]]:
    return (json.loads(line) for line in file.read_text().splitlines())


def show(file: Path) -> None:
    rows = list(rows_of(file))
    curves: dict[str, list[str]] = {}
    for row in rows:
        key = f"{row.get('arm')}:{row.get('seed')}"
        if row["kind"] == "step" and "recall" in row:
            curves.setdefault(key, []).append(f"{row['step']}: {row['recall']:.2f} ({row['loss_nats']:.2f})")
        elif row["kind"] == "trained":
            print(f"{key}: {row['tokens'] / 1e6:.1f}M tokens, {row['parameters'] / 1e6:.1f}M parameters, "
                  f"{row['steps']} of {row['of_steps']} steps, {row['seconds']} s")  # fmt: skip
    print("\nrecall (training loss) by step")
    for key, points in curves.items():
        print(f"  {key}  {', '.join(points)}")
    losses = {(r["arm"], r["seed"], r["read"]): r for r in rows if r["kind"] == "loss"}
    found = {(r["arm"], r["seed"], r["read"], r["length"]): r for r in rows if r["kind"] == "recall"}
    lengths = sorted({key[3] for key in found}, reverse=True)
    heads = [f"recall at {n:,}" for n in lengths]
    print(f"\n| trained | read | seed | bits per byte | {' | '.join(heads)} |\n|---|---|--:|--:|{'--:|' * len(heads)}")
    for (arm, seed, read), loss in losses.items():
        cells = [_share(found.get((arm, seed, read, n))) for n in lengths]
        print(f"| {arm} | {read} | {seed} | {loss['val_bits_per_byte']:.4f} | {' | '.join(cells)} |")
    for arm, read in (("sparse", "sparse"), ("dense", "sparse"), ("switch", "sparse")):
        _against_dense(arm, read, losses, found, lengths)
    _by_distance(found, lengths[0] if lengths else 0)


def _share(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    e = estimate(row["right"])
    return f"{e.mean:.3f} [{e.low:.3f}, {e.high:.3f}]"


def _against_dense(arm: str, read: str, losses: Any, found: Any, lengths: Sequence[int]) -> None:
    """Loss and recall over those of dense:dense of the same seeds; the interval of the ratio is over items, which all
    arms share, and seeds, drawn again together."""
    seeds = sorted({s for a, s, r in losses if (a, r) == (arm, read) and ("dense", s, "dense") in losses})
    if not seeds:
        return
    each = [losses[arm, s, read]["val_loss_nats"] / losses["dense", s, "dense"]["val_loss_nats"] - 1 for s in seeds]
    said = [f"loss {', '.join(f'{100 * x:+.2f} %' for x in each)}"]
    rng = np.random.default_rng(0)
    for length in lengths:
        a, b = (
            np.array([found[x, s, r, length]["right"] for s in seeds if (x, s, r, length) in found])
            for x, r in ((arm, read), ("dense", "dense"))
        )
        if a.shape != b.shape or b.sum() == 0:
            said.append(f"recall at {length:,}: nothing to compare")
            continue
        drawn = []
        for _ in range(2000):
            i, s = rng.integers(a.shape[1], size=a.shape[1]), rng.integers(len(a), size=len(a))
            drawn.append(a[s][:, i].sum() / max(1, b[s][:, i].sum()))
        low, high = np.quantile(drawn, (0.025, 0.975))
        said.append(f"recall at {length:,} × {a.sum() / b.sum():.3f} [{low:.3f}, {high:.3f}]")
    print(f"\ntrained {arm}, read {read}, over trained and read dense, seeds {seeds}: {'; '.join(said)}")


def _by_distance(found: Any, length: int, parts: int = 4) -> None:
    """Recall at the longest texts, by the distance of the line from the question."""
    print(f"\nrecall at {length:,} tokens by distance, in quarters of the text from near to far")
    for arm, read in (("dense", "dense"), ("sparse", "sparse"), ("dense", "sparse"), ("switch", "sparse")):
        own = [row for (a, _, r, n), row in found.items() if (a, r, n) == (arm, read, length)]
        if not own:
            continue
        distance, right = (np.concatenate([np.array(row[x]) for row in own]) for x in ("distance_characters", "right"))
        quarter = np.minimum(parts * distance // (distance.max() + 1), parts - 1)
        each = [right[quarter == i] for i in range(parts) if (quarter == i).any()]
        print(f"  trained {arm}, read {read}: {', '.join(f'{x.mean():.3f} of {len(x)}' for x in each)}")
