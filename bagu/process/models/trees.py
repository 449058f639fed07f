"""Gradient-boosted trees: LightGBM trains in a child process, and its text format is evaluated here with numpy.

A child process can be killed when its time is over, and torch and LightGBM never share a process: two OpenMP runtimes
in one crash on some systems (pytorch issue 191933). Monotone signs hold for squared loss, and not for quantile loss, so
the band comes from residuals and not from quantile trees.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Self

import numpy as np

WORKER = Path(__file__).with_name("tree_worker.py")


@dataclass(frozen=True)
class Trees:
    """All trees padded to the same number of nodes: node i goes to `left` or `right` by x[feature] <= threshold; a
    negative child -k is leaf k - 1."""

    text: str
    feature: np.ndarray
    threshold: np.ndarray
    left: np.ndarray
    right: np.ndarray
    leaf: np.ndarray

    def predict(self, x: np.ndarray) -> np.ndarray:
        rows, trees = len(x), np.arange(len(self.leaf))
        at = np.zeros((rows, len(trees)), int)
        active = at >= 0
        while active.any():
            node = np.maximum(at, 0)
            go_left = x[np.arange(rows)[:, None], self.feature[trees, node]] <= self.threshold[trees, node]
            at = np.where(active, np.where(go_left, self.left[trees, node], self.right[trees, node]), at)
            active = at >= 0
        return self.leaf[trees, -at - 1].sum(1)

    def arrays(self) -> dict[str, np.ndarray]:
        return {"text": np.frombuffer(self.text.encode(), np.uint8)}

    @classmethod
    def from_arrays(cls, a: dict[str, np.ndarray]) -> Self:
        return cls.parse(a["text"].tobytes().decode())

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read LightGBM's text format."""
        found = []
        for block in text.split("\nTree=")[1:]:
            lines = dict(re.findall(r"^(\w+)=(.*)$", block, re.M))
            leaf = np.array(lines["leaf_value"].split(), float)
            if int(lines["num_leaves"]) == 1:  # a tree without a split: both ways lead to its leaf
                found.append((np.zeros(1, int), np.zeros(1), np.array([-1]), np.array([-1]), leaf))
                continue
            feature, left, right = (
                np.array(lines[k].split(), int) for k in ("split_feature", "left_child", "right_child")
            )
            found.append((feature, np.array(lines["threshold"].split(), float), left, right, leaf))
        nodes, leaves = max(len(t[0]) for t in found), max(len(t[4]) for t in found)
        padded = [np.stack([np.pad(t[i], (0, nodes - len(t[i]))) for t in found]) for i in range(4)]
        feature, threshold, left, right = padded
        return cls(
            text, feature, threshold, left, right, np.stack([np.pad(t[4], (0, leaves - len(t[4]))) for t in found])
        )


def offered() -> bool:
    return find_spec("lightgbm") is not None


def fit_trees(
    x: np.ndarray, y: np.ndarray, signs: np.ndarray, train_sets: list[np.ndarray], *, seconds: float
) -> list[Trees] | None:
    """A model per set of training rows, made in one child process; None if it does not end in `seconds`."""
    with tempfile.TemporaryDirectory() as folder:
        job, made = Path(folder, "job.npz"), Path(folder, "made")
        made.mkdir()
        rows = {f"rows_{i}": rows for i, rows in enumerate(train_sets)}
        np.savez(job, x=x, y=y, signs=signs, **rows)  # type: ignore[arg-type]
        command = [sys.executable, "-I", str(WORKER), str(job), str(made)]
        try:
            run = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
        except subprocess.TimeoutExpired:
            return None
        if run.returncode:
            raise RuntimeError(f"LightGBM's process ended with status {run.returncode}: {run.stderr.strip()[-300:]}")
        return [Trees.parse((made / f"{i}.txt").read_text(encoding="utf-8")) for i in range(len(train_sets))]
