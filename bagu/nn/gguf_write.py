"""Write a model as a GGUF file, for llama.cpp and its users: Llama, Qwen2 and Qwen3."""

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from bagu.errors import UnknownName
from bagu.machine.hub import WeightsError
from bagu.nn.families import family_for
from bagu.nn.gguf_file import package
from bagu.nn.gguf_names import gguf_metadata, gguf_name, to_pairs
from bagu.nn.model import Transformer
from bagu.nn.weights import parts_of

# our name -> the type of matrices, of the embedding and head, and llama.cpp's number of the file type. llama.cpp keeps
# the head of a Q4_0 file in more bits too.
GGUF_TYPES = {
    "f32": ("F32", "F32", 0),
    "f16": ("F16", "F16", 1),
    "bf16": ("BF16", "BF16", 32),
    "q8_0": ("Q8_0", "Q8_0", 7),
    "q4_0": ("Q4_0", "Q8_0", 2),
}
BLOCK = 32  # values that share a scale in Q8_0 and Q4_0


def save_gguf(
    model: Transformer, path: Path, *, quantization: str = "f16", metadata: Mapping[str, Any] | None = None
) -> None:
    """Write `path`, with matrices in the type `quantization` and vectors in F32. `metadata` is added to the file: the
    tokenizer (data/gguf_tokenizer.py). A matrix whose rows are no multiple of 32 is F16 in a quantized file."""
    UnknownName.check("GGUF quantization", quantization, GGUF_TYPES)
    gguf = package()
    family = family_for(model.config)
    hf = family.file(model.config)
    matrix, outer, file_type = GGUF_TYPES[quantization]
    facts = {**gguf_metadata(hf, model.config.head_dim), "general.file_type": file_type, **(metadata or {})}
    if matrix.startswith("Q"):
        facts["general.quantization_version"] = 2
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".partial-", dir=path.parent) as partial:
            made = Path(partial) / path.name
            writer = gguf.GGUFWriter(made, hf["model_type"])
            for key, value in facts.items():
                _add(writer, key, value)
            for name, part in parts_of(model, family).items():
                theirs, values = gguf_name(name), part.save()
                heads = {"attn_q": model.config.num_heads, "attn_k": model.config.num_kv_heads}.get(
                    theirs.split(".")[-2]
                )
                if hf["model_type"] == "llama" and heads is not None:
                    values = to_pairs(values, heads)
                kind = outer if theirs in ("token_embd.weight", "output.weight") else matrix
                _add_tensor(gguf, writer, theirs, values, kind)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            made.replace(path)
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error}", hint="free some space, or save elsewhere") from error


def _add_tensor(gguf: Any, writer: Any, name: str, values: torch.Tensor, kind: str) -> None:
    if values.dim() < 2:
        kind = "F32"
    elif kind.startswith("Q") and values.shape[-1] % BLOCK:
        kind = "F16"
    array = values.detach().cpu().float().numpy()
    if kind in ("F32", "F16"):
        writer.add_tensor(name, array.astype(np.float16) if kind == "F16" else array)
    else:
        as_type = gguf.GGMLQuantizationType[kind]
        writer.add_tensor(name, gguf.quants.quantize(array, as_type), raw_dtype=as_type)


def _add(writer: Any, key: str, value: Any) -> None:
    """One key of the metadata, with GGUF's type for the value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
