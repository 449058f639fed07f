"""The other ranks of an engine with tp > 1: rank 0 starts them as processes of this machine, and watches them.

    rank 0 (the engine)                     rank r (rank.py)
    Ranks.send(message)    -> stdin ->      a thread reads messages; the main thread runs them in order
    collectives of a step  <- Gloo, NCCL -> the same collectives

A message is 4 bytes of length and a pickle. If rank 0 ends, its pipes close and the others end. If another rank ends,
`lost` says how. A collective of rank 0 then raises with Gloo, but waits for ever with NCCL: a thread ends the process.
"""

import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bagu.errors import ArgumentError, BaguError
from bagu.parallel.launch import COLLECTIVE_TIMEOUT, START_TIMEOUT_S
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh

HOST = "127.0.0.1"
NOTICE_S = 5.0  # for the exit of a rank to be seen after a collective failed, and for the failure after its exit


class RankLost(BaguError):
    """Another rank of the engine ended."""


class Close:
    """The last message: the rank ends."""


def backend_for(device: torch.device) -> str:
    return "nccl" if device.type == "cuda" else "gloo"


def here_key(rank: int) -> str:
    """Set in the store by a rank that is ready to join the process group."""
    return f"here/{rank}"


def failed_key(rank: int) -> str:
    """Set in the store by a rank that ends with an error, to the error."""
    return f"failed/{rank}"


def framed(message: Any) -> bytes:
    content = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return len(content).to_bytes(4, "big") + content


class Ranks:
    """Ranks 1 to `count` - 1, started by this process, which is rank 0 of the process group. `close` ends them."""

    def __init__(self, count: int, device: torch.device) -> None:
        if dist.is_initialized():
            raise ArgumentError(
                f"engine: tp = {count} in a process that has initialised torch.distributed",
                hint="start the engine in a process of its own; one process has one engine with tp > 1",
            )
        if device.type == "cuda" and torch.cuda.device_count() < count:
            raise ArgumentError(
                f"engine: tp = {count} on a machine with {torch.cuda.device_count()} GPUs",
                hint="each rank needs a GPU: lower tp, or use --device cpu",
            )
        if device.index:
            raise ArgumentError(
                f"engine: tp = {count} with device {device}", hint="use cuda, and CUDA_VISIBLE_DEVICES to choose GPUs"
            )
        self.count = count
        self._closed = False
        timeout = float(os.environ.get("BAGU_START_TIMEOUT", START_TIMEOUT_S))
        self._store = dist.TCPStore(HOST, 0, None, True, timedelta(seconds=timeout), wait_for_workers=False)
        self.processes = {rank: self._start(rank, device) for rank in range(1, count)}
        try:
            self._wait_for_all(timeout)
            dist.init_process_group(
                backend_for(device),
                store=dist.PrefixStore("group", self._store),
                rank=0,
                world_size=count,
                timeout=COLLECTIVE_TIMEOUT,
            )
            self.mesh: Mesh = open_mesh(MeshConfig(tp=count), device)
        except BaseException:
            self.close()
            raise
        for rank in self.processes:
            threading.Thread(target=self._watch, args=(rank,), daemon=True).start()

    def send(self, message: Any) -> None:
        """Send a message to all ranks. Does not wait until they run it."""
        data = framed(message)
        with self.explained():
            for process in self.processes.values():
                assert process.stdin is not None
                process.stdin.write(data)
                process.stdin.flush()

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Raise `RankLost` for an error inside that the end of another rank has caused."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, OSError) as error:
            end = time.monotonic() + NOTICE_S
            while (reason := self.lost()) is None and time.monotonic() < end:
                time.sleep(0.02)
            if reason is None:
                raise
            raise RankLost(reason) from error

    def check(self) -> None:
        """Raise `RankLost` if a rank has ended."""
        if (reason := self.lost()) is not None:
            raise RankLost(reason)

    def lost(self) -> str | None:
        """How a rank ended; None if all are running."""
        for rank, process in self.processes.items():
            code = process.poll()
            if code is None:
                continue
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            if code > 0 and self._store.check([failed_key(rank)]):
                how = f"failed: {self._store.get(failed_key(rank)).decode()}"
            return f"rank {rank} of tp = {self.count} {how}"
        return None

    def close(self) -> None:
        """End the other ranks. They have NOTICE_S for it and are killed then."""
        for process in self.processes.values():
            assert process.stdin is not None
            try:
                process.stdin.write(framed(Close()))
                process.stdin.close()
            except OSError:  # it has ended
                pass
        if dist.is_initialized():
            dist.destroy_process_group()
        end = time.monotonic() + NOTICE_S
        for process in self.processes.values():
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._closed = True

    def _start(self, rank: int, device: torch.device) -> subprocess.Popen[bytes]:
        command = "from bagu.serve.tp.rank import main; main()"
        words = [str(rank), str(self.count), str(self._store.port), device.type]
        return subprocess.Popen([sys.executable, "-c", command, *words], stdin=subprocess.PIPE)

    def _wait_for_all(self, timeout: float) -> None:
        end = time.monotonic() + timeout
        while not all(self._store.check([here_key(rank)]) for rank in self.processes):
            if (reason := self.lost()) is not None:
                raise RankLost(f"{reason} before the start", hint="its output is above")
            if time.monotonic() > end:
                raise BaguError(
                    f"the ranks of tp = {self.count} did not start within {timeout:.0f} s",
                    hint="BAGU_START_TIMEOUT sets the seconds to wait",
                )
            time.sleep(0.02)

    def _watch(self, rank: int) -> None:
        """After the end of a rank: give the engine time to raise and to close, then end this process, which would wait
        for ever in a collective."""
        self.processes[rank].wait()
        time.sleep(2 * NOTICE_S)
        if not self._closed:
            print(f"bagu: {self.lost()}; the engine ends", file=sys.stderr, flush=True)
            os._exit(1)
