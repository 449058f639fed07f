"""The ways to run a step. Each puts the inputs of the steps that it takes on the device, and computes their hidden
states when the tokens that the previous step samples are known.

    Compiled   a CPU, short steps: one call of C++ (cpu/compiled.py, cpu/invariant_decode.py)
    Replay     a GPU, steps without prompts: a CUDA graph (graphs.py)
    Forward    every step: `Transformer.forward` on the packed tokens of all sequences; alone takes those with images

Dims: T = tokens, D = features.
"""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from bagu.nn.model import Placed, Transformer
from bagu.serve.adapters.layers import Rows
from bagu.serve.cpu.compiled import CompiledDecode, Decodes
from bagu.serve.cpu.invariant_decode import InvariantDecode
from bagu.serve.graphs import GraphDecode
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.inputs import Late, StepInputs, sample_rows
from bagu.serve.kv.paged import Batch, PagedKV
from bagu.serve.plan import Plan

# Tokens of a step that C++ computes, if a sequence has several. On Linux for ARM, where torch multiplies by OpenBLAS,
# the C++ is 1.47 times as fast as the forward at 256 tokens and 1.06 times at 1,024 (8M model, fp32, one Neoverse-N1
# core). On x86 and macOS torch has faster products than the C++, and longer steps gain little or lose.
SHORT_STEP = 1024 if platform.machine() == "aarch64" else 128


@dataclass(frozen=True, slots=True)
class Staged:
    """A plan whose inputs are on the device, except for the tokens that the previous plan samples."""

    plan: Plan
    hidden: Callable[[torch.Tensor | None], torch.Tensor]  # from these tokens to the hidden states [T, D]
    rows: torch.Tensor | None = None  # of the tokens after which one is sampled; None: all


class Way(Protocol):
    def takes(self, plan: Plan) -> bool: ...

    def stage(self, plan: Plan) -> Staged:
        """Launch it before the next call."""
        ...


class Compiled:
    """`always`: the C++ computes all steps. `prompts`: also short steps with prompts. In invariant mode it leaves them
    to the forward: it keeps a list of calls for each number of tokens, and prompts have many."""

    def __init__(
        self, step: CompiledDecode | InvariantDecode, inputs: StepInputs, *, always: bool, prompts: bool
    ) -> None:
        self.step, self.inputs, self.always, self.prompts = step, inputs, always, prompts

    def takes(self, plan: Plan) -> bool:
        if plan.images:
            return False
        if plan.max_len == 1 or self.always:
            return True
        return plan.num_tokens <= SHORT_STEP and (self.prompts or not plan.num_prompts)

    def stage(self, plan: Plan) -> Staged:
        rows = sample_rows(plan)
        run = partial(self._run, plan, self.inputs.decodes(plan))
        return Staged(plan, run, None if rows is None else torch.from_numpy(rows))

    def _run(self, plan: Plan, inputs: Decodes, tokens: torch.Tensor | None) -> torch.Tensor:
        for row, sample in plan.late:
            inputs.new[0, row] = tokens[sample]  # type: ignore[index]
        return self.step(inputs)


class Replay:
    def __init__(self, graphs: GraphDecode, inputs: StepInputs) -> None:
        self.graphs, self.inputs = graphs, inputs

    def takes(self, plan: Plan) -> bool:
        return not plan.num_prompts and not plan.images

    def stage(self, plan: Plan) -> Staged:
        captured, late, rows = self.graphs.load(self.inputs.arrays(plan))

        def run(tokens: torch.Tensor | None) -> torch.Tensor:
            _fill(captured.inputs.batch, late, tokens)
            captured.graph.replay()
            return captured.hidden[: plan.num_tokens]

        return Staged(plan, run, rows)


class Forward:
    """`adapters` are where the layers read the adapters of tokens, if there are any; `images` has the vectors of
    images."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKV,
        inputs: StepInputs,
        adapters: Rows | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        self.model, self.kv, self.inputs, self.adapters, self.images = model, kv, inputs, adapters, images

    def takes(self, plan: Plan) -> bool:
        return True

    def stage(self, plan: Plan) -> Staged:
        batch, late, rows = self.inputs.batch(plan)
        placed = None
        if plan.images:
            assert self.images is not None, "the engine refuses images that no encoder takes"
            placed = self.images.place(plan.images)

        def run(tokens: torch.Tensor | None) -> torch.Tensor:
            _fill(batch, late, tokens)
            return self(batch, placed)

        return Staged(plan, run, rows)

    def __call__(self, batch: Batch, placed: Placed | None = None) -> torch.Tensor:
        self.kv.load(batch)
        if self.adapters is not None:
            self.adapters.load(batch.adapters)
        hidden: torch.Tensor = self.model(
            batch.ids, batch.positions, batch.cu_seqlens, batch.max_len, self.kv, placed=placed
        ).hidden
        return hidden


def _fill(batch: Batch, late: Late | None, tokens: torch.Tensor | None) -> None:
    if late is not None and tokens is not None:
        late.fill(batch.ids, tokens)
