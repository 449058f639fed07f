"""A step whose tokens are sampled on the device but not committed yet, and their copy to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bagu.serve.plan import Plan
from bagu.serve.request import TokenLogprob
from bagu.serve.sampler import SampledLogprobs, SamplerOutput

__all__ = ["PendingStep"]


class PendingStep(NamedTuple):
    plan: Plan
    output: SamplerOutput
    tokens: torch.Tensor  # on the host, as are the logprobs; valid after the event `copied`
    logprobs: SampledLogprobs | None
    copied: torch.cuda.Event | None
    began: float

    @staticmethod
    def of(plan: Plan, output: SamplerOutput, began: float) -> PendingStep:
        """Start the copy of the sampled tokens and their logprobs to the host."""
        tokens, logprobs = output.tokens, output.logprobs
        if not tokens.is_cuda:
            return PendingStep(plan, output, tokens, logprobs, None, began)
        tokens = tokens.to("cpu", non_blocking=True)  # pinned memory, valid after the event
        if logprobs is not None:
            logprobs = logprobs._replace(values=logprobs.values.to_host())
        copied = torch.cuda.Event()
        copied.record()
        return PendingStep(plan, output, tokens, logprobs, copied, began)

    def wait(self) -> tuple[list[int], Sequence[float | TokenLogprob | None] | None]:
        """The tokens on the host, and a logprob for each of them, if a request asks for them."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens, None if self.logprobs is None else self.logprobs.details(len(tokens))
