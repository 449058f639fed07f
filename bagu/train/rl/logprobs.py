"""Log-probabilities of the targets of a batch: what the losses of preferences, rewards and policies are made from."""

import torch

from bagu import ops
from bagu.nn.model import Output, Transformer
from bagu.types import IGNORE, Batch


def token_logprobs(model: Transformer, batch: Batch) -> tuple[torch.Tensor, Output]:
    """log p of each target, [T] fp32 and 0 where the target is IGNORE, and the output of the model.

    The inference engine computes the logprobs of sampled tokens with the same function (`ops.token_losses`), so that in
    invariant mode both have the same bits.
    """
    out: Output = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
    logit, lse = ops.linear_cross_entropy(out.hidden, model.head_weight, batch.targets, ignore_index=IGNORE)
    return ops.token_losses(logit, lse).logprobs, out


def segment_sums(values: torch.Tensor, cu_seqlens: torch.Tensor, segments: int) -> torch.Tensor:
    """The sums of `values` [T] over the first `segments` segments, [segments].

    Adds the values of a segment in a fixed order: on a GPU the result repeats bit for bit, which `index_add` does not.
    """
    lengths = cu_seqlens.diff()[:segments]
    # cu_seqlens begins at 0, so the first segments are a prefix of the values; the rest is padding
    tail = values.shape[0] - cu_seqlens[segments].long()
    lengths = torch.cat((lengths.long(), tail.view(1)))
    # `unsafe` skips a check of the lengths, which would read them from the device
    return torch.segment_reduce(values, "sum", lengths=lengths, unsafe=True, initial=0)[:segments]
