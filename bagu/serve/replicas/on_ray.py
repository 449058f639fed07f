"""Engine processes on a Ray cluster: Ray keeps cores or a GPU for each and says when one has died.

The actor that Ray places starts the engine as a child, since an engine handles signals in its main thread; the engine
connects to the server (worker/connect.py), and tokens never pass through Ray. An engine that ends is started again by
its server, where Ray then finds room.
"""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from bagu.errors import ArgumentError, BaguError
from bagu.parallel.server.on_ray import Actor, Host, OnRay
from bagu.parallel.unlike.workers import Worker
from bagu.serve.http.launch import EngineStart, Launch
from bagu.serve.worker.connect import Offer

PLACE_S = 600.0  # until Ray has found room, and may have started a machine
POLL_S = 0.05


class RayEngines:
    """The engines of one server on the cluster at `address`: auto, local, or its address."""

    def __init__(self, address: str) -> None:
        self._start = OnRay(address)
        found = self._start.ray.cluster_resources()
        self.cores, self.gpus = int(found.get("CPU", 0)), int(found.get("GPU", 0))

    def launch(self, worker: Worker) -> Launch:
        """How the engines of a replica are started; every start may be on another machine."""
        if worker.kind == "cpu" and worker.cores is None:
            raise ArgumentError("a replica cpu on Ray", hint='name its cores, which Ray keeps for it: "2x cpu:4"')
        return partial(RayEngine, self._start, worker)


class RayEngine:
    """An engine process of a cluster; a `LaunchedEngine`."""

    def __init__(self, on: OnRay, worker: Worker, start: EngineStart, stopping: Callable[[], bool]) -> None:
        offer = Offer(on.node())
        host = on.ray.remote(num_cpus=worker.cores or 1, num_gpus=int(worker.kind == "cuda"), max_restarts=0)(Host)
        actor = host.options(scheduling_strategy="SPREAD").remote()
        command = [sys.executable, "-m", "bagu.serve.worker", offer.address[0], str(offer.address[1])]
        environ = {**offer.environ(), "OMP_NUM_THREADS": str(start.config.threads or 1)}
        begun = actor.run.remote(command, environ, str(Path.cwd()))
        self._actor, connection, end = Actor(on.ray, actor, begun), None, time.monotonic() + PLACE_S
        try:
            while connection is None:
                if on.ray.wait([begun], timeout=0)[0]:
                    on.ray.get(begun)  # raises what starting the command raised
                if (code := self._actor.poll()) is not None:
                    raise BaguError(f"the engine of {worker} ended with {code}", hint="the log of Ray says why")
                if stopping() or time.monotonic() > end:
                    raise BaguError(f"Ray has started no engine of {worker} until now", hint="ray status")
                connection = offer.accept(start, POLL_S)
        except on.ray.exceptions.RayError as error:
            self._actor.kill()
            raise BaguError(f"Ray cannot start {worker}: {str(error).splitlines()[-1]}", hint="ray status") from error
        except BaguError:
            self._actor.kill()
            raise
        finally:
            offer.close()
        self.connection, self.pid = connection, self._actor.pid

    def kill(self) -> None:
        if self._actor.poll() is None:
            self._actor.send_signal(signal.SIGKILL)

    def join(self, timeout: float) -> None:
        """Then Ray may use its cores again."""
        end = time.monotonic() + timeout
        while self._actor.poll() is None and time.monotonic() < end:
            time.sleep(POLL_S)
        if self._actor.poll() is not None:
            self._actor.kill()

    @property
    def exit_code(self) -> int | None:
        return self._actor.poll()
