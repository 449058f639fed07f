"""Mixture of experts: compared with a loop over tokens and experts; load balancing."""

from __future__ import annotations

import pytest
import torch
from small_models import make, packed, small

from bagu import ops
from bagu.nn.config import ModelConfig, MoEConfig
from bagu.nn.ffn import activate
from bagu.nn.moe import MoE, balance_loss, choose
from bagu.ops.invariant.mode import sigmoid

KINDS = [
    MoEConfig(num_experts=6, top_k=2, expert_size=16),
    MoEConfig(num_experts=6, top_k=1, expert_size=16, normalize_top_k=False),
    MoEConfig(num_experts=4, top_k=4, expert_size=8, num_shared=2),
    MoEConfig(
        num_experts=8, top_k=3, expert_size=16, num_shared=1, scoring="sigmoid", num_groups=4, top_groups=2,
        route_scale=2.5, bias_rate=0.01,
    ),
]  # fmt: skip
NAMES = ["softmax", "switch", "all", "deepseek"]


def layer(moe: MoEConfig, **changes: str) -> tuple[ModelConfig, MoE]:
    config = small(num_layers=1, moe=moe, **changes)
    module = make(config, torch.float64, louder=20.0).blocks[0].ffn
    assert isinstance(module, MoE)
    if module.bias is not None:
        module.bias.copy_(torch.linspace(-0.2, 0.2, moe.num_experts).flip(0))
    return config, module


def by_loops(config: ModelConfig, module: MoE, x: torch.Tensor) -> tuple[torch.Tensor, list[int]]:
    """The definition, with a loop over tokens and experts."""
    moe = module.moe
    rows, load = [], [0] * moe.num_experts
    for token in x:
        logits = module.router.weight @ token
        scores = logits.softmax(0) if moe.scoring == "softmax" else logits.sigmoid()
        ranked = scores if module.bias is None else scores + module.bias
        size = moe.num_experts // moe.num_groups
        worth = [sum(sorted(ranked[g * size : (g + 1) * size].tolist())[-2:]) for g in range(moe.num_groups)]
        best = sorted(range(moe.num_groups), key=lambda g: -worth[g])[: moe.top_groups]
        allowed = [e for e in range(moe.num_experts) if e // size in best]
        chosen = sorted(allowed, key=lambda e: -ranked[e].item())[: moe.top_k]
        total = sum(scores[e] for e in chosen) if moe.normalize_top_k else 1.0
        y = torch.zeros_like(token)
        for e in chosen:
            up = module.gate_up[e] if config.gated else module.up[e]
            h = activate(config.ffn, (up @ token).unsqueeze(0))[0]
            y = y + moe.route_scale * scores[e] / total * (module.down[e] @ h)
            load[e] += 1
        rows.append(y if module.shared is None else y + module.shared(token.unsqueeze(0))[0])
    return torch.stack(rows), load


@pytest.mark.parametrize("moe", KINDS, ids=NAMES)
def test_a_token_has_the_same_bits_alone_and_in_a_batch_in_invariant_mode(moe: MoEConfig) -> None:
    module = make(small(num_layers=1, moe=moe), torch.float32, louder=20.0).blocks[0].ffn
    x = torch.randn(37, module.router.weight.shape[1], generator=torch.Generator().manual_seed(3))
    with ops.invariant(), torch.inference_mode():
        full = module(x)[0]
        for start, stop in [*((i, i + 1) for i in range(37)), (0, 16), (5, 36), (30, 37)]:
            part = module(x[start:stop])[0]
            assert torch.equal(part, full[start:stop]), f"tokens {start} to {stop}"


def test_the_sigmoid_of_invariant_mode_has_a_gradient_everywhere() -> None:
    z = torch.linspace(-20, 20, 4097).requires_grad_()
    far = torch.tensor([-1e4, -90.0, 90.0, 1e4], requires_grad=True)
    with ops.invariant():
        scores, ends = sigmoid(z), sigmoid(far)
        alone = torch.cat([sigmoid(one) for one in z.detach().split(1)])
    assert torch.equal(scores, alone)
    exact = z.detach().double().sigmoid()
    assert torch.allclose(scores.double(), exact, rtol=3e-7, atol=0)
    (scores.sum() + ends.sum()).backward()
    assert z.grad is not None and torch.allclose(z.grad.double(), exact * (1 - exact), rtol=1e-5, atol=1e-7)
    assert far.grad is not None and far.grad.abs().max() < 1e-30


@pytest.mark.parametrize("ffn", ["swiglu", "relu2"])
@pytest.mark.parametrize("moe", KINDS, ids=NAMES)
def test_it_matches_a_loop(moe: MoEConfig, ffn: str) -> None:
    config, module = layer(moe, ffn=ffn)
    x = torch.randn(23, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    x.requires_grad_()
    y, routing = module(x)
    expected, load = by_loops(config, module, x)
    torch.testing.assert_close(y, expected, rtol=1e-10, atol=1e-12)
    assert routing.load.tolist() == load
    wanted = [x, *module.parameters()]
    ours, theirs = (torch.autograd.grad(out.square().sum(), wanted) for out in (y, expected))
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


def test_no_token_is_dropped_if_all_go_to_one_expert() -> None:
    _, module = layer(KINDS[0])
    with torch.no_grad():
        module.router.weight.zero_()  # all scores are equal: all tokens choose the same experts
    x = torch.randn(50, 32, dtype=torch.float64)
    y, routing = module(x)
    assert sorted(routing.load.tolist()) == [0, 0, 0, 0, 50, 50]
    assert (y.abs().sum(1) > 0).all()


def test_the_balance_loss_is_1_if_balanced_and_num_experts_if_not() -> None:
    even = torch.full((12, 4), 0.25)
    assert balance_loss(even, torch.tensor([3, 3, 3, 3])).item() == pytest.approx(1.0)
    one = torch.tensor([[1.0, 0.0, 0.0, 0.0]]).repeat(12, 1)
    assert balance_loss(one, torch.tensor([12, 0, 0, 0])).item() == pytest.approx(4.0)


def test_the_balance_loss_of_the_model_is_the_weighted_sum_over_its_layers() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=8, aux_weight=0.5)
    out = make(small(num_layers=3, moe=moe), louder=1.0)(*packed([20]))
    assert out.aux_loss is not None and len(out.expert_load) == 3
    assert out.aux_loss.item() == pytest.approx(3 * 0.5, rel=0.1)  # nearly even at first
    assert make(small(moe=MoEConfig(num_experts=4, top_k=2, expert_size=8)))(*packed([9])).aux_loss is None


def test_the_bias_affects_the_choice_but_not_the_weights() -> None:
    moe = MoEConfig(num_experts=3, top_k=1, expert_size=8, scoring="sigmoid", normalize_top_k=False, bias_rate=0.1)
    scores = torch.tensor([[0.6, 0.5, 0.1]])
    assert choose(scores, torch.zeros(3), moe)[1].item() == 0
    weights, experts = choose(scores, torch.tensor([-0.2, 0.0, 0.0]), moe)
    assert experts.item() == 1 and weights.item() == pytest.approx(0.5)


def test_the_bias_balances_the_load_without_a_loss() -> None:
    """The bias alone balances a router that prefers two of six experts."""
    moe = MoEConfig(num_experts=6, top_k=2, expert_size=8, scoring="sigmoid", bias_rate=0.02)
    model = make(small(num_layers=2, moe=moe))
    with torch.no_grad():
        for block in model.blocks:
            block.ffn.router.weight[:2] *= 3
    batch = packed([32] * 16)

    def worst() -> float:
        loads = model(*batch).expert_load
        return max(float(load.max() / load.float().mean()) for load in loads)

    before = worst()
    for _ in range(60):
        model.update_balance(model(*batch).expert_load)
    assert before > 1.5 and worst() < 1.25


def test_router_scores_are_fp32_in_a_bf16_model() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=8)
    module = make(small(num_layers=1, moe=moe), torch.bfloat16).blocks[0].ffn
    assert module.router(torch.randn(3, 32, dtype=torch.bfloat16)).dtype == torch.float32
