"""`python -m bagu.train.served`: the process of a parameter server."""

import torch

from bagu.parallel.server.place import Place, read_place
from bagu.parallel.server.processes import ServerProcess
from bagu.train.served.update import update_of


def serve(place: Place) -> ServerProcess:
    torch.set_num_threads(1)
    return ServerProcess(place.number, place.servers, place.manager, place.token, update_of, host=place.host)


def main() -> None:
    place = read_place()
    assert place is not None, "started by bagu train --servers"
    serve(place).ended.wait()


if __name__ == "__main__":
    main()
