"""Weights of a run on parameter servers for a model that is not trained there: that of a rollout engine.

It reads by the client of the workers and pushes nothing. Its weights are of bounded age: before a rollout they are read
again if the servers are more than `most_age` updates ahead.
"""

import numpy as np
import torch
from torch import nn

from bagu.parallel.server.client import Client
from bagu.parallel.server.place import Place
from bagu.train.memory.flat import lay_out, master_dtype, roles, trained


class Reader:
    """Keeps `model`, which has the parameters of the trained one, close to the servers of `place`. `number` tells
    several readers from each other."""

    def __init__(self, model: nn.Module, place: Place, *, most_age: int = 0, number: int = 0) -> None:
        by_name = trained(model)
        segments = lay_out(by_name, roles(model))
        self._slots = [slot for segment in segments for slot in segment.slots]
        self.most_age, dtype = most_age, np.dtype(str(master_dtype(by_name.values())).removeprefix("torch."))
        self._flat = np.zeros(segments[-1].stop, dtype)
        ranges = [(segment.start, segment.stop) for segment in segments]
        self.client = Client(number, ranges, place.servers, dtype, place.manager, place.token, who="reader")
        self.client.wait_for_map()

    @property
    def version(self) -> int:
        """The update after which the model's weights are; -1 before the first read."""
        return self.client.version

    def refresh(self) -> bool:
        """Have weights at most `most_age` updates old; whether they changed."""
        if not self.client.fresh(self.most_age):
            return False
        self.client.read(self._flat)
        values = torch.from_numpy(self._flat)
        with torch.no_grad():
            for slot in self._slots:
                slot.parameter.copy_(slot.of(values))
        return True

    def close(self) -> None:
        self.client.close()
