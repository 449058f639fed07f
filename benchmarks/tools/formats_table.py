"""The table of docs/formats.md: size, speed and quality of each format of the weights, from recorded results.

Speed is that of `bagu bench engine --shape smollm_135m --streams 1 --peer llama.cpp`, quality that of the lab
quantization_quality, whose result.json is kept as benchmarks/results/formats/MACHINE.json.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.presets import preset
from benchmarks.tools.markdown import markdown_table

Row = Mapping[str, Any]
SHAPE = "smollm_135m"
# bits of a weight with its scales: in linear layers, and in the head. A scale of a row of 576 or more is not counted.
BITS = {
    "fp32": (32.0, 32.0), "bf16": (16.0, 16.0), "fp8": (8.0, 16.0), "int8": (8.0, 8.0), "Q8_0": (8.5, 8.5),
    "int4": (4.25, 8.0), "Q4_0": (4.5, 8.5),
}  # fmt: skip
SIZE = ("format", "bits a weight", f"`{SHAPE}`: bytes a token reads")
QUALITY = ("bits per byte, more than fp32", "continue4")
SPEED = ("machine", "weights", "decode", "prompt", "llama.cpp", "decode", "prompt", "decode ratio", "prompt ratio")
NO_SPEED = "No speeds are recorded yet."


def render(rows: Sequence[Row], quality: Sequence[Row]) -> str:
    """Two tables; `quality` are the rows of the lab. Without rows the first table has only sizes."""
    return "\n\n".join((_formats(quality), _speeds(rows)))


def _formats(quality: Sequence[Row]) -> str:
    linear, head = _weights()
    by_name = {row["format"]: row for row in quality}
    exact, lines = by_name.get("fp32"), []
    for name, (bits, head_bits) in BITS.items():
        row = by_name.get(name)
        cost = (
            "–" if row is None or exact is None else f"{row['loss_bits_per_byte'] - exact['loss_bits_per_byte']:+.4f}"
        )
        score = "–" if row is None else f"{row['continue4_percent']:.1f} %"
        size = (linear * bits + head * head_bits) / 8e6
        lines.append((name, f"{bits:g}", f"{size:,.0f} MB", *([cost, score] if quality else [])))
    return markdown_table((*SIZE, *(QUALITY if quality else ())), lines, names=1)


def _weights() -> tuple[int, int]:
    """The weights of the linear layers of the shape, and of its head."""
    model = Transformer(preset(SHAPE), device="meta")
    linear = sum(m.weight.numel() for m in model.blocks.modules() if isinstance(m, Linear))
    return linear, model.head_weight.numel()


def _speeds(rows: Sequence[Row]) -> str:
    """One line per machine and quantization: the latest run, with llama.cpp if it ran."""
    timed = [r for r in rows if r["system"] == "engine" and r["model"] == SHAPE and r["streams"] == 1]
    timed = [r for r in timed if r.get("prompt_tokens_per_s") is not None]
    latest: dict[tuple[str, str], dict[str, Row]] = {}
    for row in sorted(timed, key=lambda r: str(r["env"]["time"])):
        run = latest.setdefault((row["env"]["machine"], row["engine"]["quantization"] or row["dtype"]), {})
        if run and next(iter(run.values()))["env"]["time"] != row["env"]["time"]:
            run.clear()
        run[row["implementation"]] = row
    lines = []
    for (machine, kind), run in sorted(latest.items()):
        ours, theirs = run.get("bagu"), run.get("llama.cpp")
        if ours is None:
            continue
        pairs = [(ours[k], None if theirs is None else theirs[k]) for k in ("tokens_per_s", "prompt_tokens_per_s")]
        lines.append((
            machine, kind, *(f"{own:,.0f}" for own, _ in pairs), "–" if theirs is None else theirs["gguf_type"].upper(),
            *("–" if peer is None else f"{peer:,.0f}" for _, peer in pairs),
            *("–" if peer is None else f"{own / peer:.2f}×" for own, peer in pairs),
        ))  # fmt: skip
    if not lines:
        return NO_SPEED
    caption = f"Tokens per second of one stream, `{SHAPE}`, bagu and llama.cpp in the same run:"
    return f"{caption}\n\n{markdown_table(SPEED, lines, names=2)}"
