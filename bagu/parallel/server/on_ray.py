"""The processes of a run on a Ray cluster: Ray places them and says when one has died; values travel by bagu's sockets.

Every server is one actor. A worker is a child process of its actor, because a run handles signals in its main thread.
The manager and worker 0 run where the command was given: worker 0 writes the folder of the run and shows its progress.
Actors are not restarted by Ray: one that it restarts has lost
its state and answers, and the group starts its own. Ray is imported only here.
"""

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.parallel.server.__main__ import serve
from bagu.parallel.server.group import Process, start_here
from bagu.parallel.server.place import Place

TRIES = 3


def import_ray() -> Any:
    """The module; raises a sentence that says how to get it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # leave CUDA_VISIBLE_DEVICES to bagu
    try:
        import ray
    except ImportError as error:
        raise BaguError("Ray is asked for, and it is not installed", hint="pip install 'bagu[ray]'") from error
    version = tuple(int(part) for part in ray.__version__.split(".")[:2])
    if not (2, 56) <= version < (3, 0):
        raise BaguError(f"Ray is {ray.__version__}, and bagu needs 2.56 to 3", hint="pip install 'bagu[ray]'")
    return ray


def start_ray(address: str) -> Any:
    """Connect to a cluster ("auto" or its address), or start one on this machine ("local"), with three tries: Ray gives
    up after a fixed time when the machine is busy."""
    ray = import_ray()
    if ray.is_initialized():
        return ray
    here = address == "local"
    if here:
        os.environ.setdefault("RAY_AUTH_MODE", "disabled")  # else it writes a token into the home folder
        os.environ.setdefault("RAY_worker_niceness", "0")  # 15 by default: on a busy machine servers would starve
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "error"}
    if here:
        options |= {"address": "local", "include_dashboard": False, "object_store_memory": 100 << 20, "num_cpus": 64}
    else:
        options |= {"address": address}
    for attempt in range(TRIES):
        try:
            ray.init(**options)
            return ray
        except Exception as error:  # of many kinds, from several processes
            ray.shutdown()
            if attempt == TRIES - 1 or not here:
                hint = "the machine may be too busy to start it" if here else "is the cluster up? ray status"
                raise BaguError(
                    f"Ray at {address!r} cannot be used: {str(error).splitlines()[0]}", hint=hint
                ) from error
            time.sleep(1 + attempt)
    raise AssertionError


def examine(address: str = "local") -> list[str]:
    """Whether Ray can be started here, how long that takes, what a call costs, where its object store is."""
    begun = time.monotonic()
    ray = start_ray(address)
    try:
        lines = [f"Ray {ray.__version__} at {address!r}: started in {time.monotonic() - begun:.1f} s"]
        begun = time.monotonic()
        actor = ray.remote(num_cpus=0)(Host).remote()
        ray.get(actor.poll.remote())
        lines.append(f"an actor: there after {time.monotonic() - begun:.1f} s")
        begun = time.monotonic()
        for _ in range(100):
            ray.get(actor.poll.remote())
        lines.append(f"a call: {10 * (time.monotonic() - begun):.2f} ms")
        store = ray.cluster_resources().get("object_store_memory", 0)
        free = os.statvfs("/dev/shm")
        lines.append(
            f"object store: {store / 1e6:.0f} MB; /dev/shm has {free.f_bavail * free.f_frsize / 1e6:.0f} MB free"
        )
        return lines
    finally:
        ray.shutdown()


class Host:
    """The body of an actor."""

    def __init__(self) -> None:
        self._child: subprocess.Popen[bytes] | None = None

    def address(self) -> str:
        import ray

        return str(ray.util.get_node_ip_address())

    def start(self, place: Place, command: Sequence[str], cwd: str) -> int:
        """Begin; returns the process id."""
        if place.role == "server":
            os.chdir(cwd)
            self.process = serve(place)
            return os.getpid()
        return self.run(command, place.environ(), cwd)

    def run(self, command: Sequence[str], environ: Mapping[str, str], cwd: str) -> int:
        """Begin a process of its own."""
        self._child = subprocess.Popen(list(command), env={**os.environ, **environ}, cwd=cwd)
        return self._child.pid

    def poll(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def signal(self, number: int) -> None:
        if self._child is not None:
            self._child.send_signal(number)


class OnRay:
    """Starts processes as actors; a `Start` of group.py."""

    def __init__(self, address: str) -> None:
        self.ray = start_ray(address)
        # strict spread is not asked for: a cluster may be one machine
        self._host = self.ray.remote(num_cpus=0, max_restarts=0, scheduling_strategy="SPREAD")(Host)
        self.local = address == "local"

    def node(self) -> str:
        return "127.0.0.1" if self.local else str(self.ray.util.get_node_ip_address())

    def __call__(self, place: Place, command: Sequence[str]) -> Process:
        if place.role == "manager" or (place.role == "worker" and place.number == 0):
            return start_here(place, command)
        actor = self._host.options(runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}}).remote()
        if not self.local and place.role == "server":
            place = replace(place, host=self.ray.get(actor.address.remote()))
        return Actor(self.ray, actor, actor.start.remote(place, list(command), str(Path.cwd())))


class Actor:
    """An actor as a process of a group."""

    def __init__(self, ray: Any, actor: Any, begun: Any) -> None:
        self._ray, self._actor, self._begun = ray, actor, begun
        self._asked = actor.poll.remote()
        self._status: int | None = None

    @property
    def pid(self) -> int:
        return int(self._ray.get(self._begun))

    def poll(self) -> int | None:
        """The exit status of its process; -9 if the actor has died."""
        if self._status is None:
            ready, _ = self._ray.wait([self._asked], timeout=0)
            if ready:
                try:
                    self._status = self._ray.get(self._asked)
                    self._asked = self._actor.poll.remote()
                except self._ray.exceptions.ActorUnavailableError:  # perhaps alive: ask again
                    self._asked = self._actor.poll.remote()
                except self._ray.exceptions.RayActorError:
                    self._status = -9
        return self._status

    def send_signal(self, sig: int, /) -> None:
        self._actor.signal.remote(int(sig))

    def kill(self) -> None:
        self._actor.signal.remote(9)
        self._ray.kill(self._actor)
