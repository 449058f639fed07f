"""The table of training speeds in the documents, from the rows of `bagu bench train`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagu.bench.units import tera
from benchmarks.tools.markdown import commit_words, markdown_table

OWN = ("bagu", "flash-attention")  # the second is bagu with another attention: no peer
OTHER_NAMES = {"flash-attention": "bagu with FlashAttention-2"}

Row = Mapping[str, Any]
WORDS = {
    "en": {
        "head": ("machine", "model and step", "implementation", "tokens/s", "TFLOP/s", "peak memory", "vs. best peer"),
        "caption": "One full optimizer step on random tokens; medians, at commit {commit}. "
        "Reproduce with `bagu bench train`.",
        "nothing": "No training speed is recorded yet: `bagu bench train` writes it to `benchmarks/results/train`.",
        "micro": "{n} micro-batches",
    },
    "zh": {
        "head": ("机器", "模型与每步", "实现", "tokens/s", "TFLOP/s", "显存峰值", "与最快对照之比"),
        "caption": "随机 token 上的完整优化步，取中位数，提交 {commit}。用 `bagu bench train` 复现。",
        "nothing": "尚无训练速度的记录：`bagu bench train` 会写入 `benchmarks/results/train`。",
        "micro": "{n} 个微批",
    },
}


def render(rows: Sequence[Row], language: str) -> str:
    """One block of lines per machine and shape: each implementation from its latest run, and the ratio to the fastest
    peer of the same run."""
    words: dict[str, Any] = WORDS[language]
    if not rows:
        return str(words["nothing"])
    lines: list[list[str]] = []
    commits = []
    for machine, shape in sorted({(r["env"]["machine"], r["shape"]) for r in rows}, reverse=True):
        mine = [r for r in rows if (r["env"]["machine"], r["shape"]) == (machine, shape)]
        last: dict[tuple[str, int], str] = {}
        for row in mine:
            last[_key(row)] = max(last.get(_key(row), ""), row["env"]["time"])
        kept = [r for r in mine if r["env"]["time"] == last[_key(r)]]
        commits += [r["env"]["commit"] for r in kept]
        lines += _block(machine, kept, words)
    caption = words["caption"].format(commit=commit_words(commits))
    return f"{caption}\n\n{markdown_table(words['head'], lines, names=3)}"


def _key(row: Row) -> tuple[str, int]:
    return row["implementation"], row.get("micro_batches") or 1


def _block(machine: str, run: Sequence[Row], words: Mapping[str, Any]) -> list[list[str]]:
    """Bagu's fastest run and the one with the least memory, and each peer at its best."""
    best: dict[tuple[str, int], Row] = {}
    for row in run:  # of several rounds, the fastest of each
        key = _key(row)
        if key not in best or row["tokens_per_s"] > best[key]["tokens_per_s"]:
            best[key] = row
    lines: list[list[str]] = []
    for row in best.values():
        ours = row["implementation"].startswith("bagu")
        micro = row.get("micro_batches") or 1
        name = str(OTHER_NAMES.get(row["implementation"], row["implementation"])) + (
            f", {words['micro'].format(n=micro)}" if micro > 1 else ""
        )
        rate = f"{row['tokens_per_s']:,.0f}"
        peers = [
            r["tokens_per_s"] for r in best.values()
            if not r["implementation"].startswith(OWN) and r["env"]["time"] == row["env"]["time"]
        ]  # fmt: skip
        ratio = f"{row['tokens_per_s'] / max(peers):.2f}×" if peers and ours else "–"
        peak, tflops = row.get("peak_bytes"), row.get("tflop_per_s")
        lines.append([
            "" if lines else machine, "" if lines else _what(run), f"**{name}**" if ours else name,
            f"**{rate}**" if ours else rate, tera(tflops) if tflops else "–",
            f"{peak / 2**30:.1f} GiB" if peak else "–", ratio,
        ])  # fmt: skip
    return lines


def _what(run: Sequence[Row]) -> str:
    row = next(r for r in run if r.get("tokens"))
    model = row["model"]
    return f"`{row['shape']}`: {model['num_layers']} × {model['hidden_size']}, {row['tokens']:,} tokens"
