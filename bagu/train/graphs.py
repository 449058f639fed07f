"""A small model's forward and backward on a GPU, as one CUDA graph each.

A step of the demo's 6M model is 500 kernels of 4 ms together, and a host needs 20 ms to launch them: the GPU waits. As
graphs the model's share of them are two launches. A batch always has the same shape, so a graph is captured once: at
the third step, when kernels are compiled and allocators warm. Larger models keep a GPU busy as they are, and a graph
would hold their activations for good.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from bagu.nn.config import Alibi, ModelConfig, T5Relative
from bagu.nn.kv import KV
from bagu.nn.model import Output, Transformer

__all__ = ["can_capture", "captured"]

SMALL = 4e12  # FLOPs of a forward and backward: 10 ms of an H200, in which a host launches a step
BEFORE = 2  # calls of a shape that run as they are
SHAPES = 4  # of batches that are captured; each has memory of its own


def can_capture(config: ModelConfig, dtype: torch.dtype) -> bool:
    """Whether a forward and its backward are launches alone: nothing reads a value back, nothing counts its calls.

    Experts are chosen by values, batch norm keeps statistics, and attention with a bias or in fp32 has all scores in
    memory, whose size it reads from the offsets.
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
    """Inside, training batches go through graphs of the model."""
    model.forward = _Graphs(model)  # type: ignore[method-assign]
    try:
        yield
    finally:
        del model.forward  # the instance's; the class's shows again


class _Graphs:
    """`model.forward`, whose training batches of a shape that came before are replayed."""

    def __init__(self, model: Transformer) -> None:
        self.model, self.forward = model, model.forward
        self.parameters = sum(p.numel() for p in model.parameters())
        self.graphs: dict[tuple[Any, ...], Callable[..., torch.Tensor]] = {}
        self._calls: Counter[tuple[Any, ...]] = Counter()
        self._open: set[tuple[Any, ...]] = set()  # graphs whose backward is still to come

    def __call__(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor,
        cu_seqlens: torch.Tensor,
        max_len: int,
        kv: KV | None = None,
        *,
        token_types: torch.Tensor | None = None,
    ) -> Output:
        shape = (ids.shape, cu_seqlens.shape, max_len)
        training = self.model.training and torch.is_grad_enabled() and kv is None and token_types is None
        if training and 6 * self.parameters * len(ids) <= SMALL:
            self._calls[shape] += 1
            if self._calls[shape] > BEFORE and shape not in self.graphs and len(self.graphs) < SHAPES:
                self.graphs[shape] = self._capture(ids, positions, cu_seqlens, max_len)
            if shape in self.graphs and shape not in self._open:
                return Output(self._replayed(shape, ids, positions, cu_seqlens), None, ())
        return self.forward(ids, positions, cu_seqlens, max_len, kv, token_types=token_types)

    def _replayed(self, shape: tuple[Any, ...], *batch: torch.Tensor) -> torch.Tensor:
        """The hidden states. Until their backward the graph is taken: another forward would write over what it kept, so
        a loss of two forwards (chosen and rejected, say) makes the second one as it is."""
        hidden = self.graphs[shape](*batch)
        self._open.add(shape)
        hidden.register_hook(lambda grad: self._open.discard(shape))
        return hidden

    def _capture(
        self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, max_len: int
    ) -> Callable[..., torch.Tensor]:
        """The hidden states as a function of a batch of this shape.

        It is captured on other leaves than the parameters, in the same memory: the nodes of these belong to the stream
        that steps run on, and a capture has a stream of its own.
        """
        whole = _Hidden(self.model, self.forward, max_len)
        trained = {name: p for name, p in whole.named_parameters() if p.requires_grad}

        def run(ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor, *weights: torch.Tensor) -> Any:
            return functional_call(whole, dict(zip(trained, weights, strict=True)), (ids, positions, cu_seqlens))

        own = tuple(t.clone() for t in (ids, positions, cu_seqlens))  # a graph reads its inputs where they were
        leaves = tuple(p.detach().requires_grad_() for p in trained.values())
        with _streams_may_differ():
            graphed: Any = torch.cuda.make_graphed_callables(run, (*own, *leaves), allow_unused_input=True)
        return lambda *batch: graphed(*batch, *trained.values())


@contextmanager
def _streams_may_differ() -> Iterator[None]:
    """make_graphed_callables warms up on one stream and captures on another, while the leaves' nodes are still those of
    the warm-up. Nothing waits for either, and autograd would warn of it."""
    torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
    try:
        yield
    finally:
        torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(True)


class _Hidden(nn.Module):
    """What is captured: tensors to the tensor that the head takes."""

    def __init__(self, model: Transformer, forward: Callable[..., Output], max_len: int) -> None:
        super().__init__()
        self.model, self.run, self.max_len = model, forward, max_len

    def forward(self, ids: torch.Tensor, positions: torch.Tensor, cu_seqlens: torch.Tensor) -> torch.Tensor:
        return self.run(ids, positions, cu_seqlens, self.max_len).hidden
