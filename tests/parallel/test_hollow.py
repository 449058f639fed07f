"""Models that no rank has whole: the bits of one device after the start, and the memory of a part until the end."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import tiny
import torch
from ranks import Ranks
from tiny import Case

from bagu.nn.config import MoEConfig
from bagu.nn.hollow import hollow, is_hollow
from bagu.nn.init import initial_values
from bagu.nn.model import Transformer
from bagu.parallel.mesh import open_mesh
from bagu.train import TrainState
from bagu.train.loop import fit

EXPERTS = {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=16)}
CASES = [
    Case(name="zero 1", mesh="shard=2", zero=1),
    Case(name="zero 2", mesh="shard=2", zero=2),
    Case(name="zero 3", mesh="shard=2", zero=3),
    Case(name="zero 3, bf16, tied", mesh="shard=2", zero=3, dtype=torch.bfloat16, model={"tie_embeddings": True}),
    Case(name="tp", mesh="tp=2", model={"num_kv_heads": 2, "out_bias": True, "ffn_bias": True}),
    Case(name="tp, tied", mesh="tp=2", model={"num_kv_heads": 2, "tie_embeddings": True}),
    Case(name="pp", mesh="pp=2"),
    Case(name="cp", mesh="cp=2"),
    Case(name="ep", mesh="ep=2", model=EXPERTS),
]
FOUR = [
    Case(name="zero 3 and tp", mesh="shard=2,tp=2", zero=3, model={"num_kv_heads": 2}),
    Case(name="pp and tp", mesh="pp=2,tp=2", model={"num_kv_heads": 2}),
    Case(name="ep and tp", mesh="ep=2,tp=2", model=EXPERTS | {"num_kv_heads": 2}),
]


def empty(case: Case) -> Transformer:
    config = tiny.model(case).config
    with hollow():
        made = Transformer(config, dtype=case.dtype)
    assert all(is_hollow(p) for p in made.parameters())
    return made


def started_and_exported(case: Case, folder: Path) -> dict[str, torch.Tensor]:
    """The weights that rank 0 exports before the first step; the other ranks have nothing."""
    config, made = tiny.config(case, alone=False), empty(case)
    mesh = open_mesh(config.mesh, tiny.CPU)
    state = TrainState(made, config, mesh=mesh, values=initial_values(made, 1))
    state.export(folder)
    state.close()
    if mesh.rank:
        held = sum(p.untyped_storage().nbytes() for p in made.parameters())
        assert held == 0 or (state.divided is None and config.zero_stage < 3), "a part of a stage 1 or 2 is whole"
        return {}
    return {name: p.detach().clone() for name, p in made.named_parameters()}


def check(group: Ranks, case: Case, folder: Path) -> None:
    found = group.run(started_and_exported, case, folder)[0]
    wanted = dict(tiny.model(case).named_parameters())
    assert found.keys() == wanted.keys()
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_two_ranks_start_with_the_bits_of_one_device(two: Ranks, case: Case, tmp_path: Path) -> None:
    check(two, case, tmp_path)


@pytest.mark.parametrize("case", FOUR, ids=lambda case: case.name)
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


BIG = {
    "hidden_size": 768,
    "num_layers": 8,
    "num_heads": 8,
    "num_kv_heads": 8,
    "head_dim": 96,
    "intermediate_size": 2048,
}


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.parametrize(("mesh", "zero"), [("shard=4", 3), ("tp=4", None)])
def test_a_rank_never_has_much_more_than_its_steady_state(
    four: Ranks, mesh: str, zero: int | None, tmp_path: Path
) -> None:
    case = Case(
        name="memory", mesh=mesh, zero=zero, model=BIG, dtype=torch.float32, steps=3, options={"bucket_mb": 25.0}
    )
    found = four.run(peaks, case, tmp_path / "run")
    whole = 4 * sum(p.numel() for p in empty(case).parameters())
    steady, most = found[0][0], max(top for _, top in found)
    print(f"{mesh}: model {whole / 2**20:.0f} MiB, steady {steady / 2**20:.0f}, peaks", [t >> 20 for _, t in found])
    assert most <= 1.3 * steady
