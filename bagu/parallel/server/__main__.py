"""`python -m bagu.parallel.server`: the process of the manager, or of a server that only adds gradients up.

Imports no torch: a process is there within half a second. Servers of a training run are bagu.train.served.
"""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from bagu.parallel.server.place import Place, read_place
from bagu.parallel.server.processes import ManagerProcess, ServerProcess
from bagu.parallel.server.store import Update


def manage(place: Place) -> ManagerProcess:
    return ManagerProcess(place.servers, *place.manager, place.token)


def descend(rule: Mapping[str, Any], number: int) -> Update:
    """values ← values - lr gradient"""

    def update(memory: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any]) -> None:
        memory[0] -= decision["lr"] * gradient

    return update


def main() -> None:
    place = read_place()
    assert place is not None, "started by bagu train --servers"
    if place.role == "server":
        process: ManagerProcess | ServerProcess = ServerProcess(
            place.number, place.servers, place.manager, place.token, descend, host=place.host
        )
    else:
        process = manage(place)
    parent = os.getppid()
    while not process.ended.wait(0.5):
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    main()
