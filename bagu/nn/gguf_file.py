"""Read GGUF files (llama.cpp) of Llama, Qwen2 and Qwen3: metadata as a config.json, tensors under Hugging Face's names.

Every type that the `gguf` package can dequantize is read, from F32 and F16 to Q4_0, Q8_0 and the K types; its values
are expanded when a tensor is read. llama.cpp rotates neighbouring pairs in Llama's heads, so the rows of q and k are in
another order there (`to_halves` of gguf_names.py).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bagu.machine.hub import WeightsError
from bagu.nn.gguf_names import hf_config, hf_name, to_halves
from bagu.nn.stored import StoredTensor

FLOATS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}


def is_gguf(path: Path) -> bool:
    return path.suffix == ".gguf" and path.is_file()


def package() -> Any:
    """The `gguf` package; raises if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise WeightsError(f"GGUF files need the package gguf: {error}", hint="pip install 'bagu[gguf]'") from error
    return gguf


@dataclass(frozen=True)
class GgufFile:
    metadata: Mapping[str, Any]
    hf: Mapping[str, Any]  # the model as a config.json
    tensors: Mapping[str, StoredTensor]  # by Hugging Face's names


def read_gguf(path: Path) -> GgufFile:
    """Read the metadata and the list of tensors; raises WeightsError if the file is broken or not supported."""
    gguf = package()
    try:
        reader = gguf.GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
        found = {tensor.name: tensor for tensor in reader.tensors}
    except (OSError, ValueError, IndexError, KeyError, TypeError, OverflowError, MemoryError) as error:
        raise WeightsError(
            f"cannot read {path} as GGUF: {error}", hint="the file may be incomplete: download or write it again"
        ) from error
    if metadata.get("split.count", 0) > 1:
        raise WeightsError(
            f"{path} is one of {metadata['split.count']} files of a model",
            hint="join them with llama.cpp's llama-gguf-split --merge",
        )
    hf = hf_config(metadata, {name: tuple(int(n) for n in reversed(t.shape)) for name, t in found.items()}, path)
    return GgufFile(metadata, hf, {hf_name(name, path): _stored(gguf, t, hf, path) for name, t in found.items()})


def _stored(gguf: Any, tensor: Any, hf: Mapping[str, Any], path: Path) -> StoredTensor:
    kind, shape = tensor.tensor_type.name, tuple(int(n) for n in reversed(tensor.shape))
    heads = {"attn_q": hf["num_attention_heads"], "attn_k": hf["num_key_value_heads"]}
    part = tensor.name.split(".")[-2]

    def read() -> torch.Tensor:
        if kind in ("F32", "F16"):
            values = torch.from_numpy(tensor.data.copy())
        else:
            try:
                values = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type))
            except (NotImplementedError, ValueError) as error:
                raise WeightsError(
                    f"{path}: cannot read {tensor.name} of type {kind}: {error}",
                    hint="convert the file to Q8_0 or F16 with llama.cpp's llama-quantize",
                ) from error
        values = values.reshape(shape)
        rotates_pairs = hf["model_type"] == "llama" and part in heads
        return to_halves(values, heads[part]) if rotates_pairs else values

    return StoredTensor(shape, FLOATS.get(kind, "float32"), read)
