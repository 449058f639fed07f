"""The origin of the tensors of a recorded forward: the call that computed each one, followed through views and copies.

Views share a storage, so a tensor is identified by a storage, an offset, a shape and strides. For each storage,
`Dataflow` holds the tensor that was computed into it and the position of each of its elements. A copy has the elements
of its source, permuted as the copy permutes them. So if a tensor consists of some columns of a result, in any order and
after any reshape, `Dataflow` finds these columns.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import torch

from bagu.ops.call.recording import Call, storage_id

COPIES = ("aten.clone.default", "aten.repeat.default")  # results hold unchanged elements of the first argument


class Mismatch(Exception):
    """A recording differs from the computation it is compared with."""


def first_element(x: torch.Tensor) -> tuple[int, int]:
    """An id of the first element of x; the layers of a KV pool share a storage."""
    return storage_id(x), int(x.storage_offset())


class Root(NamedTuple):
    """A result of a call, and the index of its element at each position of a storage."""

    call: Call
    result: int
    elements: torch.Tensor  # [elements of the storage]


class Dataflow:
    """`known` lists the arguments of each op that the comparison reads; `given` are tensors that no call computes."""

    def __init__(self, calls: Sequence[Call], known: Mapping[str, str], given: Iterable[torch.Tensor]) -> None:
        self.calls, self.known = calls, known
        self.given = {storage_id(t): t for t in given}
        self.roots: dict[int, Root] = {}  # by storage
        for call in calls:
            if call.operator is not None and call.operator._schema.is_mutable:
                raise Mismatch(f"{call.name} changes a tensor in place")
            for i, result in enumerate(call.results):
                if storage_id(result) not in self.roots and storage_id(result) not in self.given:
                    self.roots[storage_id(result)] = self._root(call, i)

    def _root(self, call: Call, i: int) -> Root:
        result = call.results[i]
        size = result.untyped_storage().nbytes() // result.itemsize
        if call.name not in COPIES or call.operator is None or storage_id(call.args["self"]) not in self.roots:
            return Root(call, i, torch.arange(size))
        root, elements = self.elements(call.args["self"])
        moved, copied = torch.full((size,), -1), call.operator(**{**call.args, "self": elements})
        moved.as_strided(result.shape, result.stride(), result.storage_offset()).copy_(copied)
        return root._replace(elements=moved)

    def producer_name(self, x: torch.Tensor) -> str:
        """The name of the call that computed x."""
        root = self.roots.get(storage_id(x))
        return "a weight or an input" if root is None else root.call.name

    def elements(self, x: torch.Tensor) -> tuple[Root, torch.Tensor]:
        """The result that x is a view or copy of, and the index of its element at each position of x."""
        root = self.roots[storage_id(x)]
        return root, root.elements.as_strided(x.shape, x.stride(), x.storage_offset())

    def part_of(self, x: torch.Tensor, *ops: str, result: int = 0) -> tuple[Call, torch.Tensor]:
        """The call of one of `ops` that computed x, and the index of the result's element at each position of x."""
        if self.producer_name(x) not in ops:
            raise Mismatch(f"{self.producer_name(x)} where {' or '.join(ops)} is expected")
        root, elements = self.elements(x)
        if root.result != result:
            raise Mismatch(f"another result of {root.call.name} than expected")
        return self.check_arguments(root.call), elements

    def producer(self, x: torch.Tensor, *ops: str, result: int = 0) -> Call:
        """The call of one of `ops` whose result is x: all elements, in order."""
        call, elements = self.part_of(x, *ops, result=result)
        if not torch.equal(elements.flatten(), torch.arange(call.results[result].numel())):
            raise Mismatch(f"a part of the result of {call.name}, or another order")
        return call

    def check_arguments(self, call: Call) -> Call:
        given = {name for name, value in call.args.items() if value is not None}
        if more := given - set(self.known[call.name].split()):
            raise Mismatch(f"{call.name} with {', '.join(sorted(more))}")
        return call

    def check_same(self, x: torch.Tensor, given: torch.Tensor) -> None:
        """Check that x is the tensor `given`."""
        if first_element(x) != first_element(given) or (x.shape, x.stride()) != (given.shape, given.stride()):
            raise Mismatch(f"{self.producer_name(x)} where another tensor is expected, or a part of it")
