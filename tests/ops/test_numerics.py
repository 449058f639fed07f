"""Accuracy of torch backends where no case of a spec reaches, and of the yardstick that `check` measures with."""

from __future__ import annotations

from functools import partial

import pytest
import torch

from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.ops.contract import core
from bagu.ops.contract.core import Streams

EPS = torch.finfo(torch.float32).eps


@pytest.mark.parametrize("N", [513, 4096, 33333, 262144])
def test_row_norm_loses_no_digits_with_the_length_of_a_row(N: int) -> None:
    x = Streams("row_norm").normal("x", 4, N).float()
    y = call(SPECS["rms_norm"], "torch", x=x, w=torch.ones(N), eps=0.0)
    r = (y / x).double().median(-1).values  # y / x is r but for the roundings of a product and a quotient
    want = x.double().square().mean(-1).rsqrt()
    assert ((r - want) / want).abs().max() <= 3 * EPS
    length = call(SPECS["scale_norm"], "torch", x=x, g=torch.ones(1), eps=1e-5).double()
    assert (length.square().sum(-1).sqrt() - 1).abs().max() <= 3 * EPS


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_yardstick_perturbs_incoming_gradients_by_an_fp32_rounding(dtype: torch.dtype) -> None:
    spec = SPECS["layer_norm"]
    case = next(c for c in spec.cases if c.name == "ragged")
    streams = Streams(spec.name, case.name)
    args = spec.cast(case, spec.inputs(case, streams), dtype)
    reference = spec.by_name(spec.reference)
    run = partial(core._run, spec, case, reference, args, torch.float32, streams=streams, layout="packed")
    runs = [run(perturbation=i) for i in (None, 0)]
    plain, perturbed = (results["db"][0].double() for results in runs)  # db is the sum of dy, and of nothing else
    rows = args["x"].shape[0]
    assert 0 < (plain - perturbed).abs().max() < 4 * rows * EPS
