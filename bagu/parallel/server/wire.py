"""Messages: a header of JSON and at most one contiguous array.

    u32 length of the header | u64 length of the payload | header | payload

No pickle: what arrives is data. `Message.size` is what the frame has on the wire, so bytes are counted where messages
are handed over, and equal those of a socket.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PREFIX = struct.Struct("<IQ")
NOTHING = np.empty(0, np.uint8)


@dataclass(frozen=True, kw_only=True, eq=False)
class Message:
    """`epoch` is the version of the map by which the sender acts; `t` counts updates of a range; `more` is the rest."""

    kind: str
    epoch: int = 0
    range: int = -1
    t: int = -1
    worker: int = -1
    more: Mapping[str, Any] = field(default_factory=dict)
    data: np.ndarray = field(default_factory=lambda: NOTHING)

    def header(self) -> bytes:
        head = {"kind": self.kind, "epoch": self.epoch, "range": self.range, "t": self.t, "worker": self.worker}
        return json.dumps({**head, "more": self.more}, separators=(",", ":")).encode()

    def payload(self) -> memoryview:
        return np.ascontiguousarray(self.data).reshape(-1).view(np.uint8).data

    @property
    def size(self) -> int:
        """The bytes of the frame."""
        return PREFIX.size + len(self.header()) + self.data.nbytes


def read(header: bytes, payload: np.ndarray) -> Message:
    """The message of a frame; raises ValueError if the header is not one."""
    head = json.loads(header)
    if not isinstance(head, dict) or not isinstance(head.get("more"), dict):
        raise ValueError("the header of a message is not an object")
    return Message(**head, data=payload)
