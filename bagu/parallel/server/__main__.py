"""`python -m bagu.parallel.server`: the process of the manager. Imports no torch: it is back within half a second."""

import os

from bagu.parallel.server.place import Place, read_place
from bagu.parallel.server.processes import ManagerProcess


def manage(place: Place) -> ManagerProcess:
    return ManagerProcess(place.servers, *place.manager, place.token)


def main() -> None:
    place = read_place()
    assert place is not None, "started by bagu train --servers"
    process, parent = manage(place), os.getppid()
    while not process.ended.wait(0.5):
        if os.getppid() != parent:
            return


if __name__ == "__main__":
    main()
