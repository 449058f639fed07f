"""What the stages of a pipeline did. A module of its own: recorded_stage.py imports the compiler."""

from dataclasses import dataclass
from typing import Literal, get_args

ActionKind = Literal["F", "B", "I", "W"]
KINDS: tuple[ActionKind, ...] = get_args(ActionKind)


@dataclass(frozen=True)
class Action:
    """What a stage did with a micro-batch, and when (seconds of a clock that all processes of a machine share).

    F is a forward, B a backward; I and W are its two parts, for the input and for the weights.
    """

    kind: ActionKind
    stage: int
    micro_batch: int
    start: float
    end: float
