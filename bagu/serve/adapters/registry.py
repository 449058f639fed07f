"""The adapters of an engine: their names, their slots, and the checks before one is installed.

A slot holds the weights of one adapter. `remove` takes the name away at once, so that new requests are refused, and the
requests that were accepted before finish with the weights in the slot. The slot is free when none of them is left.

Every load has a number of its own, which is the root of its prefix cache keys (kv/blocks.py): blocks are shared neither
between adapters nor between two loads of one name.
"""

from collections.abc import Iterable
from itertools import count
from pathlib import Path

import torch

from bagu.errors import ArgumentError
from bagu.machine.hub import WeightsError, find_adapter
from bagu.nn.families import family_for
from bagu.nn.linear import Linear
from bagu.nn.model import Transformer
from bagu.nn.moe import Router
from bagu.nn.peft import Adapter, num_parts, read_adapter
from bagu.serve.adapters.info import AdapterInfo, Resident
from bagu.serve.request import Unservable


def adaptable(model: Transformer) -> dict[str, Linear]:
    """The linear layers that an adapter can change. A router is not among them, nor is MLA's kv_b: the one chooses in
    fp32, and the other is folded into its neighbours, once for all tokens."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and not isinstance(module, Router) and not name.endswith(".kv_b")
    }


def adapter_bytes(model: Transformer, max_adapters: int, max_rank: int) -> int:
    """The most memory that adapters take, in the model's dtype. A fused linear (qkv, gate_up) has up to as many times
    the rank as it has parts in PEFT's format."""
    if not max_adapters:
        return 0
    family_for(model.config)  # raises for a model without Hugging Face names, which no adapter fits
    size = model.embedding.weight.itemsize
    each = sum(num_parts(model, name) * (m.in_features + m.out_features) for name, m in adaptable(model).items())
    return max_adapters * max_rank * each * size


class AdapterRegistry:
    def __init__(self, model: Transformer, *, max_adapters: int, max_rank: int) -> None:
        self.model, self.max_adapters, self.max_rank = model, max_adapters, max_rank
        self.named: dict[str, Resident] = {}
        self._loads = count(1)

    @property
    def infos(self) -> tuple[AdapterInfo, ...]:
        return tuple(resident.info for resident in self.named.values())

    def room(self) -> str:
        """How many adapters fit, and the memory that they take."""
        most = adapter_bytes(self.model, self.max_adapters, self.max_rank)
        return f"room for {self.max_adapters} LoRA adapters of rank {self.max_rank}, {most:,} bytes at most"

    def find(self, name: str) -> Resident:
        found = self.named.get(name)
        if found is None:
            hint = f"loaded: {', '.join(self.named)}" if self.named else "none is loaded"
            raise Unservable(f"there is no adapter {name!r}", hint=hint, param="model")
        return found

    def read(self, path: str | Path) -> Adapter:
        """Read and check an adapter. It changes nothing, so another thread may do it."""
        adapter = read_adapter(self.model, find_adapter(path))
        self.check(adapter)
        return adapter

    def check(self, adapter: Adapter) -> None:
        """Raise if the adapter is of a rank, for a layer or with values that cannot be served."""
        if adapter.rank > self.max_rank:
            raise WeightsError(
                f"the adapter has rank {adapter.rank}, and the server allows {self.max_rank}",
                hint=f"start the server with --max-adapter-rank {adapter.rank}",
            )
        known = adaptable(self.model)
        for name, pair in adapter.pairs.items():
            if name not in known:
                raise WeightsError(
                    f"the adapter changes {name}, which cannot differ between the requests of a batch",
                    hint="merge the adapter (bagu export), and serve the merged model",
                )
            if not all(torch.isfinite(x).all() for x in pair):
                raise WeightsError(f"the adapter has NaN or infinite weights for {name}", hint="train it again")

    def install(self, name: str, path: str, adapter: Adapter, busy: Iterable[int]) -> Resident:
        """Give the adapter a name and a free slot. `busy` are the slots that unfinished requests use."""
        if not name:
            raise ArgumentError("an adapter with an empty name", hint="give it a name")
        if name in self.named:
            raise ArgumentError(f"there is already an adapter {name!r}", hint="unload it first, or use another name")
        taken = {*busy, *(resident.slot for resident in self.named.values())}
        slot = next((slot for slot in range(self.max_adapters) if slot not in taken), None)
        if slot is None:
            draining = len(taken) - len(self.named)
            waits = f", and {draining} more finish requests" if draining else ""
            raise ArgumentError(
                f"{len(self.named)} adapters are loaded{waits}; the server holds {self.max_adapters} at most",
                hint="unload one, or start the server with a larger --max-adapters",
            )
        info = AdapterInfo(name=name, path=path, rank=adapter.rank)
        resident = Resident(info=info, slot=slot, root=b"adapter %d" % next(self._loads))
        self.named[name] = resident
        return resident

    def remove(self, name: str) -> None:
        self.find(name)
        del self.named[name]
