"""The trainer: `fit` is the loop, `step` is one update; `objectives` has one file per training objective."""

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
