"""Turn a language model into one that scores: a reward model, or the critic of PPO."""

from dataclasses import replace

from torch import nn

from bagu.errors import ArgumentError
from bagu.nn.model import ScoreHead, Transformer


def with_score_head(model: Transformer) -> Transformer:
    """Replace the head of `model` by a score head with zero weights, in place; returns the model.

    Every score is 0 until the head is trained, so that a Bradley-Terry loss starts at ln 2.
    """
    if model.score is not None:
        raise ArgumentError("the model has a score head already", hint="use it as it is")
    if model.mlm is not None:
        raise ArgumentError("the model has a masked-LM head", hint="use a causal language model")
    w = model.embedding.weight
    model.config = replace(model.config, score_head=True)
    model.head = None
    model.score = ScoreHead(model.config.hidden_size, device=w.device, dtype=w.dtype)
    nn.init.zeros_(model.score.weight)
    return model
