"""A step between its launch and its commit: first its forward runs, then its tokens are sampled on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from bagu.serve.plan import Plan
from bagu.serve.request import TokenLogprob
from bagu.serve.runner import RunnerOutput
from bagu.serve.sampler import SampledLogprobs, SamplerOutput


class LaunchedStep(NamedTuple):
    """A step whose forward is launched, and whose tokens are not sampled yet."""

    plan: Plan
    output: RunnerOutput
    began: float


class SampledStep(NamedTuple):
    """A step whose tokens are sampled on the device but not committed yet, and their copy to the host."""

    plan: Plan
    output: SamplerOutput
    tokens: torch.Tensor  # on the host, as are the logprobs; valid after the event `copied`
    logprobs: SampledLogprobs | None
    sums: torch.Tensor | None  # of the logits
    copied: torch.cuda.Event | None
    began: float

    @staticmethod
    def of(plan: Plan, output: SamplerOutput, began: float) -> SampledStep:
        """Start the copy of the sampled tokens and their logprobs to the host."""
        tokens, logprobs, sums = output.tokens, output.logprobs, output.sums
        if not tokens.is_cuda:
            return SampledStep(plan, output, tokens, logprobs, sums, None, began)
        tokens = tokens.to("cpu", non_blocking=True)  # pinned memory, valid after the event
        if logprobs is not None:
            logprobs = logprobs._replace(values=logprobs.values.to_host())
        sums = None if sums is None else sums.to("cpu", non_blocking=True)
        copied = torch.cuda.Event()
        copied.record()
        return SampledStep(plan, output, tokens, logprobs, sums, copied, began)

    def wait(self) -> tuple[list[int], Sequence[float | TokenLogprob | None] | None]:
        """The tokens on the host, and a logprob for each of them, if a request asks for them."""
        if self.copied is not None:
            self.copied.synchronize()
        tokens: list[int] = self.tokens.tolist()
        return tokens, None if self.logprobs is None else self.logprobs.details(len(tokens))
