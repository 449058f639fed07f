"""ONNX export: the forward of a model as a graph, from input_ids [batch, seq] to logits [batch, seq, V].

Both dims are dynamic. Every row of `input_ids` is a sequence of its own from position 0, and all have one length: the
graph has no attention mask and no key-value cache. It is traced by torch.export from the torch backends of the ops, and
translated by torch.onnx.
"""

import importlib
import warnings
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from bagu import ops
from bagu.errors import ArgumentError, BaguError
from bagu.machine.hub import WeightsError
from bagu.nn.config import Rope
from bagu.nn.model import Transformer
from bagu.nn.position_choices import Learned

PACKAGES = ("onnx", "onnxscript")


def check_onnx(dtype: str | None = None) -> None:
    """Raise if the packages for the export are missing, or if the weights should have another dtype than fp32."""
    if dtype not in (None, "fp32", "float32"):
        raise ArgumentError(f"ONNX in {dtype}", hint="ONNX is written in fp32: leave --dtype out")
    for name in PACKAGES:
        _package(name)


def _package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise BaguError(
            f"the ONNX export needs the package {name}, which is not installed", hint="pip install 'bagu[onnx]'"
        ) from error


class _Graph(nn.Module):
    def __init__(self, model: Transformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        batch, length = input_ids.shape
        positions = torch.arange(length).repeat(batch)
        offsets = torch.arange(batch + 1, dtype=torch.int32) * length
        hidden = self.model(input_ids.flatten(), positions, offsets, length).hidden
        return self.model.logits(hidden).unflatten(0, (batch, length))


def export_onnx(model: Transformer, path: str | Path) -> None:
    """Write `model`, in fp32 on a CPU, to `path`. Weights of more than 1.5 GB are written beside it (`path`.data)."""
    check_onnx()
    _refuse(model)
    if (scaling := model.config.longrope) is not None:
        model = model.for_length(scaling.original_max_len)  # a graph has one list of factors, the exact one up to here
    example = torch.zeros(2, min(7, model.config.max_len), dtype=torch.int64)
    sizes = {0: torch.export.Dim("batch"), 1: torch.export.Dim("seq", max=model.config.max_len)}
    with torch.no_grad(), ops.use("torch"), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch and onnxscript about their own deprecated calls
        program = torch.export.export(
            _Graph(model.eval()), (example,), dynamic_shapes={"input_ids": sizes}, strict=False
        )
        graph = torch.onnx.export(
            program, dynamo=True, verbose=False, input_names=["input_ids"], output_names=["logits"]
        )
    assert graph is not None, "torch.onnx.export returns a program if dynamo is True"
    try:
        graph.save(str(path))
    except OSError as error:
        raise WeightsError(f"cannot write {path}: {error}", hint="free some space, or write elsewhere") from error


def _refuse(model: Transformer) -> None:
    config = model.config
    parameter = model.embedding.weight
    found = {
        "a mixture of experts: how many tokens an expert has is known only at run time": any(
            config.experts(i) is not None for i in range(config.num_layers)
        ),
        "linear attention": config.attention == "linear",
        "attention to chosen blocks": config.attention == "blocks",
        # these may work: nobody has compared their logits with ONNX Runtime's
        "multi-head latent attention": config.mla is not None,
        "a sliding window": any(config.window(i) is not None for i in range(config.num_layers)),
        f"{type(config.positions).__name__} positions": not isinstance(config.positions, Rope | Learned),
        "a score head": model.score is not None,
        f"weights in {parameter.dtype} on {parameter.device}": (parameter.dtype, parameter.device.type)
        != (torch.float32, "cpu"),
    }
    for what, is_so in found.items():
        if is_so:
            raise ArgumentError(f"the ONNX export does not support {what}", hint="export to safetensors or GGUF")
