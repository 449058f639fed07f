"""A training forward recorded on meta tensors: the cost of each call, and the tensors that autograd saves.

It runs `Transformer.forward` itself, so a trace cannot differ from the model (docs/decisions/014). FLOPs come from the
ops' specs, and from PyTorch's FLOP counter for products between the ops. Bytes are those of the storages that a
backward would read: v is a view of the output of the QKV matmul, so saving v keeps that whole output.
"""

from collections import Counter
from collections.abc import Iterable
from itertools import chain
from typing import Any, Literal

import torch
from torch.nn.functional import dropout
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from bagu.nn.model import Transformer
from bagu.ops.call.recording import Call, Recorder, storage_id
from bagu.ops.contract.signature import sizes

Kind = Literal["linear", "attention", "other"]
KINDS: dict[str, Kind] = {
    "matmul": "linear",
    "grouped_matmul": "linear",
    "attention": "attention",
    "linear_attention": "attention",
    "block_attention": "attention",
    "choose_blocks": "attention",
}


class Trace:
    """One forward and the head, over `documents` of `context` tokens each. The model is on the meta device."""

    def __init__(self, model: Transformer, context: int, documents: int = 1) -> None:
        T = documents * context
        ids = torch.empty(T, dtype=torch.int64, device="meta")
        positions = torch.empty(T, dtype=torch.int64, device="meta")
        cu_seqlens = torch.empty(documents + 1, dtype=torch.int32, device="meta")
        self.weights = {storage_id(t) for t in (*model.parameters(), *model.buffers())}
        self.given = self.weights | {storage_id(t) for t in (ids, positions, cu_seqlens)}
        self.saved: list[list[torch.Tensor]] = [[]]  # before the first block, inside it, between it and the second, …
        self.block_inputs: list[torch.Tensor] = []
        hooks = [block.register_forward_pre_hook(self._enter) for block in model.blocks]
        hooks += [block.register_forward_hook(lambda *_: self.saved.append([])) for block in model.blocks]
        saving = torch.autograd.graph.saved_tensors_hooks(self._save, lambda x: x)
        try:
            with _GpuDropout(), Recorder() as recorder, saving:
                hidden = model(ids, positions, cu_seqlens, context).hidden
                self.result = hidden
                if model.score is not None:
                    self.result = model.score(hidden)
                elif model.config.lm_head:
                    self.result = model.logits(hidden)
        finally:
            for hook in hooks:
                hook.remove()
        self.calls = recorder.calls

    def _enter(self, block: torch.nn.Module, args: tuple[Any, ...]) -> None:
        self.block_inputs += [x for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        self.saved.append([])

    def _save(self, x: torch.Tensor) -> torch.Tensor:
        self.saved[-1].append(x)
        return x

    def flops(self) -> tuple[Counter[Kind], Counter[Kind]]:
        """The FLOPs of the forward and of the backward."""
        forward: Counter[Kind] = Counter()
        backward: Counter[Kind] = Counter()
        for call in self.calls:
            if call.spec is None or call.dims is None:
                kind: Kind = "linear" if self._has_weight(call) else "other"
                product = _product_flops(call)
                forward[kind] += product
                backward[kind] += 2 * product  # a product has two gradients
                continue
            kind, dims = KINDS.get(call.name, "other"), sizes(call.dims)
            itemsize = call.args[call.spec.sig.tensors[0].name].dtype.itemsize
            forward[kind] += call.spec.cost(dims, itemsize).flops
            if call.spec.cost_backward is not None:
                backward[kind] += call.spec.cost_backward(dims, itemsize).flops
        return forward, backward

    def _has_weight(self, call: Call) -> bool:
        return any(isinstance(x, torch.Tensor) and storage_id(x) in self.weights for x in call.args.values())

    def kept_bytes(self) -> int:
        """The bytes that autograd saves, without weights and the batch."""
        return self._bytes(chain(*self.saved))

    def kept_bytes_recomputing(self) -> list[int]:
        """Like `kept_bytes`, with blocks that save only their inputs: one value for the recomputation of each block."""
        return [self._bytes(chain(*self.saved[::2], self.block_inputs, block)) for block in self.saved[1::2]]

    def _bytes(self, tensors: Iterable[torch.Tensor]) -> int:
        storages = {storage_id(x): x.untyped_storage().nbytes() for x in tensors}
        return sum(size for key, size in storages.items() if key not in self.given)


class _GpuDropout(TorchFunctionMode):
    """Dropout as on a GPU, where it saves a mask of one byte per element; other devices save the factors themselves."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is dropout and kwargs is not None and kwargs["training"]:
            return torch.native_dropout(args[0], kwargs["p"], True)[0]
        return func(*args, **(kwargs or {}))


def _product_flops(call: Call) -> int:
    from torch.utils.flop_counter import flop_registry

    assert call.operator is not None
    formula = flop_registry.get(call.operator.overloadpacket)
    return 0 if formula is None else int(formula(*call.args.values(), out_val=call.results[0]))
