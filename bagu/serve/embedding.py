"""Embeddings and scores: the texts of all waiting calls are encoded in batches with a token budget.

A batch takes one text of each call in turn, so a call with one text does not wait for a call with two thousand. Between
two batches the engine process handles other messages.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from bagu.serve.stats import EngineStats, StepCounter

if TYPE_CHECKING:  # the HTTP server's process does not import torch
    import torch

    from bagu.nn.model import Transformer

Text = Sequence[int]
Vector = list[float]


@dataclass(kw_only=True, slots=True)
class _Call:
    id: int
    texts: Sequence[Text]
    next: int = 0  # index of the next text to encode
    vectors: list[Vector] = field(default_factory=list)


class Encoder:
    """Encodes texts into vectors with `encode` (`embed`, `embed_last` or `score`); `step` runs one batch."""

    def __init__(
        self,
        model: Transformer,
        max_num_batched_tokens: int,
        encode: Callable[[Transformer, Sequence[Text]], list[Vector]],
    ) -> None:
        self.model, self.max_num_batched_tokens, self.encode = model, max_num_batched_tokens, encode
        self._calls: deque[_Call] = deque()  # round robin: the first one is next
        self._counter = StepCounter()

    @property
    def has_work(self) -> bool:
        return bool(self._calls)

    def add(self, call: int, texts: Sequence[Text]) -> None:
        self._calls.append(_Call(id=call, texts=texts))

    def cancel(self, call: int) -> None:
        """Remove a call whose client has disconnected."""
        self._calls = deque(c for c in self._calls if c.id != call)

    def step(self) -> list[tuple[int, list[Vector]]]:
        """Encode one batch. Returns (id, vectors) of the calls that are now complete."""
        began = time.perf_counter()
        batch = self._batch()
        texts = [text for _, text in batch]
        for (call, _), vector in zip(batch, self.encode(self.model, texts), strict=True):
            call.vectors.append(vector)
        self._counter.add(began, len(batch), sum(map(len, texts)))
        done = {call.id: call.vectors for call, _ in batch if len(call.vectors) == len(call.texts)}
        return list(done.items())

    def stats(self) -> EngineStats:
        """An encoder has no KV blocks and generates no tokens; `tokens_per_s` counts input tokens."""
        counter = self._counter
        return EngineStats(
            running=0, waiting=sum(len(c.texts) - c.next for c in self._calls),
            batch_size=counter.batch_size if self._calls else 0, blocks_total=0, blocks_used=0, blocks_cached=0,
            block_map="", tokens_per_s=counter.tokens_per_s(), last_step_s=counter.last_step_s, steps=counter.steps,
            generated_tokens=0, preemptions=0, prefix_queries=0, prefix_hits=0,
        )  # fmt: skip

    def _batch(self) -> list[tuple[_Call, Text]]:
        """One text of each call in turn until the token budget is used; at least one text."""
        batch: list[tuple[_Call, Text]] = []
        left = self.max_num_batched_tokens
        while self._calls:
            call = self._calls[0]
            text = call.texts[call.next]
            if batch and len(text) > left:
                break
            batch.append((call, text))
            left -= len(text)
            call.next += 1
            self._calls.popleft()
            if call.next < len(call.texts):
                self._calls.append(call)
        return batch


def embed(model: Transformer, texts: Sequence[Text]) -> list[Vector]:
    """One unit vector per text: the normalized mean of its tokens' hidden states."""
    import torch

    with torch.inference_mode():
        hidden, lengths = _hidden(model, texts)
        hidden = hidden.float()
        segment = torch.repeat_interleave(torch.arange(len(texts)), lengths).to(hidden.device)
        total = hidden.new_zeros(len(texts), hidden.shape[1]).index_add_(0, segment, hidden)
        return (total / total.norm(dim=1, keepdim=True)).tolist()  # the norm cancels the text's length


def embed_last(model: Transformer, texts: Sequence[Text]) -> list[Vector]:
    """One unit vector per text: the normalized hidden state of its last token, the only one of a decoder that depends
    on the whole text."""
    import torch

    with torch.inference_mode():
        last = _last(model, texts).float()
        return (last / last.norm(dim=1, keepdim=True)).tolist()


def score(model: Transformer, texts: Sequence[Text]) -> list[Vector]:
    """One number per text: the score of a reward model at its last token."""
    import torch

    assert model.score is not None, "only a model with a score head is served this way"
    with torch.inference_mode():
        return model.score(_last(model, texts)).unsqueeze(1).tolist()


def _last(model: Transformer, texts: Sequence[Text]) -> torch.Tensor:
    """The hidden state of the last token of each text."""
    hidden, lengths = _hidden(model, texts)
    return hidden[(lengths.cumsum(0) - 1).to(hidden.device)]


def _hidden(model: Transformer, texts: Sequence[Text]) -> tuple[torch.Tensor, torch.Tensor]:
    """The hidden states of all tokens, and the lengths of the texts, which are packed in one batch."""
    import torch

    lengths = torch.tensor([len(t) for t in texts])
    device = model.embedding.weight.device
    ids = torch.tensor([i for t in texts for i in t], device=device)
    positions = torch.cat([torch.arange(len(t)) for t in texts]).to(device)
    cu_seqlens = torch.cat((torch.zeros(1, dtype=torch.int64), lengths.cumsum(0))).to(device, torch.int32)
    return model(ids, positions, cu_seqlens, int(lengths.max())).hidden, lengths
