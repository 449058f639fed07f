"""ONNX Runtime as a peer of `bagu bench layers`: a layer is exported in memory and run by a session."""

import importlib.util
import logging
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn


def why_no_onnx(device: torch.device) -> str | None:
    """Why ONNX Runtime cannot be timed on `device`; None if it can."""
    absent = [name for name in ("onnx", "onnxruntime", "onnxscript") if importlib.util.find_spec(name) is None]
    if absent:
        return f"{', '.join(absent)} not installed (pip install onnx onnxruntime onnxscript)"
    import onnxruntime  # type: ignore[import-not-found,unused-ignore]

    wanted = "CUDAExecutionProvider" if device.type == "cuda" else "CPUExecutionProvider"
    return None if wanted in onnxruntime.get_available_providers() else f"this onnxruntime has no {wanted}"


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def onnx_runner(model: nn.Module, x: torch.Tensor) -> Callable[[], Any] | None:
    """A call of the exported layer on x; None if ONNX Runtime is absent or has no operator for this dtype or layer."""
    if why_no_onnx(x.device) is not None:
        return None
    import onnxruntime

    threads = onnxruntime.SessionOptions()
    threads.intra_op_num_threads = torch.get_num_threads()
    # its idle threads would spin on the cores of the implementation that is timed next
    threads.add_session_config_entry("session.intra_op.allow_spinning", "0")
    provider = "CUDAExecutionProvider" if x.is_cuda else "CPUExecutionProvider"
    try:
        # the exporter names absent torchvision operators
        with warnings.catch_warnings(), _quiet(logging.getLogger("torch.onnx")):
            warnings.simplefilter("ignore")
            program = torch.onnx.export(model.eval(), (x,), dynamo=True, verbose=False)
            assert program is not None
        session = onnxruntime.InferenceSession(program.model_proto.SerializeToString(), threads, providers=[provider])
        given = {session.get_inputs()[0].name: x.detach().cpu().numpy()}
        session.run(None, given)
    except Exception:  # an operator or dtype that the exporter or the runtime does not have
        return None
    return lambda: session.run(None, given)[0]
