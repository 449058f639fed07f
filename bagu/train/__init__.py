"""The trainer: `fit` is the loop, `step` one update; `objectives` has what is trained for, one file each."""

from bagu.train.cross_entropy import CrossEntropy
from bagu.train.loop import FitResult, fit
from bagu.train.loss import Loss, MicroBatchLoss, Totals
from bagu.train.objective import Objective
from bagu.train.optim import OptimizerConfig
from bagu.train.schedule import ScheduleConfig
from bagu.train.stability import StabilityConfig, TrainingDiverged
from bagu.train.state import TrainConfig, TrainState
from bagu.train.step import StepResult, step

__all__ = [
    "CrossEntropy",
    "FitResult",
    "Loss",
    "MicroBatchLoss",
    "Objective",
    "OptimizerConfig",
    "ScheduleConfig",
    "StabilityConfig",
    "StepResult",
    "Totals",
    "TrainConfig",
    "TrainState",
    "TrainingDiverged",
    "fit",
    "step",
]
