"""Optimizers over flat parameters: SGD, momentum, Nesterov, Adagrad, Adadelta, RMSprop, Adam, AdamW, Lion, Muon."""

from bagu.train.optim.config import OptimizerConfig
from bagu.train.optim.optimizer import Optimizer

__all__ = ["Optimizer", "OptimizerConfig"]
