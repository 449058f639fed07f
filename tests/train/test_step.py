"""One step: what is summed, what is divided, what is left as it was."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
import torch
from tiny_run import VOCAB, Notes, batches, loader, model

from bagu import ops
from bagu.bench import train as bench
from bagu.bench.options import BenchSetting, TrainBench
from bagu.errors import ArgumentError, BackendError, BaguError, UnknownName
from bagu.nn.config import Alibi, MoEConfig
from bagu.nn.model import Transformer
from bagu.train import OptimizerConfig, StabilityConfig, TrainConfig, TrainState, fit, graphs, prepare, step
from bagu.train.cross_entropy import CrossEntropy, TargetTotals
from bagu.train.loss import Loss, Metrics, MicroBatchLoss
from bagu.train.schedule import ScheduleConfig
from bagu.types import IGNORE, Batch

CONFIG = TrainConfig(steps=20, optimizer=OptimizerConfig(lr=0.02))


def gradients(micro: tuple[Batch, ...], dtype: torch.dtype = torch.float32, **options: Any) -> dict[str, torch.Tensor]:
    """The flat gradients a step would use: SGD at a rate of 0 leaves them alone."""
    config = TrainConfig(optimizer=OptimizerConfig(kind="sgd", lr=0.0), clip=None, **options)
    state = TrainState(model(dtype), config)
    step(state, micro)
    return {slot.name: slot.of(state.flat.grad).clone() for slot in state.flat.slots}


class Poisoned(CrossEntropy):
    """The loss times NaN: so is every gradient."""

    def __call__(self, m: Transformer, batch: Batch, totals: TargetTotals) -> MicroBatchLoss:
        part = super().__call__(m, batch, totals)
        return part._replace(loss=part.loss * float("nan"))


def masked(batch: Batch, keep: int) -> Batch:
    """The batch with only its first `keep` targets."""
    counted = (batch.targets != IGNORE).cumsum(0) <= keep
    targets = torch.where(counted, batch.targets, IGNORE)
    return dataclasses.replace(batch, targets=targets, num_targets=int((targets != IGNORE).sum()))


def test_micro_batches_weigh_by_their_targets() -> None:
    """One batch of eight rows and two of four have the same gradient, also when the halves have unlike targets."""
    whole, halves = batches(rows=8), batches(rows=4, micro_batches=2)
    assert torch.equal(whole[0].ids, torch.cat([h.ids for h in halves]))
    few = (masked(halves[0], 5), halves[1])
    joined = dataclasses.replace(
        whole[0], targets=torch.cat([h.targets for h in few]), num_targets=sum(h.num_targets for h in few)
    )
    for one, two in (((whole[0],), halves), ((joined,), few)):
        a, b = gradients(one), gradients(two)
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=1e-6)


def test_loss_and_bits_per_byte_are_those_of_the_logits() -> None:
    m, (batch,) = model(), batches()
    with torch.no_grad():
        logits = m.logits(m(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden)
    want = torch.nn.functional.cross_entropy(logits, batch.targets, ignore_index=IGNORE)
    result = step(TrainState(m, CONFIG), (batch,))
    assert result.loss == result.metrics["loss_nats"] == pytest.approx(float(want), rel=1e-5)
    assert result.metrics["bits_per_byte"] == pytest.approx(float(want) / math.log(2) / 3)  # three bytes a token
    assert "objective_nats" not in result.metrics
    z = step(TrainState(model(), CONFIG, CrossEntropy(z_loss=0.1)), (batch,))
    lse = logits.logsumexp(-1)[batch.targets != IGNORE]
    assert z.metrics["loss_nats"] == pytest.approx(float(want), rel=1e-5)
    assert z.loss == z.metrics["objective_nats"] == pytest.approx(float(want + 0.1 * lse.square().mean()), rel=1e-5)


def test_a_step_equals_plain_torch() -> None:
    """Autograd, clip_grad_norm_ and torch's AdamW on the same model and batches."""
    data, plain = loader(), model()
    state = TrainState(model(), dataclasses.replace(CONFIG, clip=0.5))
    optimizer = torch.optim.AdamW(
        [{"params": [p for p in plain.parameters() if p.ndim > 1], "weight_decay": 0.1},
         {"params": [p for p in plain.parameters() if p.ndim < 2], "weight_decay": 0.0}], betas=(0.9, 0.95)
    )  # fmt: skip
    for s in range(5):
        (batch,) = data.batch(s)
        for group in optimizer.param_groups:
            group["lr"] = state.lr
        hidden = plain(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len).hidden
        weights = torch.full(batch.targets.shape, 1 / batch.num_targets)
        ops.linear_cross_entropy_loss(hidden, plain.head_weight, batch.targets, weights)[0].backward()
        norm = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        assert step(state, (batch,)).grad_norm == pytest.approx(float(norm), rel=1e-4)
    for (name, a), b in zip(state.model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-4, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("kind", ["adamw", "muon", "lion"])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_it_learns(kind: str, dtype: torch.dtype) -> None:
    lr = 0.008 if kind == "lion" else 0.02
    state = TrainState(model(dtype), TrainConfig(steps=40, optimizer=OptimizerConfig(kind=kind, lr=lr)))
    data = loader()
    losses = [step(state, data.batch(s)).loss for s in range(40)]
    assert losses[0] == pytest.approx(math.log(VOCAB), rel=0.05)
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]


def test_masters_keep_what_bf16_would_lose() -> None:
    state = TrainState(model(torch.bfloat16), TrainConfig(optimizer=OptimizerConfig(kind="sgd", lr=1e-3)))
    before = {n: p.clone() for n, p in state.model.named_parameters()}
    step(state, batches())
    moved = {n: (m != before[n].float()).float().mean() for n, m in state.flat.masters().items()}
    seen = {n: (p != before[n]).float().mean() for n, p in state.model.named_parameters()}
    matrices = [n for n in moved if before[n].ndim == 2 and "emb" not in n and "head" not in n]
    assert matrices and all(moved[n] > 0.9 and seen[n] < 0.1 for n in matrices)


def test_a_refused_step_changes_the_data_position_alone() -> None:
    state = TrainState(model(), CONFIG)
    step(state, batches())
    tensors = {**state.flat.masters(), **state.optimizer.tensors()}
    before = {n: t.clone() for n, t in tensors.items()}
    sound, state.loss = state.loss, Poisoned()
    result = step(state, batches(1))
    state.loss = sound
    assert result.skipped == "the loss is nan"
    assert (state.step, state.data_step) == (1, 2)
    assert all(torch.equal(t, before[n]) for n, t in tensors.items())
    assert step(state, batches(2)).skipped is None


def test_a_step_without_targets_is_refused() -> None:
    with pytest.raises(BaguError, match="no target that counts"):
        step(TrainState(model(), CONFIG), (masked(batches()[0], 0),))


def test_dropout_is_a_function_of_seed_and_data_step() -> None:
    def losses(seed: int, noise: int) -> list[float]:
        state = TrainState(model(dropout=0.3), dataclasses.replace(CONFIG, seed=seed))
        torch.manual_seed(noise)
        return [step(state, batches(0)).loss for _ in range(2)]

    assert losses(0, 1) == losses(0, 2)
    assert losses(0, 1) != losses(1, 1)


def test_experts_are_balanced_once_per_step_by_the_load_of_all_micro_batches() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, expert_size=16, bias_rate=0.01, aux_weight=0.01)
    state = TrainState(model(moe=moe), CONFIG)
    result = step(state, batches(micro_batches=2))
    assert result.loss == result.metrics["objective_nats"] > result.metrics["loss_nats"]
    biases = torch.stack([b for b in state.model.buffers() if b.shape == (4,)])  # of two layers
    assert biases.shape == (2, 4) and biases.any()
    steps = biases.abs()
    assert ((steps == 0) | (steps - 0.01).abs().lt(1e-6)).all()  # one step of the rate, not one per micro-batch


@pytest.mark.parametrize("how", ["selective", "block"])
def test_recomputed_activations_give_the_same_bits_from_less_memory(how: str) -> None:
    def run(mode: str) -> tuple[dict[str, torch.Tensor], int]:
        kept: dict[int, int] = {}

        def keep(t: torch.Tensor) -> torch.Tensor:
            kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        m = model(dropout=0.1)
        config = dataclasses.replace(CONFIG, activation_checkpointing=mode)
        state = TrainState(m, config)
        saving = torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t)
        with prepare.prepared(m, config, state.device), saving:
            step(state, batches())
        return {n: t.clone() for n, t in state.flat.masters().items()}, sum(kept.values())

    (want, all_bytes), (got, fewer_bytes) = run("none"), run(how)
    assert all(torch.equal(got[n], want[n]) for n in want)
    assert fewer_bytes < all_bytes


def test_a_bench_of_nothing_or_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    for nothing in ({"steps": 0}, {"rounds": 0}, {"micro_batches": (1, 0)}):
        with pytest.raises(ArgumentError, match=f"{next(iter(nothing))} is 0"):
            bench.main(TrainBench(shape="cpu_6m", **nothing), BenchSetting(device="cpu", out=tmp_path))
    with pytest.raises(UnknownName, match="activation_checkpointing 'blok'") as caught:
        bench.main(TrainBench(shape="cpu_6m", recompute="blok"), BenchSetting(device="cpu", out=tmp_path))
    assert "'block'" in caught.value.hint
    assert not list(tmp_path.iterdir())


def test_a_model_is_as_before_after_a_run() -> None:
    m = model()
    m.eval()
    fit(dataclasses.replace(CONFIG, steps=2, activation_checkpointing="block", deterministic=True), m, loader())
    assert not m.training
    assert all("forward" not in vars(b) and b._compiled_call_impl is None for b in m.blocks)
    assert not torch.are_deterministic_algorithms_enabled()


def test_compile_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bagu.machine.device.cxx_compiler", lambda: None)
    asked = dataclasses.replace(CONFIG, steps=1, compile=True)
    with pytest.raises(BackendError, match=r"C\+\+ compiler"):
        fit(asked, model(), loader())
    with pytest.warns(RuntimeWarning, match="goes on without"):
        fit(dataclasses.replace(asked, compile=None), model(), loader())


def test_rows_have_every_meter_and_callables_run_when_due() -> None:
    notes, m = Notes(), model()
    modes = []

    def evaluate(_: object) -> dict[str, float]:
        modes.append((m.training, torch.is_grad_enabled()))
        return {"val_loss_nats": 1.5}

    config = TrainConfig(steps=5, eval_every=2, sample_every=3)
    result = fit(
        config, m, loader(), observers=[notes], evaluate=evaluate, sample=lambda _: ["text"],
        flops_per_token=1e3, peak_flops=1e9,
    )  # fmt: skip
    assert result.step == 5 and not result.interrupted and result.checkpoint is None
    names = "loss_nats bits_per_byte lr grad_norm tokens_per_s mfu_percent memory_bytes padding_percent data_wait_s"
    assert all(set(names.split()) <= row.keys() and None not in row.values() for row in notes.rows.values())
    assert [s for s, row in notes.rows.items() if "val_loss_nats" in row] == [1, 3, 4]
    assert list(notes.texts) == [2, 4]
    assert modes == [(False, False)] * 3


def test_options_that_would_do_nothing_are_refused() -> None:
    for option in ("eval_every", "sample_every", "save_every"):
        with pytest.raises(ArgumentError, match=option):
            fit(TrainConfig(steps=1, **{option: 1}), model(), loader())
    with pytest.raises(ArgumentError, match="keep_best"):
        TrainConfig(keep_best=True, eval_every=2, save_every=3)
    with pytest.raises(ArgumentError, match="clip"):
        TrainConfig(clip=0.0)
    with pytest.raises(ArgumentError, match="min_history"):
        StabilityConfig(window=4, min_history=5)


def test_a_shape_of_batch_is_captured_at_its_third_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """And not in evaluation, nor a batch that keeps a GPU busy by itself."""
    m, (batch,), captures, replays = model().train(), batches(rows=4), [], []

    def capture(self: Any, ids: torch.Tensor, positions: torch.Tensor, cu: torch.Tensor, max_len: int) -> Any:
        captures.append(tuple(ids.shape))
        return lambda *given: replays.append(1) or self.forward(*given, max_len).hidden

    monkeypatch.setattr(graphs._Graphs, "_capture", capture)
    given = (batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
    want = m(*given).hidden
    with graphs.captured(m):
        for _ in range(2):
            m(*given)
            with torch.no_grad():
                m(*given)
        assert not captures
        first, second = m(*given).hidden, m(*given).hidden
        assert torch.equal(first, want) and torch.equal(second, want)
        assert captures == [tuple(batch.ids.shape)] and replays == [1]  # a second forward before a backward is its own
        first.sum().backward()
        m(*given)
        assert replays == [1, 1]
        monkeypatch.setattr(graphs, "SMALL", 0)
        for _ in range(3):
            m(batch.ids[:-1], batch.positions[:-1], batch.cu_seqlens.clamp(max=len(batch.ids) - 1), batch.max_len)
    assert len(captures) == 1 and "forward" not in vars(m)


def test_gradients_flow_to_the_parameters_from_what_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture is of other leaves in the same memory; here it runs as it is."""
    monkeypatch.setattr(torch.cuda, "make_graphed_callables", lambda fn, args, **_: fn)
    found = []
    for context in (contextlib.nullcontext, graphs.captured):
        m, grads = model().train(), []
        m.embedding.weight.requires_grad_(False)
        with context(m) if context is graphs.captured else context():
            for _ in range(4):
                part = CrossEntropy()(m, batches()[0], TargetTotals.of(batches()))
                grads.append(torch.autograd.grad(part.loss, [p for p in m.parameters() if p.requires_grad]))
        found.append(grads[-1])
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


def test_what_reads_values_back_is_not_captured() -> None:
    config = model().config
    assert graphs.can_capture(config, torch.bfloat16) and not graphs.can_capture(config, torch.float32)
    experts = dataclasses.replace(config, moe=MoEConfig(num_experts=4, top_k=2, expert_size=16))
    assert not graphs.can_capture(experts, torch.bfloat16)
    assert not graphs.can_capture(dataclasses.replace(config, positions=Alibi()), torch.bfloat16)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_captured_step_has_the_gradients_of_one_that_is_not() -> None:
    m = model(torch.bfloat16).cuda()
    config = TrainConfig(optimizer=OptimizerConfig(kind="sgd", lr=0.0), clip=None)
    state, found = TrainState(m, config), []
    with prepare.prepared(m, config, state.device), warnings.catch_warnings(record=True) as seen:
        for seed in (0, 1, 0, 1, 0):  # two as they are, then the graph, also on another batch
            result = step(state, batches(seed, rows=8))
            found.append((seed, result.loss, state.flat.grad.clone()))
        assert m.forward.graphs  # type: ignore[attr-defined]
        assert not [w for w in seen if "AccumulateGrad" in str(w.message)]
    first = {seed: (loss, grad) for seed, loss, grad in reversed(found)}
    for seed, loss, grad in found:
        want_loss, want = first[seed]
        assert loss == pytest.approx(want_loss, rel=2**-8)
        assert (grad - want).abs().max() <= 2**-7 * want.abs().max()  # two roundings to bf16
    assert not torch.equal(found[2][2], found[3][2])


class Noted(CrossEntropy):
    """Cross-entropy with a metric of each kind: the targets of a micro-batch, summed and at most."""

    def __call__(self, m: Transformer, batch: Batch, totals: TargetTotals) -> MicroBatchLoss:
        part, count = super().__call__(m, batch, totals), torch.tensor(float(batch.num_targets))
        return part._replace(metrics={**part.metrics, "all": count}, peaks={"most": count})

    def metrics(self, loss: float, sums: Mapping[str, float], totals: TargetTotals) -> Metrics:
        return {"all": sums.get("all"), "most": sums.get("most")}


class Idle(Noted):
    def totals(self, batches: Sequence[Batch]) -> TargetTotals:
        return dataclasses.replace(super().totals(batches), idle=True)


def test_metrics_are_summed_over_micro_batches_and_peaks_are_the_largest() -> None:
    first, second = batches(rows=4, micro_batches=2)
    micro = (masked(first, 5), masked(second, 7))
    state = TrainState(model(), CONFIG, Noted())
    assert step(state, micro).metrics == {"all": 12, "most": 7}
    assert state.loss.evaluate(state.model, micro) == {"val_loss_nats": ANY, "val_bits_per_byte": ANY}
    found = Loss.evaluate(state.loss, state.model, micro)
    assert found == {"val_all": 12, "val_most": 7}


def test_an_idle_step_is_counted_and_changes_nothing() -> None:
    state = TrainState(model(), CONFIG, Noted())
    step(state, batches())  # the optimizer now has momentum
    state.loss = Idle()
    before, moments = state.flat.master.clone(), {k: t.clone() for k, t in state.optimizer.tensors().items()}
    result = step(state, batches(1))
    assert result.skipped is None and result.grad_norm == 0 and result.metrics == {"all": None, "most": None}
    assert (state.step, state.data_step) == (2, 2)
    assert torch.equal(state.flat.master, before)
    assert all(torch.equal(t, moments[name]) for name, t in state.optimizer.tensors().items())


def test_adam_corrects_its_bias_by_updates_and_not_by_idle_steps() -> None:
    """Rollouts may begin with rewards that are all equal: the first update after them has the size of a first one."""
    config = dataclasses.replace(CONFIG, schedule=ScheduleConfig(kind="constant"))
    plain, state = TrainState(model(), config), TrainState(model(), config, Idle())
    step(plain, batches())
    step(state, batches(1))
    state.loss = CrossEntropy()
    step(state, batches())
    assert torch.equal(state.flat.master, plain.flat.master)
