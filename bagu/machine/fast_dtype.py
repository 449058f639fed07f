"""The faster dtype for matrix products on this machine: bf16 or fp32.

On a GPU the compute capability decides. On a CPU it is measured, because CPU flags are not enough: Intel's AMX and
AVX512-BF16, Arm's BF16 extension and Apple's chips can multiply bf16 faster than fp32, but a build of torch may have no
kernel for them. Without such instructions torch's bf16 product is a scalar loop (130 to 600 times slower than fp32 on a
Neoverse-N1). The rates are stored in the cache folder, in one file per CPU, torch version, number of threads and
settings of the math libraries.
"""

import contextlib
import functools
import hashlib
import json
import math
import os
import time
import warnings
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from bagu.config import write_atomic
from bagu.machine import device as machine
from bagu.machine.cache import cache_folder

MIN_GAIN = 1.2  # the speedup bf16 must give: casts between fp32 master weights and bf16 weights cost about as much
# Environment variables that make the math libraries choose other kernels.
SETTINGS = (
    "ATEN_CPU_CAPABILITY",
    "DNNL_MAX_CPU_ISA",
    "MKL_ENABLE_INSTRUCTIONS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
)


@dataclass(frozen=True, kw_only=True)
class MatmulRates:
    """FLOP/s of a square matrix product on this CPU, both dtypes measured at the same size, alternating."""

    fp32: float
    bf16: float

    @property
    def fastest(self) -> torch.dtype:
        return torch.bfloat16 if self.bf16 >= MIN_GAIN * self.fp32 else torch.float32


def compute_dtype(device: torch.device) -> torch.dtype:
    """The default compute dtype of a model on `device`: bf16 if it is faster than fp32, else fp32."""
    if device.type == "cuda":
        return torch.bfloat16 if machine.gpu(device).capability >= (8, 0) else torch.float32
    return matmul_rates().fastest


def compute_dtype_name(device: torch.device) -> Literal["bf16", "fp32"]:
    """`compute_dtype` as the name used in configs and flags."""
    return "bf16" if compute_dtype(device) == torch.bfloat16 else "fp32"


def matmul_rates() -> MatmulRates:
    """The rates of this CPU, from the cache or measured now (a fraction of a second)."""
    facts = {
        "cpu": machine.cpu_model(),
        "features": machine.cpu_features(),
        "torch": torch.__version__,
        "threads": str(torch.get_num_threads()),
        **{name: os.environ.get(name, "") for name in SETTINGS},
    }
    return _rates_of(tuple(facts.items()), cache_folder())


@functools.cache
def _rates_of(facts: tuple[tuple[str, str], ...], folder: Path) -> MatmulRates:
    digest = hashlib.sha256(repr(facts).encode()).hexdigest()[:24]
    path = folder / "matmul" / f"{digest}.json"
    found = _read(path)
    if found is None:
        found = _measure()
        with contextlib.suppress(OSError):  # if the folder is not writable, each process measures again
            write_atomic(path, json.dumps({**asdict(found), "of": dict(facts)}, indent=1) + "\n")
    return found


def _read(path: Path) -> MatmulRates | None:
    """The rates in a cache file; None if it does not exist or `_rates_of` did not write it."""
    try:
        rates: Mapping[str, object] = json.loads(path.read_text(encoding="utf-8"))
        found = {name: rates[name] for name in ("fp32", "bf16")}
    except (OSError, ValueError, KeyError, TypeError):
        return None
    good = all(type(rate) is float and math.isfinite(rate) and rate > 0 for rate in found.values())
    return MatmulRates(**found) if good else None  # type: ignore[arg-type]


def _measure() -> MatmulRates:
    """Increase the size until bf16 is clearly slower, or the product is large enough to be compute-bound.

    Side 64 detects a scalar bf16 loop in a few milliseconds; at side 1,024 that loop would take a minute. Tile units
    (AMX) reach their rate only on a large product.
    """
    rates = MatmulRates(fp32=1.0, bf16=1.0)
    with warnings.catch_warnings(), torch.no_grad():
        # On a CPU without bf16, oneDNN's fallback prints a warning with a C++ stack trace.
        warnings.simplefilter("ignore", UserWarning)
        for side in (64, 256, 1024):
            rates = _rates_at(side)
            if rates.bf16 < rates.fp32 / 4:
                break
    return rates


def _rates_at(side: int, rounds: int = 4) -> MatmulRates:
    """The best rate of several products per dtype. The dtypes alternate, so that other load affects both."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(side, side, generator=generator)
    inputs = {"fp32": x, "bf16": x.bfloat16()}
    best = dict.fromkeys(inputs, math.inf)
    for turn in range(1 + rounds):
        for name, x in inputs.items():
            began = time.perf_counter()
            torch.mm(x, x)
            if turn:  # the first round is warmup
                best[name] = min(best[name], time.perf_counter() - began)
    return MatmulRates(**{name: 2 * side**3 / seconds for name, seconds in best.items()})
