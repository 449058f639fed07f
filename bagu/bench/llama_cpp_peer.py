"""llama.cpp as a peer of `bagu bench engine --streams 1`: the same weights in the same run, as a GGUF file.

The type of the file has the bits of the engine's weights: Q8_0 for int8, Q4_0 for int4, else F16. llama.cpp runs in its
own process with the user's environment, because it has its own OpenMP settings.
"""

import importlib.util
import os
import statistics
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from bagu.bench.engine_timing import Case
from bagu.bench.harness import script_rates
from bagu.errors import ArgumentError, BaguError
from bagu.machine.openmp import settings
from bagu.nn.gguf_write import save_gguf
from bagu.nn.model import Transformer

LLAMA_CPP = "llama.cpp"
TYPES = {"int8": "q8_0", "int4": "q4_0"}
SCRIPT = Path(__file__).with_name("llama_cpp_run.py")


def check_llama_cpp(case: Case, device: torch.device) -> None:
    """Raise before anything is timed if the peer cannot run this measurement."""
    if case.streams != (1,) or device.type != "cpu":
        raise ArgumentError("the peer llama.cpp measures one stream on a CPU", hint="add --streams 1 --device cpu")
    if importlib.util.find_spec("llama_cpp") is None:
        raise BaguError("the peer llama.cpp needs llama-cpp-python", hint="pip install llama-cpp-python")


def llama_cpp_row(
    model: Transformer, case: Case, quantization: str | None, environ: Mapping[str, str] | None
) -> dict[str, Any]:
    """The row of the repeat with the median decode rate."""
    kind = TYPES.get(quantization or "", "f16")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.gguf"
        save_gguf(model, file, quantization=kind, metadata={"tokenizer.ggml.model": "none"})
        sizes = (model.config.vocab_size, case.prompt, case.new, case.repeats, torch.get_num_threads())
        found = script_rates(SCRIPT, environ, arguments=[str(file), *map(str, sizes)])
        stored = file.stat().st_size
    middle = statistics.median_low(row["tokens_per_s"] for row in found)
    row = next(row for row in found if row["tokens_per_s"] == middle)
    return {
        "implementation": LLAMA_CPP,
        "streams": 1,
        "tokens_per_s": middle,
        "prompt_tokens_per_s": row["prompt_tokens_per_s"],
        "gguf_type": kind,
        "file_bytes": stored,
        "reported": row,
        "openmp": settings(os.environ if environ is None else environ),
    }
