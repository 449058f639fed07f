"""Recording: every op without a backend, results of the right kind, and exactly what its backward reads saved."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from bagu import ops
from bagu.ops.call.dispatch import call
from bagu.ops.call.recording import Recorder, active, storage_id
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec, Streams


def drawn(spec: OpSpec, dtype: torch.dtype) -> dict[str, Any]:
    case = spec.cases[0]
    args = spec.cast(case, spec.inputs(case, Streams(spec.name, case.name)), dtype)
    return {k: v.requires_grad_(k in spec.grads) if isinstance(v, torch.Tensor) else v for k, v in args.items()}


def on_meta(args: dict[str, Any]) -> dict[str, Any]:
    return {
        k: v.detach().to("meta").requires_grad_(v.requires_grad) if isinstance(v, torch.Tensor) else v
        for k, v in args.items()
    }


@pytest.mark.parametrize("name", SPECS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_op_is_recorded_with_the_results_it_has(name: str, dtype: torch.dtype) -> None:
    spec = SPECS[name]
    args = drawn(spec, dtype)
    real = call(spec, "torch", **args)
    saved: set[int] = set()
    given = on_meta(args)

    def save(x: torch.Tensor) -> torch.Tensor:
        saved.add(storage_id(x))
        return x

    with Recorder() as recorder, torch.autograd.graph.saved_tensors_hooks(save, lambda x: x):
        out = call(spec, None, **given)
    (noted,) = recorder.calls
    assert noted.name == name and noted.spec is spec and dict(noted.args) == given
    kinds = [[(t.shape, t.dtype) for t in (r if isinstance(r, tuple) else (r,))] for r in (out, real) if r is not None]
    assert all(k == kinds[0] for k in kinds)
    known = given | dict(zip((r.name for r in spec.sig.results), noted.results, strict=True))
    assert saved == {storage_id(known[s]) for s in spec.saves if known[s] is not None}


def test_pytorch_between_the_ops_is_recorded_in_order() -> None:
    x, w = torch.empty(3, 8, device="meta"), torch.empty(8, device="meta")
    with Recorder() as recorder:
        y = ops.rms_norm(x, w, eps=1e-6).view(2, 12) * 2
    names = [c.name for c in recorder.calls]
    assert names == ["rms_norm", "aten.view.default", "aten.mul.Tensor"]
    norm, view, product = recorder.calls
    assert storage_id(view.results[0]) == storage_id(norm.results[0]) == storage_id(view.args["self"])
    assert product.results[0] is y and product.args["other"] == 2


def test_a_recorder_is_of_its_own_thread_and_ends_with_its_block() -> None:
    seen = []
    with Recorder() as outer, Recorder() as inner:
        assert active() is inner
        thread = threading.Thread(target=lambda: seen.append(active()))
        thread.start()
        thread.join()
    assert seen == [None] and active() is None
    with pytest.raises(ValueError, match="inside"), outer:
        raise ValueError("inside")
    assert active() is None


def test_real_tensors_are_refused() -> None:
    with Recorder(), pytest.raises(AssertionError, match="meta tensors"):
        ops.rms_norm(torch.ones(3, 8), torch.ones(8), eps=1e-6)
