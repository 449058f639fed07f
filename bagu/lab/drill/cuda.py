"""Level cuda: an answer's kernel, compiled by NVRTC and launched on the GPU in a process of its own, which has the
inputs and neither the truth nor the verdict. No host code of the answer runs.

The result lies between two bands of memory that the kernel must not write, and begins as NaN.
"""

from __future__ import annotations

import ctypes
import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self, cast

import torch

from bagu.errors import BaguError
from bagu.lab.drill import wire
from bagu.lab.drill.answers import CALL_S, GRACE_S, AnswerFault, Reply
from bagu.lab.drill.child import digest
from bagu.lab.drill.core import Drill
from bagu.lab.drill.cuda_source import launch, parameter
from bagu.lab.drill.signature import inputs_of, name_of

PACKAGE = Path(__file__).parents[3]
START = "import sys; sys.path.append(sys.argv[1]); from bagu.lab.drill.cuda import main; main(*sys.argv[2:])"
START_S = 120.0  # torch, a context of CUDA, NVRTC
BAND = 1024  # values before and after the result
ERROR = re.compile(r"\((\d+)\): error: ?(.*)")


def check_offered() -> None:
    """Raise if this machine has no CUDA."""
    if torch.version.cuda is None:
        raise BaguError(
            f"level cuda needs a CUDA build of torch, and this one is {torch.__version__}",
            hint="use --level triton here: its truth needs no GPU",
        )
    if not torch.cuda.is_available():
        raise BaguError(
            "level cuda needs a GPU, and torch finds none", hint="use --level triton here: its truth needs no GPU"
        )


class CudaAnswers:
    """What opens answers of level cuda, in place of `Answers`."""

    isolation = "a process with the inputs alone; no host code"

    def __init__(self, drill: Drill) -> None:
        check_offered()
        self.drill = drill

    def open(self, source: str, file: str, **_: Any) -> CudaAnswer:
        return CudaAnswer(self.drill, source, file)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None: ...


class CudaAnswer:
    """One answer in its process."""

    def __init__(self, drill: Drill, source: str, file: str) -> None:
        self.file = file
        mine, its = socket.socketpair()
        command = [sys.executable, "-c", START, str(PACKAGE), str(its.fileno()), drill.op]
        self.process = subprocess.Popen(command, pass_fds=[its.fileno()], stdin=subprocess.DEVNULL)
        its.close()
        self.channel = mine
        self._ask({"source": source}, START_S, "while the file is compiled")

    def call(
        self,
        function: str,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        seconds: float = CALL_S,
        reuse: bool = False,
        **_: Any,
    ) -> Reply:
        given = dict(kwargs or {})
        packed = {k: _packed(v) if isinstance(v, torch.Tensor) else v for k, v in given.items()}
        said = self._ask({"kwargs": packed, "reuse": reuse}, seconds, "in the kernel")
        before = [digest(t) for t in wire.tensors(packed)]
        return Reply(value=said["value"], changed=said["hashes"] != before)

    def _ask(self, asked: Mapping[str, Any], seconds: float, where: str) -> dict[str, Any]:
        self.channel.settimeout(seconds + GRACE_S)
        try:
            wire.send(self.channel, dict(asked))
            said = wire.receive(self.channel)
        except TimeoutError:
            self.close()
            raise AnswerFault(f"{self.file}: no result after {seconds:g} s {where}", cause="hangs") from None
        except (wire.Closed, OSError):
            self.close()
            raise AnswerFault(f"{self.file}: its process has ended ({where})", cause="dies") from None
        if "raised" in said:
            line = said["line"]
            at = f"{self.file} line {line}" if line else self.file
            raise AnswerFault(f"{at}: {said['raised']} ({where})", cause=said["cause"], line=line)
        return dict(said)

    def close(self, *, kill: bool = True) -> None:
        self.channel.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def _packed(x: torch.Tensor) -> torch.Tensor:
    """As a kernel gets it: without gaps, integers of 64 bits."""
    return (x if x.is_floating_point() or x.dtype is torch.bool else x.to(torch.int64)).contiguous()


def main(fd: str, op: str) -> None:
    """In that process: compile the source, then launch it for each call."""
    channel = socket.socket(fileno=int(fd))
    parts, results = inputs_of(op)
    device = Device(parts, results)
    while True:
        try:
            asked = wire.receive(channel)
        except wire.Closed:
            os._exit(0)
        try:
            said = device.compile(asked["source"]) if "source" in asked else device.run(asked["kwargs"], asked["reuse"])
        except (BaguError, RuntimeError) as error:  # RuntimeError: CUDA's own, which end the context
            said = fault(str(error))
        wire.send(channel, said)


def fault(message: str) -> dict[str, Any]:
    """One sentence of NVRTC's log or of CUDA's message."""
    found = ERROR.search(message)
    if found:
        return {"raised": f"NVRTC: {found[2].strip()}", "line": int(found[1]), "cause": "raises"}
    first = message.strip().splitlines()[0]
    if "illegal memory access" in message or "misaligned" in message or "status 7" in message:
        first = f"the kernel reached outside of its tensors ({first})"
        return {"raised": first, "line": None, "cause": "dies"}
    return {"raised": first, "line": None, "cause": "raises"}


class Device:
    """The kernel and the memory of its calls."""

    def __init__(self, inputs: Sequence[str], results: Sequence[str]) -> None:
        self.inputs, self.result = inputs, results[0]
        self.source, self.kernels = "", cast(Any, None)
        self.before: dict[str, torch.Tensor] = {}  # the inputs of the call before

    def compile(self, source: str) -> dict[str, Any]:
        from bagu.lab.parts.cuda import Kernels

        if 'extern "C" __global__ void kernel(' not in source:
            raise BaguError('it defines no `extern "C" __global__ void kernel(`')
        launch(source, 1, 1)
        self.source, self.kernels = source, Kernels(source, expects=())
        return {"compiled": True}

    def run(self, given: Mapping[str, Any], reuse: bool) -> dict[str, Any]:
        """The result of one launch, and digests of the inputs after it."""
        kept = [p for p in self.inputs if name_of(p) in given]
        on = {k: v.to("cuda") for k, v in given.items() if isinstance(v, torch.Tensor)}
        if reuse:
            on = {k: self.before[k].copy_(v) for k, v in on.items()}
        self.before = on
        first = on[name_of(self.inputs[0])]
        N = first.shape[-1]
        M = first.numel() // N if N else 0
        whole = "N]" in self.result  # a result for each column, or one for each row
        y = torch.full(((M * N if whole else M) + 2 * BAND,), torch.nan, device="cuda")
        arguments = [self._argument(p, on.get(name_of(p)), given[name_of(p)]) for p in kept]
        if M * N:
            blocks, threads = launch(self.source, M, N)
            result = y[BAND:]
            self.kernels("kernel", blocks, threads, *arguments, result, _long(M), _long(N))
            torch.cuda.synchronize()
        if not (y[:BAND].isnan().all() and y[len(y) - BAND :].isnan().all()):
            raise BaguError("the kernel wrote outside of its result")
        value = y[BAND : len(y) - BAND].cpu().clone().view(first.shape if whole else first.shape[:-1])
        return {"value": value, "hashes": [digest(t.cpu()) for t in wire.tensors(on)]}

    @staticmethod
    def _argument(part: str, tensor: torch.Tensor | None, value: Any) -> Any:
        """What the kernel's parameter gets. Integers are 64 bits."""
        kind = parameter(part).rpartition(" ")[0]
        if tensor is not None:
            return tensor
        if kind.endswith("*"):
            return ctypes.c_void_p(None)
        return _long(value) if kind == "long long" else float(value)


def _long(value: int) -> Any:
    return ctypes.c_longlong(value)
