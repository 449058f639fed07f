"""Every branch of every launcher is taken by a case that conformance checks."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
import traceback
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from bagu.errors import BackendError
from tests.ops import branches, sources
from tests.ops.mutants import replace_modules
from tests.ops.points import Point, other_points, points, small, tunings
from tests.ops.reaching import launch

# part of a branch's text -> why no case on a CPU takes it
ELSEWHERE = {
    "is_cuda": "CUDA",
    "device.type": "CUDA and meta tensors",
    "device.index": "CUDA",
    "is_compiling": "under torch.compile: test_compiles_as_one_graph_with_the_same_result",
    "bfloat16": "bf16 is garbage in the interpreter",
    "hidden.dtype == out.dtype": "a CPU widens fp16 before the product",
    "self.total.dtype == dlogits.dtype": "bf16",
    "x.element_size() == 16": "complex128, which has no fp64 reference: test_transpose_carries_out_a_conjugation",
    "max(1, V * itemsize) gives 1": "a vocabulary of none",
    "not (math.isfinite(high))": "1 / tau past fp32's largest value",
    "matmul.triton_backend.by_tma: not (reads_by_tma(x))": "GPUs older than Hopper",
    "matmul.triton_backend.forward: not (by_tma(rows))": "rows that begin at an address that is not 16-byte aligned",
    "linear_cross_entropy.tile_kernels.fits: not (by_tma(rows))": "as above",
    "mla_attention.triton_backend._fits_hopper": "meta tensors: the compile gate",
    "mla_attention.triton_backend.forward: hopper": "a kernel in Gluon, which has no interpreter",
    "int8_attention.triton_backend._fits_hopper": "meta tensors: the compile gate",
    "int8_attention.triton_backend.forward: hopper": "a kernel in Gluon, which has no interpreter",
    "conv2d.torch_backend._wide: not (widens)": "CUDA",
    "conv2d.triton_backend.as_nhwc": "channels first in memory: test_conv2d.py",
    "conv2d.triton_backend._fits_hopper": "meta tensors: the compile gate",
    "conv2d.triton_backend._by_boxes": "a kernel in Gluon, which has no interpreter",
    "conv2d.triton_backend._box": "as above",
    "conv2d.triton_backend.convolve: _fits_hopper": "as above",
    "grouped_matmul.torch_backend": "torch's dw: bf16 on CUDA",
    "grouped_matmul.triton_backend.backward: by_torch": "as above",
    "grouped_matmul.triton_backend.multiply_weights: not dw.numel()": "no feature",
    "paged_attention.triton_backend._starts_next": "dependent launches: Hopper",
    "linear_cross_entropy_loss.triton_backend.forward: a.token_weights is None": "cases without gradients have weights",
    "tile.M * x.stride(0)": "a row stride of more than 2^31 elements: test_far_memory.py",
    # how rows are shared among programs and warps on a GPU, for speed alone
    "kernels.norms.run_backward: not (tile.per_sm)": "programs per multiprocessor",
    "layer_norm.triton_backend._long_rows": "programs and warps of rows past 8,192",
    "layer_norm.triton_backend.forward_tile: block_n == 8192": "programs per multiprocessor",
    "layer_norm.triton_backend.forward_tile: per_sm": "programs per multiprocessor",
    "quantize_int8.triton_backend": "tunings and fp64 meet the first two cases alone, which are by row",
    "softmax.triton_backend._registers": "registers",
    "softmax.wide_kernels._programs: num_warps": "tunings meet the second case alone, which is not wide",
    "softmax.wide_kernels._programs: not (2 * sms * row_bytes <= L2_BYTES)": "rows larger than the L2",
}


def untaken() -> list[str]:
    """The arms that no case takes. For a process of its own: the backends are loaded anew, with recording launchers."""
    with tempfile.TemporaryDirectory() as folder:
        changed = {m: branches.instrumented(m) for m in sources.modules("triton")}
        replace_modules(changed, "triton", Path(folder))
        with branches.kernels_switched_off():
            for spec in branches.triton_specs():
                module = importlib.import_module(sources.backend_module(spec, "triton"))
                backward = getattr(module, "backward", None)
                double = Point(small(spec)[0], torch.float64, "packed")  # as gradcheck has it
                for point in [*points(spec, "triton"), *other_points(spec), double]:
                    launch(spec, point, module.forward, backward)
                    if (invariant := getattr(module, "invariant_forward", None)) is not None:
                        with suppress(BackendError):  # an 8-bit cache has no invariant mode
                            launch(spec, point, invariant, backward)
                tuned = Point(small(spec)[1], torch.float16, "packed")
                for function, tuning in tunings(spec, "triton"):
                    with_tuning = lambda *a, **b: getattr(module, function)(*a, **b, **tuning)  # noqa: B023, E731
                    forward = with_tuning if function == "forward" else module.forward
                    launch(spec, tuned, forward, with_tuning if function == "backward" else backward)
    return sorted({name for arm, name in branches.arms.items() if arm not in branches.taken})


@pytest.mark.skipif(torch.cuda.is_available(), reason="launchers run on a CPU, with kernels that do nothing")
def test_a_case_takes_every_branch_of_every_launcher() -> None:
    read, write = os.pipe()
    if (child := os.fork()) == 0:
        torch.set_num_threads(1)
        try:
            found = untaken()
        except BaseException:
            found = [traceback.format_exc()]
        with os.fdopen(write, "w") as pipe:
            json.dump(found, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = json.load(pipe)
    os.waitpid(child, 0)
    missing = [arm for arm in found if not any(part in arm for part in ELSEWHERE)]
    stale = [part for part in ELSEWHERE if not any(part in arm for arm in found)]
    assert not stale, f"cases take these branches now, take them off ELSEWHERE: {stale}"
    assert not missing, "no case takes these branches:\n" + "\n".join(missing)
