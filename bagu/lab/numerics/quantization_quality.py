"""Quantization quality: bits per byte of held-out text and the score of a task, for each format of the weights.

    cost = bits per byte with the format - bits per byte in fp32

Formats differ in bits and in how many weights share a scale: a row (int8, fp8), 128 inputs (int4), 32 inputs (Q8_0 and
Q4_0 of GGUF). int8 and int4 run as `--quantization` serves them, with activations in int8 where the CPU rounds them;
GGUF's are dequantized when they are loaded, so only their weights are rounded. The embedding, which is the head too, is
int8 with int8 and int4, Q8_0 with both GGUF types, and fp32 with fp8.
"""

import copy
import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from bagu.eval.score import evaluate
from bagu.eval.task import Item, Task
from bagu.eval.tasks.continue4 import continue4
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, column, names_in, number
from bagu.lab.parts.confidence import known
from bagu.lab.parts.library_models import (
    CONTEXT,
    KV_MEMORY,
    STEP_TOKENS,
    VOCAB,
    Library,
    new_model,
    read_library,
    sized,
    train,
)
from bagu.lab.plot import Line, Mark, Note, Panel
from bagu.nn import Transformer
from bagu.nn.gguf_write import save_gguf
from bagu.nn.weights import from_pretrained
from bagu.recipes.eval_models import EngineModel
from bagu.serve.config import EngineConfig, Quantization
from bagu.serve.engine import Engine

STEPS, WIDTH = 400, 256
DOCUMENTS, ITEMS, CHARACTERS = 60, 400, 6000
EIGHT_BITS, FREE = ("int8", "Q8_0", "fp8"), 0.01  # bits per byte that count as free


class Format(NamedTuple):
    """How the weights of linear layers are stored, and their bits with scales."""

    name: str
    bits: float
    quantization: Quantization | None = None
    convert: Callable[[Transformer], Transformer] | None = None


def in_bf16(model: Transformer) -> Transformer:
    return copy.deepcopy(model).to(torch.bfloat16).to(torch.float32)


def by_gguf(quantization: str) -> Callable[[Transformer], Transformer]:
    def convert(model: Transformer) -> Transformer:
        with tempfile.TemporaryDirectory() as folder:
            save_gguf(model, Path(folder) / "model.gguf", quantization=quantization)
            return from_pretrained(Path(folder) / "model.gguf", dtype=torch.float32)

    return convert


def formats() -> list[Format]:
    """Scales are fp32 a row of WIDTH or more inputs, fp32 a group of 128, or fp16 a block of 32."""
    found = [
        Format("fp32", 32.0),
        Format("bf16", 16.0, convert=in_bf16),
        Format("int8", 8 + 32 / WIDTH, "int8"),
        Format("fp8", 8 + 32 / WIDTH, "fp8"),
        Format("int4", 4 + 32 / 128, "int4"),
    ]
    if importlib.util.find_spec("gguf") is not None:
        found[3:3] = [Format("Q8_0", 8 + 16 / 32, convert=by_gguf("q8_0"))]
        found += [Format("Q4_0", 4 + 16 / 32, convert=by_gguf("q4_0"))]
    return found


def run(setting: Setting) -> list[Row]:
    quick = setting.quick
    library = read_library(quick=quick)
    model = new_model(width=WIDTH, seed=1, device="cpu")
    steps = 3 if quick else STEPS
    train(model, library.train_tokens, steps=steps, seed=1)
    tasks = (
        held_out(library, *((2, 800) if quick else (DOCUMENTS, CHARACTERS))),
        continue4(CONTEXT, lambda: library.held),
    )
    limits = (None, 8 if quick else ITEMS)
    rows: list[Row] = []
    for form in setting.track(formats()):
        asked = engine_model(model.eval() if form.convert is None else form.convert(model), library, form.quantization)
        loss, choice = (evaluate(asked, t, limit=n) for t, n in zip(tasks, limits, strict=True))
        accuracy = known(next(iter(choice.metrics.values())))
        rows.append(
            {
                "format": form.name,
                "weight_bits": form.bits,
                "loss_bits_per_byte": loss.metrics["bits_per_byte"].mean,
                "continue4_percent": 100 * accuracy.mean,
                "continue4_low_percent": 100 * accuracy.low,
                "continue4_high_percent": 100 * accuracy.high,
                "items": accuracy.items,
            }
        )
    return sized(rows, model, steps)


def held_out(library: Library, count: int, characters: int) -> Task:
    """The bits per byte of the beginnings of held-out modules."""
    items = [Item(id=d.id, prompt=d.text[:characters]) for d in library.held[:count]]
    return Task(name="library", kind="loss", items=lambda: items, limits="Python source alone.")


def engine_model(model: Transformer, library: Library, quantization: Quantization | None) -> EngineModel:
    config = EngineConfig(kv_memory=KV_MEMORY, quantization=quantization)
    return EngineModel(Engine(model, library.tokenizer, config), library.tokenizer, None, "lab")


def cost(row: Row, rows: Sequence[Row]) -> float:
    """Bits per byte more than in fp32."""
    exact = next(r for r in rows if r["format"] == "fp32")
    return number(row, "loss_bits_per_byte") - number(exact, "loss_bits_per_byte")


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if every format of 8 bits costs at most FREE bits per byte, and every one of 4 bits costs more."""
    eight = [cost(r, rows) for r in rows if r["format"] in EIGHT_BITS]
    four = [cost(r, rows) for r in rows if number(r, "weight_bits") < 8]
    free, dear = max(eight) <= FREE, min(four) > FREE
    kind: Kind = "held" if free and dear else "holds only where" if free else "did not hold"
    rounded = [r for r in rows if r["format"] != "fp32"]
    each = ", ".join(f"{r['format']} {cost(r, rows):+.4f}" for r in rounded)
    scores = ", ".join(f"{r['format']} {number(r, 'continue4_percent'):.1f} %" for r in rows)
    return Verdict(
        kind=kind,
        sentence_en=f"Bits per byte more than fp32: {each}. Right continuations: {scores}.",
        sentence_zh=f"比 fp32 多出的每字节比特数：{each}。选对续写的比例：{scores}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names, bits, loss = names_in(rows, "format"), column(rows, "weight_bits"), column(rows, "loss_bits_per_byte")
    left: list[Mark] = [Line([x], [y], "", "o", i) for i, (x, y) in enumerate(zip(bits, loss, strict=True))]
    left += [Note(x, y, name) for x, y, name in zip(bits, loss, names, strict=True)]
    ends = ("continue4_low_percent", "continue4_high_percent")
    right = [
        Line([i], [number(r, "continue4_percent")], "", "o", i, [(number(r, ends[0]), number(r, ends[1]))])
        for i, r in enumerate(rows)
    ]
    return [
        Panel(left, "Held-out text", "bits per weight", "bits per byte", "log2"),
        Panel(right, "Right continuation of four", y="%", xnames=names),
    ]


LAB = Claim(
    title_en="Quantization quality",
    title_zh="量化的质量代价",
    claim_en="Weights of 8 bits cost nothing that can be measured; weights of 4 bits cost something.",
    claim_zh="8 比特的权重几乎没有可测的代价，4 比特的权重有代价。",
    regime=f"A decoder of width {WIDTH} with 2 layers and a vocabulary of {VOCAB:,}, trained on "
    f"{STEPS * STEP_TOKENS:,} tokens of the standard library; {DOCUMENTS} held-out modules of at most {CHARACTERS:,} "
    f"characters; up to {ITEMS} items of continue4. On a CPU.",
    varies="The format of the weights of linear layers: fp32, bf16, int8, Q8_0, fp8, int4, Q4_0.",
    measures=f"Bits per byte of held-out text (at most {FREE:g} more counts as free), and the share of right choices.",
    evidence="model",
)
