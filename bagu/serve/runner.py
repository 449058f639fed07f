"""The model runner: it prepares the weights for inference, and runs the model on plans.

A step is one forward of the packed new tokens of all sequences, prompts and decodes together. ways.py has the ways to
run it: by `Transformer.forward`, as a CUDA graph, or by C++ where that computes the model's layers (cpu/match.py). With
int4 weights, and with int8 on a CPU with int8 dot products, the C++ computes all steps.

With a mesh, `model` is this rank's part of a divided model (parallel/inference.py): every rank runs the plan that
tp/lead.py sends, and the logits are gathered.

With `adapters`, a token computes with the LoRA adapter of its sequence (adapters/layers.py, cpu/low_rank.py).

Dims: T = tokens, N = samples, D = features, V = vocabulary.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.nn.peft import Adapter
from bagu.parallel.inference import gather_logits
from bagu.parallel.mesh import Mesh
from bagu.parallel.vocab_loss import vocab_cross_entropy
from bagu.serve.adapters.layers import AdapterWeights, GroupedLinear, Rows
from bagu.serve.config import EngineConfig
from bagu.serve.cpu.compiled import CompiledDecode, PackedLinear, Rounding, compiles, has_int8_dot, lanes
from bagu.serve.cpu.dataflow import Mismatch
from bagu.serve.cpu.invariant_decode import InvariantDecode
from bagu.serve.cpu.low_rank import LowRankPairs
from bagu.serve.cpu.match import DecodeStep, KeptMatch
from bagu.serve.cpu.quantize import int8, merged, replace_linears
from bagu.serve.graphs import GraphDecode
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.inputs import StepInputs
from bagu.serve.kv.paged import PagedKV
from bagu.serve.plan import Plan
from bagu.serve.quantization import quantized
from bagu.serve.ways import Compiled, Forward, Replay, Staged, Way

Project = Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]  # logits, and their argmax or None


class RunnerOutput(NamedTuple):
    """The result of running a plan."""

    hidden: torch.Tensor  # [T, D]
    sampled: torch.Tensor  # [N, D]: the rows from which a token is sampled
    logits: torch.Tensor  # [N, V]
    argmax: torch.Tensor | None  # [N] int64: the first largest logit of each row, if the head also computes it


class Runner:
    """Runs plans on one model and one pool."""

    def __init__(
        self,
        model: Transformer,
        kv: PagedKV,
        config: EngineConfig,
        max_model_len: int,
        mesh: Mesh | None = None,
        adapters: AdapterWeights | None = None,
        images: ImageEncoder | None = None,
    ) -> None:
        device = model.embedding.weight.device
        self.kv, self.device = kv, device
        self.inputs = StepInputs(kv, device, config.max_num_seqs, max_model_len, adapters=adapters is not None)
        self.source, self.config, self.mesh, self.adapters, self.images = model, config, mesh, adapters, images
        self.graphs: GraphDecode | None = None
        self.matched = KeptMatch()
        self.released = False  # whether `release_source` was called
        self.project: Project
        self.prepare()

    def prepare(self) -> None:
        """Pack or quantize the weights for inference. Call it again after the weights change.

        CUDA graphs read the weights at their addresses, so they stay valid after a change in place; quantized weights
        are new tensors, and need new graphs.
        """
        self.check_updatable()
        model, kind, on_cpu = self.source, self.config.quantization, self.device.type == "cpu"
        rounding: Rounding = None if kind is None or kind == "fp8" else kind
        if kind == "fp8" and on_cpu:
            model = quantized(model, "fp8")  # the layers are ordinary ones with other weights
        self.mismatch: str | None = None  # why the C++ does not support this model, if the machine could use it
        self.low_rank: LowRankPairs | None = None  # the adapters of `compiled`
        self.compiled = self._compiled_step(model, rounding)
        self.model: Transformer | None = None  # its layers, if a step runs them
        if not self._only_compiled(rounding):
            layers = model if kind is None or (kind == "fp8" and on_cpu) else quantized(model, kind)
            self.model = layers if self.adapters is None else self.adapters.wrap(layers)
        if self.device.type == "cuda" and self.config.cuda_graphs:
            assert self.model is not None, "the C++ is for CPUs"
            if self.graphs is None or not self.graphs.reads(self.model):
                self.graphs = self.new_graphs()
        self.ways = self._ways()
        self.project = self._projection(model, "int8" if rounding is not None and on_cpu else None)

    def _ways(self) -> list[Way]:
        """The ways to run a step on this machine, the fastest first."""
        ways: list[Way] = []
        if self.compiled is not None:
            only, prompts = self.model is None, not self.config.invariant
            ways.append(Compiled(self.compiled, self.inputs, always=only, prompts=prompts))
        if self.graphs is not None:
            ways.append(Replay(self.graphs, self.inputs))
        if self.model is not None:
            ways.append(Forward(self.model, self.kv, self.inputs, self._adapter_rows, self.images))
        return ways

    @property
    def _adapter_rows(self) -> Rows | None:
        return None if self.adapters is None else self.adapters.rows

    def _compiled_step(self, model: Transformer, rounding: Rounding) -> CompiledDecode | InvariantDecode | None:
        """The C++ step of this model, or None if there is none."""
        if self.device.type != "cpu" or self.mesh is not None:
            return None
        try:
            if any(group.first for group in self.kv.groups):
                raise Mismatch("first positions beside a window")
            model = model.with_attention(replace(model.config, attention="softmax")) if self.kv.choice else model
            if self.config.invariant:  # not `merged`: LoRA is a product of its own in training
                return InvariantDecode(self.matched.step(model), self.kv)
            if not compiles(model.embedding.weight.dtype):
                return None
            if self.kv.quantized:
                raise Mismatch("an 8-bit KV cache")
            step = self.matched.step(merged(model))
            self.low_rank = self.low_rank_pairs(step)
            return CompiledDecode(step, self.kv, rounding=rounding, low_rank=self.low_rank)
        except Mismatch as error:
            self.mismatch = str(error)  # the exception would keep the frames that hold the weights
            return None

    def _only_compiled(self, rounding: Rounding) -> bool:
        """Whether the C++ computes all steps, because it has the same products as the quantized layers. A second copy
        of the weights is then not made. int8 without dot products: torch has integer products, the C++ does not.
        Batches with adapters and long prompts run the layers, and so do prompts with images."""
        if not isinstance(self.compiled, CompiledDecode) or self.adapters is not None or self.images is not None:
            return False
        return rounding == "int4" or (rounding == "int8" and has_int8_dot())

    def _projection(self, model: Transformer, rounding: Rounding) -> Project:
        """The product with the head."""
        if self.mesh is not None:
            vocab_size, mesh = model.config.vocab_size, self.mesh
            return lambda hidden: (gather_logits(model.logits(hidden), vocab_size, mesh), None)
        if isinstance(self.compiled, CompiledDecode):
            return PackedLinear(model.head_weight, rounding=rounding)
        if rounding is not None:
            packed = int8(model.head_weight)
            return lambda hidden: (packed(hidden), None)
        whole = self.model or model  # not `model` if layers are quantized: `release_source` frees its weights
        return lambda hidden: (whole.logits(hidden), None)

    def release_source(self) -> None:
        """Free the weights of the linear layers before quantization, if no other code holds the model. Weights cannot
        be changed afterwards. Without quantization they are in use, and nothing is freed."""
        if self.config.quantization is None or self.mesh is not None or self.adapters is not None:
            return  # reading an adapter needs the shapes of the layers
        self.released = True
        self.source = replace_linears(self.source, lambda linear: nn.Identity())
        if self.config.quantization != "fp8" and self.device.type == "cpu":
            self.source.head = None  # it is packed in int8

    def check_updatable(self) -> None:
        """Raise if the weights cannot change any more."""
        if self.released:
            raise ArgumentError(
                "this engine has released the weights that it quantized, so they cannot be changed",
                hint="start the server again with the new weights, or use an engine without release_source()",
            )

    def new_graphs(self) -> GraphDecode:
        assert self.model is not None, "the C++ is for CPUs"
        longest = min(self.inputs.table_positions, self.model.config.max_len)
        return GraphDecode(self.model, self.kv, longest, self.config.max_num_seqs, self._adapter_rows)

    def low_rank_pairs(self, step: DecodeStep) -> LowRankPairs | None:
        """The adapters for the C++ step. On a CPU their layers are `GroupedLinear`."""
        if self.adapters is None:
            return None
        layers = {name: layer for name, layer in self.adapters.layers.items() if isinstance(layer, GroupedLinear)}
        return LowRankPairs(step, layers, lanes())

    def install_adapter(self, slot: int, adapter: Adapter) -> None:
        """Replace the adapter in a slot. No step may be running that uses it."""
        assert self.adapters is not None, "the engine has no slots for adapters"
        self.adapters.install(slot, adapter)
        if self.low_rank is not None:
            self.low_rank.forget(slot)
        # a stack has grown
        if self.graphs is not None and self.model is not None and not self.graphs.reads(self.model):
            self.graphs = self.new_graphs()
            self.ways = self._ways()

    def run(self, plan: Plan, late: torch.Tensor | None = None) -> RunnerOutput:
        """Compute the plan. Afterwards its tokens' keys and values are in the pool. `late` are the tokens that the
        previous plan sampled, on the device, if `plan.late` refers to them."""
        return self.launch(self.stage(plan), late)

    def stage(self, plan: Plan) -> Staged:
        """All of `run` that does not need the tokens of the previous plan. Launch it before the next call."""
        if plan.copies:
            self.kv.copy(plan.copies)
        self.inputs.write_tables(plan)
        return next(way for way in self.ways if way.takes(plan)).stage(plan)

    def launch(self, staged: Staged, late: torch.Tensor | None = None) -> RunnerOutput:
        """The rest of `run`: the forward and the logits."""
        plan = staged.plan
        assert late is not None or not plan.late, "a plan with late tokens needs the tokens of the previous plan"
        hidden = staged.hidden(late)
        sampled = hidden if staged.rows is None else hidden.index_select(0, staged.rows)
        return RunnerOutput(hidden, sampled, *self.project(sampled))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """The logits [R, V] of rows of `RunnerOutput.hidden`."""
        return self.project(hidden)[0]

    def logprobs(self, hidden: torch.Tensor, targets: torch.Tensor, logits: torch.Tensor | None = None) -> torch.Tensor:
        """log p of each row's target, by the function that training and scoring use. With quantized weights it is
        computed from their logits instead: the distribution from which the token was sampled. `logits` are those of
        `hidden`, if they are known."""
        if self.config.quantization is not None:
            wide = (self.logits(hidden) if logits is None else logits).float()
            return wide.gather(1, targets.unsqueeze(1)).squeeze(1) - wide.logsumexp(1)
        if self.mesh is not None:
            vocab_size = self.source.config.vocab_size
            values = vocab_cross_entropy(
                hidden, self.source.head_weight, targets, vocab_size=vocab_size, mesh=self.mesh
            )
            return ops.token_losses(*values).logprobs
        return ops.token_losses(*ops.linear_cross_entropy(hidden, self.source.head_weight, targets)).logprobs
