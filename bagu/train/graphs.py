"""Runs a small model's forward and backward on a GPU as one CUDA graph each.

A step of the demo's 6M model has 500 kernels that take 4 ms together, but a host needs 20 ms to launch them, so the GPU
is idle. With graphs, the model's kernels are two launches. A batch always has the same shape, so a graph is captured
once: at the third step, when kernels are compiled and allocators are warm. Larger models keep a GPU busy without
graphs, and a graph would keep the memory of their activations.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from bagu.nn.change import running_as
from bagu.nn.config import Alibi, ModelConfig, T5Relative
from bagu.nn.kv import KV
from bagu.nn.model import Output, Placed, Transformer

SMALL = 4e12  # FLOPs of a forward and backward: 10 ms on an H200, about the time a host needs to launch a step
BEFORE = 2  # calls of a shape that run without a graph
SHAPES = 4  # the most batch shapes that are captured; each graph has its own memory


def can_capture(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a forward and its backward only launch kernels: they read no value on the host and keep no state.

    Expert routing depends on values, batch norm updates statistics, and attention with a bias or in fp32 has all scores
    in memory and reads their size from the offsets.
    """
    return (
        config.moe is None
        and config.attention == "softmax"
        and config.norm.kind != "batch"
        and not isinstance(config.positions, (Alibi, T5Relative))
        and dtype in (torch.float16, torch.bfloat16)
    )


@contextmanager
def captured(model: Transformer) -> Iterator[None]:
    """Inside, training batches run as CUDA graphs of the model."""
    with running_as(model, _Graphs(model)):
        yield


class _Graphs:
    """A replacement for `model.forward` that replays training batches of a known shape."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.forward = model, model.forward
        self.parameters = sum(p.numel() for p in model.parameters())
        self.graphs: dict[tuple[Any, ...], Callable[..., torch.Tensor]] = {}
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._open: set[tuple[Any, ...]] = set()  # graphs whose backward has not run yet

    # The arguments of Transformer.forward, in whose place it is called.
    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        kv: KV | None = None,
        *,
        token_types: torch.Tensor | None = None,
        placed: Placed | None = None,
    ) -> Output:
        shape = (ids.shape, cu_seqlens.shape, max_len)
        plain = kv is None and token_types is None and placed is None
        training = plain and self.model.training and torch.is_grad_enabled()
        if training and 6 * self.parameters * len(ids) <= SMALL:
            self._calls[shape] += 1
            if self._calls[shape] > BEFORE and shape not in self.graphs and len(self.graphs) < SHAPES:
                self.graphs[shape] = self._capture(ids, positions, cu_seqlens, max_len)
            if shape in self.graphs and shape not in self._open:
                return Output(self._replayed(shape, ids, positions, cu_seqlens), None, ())
        return self.forward(ids, positions, cu_seqlens, max_len, kv, token_types=token_types, placed=placed)

    def _replayed(self, shape: tuple[Any, ...], *batch: torch.Tensor) -> torch.Tensor:
        """The hidden states. A graph cannot be replayed again before its backward: a second forward would overwrite the
        saved tensors. So if a loss needs two forwards (such as chosen and rejected), the second runs without a graph.
        """
        hidden = self.graphs[shape](*batch)
        self._open.add(shape)
        hidden.register_hook(lambda grad: self._open.discard(shape))
        return hidden

    def _capture(
        self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int
    ) -> Callable[..., torch.Tensor]:
        """Capture the hidden states as a function of a batch of this shape.

        The capture uses new leaf tensors that share memory with the parameters: the autograd nodes of the parameters
        belong to the stream that steps run on, and a capture has its own stream.
        """
        whole = _Hidden(self.model, self.forward, max_len)
        trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}

        def run(ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, *weights: torch.Tensor) -> Any:
            return functional_call(whole, dict(zip(trained, weights, strict=True)), (ids, positions, cu_seqlens))

        own = tuple(t.clone() for t in (ids, positions, cu_seqlens))  # a graph reads its inputs at fixed addresses
        leaves = tuple(p.detach().requires_grad_() for p in trained.values())
        with _streams_may_differ():
            graphed: Any = torch.cuda.make_graphed_callables(run, (*own, *leaves), allow_unused_input=True)
        return lambda *batch: graphed(*batch, *trained.values())


@contextmanager
def _streams_may_differ() -> Iterator[None]:
    """Turn off autograd's warning about streams. make_graphed_callables warms up on one stream and captures on another,
    while the leaves still have the autograd nodes of the warm-up. Nothing waits on either, so this is harmless."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


class _Hidden(nn.Module):
    """The captured module: maps the tensors of a batch to the hidden states for the head."""

    def __init__(self, model: Transformer, forward: Callable[..., Output], max_len: int) -> None:
        super().__init__()
        self.model, self.run, self.max_len = model, forward, max_len

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.run(ids, positions, cu_seqlens, self.max_len).hidden
