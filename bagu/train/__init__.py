"""The trainer: `fit` is the loop, `step` one update, and each idea they stand on a file of its own."""

from bagu.train.loop import FitResult, fit
from bagu.train.optim import OptimizerConfig
from bagu.train.schedule import ScheduleConfig
from bagu.train.stability import StabilityConfig, TrainingDiverged
from bagu.train.state import TrainConfig, TrainState
from bagu.train.step import StepResult, step

__all__ = [
    "FitResult",
    "OptimizerConfig",
    "ScheduleConfig",
    "StabilityConfig",
    "StepResult",
    "TrainConfig",
    "TrainState",
    "TrainingDiverged",
    "fit",
    "step",
]
