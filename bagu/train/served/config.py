"""The settings of a run with a parameter server."""

from dataclasses import dataclass
from typing import Any, Literal, get_args

from bagu.errors import ArgumentError, UnknownName
from bagu.train.optim.config import OptimizerConfig

Compress = Literal["none", "int8", "topk"]
MOST_DELAY = 32


@dataclass(frozen=True, kw_only=True)
class ServedConfig:
    """`servers` keep the parameters and update them, `workers` compute gradients. A worker may be `delay` updates ahead
    of the slowest one; 0 waits for all, and equals data parallelism. With a delay, workers run the optimizer and
    servers add the mean of their moves (ahead.py), unless `own_ahead` is false: then training learns much less a step.
    `compress` rounds gradients on the wire, with error feedback. With `local_steps` a worker makes so many steps of its
    own between exchanges, and the servers follow the mean of the workers by Nesterov's rule with `outer_lr` and
    `outer_momentum` (DiLoCo, arXiv 2311.08105).
    """

    servers: int = 4
    workers: int = 2
    delay: int = 0
    own_ahead: bool = True
    compress: Compress = "none"
    local_steps: int | None = None
    outer_lr: float = 0.7
    outer_momentum: float = 0.9

    def __post_init__(self) -> None:
        for name in ("servers", "workers"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"{name} is {getattr(self, name)}", hint="give 1 or more")
        if not 0 <= self.delay <= MOST_DELAY:
            raise ArgumentError(f"delay is {self.delay}", hint=f"give 0 to {MOST_DELAY} updates")
        UnknownName.check("compression", self.compress, get_args(Compress))
        if self.local_steps is not None and self.local_steps < 2:
            raise ArgumentError(f"local_steps is {self.local_steps}", hint="give 2 or more")
        if self.local_steps is not None and self.delay:
            raise ArgumentError(
                f"local_steps={self.local_steps} and delay={self.delay} do not go together", hint="leave the delay out"
            )
        if not (self.outer_lr > 0 and 0 <= self.outer_momentum < 1):
            raise ArgumentError(
                f"outer_lr is {self.outer_lr} and outer_momentum {self.outer_momentum}", hint="0.7 and 0.9 are usual"
            )


def check_elementwise(config: OptimizerConfig) -> None:
    """Raise for an optimizer that needs whole matrices."""
    if config.kind == "muon":
        raise ArgumentError(
            "the optimizer muon cannot run on parameter servers: it orthogonalises whole matrices, and a server has "
            "blocks of many",
            hint="use train.optimizer.kind=adamw with its own learning rate, or --nproc",
        )


def check_served(config: Any) -> None:
    """Raise for settings of a TrainConfig that do not go together with servers."""
    if config.served is None:
        return
    if (
        config.served.local_steps is None
    ):  # else the optimizer runs on the workers, and the servers have Nesterov's rule
        check_elementwise(config.optimizer)
    if config.mesh.ranks > 1:
        raise ArgumentError(
            f"parameter servers and the mesh {config.mesh} do not go together", hint="use --servers or --nproc"
        )
    if config.precision is not None:
        raise ArgumentError("parameter servers and precision fp8 do not go together", hint="leave precision out")
