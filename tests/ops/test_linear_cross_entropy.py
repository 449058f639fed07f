"""Cross-entropy and the chunked head: strided and whole logits, budgets, frozen parts, a graph used twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from bagu.errors import ArgumentError
from bagu.ops.call.dispatch import call, load_op
from bagu.ops.cross_entropy import cross_entropy
from bagu.ops.linear_cross_entropy import chunked, linear_cross_entropy, token_losses
from bagu.ops.linear_cross_entropy.chunked import chunks
from bagu.ops.linear_cross_entropy.spec import Args
from bagu.ops.linear_cross_entropy_loss import linear_cross_entropy_loss
from bagu.ops.linear_cross_entropy_loss.spec import SPEC as LOSS

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
BACKENDS = pytest.mark.parametrize("backend", ["torch", "triton"])
M, D, V, Z = 9, 6, 45, 0.02
SMALL = 3 * V * 8  # bytes: three tokens of fp64 logits


def head(dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """hidden and weight that ask for gradients, targets of which two are ignored, and a weight per token."""
    draw = torch.Generator().manual_seed(0)
    normal = lambda *shape: torch.randn(*shape, generator=draw, dtype=torch.float64).to(DEVICE, dtype)  # noqa: E731
    targets = torch.randint(0, V, (M,), generator=draw)
    targets[[2, 8]] = -100
    return {
        "hidden": normal(M, D).requires_grad_(),
        "weight": normal(V, D).requires_grad_(),
        "targets": targets.to(DEVICE),
        "token_weights": normal(M),
    }


def whole(args: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The weighted loss over logits kept whole, and its gradients."""
    losses = cross_entropy(args["hidden"] @ args["weight"].T, args["targets"], z_loss=Z, backend="torch")
    loss = (losses * args["token_weights"]).sum()
    return loss, *torch.autograd.grad(loss, (args["hidden"], args["weight"]))


@BACKENDS
def test_loss_and_gradients_are_those_of_the_whole_logits(backend: str) -> None:
    args = head()
    want = whole(args)
    weights = args.pop("token_weights")
    parts = token_losses(*linear_cross_entropy(**args, memory=SMALL, backend=backend), z_loss=Z)
    loss = (parts.loss * weights).sum()
    for g, w in zip((loss, *torch.autograd.grad(loss, (args["hidden"], args["weight"]))), want, strict=True):
        torch.testing.assert_close(g, w)
    ignored = args["targets"] == -100
    assert ignored.any() and all((x[ignored] == 0).all() for x in parts)
    torch.testing.assert_close(parts.loss, parts.z_loss - parts.logprobs)


@BACKENDS
def test_the_one_pass_loss_is_the_same_and_scales_with_what_comes_in(backend: str) -> None:
    args = head()
    want = whole(args)
    loss, target_logit, lse = linear_cross_entropy_loss(**args, z_loss=Z, memory=SMALL, backend=backend)
    assert not target_logit.requires_grad and not lse.requires_grad
    for factor in (1.0, -3.0):
        got = torch.autograd.grad(factor * loss, (args["hidden"], args["weight"]), retain_graph=True)
        for g, w in zip(got, want[1:], strict=True):
            torch.testing.assert_close(g, factor * w)
    torch.testing.assert_close(loss, want[0])


@BACKENDS
@pytest.mark.parametrize("one_pass", [False, True])
def test_a_retained_graph_gives_the_same_gradients_again(backend: str, one_pass: bool) -> None:
    args = head(torch.float32)
    leaves = (args["hidden"], args["weight"])
    if one_pass:
        loss = linear_cross_entropy_loss(**args, backend=backend)[0]
    else:
        args.pop("token_weights")
        loss = token_losses(*linear_cross_entropy(**args, backend=backend)).loss.sum()
    first = [g.mul_(7) for g in torch.autograd.grad(loss, leaves, retain_graph=True)]  # as a clipped .grad would be
    again = torch.autograd.grad(loss, leaves, retain_graph=True)
    last = torch.autograd.grad(loss, leaves)
    for f, a, z in zip(first, again, last, strict=True):
        torch.testing.assert_close(f, 7 * a)
        assert torch.equal(a, z)


def test_the_budget_decides_the_chunks() -> None:
    assert chunks(4096, 128256, 4, None, CUDA) == [(0, 4096)]  # 2.10e9 bytes of 2^31
    assert len(chunks(8192, 128256, 4, None, CUDA)) == 2
    assert len(chunks(4096, 128256, 4, None, CPU)) == 8
    assert chunks(7, 100, 4, 1200, CPU) == [(0, 3), (3, 6), (6, 7)]
    assert chunks(3, 100, 4, 1, CPU) == [(0, 1), (1, 2), (2, 3)]  # less than a row: a row at a time
    assert chunks(0, 100, 4, None, CPU) == []
    for memory in (1, 10**5, 10**7, 2**31):
        spans = chunks(5000, 1000, 4, memory, CUDA)
        assert [a for a, _ in spans[1:]] == [z for _, z in spans[:-1]] and (spans[0][0], spans[-1][1]) == (0, 5000)
        assert all((z - a) * 4000 <= max(memory, 4000) for a, z in spans)
    assert chunks(5000, 1000, 4, 12 * 10**6, CUDA) == [(0, 2560), (2560, 5000)]  # whole tiles of 128 rows


@BACKENDS
def test_no_more_logits_exist_than_the_budget_allows(backend: str) -> None:
    args, made = head(torch.float32), []
    kernels = LOSS.module(backend).KERNELS
    spy = replace(kernels, logits=lambda h, w: made.append(h.shape[0]) or kernels.logits(h, w))
    given = Args(*[args[n].detach() for n in ("hidden", "weight", "targets")], -100, 4 * V * 4)
    _, lse = chunked.forward(given, spy)
    chunked.backward(given, lse, lse, lse, chunked.EVERY, spy)
    assert made == [3, 3, 3] * 2  # four rows fit, so three chunks, and those of one size


@BACKENDS
@pytest.mark.parametrize("padded", [40, 37])
def test_cross_entropy_takes_a_slice_of_padded_logits(backend: str, padded: int) -> None:
    """Rows of 33 words with a stride of 40 or 37: alignment of a row in and of its gradient out differ, or agree."""
    wide = torch.randn(5, padded, generator=torch.Generator().manual_seed(1)).to(DEVICE).requires_grad_()
    targets = torch.arange(5, device=DEVICE) * 8
    (got,) = torch.autograd.grad(cross_entropy(wide[:, :33], targets, backend=backend).sum(), wide)
    part = wide[:, :33].detach().clone().requires_grad_()
    (want,) = torch.autograd.grad(cross_entropy(part, targets, backend=backend).sum(), part)
    torch.testing.assert_close(got[:, :33], want, rtol=0, atol=1e-7)
    assert not got[:, 33:].any()


def test_no_product_has_an_odd_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuBLAS has no fast kernel for 50,257 columns: 13.8 ms on an H200 where 50,304 take 4.4."""
    done: list[int] = []
    mm, product = torch.mm, chunked.product
    monkeypatch.setattr(torch, "mm", lambda a, b, **k: done.append(b.shape[1]) or mm(a, b, **k))
    monkeypatch.setattr(chunked, "product", lambda a, b, d: done.extend(a.shape) or product(a, b, d))
    args = head(torch.float32)
    linear_cross_entropy_loss(**args, backend="triton")[0].backward()
    assert V % 8 and V not in done and -(-V // 64) * 64 in done
    assert args["weight"].grad is not None and args["weight"].grad.shape == args["weight"].shape


@BACKENDS
def test_a_frozen_weight_costs_no_product(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[int, ...]] = []
    product = chunked.product
    monkeypatch.setattr(chunked, "product", lambda *a: done.append(tuple(a[0].shape)) or product(*a))
    args = head(torch.float32)
    args["weight"].requires_grad_(False)
    linear_cross_entropy_loss(**args, backend=backend)[0].backward()
    want, args["hidden"].grad = args["hidden"].grad, None
    weights = args.pop("token_weights")
    target_logit, lse = linear_cross_entropy(**args, backend=backend)
    (token_losses(target_logit, lse).loss * weights).sum().backward()
    assert [(rows, columns >= V) for rows, columns in done] == [(M, True)] * 2  # dlogits @ weight, once in each op
    torch.testing.assert_close(args["hidden"].grad, want)
    with torch.no_grad():
        linear_cross_entropy_loss(**args, token_weights=weights, backend=backend)
    assert len(done) == 2


def test_gradients_that_are_not_asked_for_are_not_kept() -> None:
    load_op(LOSS.name, "triton")
    args: dict[str, Any] = head(torch.float32) | {"ignore_index": -100, "z_loss": 0.0, "memory": None}
    for asked in ((True, False), (False, True), (False, False)):
        args |= {"grad_hidden": asked[0], "grad_weight": asked[1]}
        for results in (
            LOSS.apply(LOSS.torch_backend.forward, args),
            torch.ops.bagu.linear_cross_entropy_loss_triton(*(args[a.name] for a in LOSS.sig.inputs)),
        ):
            assert [r.numel() > 0 for r in results[3:]] == list(asked)


@BACKENDS
def test_a_gradient_that_was_not_asked_for_cannot_be_had(backend: str) -> None:
    args = head(torch.float32)
    rest = {"ignore_index": -100, "z_loss": 0.0, "memory": None, "grad_hidden": True, "grad_weight": False}
    loss = call(LOSS, backend, **args, **rest)[0]
    with pytest.raises(ArgumentError, match="the gradient of weight is wanted"):
        loss.backward()


@BACKENDS
def test_the_public_functions_compile_as_one_graph(backend: str) -> None:
    args = head(torch.float32)
    leaves = (args["hidden"], args["weight"])
    run = lambda: linear_cross_entropy_loss(**args, z_loss=Z, memory=SMALL // 2, backend=backend)[0]  # noqa: E731
    torch._dynamo.reset()
    got = torch.autograd.grad(torch.compile(run, fullgraph=True, backend="aot_eager")(), leaves)
    for g, w in zip(got, torch.autograd.grad(run(), leaves), strict=True):
        torch.testing.assert_close(g, w)


@pytest.mark.parametrize("one_pass", [False, True])
def test_tiles_read_operands_of_any_strides(one_pass: bool) -> None:
    """16-bit operands that TMA reads only after a copy: transposed, and one row repeated."""
    draw = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*s, generator=draw).to(DEVICE, torch.float16) for s in ((16, 5), (16, 40)))
    targets = torch.arange(5, device=DEVICE)
    for h in (hidden.T, hidden.T[:1].expand(5, 16)):
        got, want = [], []
        for backend, found in (("triton", got), ("torch", want)):
            leaves = h.detach().requires_grad_(), weight.T.detach().requires_grad_()
            if one_pass:
                loss, *scores = linear_cross_entropy_loss(*leaves, targets, backend=backend)
            else:
                scores = linear_cross_entropy(*leaves, targets, backend=backend)
                loss = token_losses(*scores).loss.mean()
            found += [*scores, *torch.autograd.grad(loss, leaves)]
        for g, w in zip(got, want, strict=True):
            spacing = torch.finfo(torch.float16).eps * w.abs().max()
            torch.testing.assert_close(g, w, rtol=0, atol=4 * spacing.item())  # the ops allow each backend 2


def test_bad_values_are_refused() -> None:
    args = head()
    with pytest.raises(ArgumentError, match="linear_cross_entropy_loss: memory is 0 bytes"):
        linear_cross_entropy_loss(**args, memory=0)
    args.pop("token_weights")
    with pytest.raises(ArgumentError, match="linear_cross_entropy: memory is -5 bytes"):
        linear_cross_entropy(**args, memory=-5)
    with pytest.raises(ArgumentError, match=r"label_smoothing is 1.5"):
        cross_entropy(args["hidden"], args["targets"], label_smoothing=1.5)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="warps overtake each other only on a GPU")
def test_overwriting_long_rows_loses_no_logit() -> None:
    """16-bit gradients over fp32 logits, 32 blocks a row and more rows than run at once, as against a new tensor."""
    from bagu.ops.linear_cross_entropy.triton_backend import KERNELS

    rows, words = 1024, 128256
    logits = torch.randn(rows, words, device="cuda")
    targets = torch.randint(0, words, (rows,), device="cuda")
    own = [torch.randn(rows, device="cuda") for _ in range(2)]
    lse = logits.logsumexp(-1)
    want = own[1][:, None] * (logits - lse[:, None]).exp()
    want.scatter_add_(1, targets[:, None], own[0][:, None])
    got = KERNELS.slope(logits, targets, lse, *own, -100, torch.bfloat16)
    torch.testing.assert_close(got, want.bfloat16(), rtol=2**-7, atol=1e-30)


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="elsewhere every sum is in fp32")
def test_many_chunks_do_not_round_the_weights_gradient_away() -> None:
    """4096 equal tokens in chunks of 16: a bf16 sum would stop growing at 256 of its 256 parts."""
    hidden = torch.ones(4096, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.zeros(128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.zeros(4096, device="cuda", dtype=torch.int64)
    target_logit, _ = linear_cross_entropy(hidden, weight, targets, memory=16 * 128 * 4)
    target_logit.sum().backward()
    assert (weight.grad[0] == 4096).all()


@BACKENDS
def test_the_gradient_at_a_sure_target_is_what_is_left_of_1(backend: str) -> None:
    """p in 16 bits has steps of 5e-4, and 1 - p is down to 4e-4 here: the difference is taken in fp32."""
    g = torch.Generator().manual_seed(0)
    weight, targets = torch.randn(40, 64, generator=g) / 8, torch.randint(40, (5,), generator=g)
    hidden = (9 * weight[targets]).to(DEVICE, torch.float16).requires_grad_()
    weight, targets = weight.to(DEVICE, torch.float16), targets.to(DEVICE)
    loss, *_ = linear_cross_entropy_loss(hidden, weight, targets, backend=backend)
    (got,) = torch.autograd.grad(loss, hidden)
    exact = hidden.detach().double().requires_grad_()
    (want,) = torch.autograd.grad(torch.nn.functional.cross_entropy(exact @ weight.double().T, targets), exact)
    subnormal = 40 * 2**-25  # the gradients of 40 logits are in fp16, whose smallest step is 2^-24
    assert ((got.double() - want).norm(dim=-1) <= 4e-3 * want.norm(dim=-1) + subnormal).all()
