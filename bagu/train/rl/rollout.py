"""A rollout: answers that the policy sampled, with their rewards and what the loss needs to know of each token.

A column is a number per token of an answer. Names of columns:

    engine       logprob that the inference engine computed when it sampled the token
    old          logprob of the policy before the updates of this rollout, computed by the trainer
    reference    logprob of the reference policy
    values       the critic's value before the token, before the updates of this rollout
    advantages   what the policy loss multiplies the ratio by
    returns      the target of the critic
    weights      of the token in the loss of a step; added when a step is packed

A checkpoint in the middle of a rollout contains the rollout: after an update its columns cannot be computed again.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, Self

import numpy as np
import torch

from bagu.data.sequences import Tokens, micro_batches, pack
from bagu.types import Batch, Completion


class Sampler(Protocol):
    """Samples from the policy that is trained, with the weights it has now."""

    def sample(
        self, prompts: Sequence[Sequence[int]], *, n: int, max_tokens: int, seeds: Sequence[int]
    ) -> list[Completion]:
        """`n` answers to each prompt, ordered by prompt, with the logprobs of their tokens, at temperature 1.

        Token t of answer i of a prompt is a function of the weights, the prompt, its seed, i and t.
        """
        ...

    def weights_changed(self) -> None:
        """Drop what was computed with old weights. Called after the weights have changed and before `sample`."""
        ...


@dataclass(frozen=True, kw_only=True)
class PackShape:
    """The shape of micro-batches: at most `tokens` tokens and `segments` answers, each of at most `context` tokens."""

    tokens: int
    segments: int
    context: int

    def fitting(self, used: int) -> int:
        """The tokens that a micro-batch of `used` tokens is padded to: `tokens`, halved while it fits, at most three
        times. So there are few shapes (each may be a CUDA graph or a compilation), and little padding."""
        sizes = [self.tokens >> halvings for halvings in range(4)]
        return min(size for size in sizes if size >= used)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One sampled answer. `prompt` numbers the prompts of the rollout; answers to the same prompt form a group."""

    tokens: Tokens
    prompt: int
    reward: float
    columns: Mapping[str, np.ndarray] = field(default_factory=dict)  # fp32, a number per token of the answer

    def plus(self, **columns: np.ndarray) -> Answer:
        """The same answer with further columns."""
        return replace(self, columns={**self.columns, **{k: np.asarray(v, np.float32) for k, v in columns.items()}})


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """The answers to train on, and the metrics of all that were sampled."""

    number: int
    answers: tuple[Answer, ...]
    metrics: Mapping[str, float]

    def to_json(self) -> dict[str, Any]:
        """Arrays are base64 of little-endian numbers: exact, and a third of the size of decimal digits."""
        names = list(self.answers[0].columns) if self.answers else []
        return {
            "number": self.number,
            "metrics": dict(self.metrics),
            "lengths": [len(a.tokens.ids) for a in self.answers],
            "starts": [a.tokens.start for a in self.answers],
            "prompts": [a.prompt for a in self.answers],
            "rewards": [a.reward for a in self.answers],
            "ids": _encoded([np.array(a.tokens.ids) for a in self.answers], "<i4"),
            "columns": {name: _encoded([a.columns[name] for a in self.answers], "<f4") for name in names},
        }

    @classmethod
    def from_json(cls, state: Mapping[str, Any]) -> Self:
        lengths, starts = np.array(state["lengths"], int), np.array(state["starts"], int)
        ids = _decoded(state["ids"], "<i4", lengths)
        columns = {name: _decoded(text, "<f4", lengths - starts) for name, text in state["columns"].items()}
        answers = tuple(
            Answer(
                tokens=Tokens(ids=tuple(ids[i].tolist()), start=state["starts"][i]),
                prompt=state["prompts"][i],
                reward=state["rewards"][i],
                columns={name: column[i] for name, column in columns.items()},
            )
            for i in range(len(lengths))
        )
        return cls(number=state["number"], answers=answers, metrics=state["metrics"])


@dataclass(frozen=True, kw_only=True)
class RolloutBatch:
    """A micro-batch of packed answers. `columns` are [T], at the positions of the targets and 0 elsewhere.

    `batch` is None if there is nothing to learn from. `rollout` are the metrics of the rollout, at its first step.
    """

    batch: Batch | None
    columns: Mapping[str, torch.Tensor]
    rollout: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, answers: Sequence[Answer], shape: PackShape, **facts: Any) -> Self:
        used = sum(len(a.tokens.ids) for a in answers)
        batch = pack(
            [a.tokens for a in answers], tokens=shape.fitting(used), max_segments=shape.segments, context=shape.context
        )
        columns = {name: torch.zeros(batch.num_tokens) for name in answers[0].columns}
        for place, answer in zip(_places(answers), answers, strict=True):
            for name, column in columns.items():
                column[place] = torch.from_numpy(answer.columns[name])
        return cls(batch=batch, columns=columns, **facts)

    @property
    def num_tokens(self) -> int:
        return 0 if self.batch is None else self.batch.num_tokens

    @property
    def num_padding(self) -> int:
        return 0 if self.batch is None else self.batch.num_padding

    @property
    def num_targets(self) -> int:
        return 0 if self.batch is None else self.batch.num_targets

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Self:
        if self.batch is None:
            return self
        columns = {name: column.to(device, non_blocking=non_blocking) for name, column in self.columns.items()}
        return replace(self, batch=self.batch.to(device, non_blocking=non_blocking), columns=columns)


@torch.no_grad()
def with_columns(
    answers: Sequence[Answer], shape: PackShape, device: torch.device, compute: Callable[[Batch], dict[str, Any]]
) -> list[Answer]:
    """The answers with the columns that `compute` gives for a batch: tensors [T] by name, without gradients."""
    done: dict[int, Answer] = {}
    for chosen in micro_batches([len(a.tokens.ids) for a in answers], capacity=shape.tokens):
        part = [answers[i] for i in chosen]
        batch = RolloutBatch.of(part, shape).to(device).batch
        assert batch is not None
        found = {name: values.float().cpu().numpy() for name, values in compute(batch).items()}
        for i, place, answer in zip(chosen, _places(part), part, strict=True):
            done[i] = answer.plus(**{name: values[place].copy() for name, values in found.items()})
    return [done[i] for i in range(len(answers))]


def _places(answers: Sequence[Answer]) -> list[slice]:
    """The positions of each answer's targets in their pack."""
    places, at = [], 0
    for answer in answers:
        length = len(answer.tokens.ids)
        places.append(slice(at + answer.tokens.start - 1, at + length - 1))
        at += length
    return places


def _encoded(arrays: Sequence[np.ndarray], dtype: str) -> str:
    flat = np.concatenate(arrays) if arrays else np.zeros(0)
    return base64.b64encode(flat.astype(dtype).tobytes()).decode("ascii")


def _decoded(text: str, dtype: str, lengths: np.ndarray) -> list[np.ndarray]:
    flat = np.frombuffer(base64.b64decode(text), dtype)
    native = flat.astype(flat.dtype.newbyteorder("="))
    return np.split(native, np.cumsum(lengths)[:-1]) if len(lengths) else []
