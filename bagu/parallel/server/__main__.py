"""`python -m bagu.parallel.server`: the process of the manager or of a server.

Imports no torch: a process is there within half a second.
"""

import os

from bagu.parallel.server.place import Place, read_place
from bagu.parallel.server.processes import ManagerProcess, ServerProcess
from bagu.parallel.server.rules import update_of


def serve(place: Place) -> ServerProcess:
    return ServerProcess(place.number, place.servers, place.manager, place.token, update_of, host=place.host)


def manage(place: Place) -> ManagerProcess:
    return ManagerProcess(place.servers, *place.manager, place.token)


def main() -> None:
    place = read_place()
    assert place is not None, "started by bagu train --servers"
    process = serve(place) if place.role == "server" else manage(place)
    parent = os.getppid()
    while not process.ended.wait(0.5):
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    main()
