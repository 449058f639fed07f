"""The process of rank 1 and above of an engine with tp > 1: it runs what rank 0 sends, until `Close`.

python -c "from bagu.serve.tp.rank import main; main()" RANK RANKS PORT DEVICE      (started by group.py)
"""

import os
import pickle
import queue
import signal
import sys
import threading
import traceback
from datetime import timedelta
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from bagu.errors import ArgumentError
from bagu.parallel.inference import local_heads
from bagu.parallel.launch import COLLECTIVE_TIMEOUT, START_TIMEOUT_S, Place, use_own_gpu
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh
from bagu.serve.kv.paged import PagedKV, cache_dtype
from bagu.serve.runner import Runner
from bagu.serve.tp.group import HOST, Close, backend_for, failed_key, here_key
from bagu.serve.tp.messages import Cache, Logits, Logprobs, Setup, Step
from bagu.serve.tp.parts import receive_part

Messages = queue.SimpleQueue[Any]


def main() -> None:
    """Join the group, then run messages. An error is left in the store for rank 0 and ends the process."""
    for number in (signal.SIGINT, signal.SIGTERM):  # a terminal signals all processes; rank 0 decides when to end
        signal.signal(number, signal.SIG_IGN)
    rank, ranks, port = map(int, sys.argv[1:4])
    messages: Messages = queue.SimpleQueue()
    threading.Thread(target=_receive, args=(sys.stdin.buffer, messages), daemon=True).start()
    store = dist.TCPStore(HOST, port, None, False, timedelta(seconds=START_TIMEOUT_S))
    try:
        use_own_gpu(Place(rank=rank, ranks=ranks, local_rank=rank, host=HOST, port=port))
        device = torch.device(sys.argv[4])
        store.set(here_key(rank), "")
        dist.init_process_group(
            backend_for(device),
            store=dist.PrefixStore("group", store),
            rank=rank,
            world_size=ranks,
            timeout=COLLECTIVE_TIMEOUT,
        )
        with torch.inference_mode():
            serve(messages, open_mesh(MeshConfig(tp=ranks), device))
        dist.destroy_process_group()
    except Exception as error:
        traceback.print_exc()
        store.set(failed_key(rank), f"{type(error).__name__}: {error}")
        sys.stderr.flush()
        os._exit(1)  # not sys.exit: destroying a process group waits for ranks that wait for this one


def serve(messages: Messages, mesh: Mesh) -> None:
    runner = _runner(messages, mesh)
    if runner is None:
        return
    config, weight = runner.source.config, runner.source.embedding.weight

    def hidden(rows: int) -> torch.Tensor:
        return _broadcast(torch.empty(rows, config.hidden_size, dtype=weight.dtype, device=weight.device))

    while True:
        match messages.get():
            case Step(plan, late):
                runner.run(
                    plan, _broadcast(torch.empty(late, dtype=torch.int64, device=weight.device)) if late else None
                )
            case Logits(rows):
                runner.logits(hidden(rows))
            case Logprobs(rows):
                states = hidden(rows)
                runner.logprobs(states, _broadcast(torch.empty(rows, dtype=torch.int64, device=weight.device)))
            case Close():
                return
            case other:
                raise ArgumentError(f"a rank got {other!r}", hint="messages.py lists what rank 0 sends")


def _runner(messages: Messages, mesh: Mesh) -> Runner | None:
    """This rank's part of the model and its KV pool; None if the engine is closed before."""
    setup = messages.get()
    if not isinstance(setup, Setup):
        return None
    if setup.engine.threads is not None:
        torch.set_num_threads(setup.engine.threads)
    model = receive_part(setup.model, setup.dtype, setup.tensors, mesh)
    cache = messages.get()
    if not isinstance(cache, Cache):
        return None
    kv = PagedKV(
        local_heads(setup.model, mesh.size("tp")),
        cache.num_blocks,
        cache.block_size,
        device=mesh.device,
        dtype=cache_dtype(setup.engine.kv_dtype, model.embedding.weight.dtype),
        groups=cache.groups,
    )
    return Runner(model, kv, setup.engine, cache.max_model_len, mesh)


def _broadcast(tensor: torch.Tensor) -> torch.Tensor:
    dist.broadcast(tensor, 0)
    return tensor


def _receive(pipe: BinaryIO, messages: Messages) -> None:
    """Read messages, also while the main thread waits in a collective. End the process if rank 0 ends."""
    while True:
        head = pipe.read(4)
        content = pipe.read(int.from_bytes(head, "big")) if len(head) == 4 else b""
        if not content:
            os._exit(1)
        message = pickle.loads(content)
        messages.put(message)
        if isinstance(message, Close):
            return
