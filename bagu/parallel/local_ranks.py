"""Run a function on several local processes that form one Gloo group, for labs and benchmarks of parallel training."""

import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from bagu.errors import BaguError


def on_ranks(ranks: int, function: Callable[..., Any], *args: Any, timeout_s: float = 600) -> list[Any]:
    """The result of `function(*args)` on each rank. `function` is defined at the top of a module, and its arguments and
    results can be pickled. An error of one rank ends all of them."""
    methods = multiprocessing.get_all_start_methods()
    context: Any = multiprocessing.get_context("forkserver" if "forkserver" in methods else "spawn")
    if context.get_start_method() == "forkserver":  # import once, for all ranks; pipelines import _dynamo
        context.set_forkserver_preload(["torch", "torch._dynamo", "bagu.parallel.model_parallel"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes: dict[Connection, int] = {}
        processes: list[Any] = []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_serve, args=(theirs, rank, ranks, store, timeout_s, function, args))
            process.start()
            theirs.close()
            pipes[ours] = rank
            processes.append(process)
        try:
            return _collect(pipes, timeout_s)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _collect(pipes: dict[Connection, int], timeout_s: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        ready = wait([pipe for pipe, rank in pipes.items() if rank not in results], timeout_s)
        if not ready:
            raise BaguError(f"no rank answered within {timeout_s:g} s", hint="run it on an idle machine")
        for pipe, rank in [(pipe, rank) for pipe, rank in pipes.items() if pipe in ready]:
            try:
                good, results[rank] = pipe.recv()
            except EOFError:
                good, results[rank] = False, "it ended without a result"
            if not good:
                raise BaguError(f"rank {rank} failed: {results[rank]}")
    return [results[rank] for rank in sorted(results)]


def _serve(
    pipe: Connection,
    rank: int,
    ranks: int,
    store: str,
    timeout_s: float,
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        timeout = timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
        pipe.send((True, function(*args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
