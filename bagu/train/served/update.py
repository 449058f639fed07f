"""The update on a server: the trainer's own rules, on a range of the flat parameters."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from bagu.parallel.server.keys import ranges_of
from bagu.parallel.server.store import Update
from bagu.train.memory.flat import FlatParameters, Role
from bagu.train.optim.config import OptimizerConfig
from bagu.train.optim.optimizer import can_fuse, options_of, update_elements
from bagu.train.optim.rules import Now
from bagu.train.served.config import check_elementwise


def rule_of(config: OptimizerConfig, flat: FlatParameters, servers: int) -> dict[str, Any]:
    """The update as data, for `update_of` in another process."""
    segments = [[segment.start, segment.stop, segment.role.value] for segment in flat.segments]
    options = config.options()
    return {"kind": config.kind, "lr": config.lr, "options": options, "segments": segments, "servers": servers}


def update_of(rule: Mapping[str, Any], number: int) -> Update:
    """The update of range `number`: bagu/parallel/server calls it with the range's memory."""
    options: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in rule["options"].items()}
    config = OptimizerConfig(kind=rule["kind"], lr=rule["lr"], **options)
    check_elementwise(config)
    mine = ranges_of([(start, stop) for start, stop, _ in rule["segments"]], rule["servers"])[number]
    roles = [Role(role) for _, _, role in rule["segments"]]
    pieces = [(p.start, p.stop, options_of(config, config.kind, roles[p.segment])) for p in mine.pieces]
    fused = can_fuse(torch.device("cpu"))

    def update(memory: np.ndarray, gradient: np.ndarray, decision: Mapping[str, Any]) -> None:
        rows, g = torch.from_numpy(memory), torch.from_numpy(gradient)
        now = Now(lr=decision["lr"], step=decision["step"])
        for start, stop, chosen in pieces:
            p, *state = (row[start:stop] for row in rows)
            update_elements(config.kind, chosen, p, g[start:stop], state, now, scale=decision["scale"], fused=fused)

    return update
