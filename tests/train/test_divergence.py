"""Divergences of two heads in chunks: the formula over all logits in fp64, its gradients, and how many logits exist."""

from __future__ import annotations

import math

import pytest
import torch

from bagu.train.objectives import divergence
from bagu.train.objectives.divergence import Divergence, Head, divergence_loss

T, V = 11, 23
KINDS = pytest.mark.parametrize("kind", ["forward", "reverse", "jsd"])


def heads(dtype: torch.dtype = torch.float64, device: str = "cpu") -> tuple[Head, Head, torch.Tensor]:
    """A student of 6 features that wants gradients, a teacher of 9, and token weights of which two are 0."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(device, dtype)  # noqa: E731
    student = Head(normal(T, 6).requires_grad_(), normal(V, 6).requires_grad_())
    weights = normal(T).abs()
    weights[[2, 10]] = 0
    return student, Head(normal(T, 9), normal(V, 9)), weights


def naive(
    student: Head, teacher: Head, weights: torch.Tensor, kind: Divergence, beta: float, temperature: float
) -> torch.Tensor:
    """The definition with sums of probabilities, over all logits, token by token."""
    total = torch.zeros((), dtype=weights.dtype, device=weights.device)
    for token, weight in enumerate(weights):
        q = (student.hidden[token] @ student.weight.T / temperature).softmax(0)
        p = (teacher.hidden[token] @ teacher.weight.T / temperature).softmax(0)
        m = beta * p + (1 - beta) * q
        kl = lambda a, b: (a * (a.log() - b.log())).sum()  # noqa: E731
        values = {"forward": kl(p, q), "reverse": kl(q, p), "jsd": beta * kl(p, m) + (1 - beta) * kl(q, m)}
        total = total + weight * values[kind]
    return total


@KINDS
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("memory", [None, 3 * 2 * V * 8, 1])
def test_loss_and_gradients_are_those_of_the_definition(
    kind: Divergence, temperature: float, memory: int | None
) -> None:
    student, teacher, weights = heads()
    want = naive(student, teacher, weights, kind, 0.3, temperature)
    loss, values = divergence_loss(
        student, teacher, weights, kind, beta=0.3, temperature=temperature, memory=memory
    )  # fmt: skip
    torch.testing.assert_close(loss, want)
    torch.testing.assert_close((weights * values).sum(), want)
    assert not values.requires_grad and (values[weights == 0] == 0).all() and (values[weights != 0] > 0).all()
    for got, slope in zip(torch.autograd.grad(-2 * loss, student), torch.autograd.grad(want, student), strict=True):
        torch.testing.assert_close(got, -2 * slope)


@KINDS
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), ("cpu", torch.bfloat16), pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu)],
)
def test_low_precision_is_as_exact_as_the_definition(kind: Divergence, device: str, dtype: torch.dtype) -> None:
    """At most twice the error of the plain formula in the same dtype, or that of an fp32 sum over the vocabulary."""
    low = heads(dtype, device)
    exact = tuple(Head(*(t.detach().double().requires_grad_() for t in head)) for head in low[:2])
    want = torch.autograd.grad(naive(*exact, low[2].double(), kind, 0.5, 1.0), exact[0])
    plain = torch.autograd.grad(naive(*low, kind, 0.5, 1.0), low[0])
    ours = torch.autograd.grad(divergence_loss(*low, kind)[0], low[0])
    for g, p, w in zip(ours, plain, want, strict=True):
        floor = V * torch.finfo(torch.float32).eps * float(w.abs().max())
        assert (g - w).abs().max() <= max(2 * float((p - w).abs().max()), floor)


@KINDS
def test_a_student_equal_to_its_teacher_is_at_the_minimum(kind: Divergence) -> None:
    student, _, weights = heads()
    teacher = Head(*(t.detach() for t in student))
    loss, values = divergence_loss(student, teacher, weights, kind)
    bound = V * torch.finfo(torch.float64).eps
    assert values.abs().max() <= bound
    assert all(g.abs().max() <= bound * weights.sum() for g in torch.autograd.grad(loss, student))


def test_the_jsd_is_bounded_and_tends_to_both_kl() -> None:
    """At most the entropy of a coin of probability beta; divided by beta or 1 - beta, its limits are the two KL."""
    student, teacher, weights = heads()
    with torch.no_grad():
        sharp = Head(100 * student.hidden, student.weight), Head(100 * teacher.hidden, teacher.weight)
        _, values = divergence_loss(*sharp, weights, "jsd", beta=0.3)
        coin = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
        assert 0.5 * coin < values.max() <= coin * (1 + V * torch.finfo(torch.float64).eps)
        for kind, betas in (("forward", (1e-3, 1e-6)), ("reverse", (1 - 1e-3, 1 - 1e-6))):
            kl, _ = divergence_loss(student, teacher, weights, kind)  # type: ignore[arg-type]
            jsd = [
                divergence_loss(student, teacher, weights, "jsd", beta=beta)[0] / min(beta, 1 - beta) for beta in betas
            ]
            far, near = (float((kl - x).abs()) for x in jsd)
            assert near < far / 10


def test_an_ignored_token_may_be_nan_and_a_frozen_head_gets_no_gradient() -> None:
    student, teacher, weights = heads()
    want, _ = divergence_loss(student, teacher, weights)
    with torch.no_grad():
        student.hidden[2] = float("nan")
        student.weight.requires_grad_(False)
    loss, values = divergence_loss(student, teacher, weights)
    assert torch.equal(loss, want) and values[2] == 0
    (dhidden,) = torch.autograd.grad(loss, student.hidden)
    assert (dhidden[2] == 0).all() and dhidden.isfinite().all()


def test_no_more_logits_exist_than_the_budget_allows(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    plain = divergence.product

    def spy(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        made.append(a.shape[0])
        return plain(a, b, dtype)

    monkeypatch.setattr(divergence, "product", spy)
    student, teacher, weights = heads(torch.float32)
    divergence_loss(student, teacher, weights, memory=4 * 2 * V * 4)
    assert made == [4, 4, 4, 4, 3, 3]  # four tokens of both models fit, so three chunks
