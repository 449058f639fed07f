"""Recomputation: the memory that it saves, and the time that it takes.

    none        every activation is kept for the backward
    selective   products and attention are kept, the rest of a block is computed again
    block       the input of each block is kept, and the block is computed again: a second forward of the blocks

By the textbook a backward costs twice a forward, so that a second forward makes a step 4/3 as long. Recomputed is less
than that (the head and the loss are not), and what memory sets the time of (norms, activations) is not in that count.
"""

import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bagu.data.random_batches import random_batches
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.parts.interleaved import best_times
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Line, Panel, Rule
from bagu.machine.fast_dtype import compute_dtype
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.train import OptimizerConfig, TrainConfig, TrainState, step
from bagu.train.prepare import prepared
from bagu.train.state import Recompute
from bagu.types import Batch

TEXTBOOK = 4 / 3
CLOSE = 0.1  # a time within 10 % of the textbook's agrees with it
WAYS: tuple[Recompute, ...] = get_args(Recompute)
SMALL = tiny(512, 64, heads=4, ffn=192, max_len=256)
MEDIUM = replace(
    SMALL, vocab_size=4096, hidden_size=256, num_heads=8, num_kv_heads=8, head_dim=32, intermediate_size=704
)
LARGE = replace(
    SMALL,
    vocab_size=32000,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    head_dim=128,
    intermediate_size=5632,
    max_len=2048,
)


class LiveMemory(TorchDispatchMode):
    """While open, counts the bytes of the storages that ops return, until each is freed. Temporaries inside an op are
    not seen, nor are tensors that exist before."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = self.peak = 0
        self._seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = [t.untyped_storage() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._add(tensor.untyped_storage(), known)
        return out

    def _add(self, storage: Any, known: list[Any]) -> None:
        if storage in self._seen or any(storage.data_ptr() == other.data_ptr() for other in known):
            return  # a view, or the result of an op in place
        size = storage.nbytes()
        self._seen[storage] = size
        self.bytes += size
        self.peak = max(self.peak, self.bytes)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.bytes -= size


def run(setting: Setting) -> Iterator[Row]:
    device, on_gpu = torch.device(setting.device), setting.device != "cpu"
    config = SMALL if setting.quick else LARGE if on_gpu else MEDIUM
    documents = 4 if on_gpu and not setting.quick else 2
    for layers in setting.track((2, 4) if setting.quick else (2, 4, 8)):
        yield from measured(replace(config, num_layers=layers), documents, device, setting.quick)


def measured(config: ModelConfig, documents: int, device: torch.device, quick: bool) -> list[Row]:
    (batch,) = random_batches(config.vocab_size, (config.max_len,) * documents, micro_batches=1, device=device)
    with ExitStack() as stack:
        states = {way: stack.enter_context(training(config, way, device)) for way in WAYS}
        memory = {way: peak_bytes(state, batch) for way, state in states.items()}
        calls: dict[str, Callable[[], object]] = {way: partial(step, state, [batch]) for way, state in states.items()}
        times = best_times(calls, device.type, seconds=0.05 if quick else 1.0, rounds=1 if quick else 3)
    return [
        {
            "recomputed": way,
            "device": device.type,
            "layers": config.num_layers,
            "tokens": batch.num_tokens,
            "step_peak_bytes": memory[way],
            "step_ms": 1e3 * times[way],
        }
        for way in WAYS
    ]


@contextmanager
def training(config: ModelConfig, way: Recompute, device: torch.device) -> Iterator[TrainState]:
    """A state whose model recomputes in this way. Without recomputation the trainer would run CUDA graphs on a GPU,
    whose memory stays allocated between steps: that model is left as it is."""
    model = init_weights(Transformer(config, device=device, dtype=compute_dtype(device)), seed=0)
    how = TrainConfig(steps=10**6, optimizer=OptimizerConfig(kind="adamw"), activation_checkpointing=way)
    state = TrainState(model, how)
    with nullcontext() if way == "none" else prepared(model, how, device):
        yield state
    state.close()


def peak_bytes(state: TrainState, batch: Batch) -> int:
    """The most memory that a step takes besides the states. On a GPU the allocator's, on a CPU that of tensors."""
    step(state, [batch])
    if state.device.type == "cuda":
        before = torch.cuda.memory_allocated(state.device)
        torch.cuda.reset_peak_memory_stats(state.device)
        step(state, [batch])
        return torch.cuda.max_memory_allocated(state.device) - before
    with LiveMemory() as live:
        step(state, [batch])
    return live.peak


def against_none(rows: Sequence[Row], way: str, key: str) -> dict[float, float]:
    """The value over that without recomputation, by layers."""
    value = {(r["recomputed"], number(r, "layers")): number(r, key) for r in rows}
    return {layers: value[way, layers] / value["none", layers] for of, layers in value if of == way}


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if a step that recomputes blocks takes 4/3 of the time at every depth, and less memory."""
    time, memory = (against_none(rows, "block", key) for key in ("step_ms", "step_peak_bytes"))
    good = [n for n in time if abs(time[n] / TEXTBOOK - 1) <= CLOSE and memory[n] < 1]
    kind: Kind = "held" if len(good) == len(time) else "holds only where" if good else "did not hold"
    deep = max(time)

    def at(way: str) -> tuple[str, str]:
        return (
            f"×{against_none(rows, way, 'step_peak_bytes')[deep]:.2f}",
            f"×{against_none(rows, way, 'step_ms')[deep]:.2f}",
        )

    (less, more), (little, slow) = at("block"), at("selective")
    low, high = min(time.values()), max(time.values())
    return Verdict(
        kind=kind,
        sentence_en=f"A step that recomputes blocks takes ×{low:.2f} to ×{high:.2f} of the time; within "
        f"{100 * CLOSE:g} % of 4/3 at {len(good)} of {len(time)} depths. With {deep:g} layers: blocks {less} of the "
        f"memory for {more} of the time, selective {little} for {slow}.",
        sentence_zh=f"重算整块使一步的用时变为 ×{low:.2f} 至 ×{high:.2f}；{len(time)} 种深度中 {len(good)} 种与 4/3 "
        f"相差不超过 {100 * CLOSE:g} %。{deep:g} 层时：整块重算内存 {less}、用时 {more}；选择性重算内存 {little}、"
        f"用时 {slow}。",
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    memory, times = [], []
    for way in WAYS:
        own, ratios = where(rows, recomputed=way), against_none(rows, way, "step_ms")
        memory.append(Line.of(own, "layers", lambda r: number(r, "step_peak_bytes") / 1e6, way))
        times.append(Line([*ratios], [*ratios.values()], way))
    top = math.ceil(10 * max(TEXTBOOK, *against_none(rows, "block", "step_ms").values())) / 10
    y, marks = "time, times that of none", [*times, Rule(TEXTBOOK)]
    return [
        Panel(memory, "Memory", "layers", "memory of a step, MB", ylim=(0, None)),
        Panel(marks, "Time (dotted: 4/3)", "layers", y, ylim=(0.9, top), legend="none"),
    ]


LAB = Claim(
    title_en="Recomputation",
    title_zh="激活重算",
    claim_en="Recomputing every block saves memory, and makes a training step a third longer.",
    claim_zh="重算每个块可以省内存，代价是训练一步变长三分之一。",
    regime="A Llama with random tokens and AdamW. On a CPU width 256 and 512 tokens in fp32; on a GPU width 2,048 and "
    "8,192 tokens in bf16.",
    varies="What is recomputed (nothing, all but products and attention, whole blocks), number of layers.",
    measures="Peak memory of a step besides weights, gradients and optimizer state (on a CPU that of tensors between "
    "ops); time of a step, best of three interleaved medians.",
    evidence="timing",
)
