"""Matrix products in replayed calls: torch computes them again, into new memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from bagu.ops.call.node import Node
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import Case
from bagu.ops.replay.plan import Results, source
from bagu.ops.replay.replay import Replayed
from tests.ops.points import DEVICE
from tests.ops.replaying import GPU, drawn, launcher, plans, ran


def squared_product(values: Sequence[Any]) -> Results:
    """Host code with a product: relu(x[:, :8] w)² of a transposed w, and the product itself."""
    x, w = values
    y = torch.mm(x[:, :8], w.T)
    return y, SPECS["relu_squared"].module("triton").forward(y)[0]


def test_a_product_is_repeated_by_torch() -> None:
    run = Replayed(squared_product, launcher)
    draw = lambda: [torch.randn(*shape, device=DEVICE) for shape in ((4, 16), (6, 8))]  # noqa: E731
    for i in range(4):
        x, w = draw()
        if i == 3:
            (calls,) = run.kinds.values()
            calls.host = None  # type: ignore[assignment]
        y, z = run(x, w)
        assert y is not None and z is not None
        assert torch.equal(y, torch.mm(x[:, :8], w.T)) and torch.equal(z, y.relu().square())
    (plan,) = plans(run)
    text = source(plan)[0]
    assert "(empty, stream, p0, p1, x0, x1)" in text and "(x0.as_strided((4, 8), (16, 1)), x1.as_strided(" in text
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert torch.equal(run(x, w)[0], y)  # type: ignore[arg-type]


def test_a_product_from_the_middle_of_a_tensor_is_not_replayed() -> None:
    run = Replayed(lambda values: (torch.mm(values[0][:, 8:], values[1]),), launcher)
    for _ in range(4):
        x, w = torch.randn(4, 16, device=DEVICE), torch.randn(8, 5, device=DEVICE)
        assert torch.equal(run(x, w)[0], torch.mm(x[:, 8:], w))  # type: ignore[arg-type]
    assert not plans(run)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="a CPU widens the operands of the products, which is a copy")
def test_a_head_and_its_gradients_are_replayed() -> None:
    for name in ("linear_cross_entropy", "linear_cross_entropy_loss"):
        spec = SPECS[name]
        module, case = spec.module("triton"), Case("even", "", M=256, D=64, V=512)
        run = Node(spec, "r", module.forward, module.backward, launcher())
        for seed in range(3):
            args = drawn(spec, case, torch.bfloat16, "packed", seed) | {"ignore_index": -100, "z_loss": 0.0}
            if "token_weights" in args:
                args["token_weights"] = args["token_weights"].float()  # weights of 16 bits would be copied
            ran(spec, run, args, 0)
        assert plans(run) and plans(run.backward)
