"""The Transformer: every pair of options runs, documents do not attend to each other, gradients are right."""

from __future__ import annotations

import itertools
import random
import shutil
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from small_models import documents, loss, make, packed, small

from bagu.config import ConfigError
from bagu.errors import ArgumentError
from bagu.nn import ModelConfig, Transformer, init_weights
from bagu.nn.config import (
    Alibi,
    GateClamp,
    LayerPositions,
    MLAConfig,
    MoEConfig,
    Multipliers,
    NormConfig,
    Rope,
    Sinusoidal,
    T5Relative,
    YarnScaling,
)
from bagu.nn.norm import BatchNorm
from bagu.nn.position_choices import Learned, Llama3Scaling, NoPositions

MLA = MLAConfig(kv_rank=16, nope_dim=4, rope_dim=4, v_dim=6)
EXPERTS = MoEConfig(num_experts=4, top_k=2, expert_size=24, aux_weight=0.01, bias_rate=0.01)
POST = NormConfig(kind="layer", placement="post", eps=1e-5, bias=True)
NORMS = [
    NormConfig(),
    POST,
    NormConfig(kind="layer", eps=1e-5),
    NormConfig(kind="scale", eps=1e-5),
    NormConfig(kind="group", groups=4, bias=True),
    NormConfig(kind="batch", eps=1e-5, bias=True),
    NormConfig(placement="sandwich", unit_offset=True),
    NormConfig(placement="output"),
    NormConfig(placement="none", alpha=0.2),
]
SWITCHES: dict[str, list[Any]] = {  # the values of each option; `pairwise` combines them
    "norm": NORMS,
    "positions": [
        Rope(), Rope(dim=4, layout="interleaved", scaling=YarnScaling(factor=4.0, original_max_len=8)),
        Rope(scaling=Llama3Scaling(factor=8.0, original_max_len=16)), Learned(), Sinusoidal(), Alibi(),
        T5Relative(buckets=8, max_distance=6), NoPositions(),
    ],
    "heads": [(4, 4, None), (4, 2, None), (4, 1, None), (4, 4, MLA), (4, 4, MLAConfig(**vars(MLA) | {"q_rank": 8}))],
    "attention": ["softmax", "linear"],
    "causal": [True, False],
    "windows": [(None,), (3, None)],
    "ffn": ["swiglu", "geglu", "geglu_tanh", "gelu", "gelu_tanh", "relu2"],
    "moe": [
        None, MoEConfig(**vars(EXPERTS) | {"dense_layers": (0,)}),
        MoEConfig(num_experts=8, top_k=3, expert_size=16, num_shared=1, scoring="sigmoid", num_groups=4, top_groups=2,
                  route_scale=2.5, bias_rate=0.01),
    ],
    "biases": [False, True],
    "qk_norm": [False, True, "width"],
    "sinks": [False, True],
    "gate_clamp": [None, GateClamp(alpha=1.0, limit=2.0)],
    "multipliers": [Multipliers(), Multipliers(embedding=2.0, attention=0.3, residual=0.5, logits_divisor=3.0)],
    "layer_positions": [
        None, LayerPositions(layers=(1,), positions=NoPositions()),
        LayerPositions(layers=(0,), positions=Rope(base=9.0)),
    ],
    "weight_norm": [False, True],
    "dropout": [0.0, 0.1],
    "bert": [False, True],
    "tie_embeddings": [True, False],
}  # fmt: skip


def configure(row: Mapping[str, Any]) -> ModelConfig:
    row = dict(row)
    heads, kv_heads, mla = row.pop("heads")
    biases, bert = row.pop("biases"), row.pop("bert")
    return small(
        num_heads=heads, num_kv_heads=kv_heads, mla=mla, qkv_bias=biases and mla is None, out_bias=biases,
        ffn_bias=biases, embedding_norm=bert, num_token_types=2 * bert,
        mlm_head=bert and not row["causal"], **row,
    )  # fmt: skip


def pairwise() -> list[dict[str, Any]]:
    """Rows that contain every allowed pair of values of two options."""
    pick = random.Random(0)
    places = {name: range(len(values)) for name, values in SWITCHES.items()}
    missing = {((a, i), (b, j)) for a, b in itertools.combinations(places, 2) for i in places[a] for j in places[b]}
    rows = []
    while missing:
        wanted = min(missing)
        best: tuple[int, dict[str, int]] | None = None
        for _ in range(40):
            row = {name: pick.choice(at) for name, at in places.items()} | dict(wanted)
            try:
                configure({name: SWITCHES[name][i] for name, i in row.items()})
            except ConfigError:
                continue
            new = len(missing & set(itertools.combinations(row.items(), 2)))
            best = max(best or (0, row), (new, row), key=lambda found: found[0])
        if best is None:
            missing.discard(wanted)  # this pair is not allowed
            continue
        missing -= set(itertools.combinations(best[1].items(), 2))
        rows.append({name: SWITCHES[name][i] for name, i in best[1].items()})
    return rows


ROWS = pairwise()


def test_the_rows_are_few_and_cover_every_value() -> None:
    assert len(ROWS) < 120
    for name, values in SWITCHES.items():
        assert all(any(row[name] is value for row in ROWS) for value in values), name


@pytest.mark.parametrize("row", ROWS, ids=[str(i) for i in range(len(ROWS))])
def test_every_pair_of_options_runs_forward_and_backward(row: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = make(configure(row), louder=1.0)
    total = loss(model, packed([9, 1, 14]))
    total.backward()
    assert total.isfinite()
    for name, p in model.named_parameters():
        assert p.grad is not None, f"{name} has no gradient"
        assert p.grad.isfinite().all(), name


LAWFUL = [  # one config per feature that could leak information between tokens
    small(),
    small(positions=Alibi()),
    small(positions=T5Relative(buckets=8, max_distance=6), causal=False),
    small(windows=(3, None), positions=Learned()),
    small(norm=POST, causal=False),
    small(norm=NormConfig(kind="group", groups=4)),
    small(num_kv_heads=4, mla=MLA),
    small(moe=EXPERTS),
    small(num_kv_heads=4, attention="linear"),
    small(num_kv_heads=4, attention="linear", causal=False),
]
IDS = ["rope", "alibi", "t5", "window", "bert", "group", "mla", "moe", "linear", "linear_both"]


@pytest.mark.parametrize("config", LAWFUL, ids=IDS)
def test_documents_do_not_attend_to_each_other(config: ModelConfig) -> None:
    model = make(config).eval()
    first, second, third = packed([7, 12, 5])[0].split([7, 12, 5])
    other = (second + 1) % config.vocab_size
    a = model(*documents([first, second, third])).hidden.split([7, 12, 5])
    b = model(*documents([first, other, third])).hidden.split([7, 12, 5])
    assert torch.equal(a[0], b[0]) and torch.equal(a[2], b[2])
    assert not torch.allclose(a[1], b[1], atol=1e-3)


@pytest.mark.parametrize("config", LAWFUL, ids=IDS)
def test_the_order_of_documents_changes_nothing(config: ModelConfig) -> None:
    model, lengths = make(config, torch.float64).eval(), [7, 12, 5]
    docs = packed(lengths)[0].split(lengths)
    a = model(*documents(docs)).hidden.split(lengths)
    b = model(*documents(docs[::-1])).hidden.split(lengths[::-1])
    for x, y in zip(a, b[::-1], strict=True):
        torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "config", [c for c in LAWFUL if c.causal], ids=[i for i, c in zip(IDS, LAWFUL, strict=True) if c.causal]
)
def test_a_causal_model_does_not_attend_to_later_tokens(config: ModelConfig) -> None:
    model = make(config, torch.float64).eval()
    ids, *rest = packed([20])
    changed = ids.clone()
    changed[12:] = (changed[12:] + 1) % config.vocab_size
    a, b = model(ids, *rest).hidden, model(changed, *rest).hidden
    torch.testing.assert_close(a[:12], b[:12], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(a[12:], b[12:], atol=1e-3)


def test_a_bidirectional_model_attends_to_later_tokens() -> None:
    model = make(small(causal=False), torch.float64)
    ids, *rest = packed([20])
    changed = ids.clone()
    changed[-1] = (changed[-1] + 1) % 61
    assert not torch.allclose(model(ids, *rest).hidden[0], model(changed, *rest).hidden[0], atol=1e-6)


def test_the_length_of_a_window() -> None:
    """One layer of window 3: a token attends to the one two before it, not to the one three before it."""
    model = make(small(num_layers=1, windows=(3,)), torch.float64)
    ids, *rest = packed([20])
    base = model(ids, *rest).hidden
    changed = ids.clone()
    changed[10] = (changed[10] + 1) % 61
    differs = (model(changed, *rest).hidden - base).abs().amax(1) > 1e-9
    assert differs.nonzero().flatten().tolist() == [10, 11, 12]


def test_padded_empty_segments_change_nothing() -> None:
    model = make(small())
    ids, positions, cu_seqlens, max_len = packed([7, 12, 5])
    padded = torch.cat((cu_seqlens, cu_seqlens[-1:].repeat(4)))
    a, b = model(ids, positions, cu_seqlens, max_len).hidden, model(ids, positions, padded, max_len).hidden
    torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    "config",
    [
        small(num_layers=1, positions=T5Relative(buckets=8, max_distance=6), qk_norm=True),
        small(num_layers=1, norm=NormConfig(placement="sandwich"), ffn="gelu", qkv_bias=True, weight_norm=True),
        small(num_layers=1, num_kv_heads=4, mla=MLA, moe=EXPERTS),
        small(num_layers=1, num_kv_heads=4, attention="linear", ffn="relu2", norm=POST),
        small(
            num_layers=1, sinks=True, gate_clamp=GateClamp(limit=0.5), ffn_bias=True, windows=(4,),
            moe=MoEConfig(num_experts=4, top_k=2, expert_size=24, router_bias=True),
        ),
        small(
            norm=NormConfig(placement="output", unit_offset=True), qk_norm="width",
            layer_positions=LayerPositions(layers=(1,), positions=NoPositions()),
            multipliers=Multipliers(embedding=2.0, attention=0.3, logits_divisor=3.0),
        ),
    ],
    ids=["t5", "sandwich", "mla_moe", "linear", "sinks_moe", "output_width"],
)  # fmt: skip
def test_gradients_match_finite_differences(config: ModelConfig) -> None:
    """fp64, along a random direction in the space of all parameters."""
    model, batch = make(config, torch.float64, louder=2.0), packed([5, 6])
    loss(model, batch).backward()
    stream = torch.Generator().manual_seed(1)
    steps = [torch.randn(p.shape, generator=stream, dtype=p.dtype) for p in model.parameters()]
    slope = sum((p.grad * s).sum().item() for p, s in zip(model.parameters(), steps, strict=True) if p.grad is not None)
    ends = []
    for h in (1e-6, -2e-6):
        with torch.no_grad():
            for p, s in zip(model.parameters(), steps, strict=True):
                p.add_(s, alpha=h)
            ends.append(loss(model, batch).item())
    assert slope == pytest.approx((ends[0] - ends[1]) / 2e-6, rel=1e-6)


def test_initial_weights_depend_on_the_seed_only() -> None:
    a, b, c = make(small()), make(small(), torch.float64), make(small(), seed=1)
    deeper = make(small(num_layers=3))
    for name, p in a.state_dict().items():
        torch.testing.assert_close(p.double(), b.state_dict()[name], rtol=1e-6, atol=0)
        if "norm" not in name and not name.endswith(("out.weight", "down.weight")):
            assert torch.equal(p, deeper.state_dict()[name])
            assert not torch.equal(p, c.state_dict()[name])


def test_initial_weights_have_the_right_scale() -> None:
    model = init_weights(Transformer(small(hidden_size=128, intermediate_size=256, num_layers=8)), 0)
    block = model.blocks[0]
    assert model.embedding.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.ffn.gate_up.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.ffn.down.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)
    assert torch.equal(block.ffn_norm.weight, torch.ones(128))


def test_weight_normalization_starts_at_the_drawn_weights() -> None:
    plain, normed = (init_weights(Transformer(small(weight_norm=w)), 0) for w in (False, True))
    torch.testing.assert_close(plain(*packed([9])).hidden, normed(*packed([9])).hidden)
    linear = normed.blocks[0].ffn.down
    with torch.no_grad():
        linear.weight.mul_(3.0)  # only the direction of `weight` matters
    torch.testing.assert_close(plain(*packed([9])).hidden, normed(*packed([9])).hidden)


def test_a_model_without_norms_keeps_the_size_of_its_stream() -> None:
    config = small(
        hidden_size=128, head_dim=32, num_layers=12, intermediate_size=256, norm=NormConfig(placement="none", alpha=0.2)
    )
    hidden = init_weights(Transformer(config), 0)(*packed([32, 32])).hidden
    assert 0.5 < hidden.std().item() < 2.0


def test_uninitialized_weights_give_nan() -> None:
    assert Transformer(small())(*packed([5])).hidden.isnan().all()


def test_a_tied_head_is_the_embedding_and_a_biased_one_adds_its_bias() -> None:
    tied = make(small(tie_embeddings=True))
    assert tied.head_weight is tied.embedding.weight and tied.head is None
    bert = make(small(tie_embeddings=True, causal=False, mlm_head=True))
    out = bert(*packed([9]))
    assert bert.mlm is not None
    expected = out.hidden[:, :32] @ bert.embedding.weight.T + bert.mlm.bias
    torch.testing.assert_close(bert.logits(out.hidden), expected)


def test_token_types_are_added() -> None:
    model = make(small(num_token_types=2))
    batch = packed([9])
    assert torch.equal(model(*batch).hidden, model(*batch, token_types=torch.zeros(9, dtype=torch.int64)).hidden)
    assert not torch.allclose(model(*batch).hidden, model(*batch, token_types=torch.ones(9, dtype=torch.int64)).hidden)
    with pytest.raises(ArgumentError, match="token_types"):
        make(small())(*batch, token_types=torch.zeros(9, dtype=torch.int64))


def test_a_sequence_past_max_len_is_refused() -> None:
    with pytest.raises(ArgumentError, match="33 tokens, but the model has positions for 32"):
        make(small())(*packed([33]))


def test_dropout_acts_in_training_only() -> None:
    model, batch = make(small(dropout=0.5)), packed([9])
    assert not torch.equal(model(*batch).hidden, model(*batch).hidden)
    model.eval()
    assert torch.equal(model(*batch).hidden, model(*batch).hidden)


def test_batch_norm_learns_running_statistics() -> None:
    model = make(small(norm=NormConfig(kind="batch", eps=1e-5)))
    model(*packed([20]))
    norms = [m for m in model.modules() if isinstance(m, BatchNorm)]
    assert norms and all(not torch.equal(m.mean, torch.zeros(32)) for m in norms)
    before = norms[0].mean.clone()
    model.eval()(*packed([20], seed=1))
    assert torch.equal(before, norms[0].mean)


def test_a_cast_or_a_move_does_not_round_the_tables() -> None:
    config = small(max_len=4096)
    model = make(config).to(torch.bfloat16)
    cos = model.positions.signals(torch.tensor([4095]), 4096).cos
    assert cos is not None and cos.dtype == torch.float32
    assert cos[0, 0].item() == pytest.approx(torch.tensor(4095.0, dtype=torch.float64).cos().item(), abs=1e-6)


def test_a_model_created_on_meta_runs_after_initialization() -> None:
    model = make(small())
    empty = Transformer(small(), device="meta")
    empty.load_state_dict(model.state_dict(), assign=True)
    assert torch.equal(model(*packed([9])).hidden, empty(*packed([9])).hidden)


@pytest.mark.parametrize("positions", [Rope(), Alibi(), T5Relative(), Sinusoidal()], ids=lambda p: p.kind)
def test_generation_under_inference_mode_leaves_the_model_trainable(positions: Any) -> None:
    model = make(small(positions=positions))
    want = torch.autograd.grad(loss(model, packed([9])), list(model.parameters()))
    fresh = make(small(positions=positions))
    with torch.inference_mode():
        fresh(*packed([9]))
    got = torch.autograd.grad(loss(fresh, packed([9])), list(fresh.parameters()))
    assert want and all(torch.equal(g, w) for g, w in zip(got, want, strict=True))


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile on a CPU needs a C++ compiler")
def test_it_compiles_to_one_graph() -> None:
    torch.compiler.reset()
    model, batch = make(small(num_layers=1, tie_embeddings=True)), packed([8, 8, 8])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(*batch).hidden, model(*batch).hidden, rtol=1e-5, atol=1e-5)
