"""Prepare the model and the process before the first step, and undo it after the last.

The model has no code for compilation or recomputation: both wrap its blocks here.
"""

import ctypes
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from bagu.errors import BackendError, BaguError
from bagu.machine import device as machine
from bagu.nn.block import Block
from bagu.nn.change import running_as
from bagu.nn.model import Transformer
from bagu.train.graphs import can_capture, captured
from bagu.train.state import Recompute, TrainConfig

M_TRIM_THRESHOLD, M_TOP_PAD, M_MMAP_MAX = -1, -2, -4  # of glibc's malloc.h


@contextmanager
def prepared(model: nn.Module, config: TrainConfig, device: torch.device) -> Iterator[None]:
    """Context manager: the model in training mode, with its blocks recomputed and compiled as configured.

    On a GPU, a small model that is neither recomputed, compiled nor in fp8 runs as CUDA graphs (graphs.py).
    """
    if device.type == "cpu":
        keep_freed_memory()
    with ExitStack() as stack:
        if config.deterministic:
            stack.enter_context(deterministic(device))
        # a vision model has several Transformers; of one that is divided, "blocks" are those of this rank
        blocks = list(model.get_submodule("blocks").children()) if hasattr(model, "blocks") else _blocks(model)
        if config.activation_checkpointing != "none":
            stack.enter_context(_recomputing(blocks, config.activation_checkpointing))
        compiles = config.compile is not False and _can_compile(device, asked=config.compile is True)
        if compiles:
            stack.enter_context(_compiled(blocks))
        whole = config.mesh.shard == 1 or config.zero_stage < 3  # stage 3 frees parameters, and a graph has addresses
        unchanged = whole and not config.mesh.divides_model and not compiles and _as_it_is(config)
        if (
            device.type == "cuda"
            and unchanged
            and isinstance(model, Transformer)
            and can_capture(model.config, _dtype(model))
        ):
            stack.enter_context(captured(model))
        was_training = model.training
        stack.callback(model.train, was_training)
        model.train()
        yield


def _blocks(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, Block)]


def _as_it_is(config: TrainConfig) -> bool:
    """Whether blocks run unchanged: a recomputed block runs twice, a graph may select other algorithms, and fp8 weights
    have a new address in every step."""
    return config.activation_checkpointing == "none" and not config.deterministic and config.precision is None


def _dtype(model: Transformer) -> torch.dtype:
    return model.embedding.weight.dtype


# --- recomputation ----------------------------------------------------------------------------------------------------

# "selective" keeps the outputs of products and attention: most of a block's FLOPs and a third of its activations.
# Norms, activation functions, RoPE and dropout are limited by memory, and are recomputed.
KEPT = ("mm", "matmul", "attention", "grouped")


def _keep(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    name = op.name().split("::")[-1]
    kept = any(part in name for part in KEPT)
    return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE


@contextmanager
def _recomputing(blocks: list[nn.Module], how: Recompute) -> Iterator[None]:
    """Each block frees its activations (all, or only the cheap ones) and recomputes them in the backward."""
    options: dict[str, Any] = {"use_reentrant": False}
    if how == "selective":
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, _keep)

    def recomputed(forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return checkpoint(forward, *args, **options, **kwargs)

        return run

    with ExitStack() as stack:
        for block in blocks:
            stack.enter_context(running_as(block, recomputed(block.forward)))
        yield


# --- compilation ------------------------------------------------------------------------------------------------------


def _can_compile(device: torch.device, *, asked: bool) -> bool:
    """Whether torch.compile works here. If not: raise if it was requested, else warn."""
    missing = None
    if device.type == "cpu" and machine.cxx_compiler() is None:
        missing = "a C++ compiler (g++ or clang++)"
    elif device.type == "cuda" and machine.c_compiler() is None:
        missing = "a C compiler (gcc or clang), by which Triton builds its launchers"
    if missing is None:
        return True
    message = f"torch.compile needs {missing}, and there is none here"
    if asked:
        raise BackendError(message, hint="install one, or set compile=false")
    warnings.warn(f"{message}: the run goes on without it", RuntimeWarning, stacklevel=3)
    return False


@contextmanager
def _compiled(blocks: list[nn.Module]) -> Iterator[None]:
    """Compile each block. Blocks share their code, so there is one compilation, not one per layer."""
    for block in blocks:
        block.compile(dynamic=False)  # all batches have the same shape
    try:
        yield
    finally:
        for block in blocks:
            block._compiled_call_impl = None


# --- the process ------------------------------------------------------------------------------------------------------


def keep_freed_memory() -> bool:
    """Ask glibc to keep freed memory instead of returning it to the system; return whether this succeeded.

    A step frees and allocates the same activations again, and every returned page causes a page fault and is zeroed: a
    sixth of a step of the 5.9M model. Applies to the whole process from here on; its resident memory stays at its peak.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        libc = ctypes.CDLL(None)
        options = {M_TRIM_THRESHOLD: 2**31 - 1, M_MMAP_MAX: 0, M_TOP_PAD: 2**26}
        return all(libc.mallopt(option, value) for option, value in options.items())
    except AttributeError:  # musl does not have this function
        return False


@contextmanager
def deterministic(device: torch.device) -> Iterator[None]:
    """Use only algorithms that give the same bits every time; an op that has none raises."""
    if device.type == "cuda" and os.environ.get("CUBLAS_WORKSPACE_CONFIG") not in (":4096:8", ":16:8"):
        raise BaguError(
            "deterministic=true on a GPU needs CUBLAS_WORKSPACE_CONFIG to be set before Python starts",
            hint="export CUBLAS_WORKSPACE_CONFIG=:4096:8",
        )
    was = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    memory: Any = torch.utils.deterministic
    filled = memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    memory.fill_uninitialized_memory = False  # it would fill every new tensor, for debugging
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was[0], warn_only=was[1])
        memory.fill_uninitialized_memory = filled
