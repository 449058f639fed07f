"""How far the next-token distributions of a student are from a teacher's, without keeping the logits of either.

With p the teacher's and q the student's distribution of a token, both softmax(logits / temperature):

    forward   KL(p‖q)                              covers everything that the teacher may say; Hinton's distillation
    reverse   KL(q‖p)                              avoids what the teacher would not say
    jsd       β KL(p‖m) + (1 − β) KL(q‖m)          m = β p + (1 − β) q; bounded, and β = 0 and 1 are its limits

Papers: https://arxiv.org/abs/1503.02531, https://arxiv.org/abs/2306.13649

The logits of both models exist for one chunk of tokens at a time. The token weights are known in the forward, so the
gradient of a chunk's logits is computed there too, as in `ops.linear_cross_entropy_loss`, and the backward scales it.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import torch

from bagu.ops.contract.signature import accumulator
from bagu.ops.linear_cross_entropy.chunked import Gradients, chunks, joined, operand, part, product

Divergence = Literal["forward", "reverse", "jsd"]
# log p, log q -> the divergence of each row, and its gradient by the logits of q
Rule = Callable[[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]


class Head(NamedTuple):
    """Hidden states [T, D] and the head's weight [V, D]: the logits are hidden @ weight.T. D may differ by model."""

    hidden: torch.Tensor
    weight: torch.Tensor


def divergence_loss(
    student: Head,
    teacher: Head,
    token_weights: torch.Tensor,
    kind: Divergence = "forward",
    *,
    beta: float = 0.5,
    temperature: float = 1.0,
    memory: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (loss, divergences): the sum of token_weights * divergences, to call backward on, and its [T] constants.

    A token of weight 0 has divergence 0 and no gradient. Gradients go to the student alone. `beta` is that of "jsd".
    `memory` limits the bytes of logits, of both models, that exist at one time: see `ops.linear_cross_entropy`.
    """
    wants = [torch.is_grad_enabled() and t.requires_grad for t in student]
    rule = {"forward": _forward, "reverse": _reverse, "jsd": partial(_jsd, beta)}[kind]
    return _Loss.apply(*student, *teacher, token_weights, rule, temperature, memory, (wants[0], wants[1]))


def _forward(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    teacher = p.exp()
    return (teacher * (p - q)).sum(-1), q.exp() - teacher


def _reverse(p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    student, slope = q.exp(), q - p
    value = (student * slope).sum(-1)
    return value, student * (slope - value.unsqueeze(-1))


def _jsd(beta: float, p: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    m = torch.logaddexp(p + math.log(beta), q + math.log1p(-beta))
    student, slope = q.exp(), (1 - beta) * (q - m)  # the derivative of the divergence by q is log q - log m, times 1-β
    mean = (student * slope).sum(-1)
    return beta * (p.exp() * (p - m)).sum(-1) + mean, student * (slope - mean.unsqueeze(-1))


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        teacher_hidden: torch.Tensor,
        teacher_weight: torch.Tensor,
        token_weights: torch.Tensor,
        rule: Rule,
        temperature: float,
        memory: int | None,
        wants: tuple[bool, bool],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        grad_hidden, grad_weight = wants
        dtype, V, acc = hidden.dtype, weight.shape[0], accumulator(hidden.dtype)
        h, w, th, tw = (operand(x, dtype) for x in (hidden, weight, teacher_hidden, teacher_weight))
        spans = chunks(h.shape[0], V, 2 * acc.itemsize, memory, h.device)  # two models: two rows of logits a token
        grads = Gradients(w, V, dtype, len(spans), of_hidden=grad_hidden, of_weight=grad_weight)
        weights, values = token_weights.to(acc), []
        for span in spans:
            q = product(part(h, span), w.T, acc).div_(temperature).log_softmax(-1)
            p = product(part(th, span), tw.T, acc).div_(temperature).log_softmax(-1)
            value, dlogits = rule(p, q)
            own = part(weights, span)
            values.append(torch.where(own != 0, value, 0.0))
            if grad_hidden or grad_weight:
                dlogits *= (own / temperature).unsqueeze(-1)
                dlogits.masked_fill_((own == 0).unsqueeze(-1), 0.0)  # 0 * NaN is NaN
                grads.add(operand(dlogits, dtype), part(h, span))
            del p, q, dlogits  # before the next chunk's logits are computed, or two chunks would exist
        divergences = joined(values, token_weights.shape, hidden, acc)
        ctx.save_for_backward(
            grads.dhidden(hidden.shape) if grad_hidden else None, grads.dweight() if grad_weight else None
        )
        ctx.mark_non_differentiable(divergences)
        return (weights * divergences).sum(), divergences

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dloss: torch.Tensor, _: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        scaled = (None if g is None else (g.to(dloss.dtype) * dloss).to(g.dtype) for g in ctx.saved_tensors)
        return *scaled, *(None,) * 7
