"""The C++ counterparts of the GPU's micro-labs, timed by the CPU time of one thread, the least of some runs."""

import ctypes
import time
from collections.abc import Callable
from typing import Any

import torch

from bagu.errors import BaguError
from bagu.machine import native


def library() -> ctypes.CDLL:
    found = native.library("lab/parts/micro.cpp")
    if found is None:
        raise BaguError("the CPU part of this lab is C++, which could not be compiled", hint="install a C++ compiler")
    found.strided.restype = found.fma_chains.restype = ctypes.c_float
    found.branches.restype = ctypes.c_int64
    return found


def pointer(x: torch.Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(x.data_ptr())


def long(n: int) -> ctypes.c_int64:
    return ctypes.c_int64(n)


def least_s(call: Callable[[], Any], runs: int = 5) -> float:
    """Seconds of CPU time of this thread, the least of some runs: others can only make it longer."""
    call()
    found = []
    for _ in range(runs):
        start = time.thread_time()
        call()
        found.append(time.thread_time() - start)
    return min(found)


def random_cycle(lines: int, words: int, device: str) -> torch.Tensor:
    """next[i]: one random cycle over `lines` lines of `words` 32-bit words, so that a walk visits each line once."""
    order = torch.randperm(lines, device=device, generator=torch.Generator(device).manual_seed(0)) * words
    following = torch.zeros(lines * words, dtype=torch.int32, device=device)
    following[order] = order.roll(-1).to(torch.int32)
    return following
