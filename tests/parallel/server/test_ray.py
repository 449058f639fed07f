"""Ray places the processes: one start for the whole file."""

from __future__ import annotations

import os
import signal
import sys
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from bagu.errors import BaguError
from bagu.parallel.server import on_ray
from bagu.parallel.server.client import Client
from bagu.parallel.server.group import COMMANDS
from bagu.parallel.server.place import new_group


def test_a_server_actor_is_killed_and_its_values_stay() -> None:
    pytest.importorskip("ray")
    start = on_ray.OnRay("local")
    try:
        place = new_group(3)
        manager = start(place, COMMANDS["manager"])
        servers: list[Any] = [start(replace(place, role="server", number=n), []) for n in range(3)]
        rule = {
            "kind": "sgd",
            "lr": 1.0,
            "options": {"weight_decay": 0.0},
            "segments": [[0, 4096, "vector"]],
            "servers": 3,
        }
        client = Client(0, [(0, 4096)], 3, np.dtype(np.float64), place.manager, place.token)
        client.wait_for_map()
        client.load(0, [np.zeros(4096)], rule, 1, {"facts": {}})
        flat = np.zeros(4096)
        for t in range(1, 9):
            if t == 4:
                os.kill(servers[1].pid, signal.SIGKILL)
            client.push(t, np.full(4096, float(t)), [0.0])
            client.total(t)
            client.commit(t, {"lr": 1.0, "scale": 1.0, "step": t, "facts": {}})
            client.read(flat)
            assert (flat == -t * (t + 1) / 2).all()
        deadline = time.monotonic() + 20
        while servers[1].poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert servers[1].poll() == -9 and servers[0].poll() is None and manager.poll() is None
        client.close()
        manager.kill()
    finally:
        start.ray.shutdown()


def test_without_ray_one_sentence_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(BaguError, match="not installed") as error:
        on_ray.import_ray()
    assert "bagu[ray]" in error.value.hint
