"""Models that no rank has whole: the bits of one device after the start, and the memory of a part until the end."""

from __future__ import annotations

import contextlib
import itertools
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from ranks import Ranks, ranks
from tiny import Case

from bagu.nn.config import MoEConfig
from bagu.nn.digest import digest_of
from bagu.nn.hollow import hollow, is_hollow
from bagu.nn.init import initial_values
from bagu.nn.model import Transformer
from bagu.parallel.mesh import open_mesh
from bagu.recipes.models import load_model, opened_model, save_model
from bagu.train import TrainState, step
from bagu.train.loop import fit
from bagu.train.memory import gradients
from bagu.train.prepare import prepared
from tests.variants import of_cases

# a model that every dimension divides, with a balancing bias for each expert, which is a buffer
EXPERTS = {
    "num_heads": 4, "num_kv_heads": 4, "head_dim": 8, "num_layers": 4,
    "moe": MoEConfig(num_experts=4, top_k=2, expert_size=16, bias_rate=0.01),
}  # fmt: skip
BIASES = {"num_kv_heads": 2, "out_bias": True, "ffn_bias": True}  # no family has names for these two
TIED = {"num_kv_heads": 2, "tie_embeddings": True}
ULYSSES = {"context_parallel": "ulysses"}  # the ring would count padding in the balancing bias
CASES = [
    *(Case(name=f"zero {stage}", mesh="shard=2", zero=stage, model=EXPERTS) for stage in (1, 2, 3)),
    *(Case(name=dim, mesh=f"{dim}=2", model=EXPERTS) for dim in ("tp", "pp", "ep")),
    Case(name="cp", mesh="cp=2", model=EXPERTS, options=ULYSSES),
    Case(name="interleaved", mesh="pp=2", model=EXPERTS, options={"pipeline": "interleaved"}),
    Case(name="zero bubble, tied", mesh="pp=2", model=TIED | {"num_layers": 4}, options={"pipeline": "zero_bubble"}),
    Case(name="zero 3, bf16, tied", mesh="shard=2", zero=3, dtype=torch.bfloat16, model=TIED),
    Case(name="zero 2, fp8", mesh="shard=2", zero=2, dtype=torch.bfloat16, options={"precision": "fp8"}),
    Case(name="tp, biases", mesh="tp=2", model=BIASES),
    Case(name="tp, odd vocabulary", mesh="tp=2", model=TIED | {"vocab_size": 65}),
    Case(name="tp, lora", mesh="tp=2", model=BIASES, lora=True),
    Case(name="pp, lora", mesh="pp=2", model=TIED, lora=True),
]
PAIRS = itertools.combinations(("pp", "dp", "shard", "ep", "cp", "tp"), 2)
FOUR = [
    *(Case(name=f"{dim}=4", mesh=f"{dim}=4", model=EXPERTS) for dim in ("shard", "tp", "pp", "ep")),
    *(Case(name=f"zero {stage}, shard=4", mesh="shard=4", zero=stage, model=EXPERTS) for stage in (1, 3)),
    Case(name="cp=4", mesh="cp=4", model=EXPERTS, options=ULYSSES),
    *(
        Case(name=f"{a},{b}", mesh=f"{a}=2,{b}=2", model=EXPERTS, options=ULYSSES if "cp" in (a, b) else {})
        for a, b in PAIRS
    ),
    Case(name="zero 3, tp, lora", mesh="shard=2,tp=2", zero=3, model=BIASES, lora=True),
]


def empty(case: Case) -> Transformer:
    with hollow():
        made = Transformer(tiny.model_config(case), dtype=case.dtype)
    assert all(is_hollow(p) for p in made.parameters())
    return made


def started_and_exported(case: Case, folder: Path, source: Path | None) -> tuple[dict[str, torch.Tensor], str | None]:
    """The weights and buffers that rank 0 exports before the first step, new or of the model in `source`, and the
    digest of its frozen weights. The other ranks have nothing."""
    config = tiny.config(case, alone=False)
    mesh = open_mesh(config.mesh, tiny.CPU)
    with contextlib.ExitStack() as stack:
        if source is None:
            made = empty(case)
            values = initial_values(made, 1)
        else:
            made, values = stack.enter_context(opened_model(source, dtype=case.dtype))
            assert all(is_hollow(p) for p in made.parameters())
        if case.lora:
            tiny.with_lora(made)
        state = TrainState(made, config, mesh=mesh, values=values)
    state.export(folder)
    state.close()
    if mesh.rank:
        held = sum(p.untyped_storage().nbytes() for p in made.parameters())
        assert held == 0 or (state.divided is None and config.zero_stage < 3), "a part of a stage 1 or 2 is whole"
        return {}, state.frozen_digest
    return {name: t.detach().clone() for name, t in made.state_dict().items()}, state.frozen_digest


def check(group: Ranks, case: Case, folder: Path) -> None:
    """The weights of one device after initialisation, and after loading a folder of Hugging Face or of bagu."""
    source = folder / "model"
    random = tiny.model(replace(case, lora=False))
    for b in random.buffers():
        b.normal_(generator=torch.Generator().manual_seed(2)) if b.is_floating_point() else None
    save_model(random, None, source)
    assert (source / "bagu.json").is_file() == (case.model in (BIASES, EXPERTS)), "both kinds of folder"
    for start in (None, source):
        one = tiny.model(case) if start is None else load_model(source, dtype=case.dtype)
        if case.lora and start is not None:
            tiny.with_lora(one)
        frozen = {name: p for name, p in one.named_parameters() if not p.requires_grad}
        results = group.run(started_and_exported, case, folder, start)
        found, wanted = results[0][0], one.state_dict()
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), start
        assert {digest for _, digest in results} == {digest_of(frozen) if frozen else None}


QUICK = ("zero 1", "zero 3", "tp", "ep", "interleaved", "zero 3, bf16, tied", "tp, odd vocabulary", "pp, lora")


@pytest.mark.parametrize("case", of_cases(CASES, *QUICK))
def test_two_ranks_start_with_the_bits_of_one_device(two: Ranks, case: Case, tmp_path: Path) -> None:
    check(two, case, tmp_path)


@pytest.mark.parametrize("case", of_cases(FOUR, "pp=4", "zero 3, tp, lora", "ep,tp", "pp,cp", "pp,shard", "shard,ep"))
def test_four_ranks_start_with_the_bits_of_one_device(four: Ranks, case: Case, tmp_path: Path) -> None:
    check(four, case, tmp_path)


def test_a_value_that_depends_on_another_is_that_of_the_model() -> None:
    """The gains of weight normalization are the lengths of the drawn rows, in the dtype of the model."""
    case = Case(name="gains", model={"weight_norm": True}, dtype=torch.bfloat16)
    made, values = tiny.model(case), initial_values(empty(case), 1)
    gains = {name: p for name, p in made.named_parameters() if name.endswith(".gain")}
    assert gains
    for name, p in gains.items():
        rows = made.get_parameter(name.removesuffix("gain") + "weight")
        assert torch.equal(values(name).to(p.dtype), p) and torch.equal(p, rows.float().norm(dim=1).to(p.dtype))


class Handle:
    """Of a collective: counts itself among those that are open until something waits for it."""

    open_now = most = 0

    def __init__(self, work: Any) -> None:
        self.work = work
        Handle.open_now += 1
        Handle.most = max(Handle.most, Handle.open_now)

    def wait(self) -> None:
        self.work.wait()
        Handle.open_now -= 1


def open_reductions(case: Case) -> tuple[int, int, int]:
    """The units of a model, the most reductions that are open at once in a step, and how many are after it."""
    config = tiny.config(case, alone=False)
    state = TrainState(tiny.model(case), config, mesh=open_mesh(config.mesh, tiny.CPU))
    start, Handle.open_now, Handle.most = gradients.reduce_scatter, 0, 0
    gradients.reduce_scatter = lambda *args, **kwargs: Handle(start(*args, **kwargs))  # type: ignore[assignment,return-value]
    try:
        with prepared(state.model, config, tiny.CPU):
            step(state, tiny.loader(case.micro_batches).batch(0))
    finally:
        gradients.reduce_scatter = start
    state.close()
    return len(state.flat.gradients._by_start), Handle.most, Handle.open_now  # type: ignore[union-attr]


@pytest.mark.parametrize("stage", [2, 3])
def test_a_backward_waits_for_the_gradient_of_a_unit_before_it_sends_the_next(two: Ranks, stage: int) -> None:
    """A reduction that nothing has waited for keeps a whole gradient alive (NCCL what is sent, Gloo a copy of it)."""
    case = Case(name="gradients", mesh="shard=2", zero=stage, model={"num_layers": 6})
    for units, most, left in two.run(open_reductions, case):
        assert units >= 7 and most == 1 and left == 0


class Peak(threading.Thread):
    """The most memory of this process that is not a file's, sampled every few milliseconds."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most, self.done = 0, threading.Event()

    def run(self) -> None:
        while not self.done.wait(0.002):
            self.most = max(self.most, anonymous())


def anonymous() -> int:
    """Bytes of this process that are no file's."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return 1024 * int(line.split()[1])
    raise LookupError("RssAnon")


def peaks(case: Case, folder: Path) -> tuple[int, int]:
    """(steady state, most) of a rank above its start: of the second step, and from the start to the end of the run."""
    before = anonymous()
    watch = Peak()
    watch.start()
    config, made = tiny.config(case, alone=False), empty(case)
    mesh = open_mesh(config.mesh, tiny.CPU)
    rows = Steady()
    fit(
        config, made, tiny.loader(case.micro_batches), folder=folder, observers=[rows], mesh=mesh,
        values=initial_values(made, 1),
    )  # fmt: skip
    watch.done.set()
    watch.join()
    return rows.memory - before, watch.most - before


class Steady:
    """An observer that reads the memory after each step; on other ranks than 0 it is not called."""

    memory = 0

    def on_step(self, step: int, metrics: object) -> None:
        self.memory = max(self.memory, anonymous())

    def on_event(self, kind: str, step: int, **facts: object) -> None: ...
    def on_sample(self, step: int, texts: object) -> None: ...
    def rewind(self, step: int) -> None: ...
    def close(self) -> None: ...


# 56.6M parameters in as many blocks as a model of 7B has: ZeRO-3 gathers one block ahead, and Gloo copies what it sends
BIG = {
    "hidden_size": 384,
    "num_layers": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "head_dim": 96,
    "intermediate_size": 1024,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("mesh", "zero"), [("shard=4", 3), ("tp=4", None)])
def test_a_rank_never_has_much_more_than_its_steady_state(mesh: str, zero: int | None, tmp_path: Path) -> None:
    """In processes of their own: the allocator keeps what a run before has freed, and a start would count it."""
    case = Case(
        name="memory", mesh=mesh, zero=zero, model=BIG, dtype=torch.float32, steps=3, options={"bucket_mb": 25.0}
    )
    with ranks(4) as group:
        found = group.run(peaks, case, tmp_path / "run")
    whole = 4 * sum(p.numel() for p in empty(case).parameters())
    steady, most = found[0][0], max(top for _, top in found)
    print(f"{mesh}: model {whole / 2**20:.0f} MiB, steady {steady / 2**20:.0f}, peaks", [t >> 20 for _, t in found])
    assert most <= 1.3 * steady
