"""Kernel, collective and pipeline times: the laws they must follow."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from bagu.parallel.planner import collectives as comm
from bagu.parallel.planner import kernels
from bagu.parallel.planner.calibration import CALIBRATION
from bagu.parallel.planner.cluster import CLUSTERS, GPUS
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.model_cost import model_cost
from bagu.parallel.planner.models import MODELS
from bagu.parallel.planner.software import STACKS
from bagu.parallel.planner.step import step_time
from benchmarks.tools import plan_gloo

A100, H100 = CLUSTERS["a100"], CLUSTERS["h100"]


def array(*values: float) -> np.ndarray:
    return np.array(values, dtype=float)


@pytest.mark.parametrize("gpu", GPUS.values(), ids=str)
def test_no_matmul_exceeds_the_best_measured_rate(gpu: object) -> None:
    n = array(64, 1000, 4096, 16384, 53248)
    seconds = kernels.matmul_s(gpu, CALIBRATION, n, n, n)  # type: ignore[arg-type]
    assert (2 * n**3 / seconds <= 1.05 * gpu.matmul_bf16_tflops * 1e12).all()  # type: ignore[attr-defined]


def test_one_tile_more_than_a_wave_costs_a_wave() -> None:
    """108 multiprocessors: 108 tiles of 128 x 256 are one wave, 109 are two."""
    gpu = GPUS["a100"]
    m = 128 * array(107, 108, 109)
    seconds = kernels.matmul_s(gpu, CALIBRATION, m, array(256, 256, 256), array(4096, 4096, 4096))
    assert seconds[0] == seconds[1]
    assert seconds[2] > 1.3 * seconds[1]


def test_an_odd_head_size_is_slow() -> None:
    """BLOOM's 14400 / 64 = 225: rows that do not start at 16 bytes."""
    gpu = GPUS["a100"]
    even, odd = (
        kernels.unfused_attention_s(gpu, CALIBRATION, array(2), array(8), 2048, size)[0][0] for size in (224, 225)
    )
    assert odd > 1.5 * even


def test_ring_all_reduce_moves_twice_the_share() -> None:
    g = comm.group(A100, array(8), array(1))
    size = array(1e9)
    expected = 2 * 7 / 8 * 1e9 / 235e9 + 2 * 7 * A100.nvlink_latency_us * 1e-6
    assert comm.all_reduce_s(A100, CALIBRATION, g, size)[0] == pytest.approx(expected)


def test_the_switch_reduces_from_five_ranks() -> None:
    """On Hopper, NVLS is used from 5 ranks of a node; A100 has none."""
    four, eight = (
        comm.all_reduce_s(H100, CALIBRATION, comm.group(H100, array(n), array(1)), array(1e9)) for n in (4, 8)
    )
    per_byte = [t[0] / (2 * (n - 1) / n) for t, n in ((four, 4), (eight, 8))]
    assert per_byte[1] < 0.8 * per_byte[0]


def test_groups_across_nodes_use_the_cards_of_their_members() -> None:
    """Two ranks of a node drive two cards: twice the rate of a group with one rank per node."""
    wide = comm.group(H100, array(16), array(4))
    narrow = comm.group(H100, array(16), array(8))
    assert (wide.local[0], narrow.local[0]) == (2, 1)
    size = array(1e10)
    fast, slow = (comm.all_gather_s(H100, CALIBRATION, g, size)[0] for g in (wide, narrow))
    assert slow / fast == pytest.approx(2, rel=0.01)


def test_pods_share_the_network_between_them() -> None:
    pods = replace(H100, pod_gpus=64, pod_oversubscription=4.0)
    inside, across = (comm.group(pods, array(n), array(1)) for n in (64, 128))
    size = array(1e10)
    times = [comm.all_gather_s(pods, CALIBRATION, g, size)[0] for g in (inside, across)]
    assert times[1] > 3.5 * times[0]


def test_a_group_of_one_costs_nothing() -> None:
    g = comm.group(H100, array(1), array(1))
    for collective in (comm.all_reduce_s, comm.all_gather_s, comm.all_to_all_s):
        assert collective(H100, CALIBRATION, g, array(1e9))[0] == 0


@pytest.mark.parametrize(
    ("virtual", "schedule", "share"), [(1, "1f1b", 1.0), (2, "1f1b", 0.5), (1, "zero_bubble", 1 / 6)]
)
def test_the_bubble_is_that_of_the_schedule(virtual: int, schedule: str, share: float) -> None:
    """(p - 1) / m of the ideal time, divided by the stages per rank; the head is left out by an empty vocabulary."""
    model = replace(MODELS["llama3-8b"], vocab_size=1, num_layers=32)
    layouts = Layouts.of(Layout(pp=4, virtual=virtual, schedule=schedule))  # type: ignore[arg-type]
    stack = replace(STACKS["bagu"], stages="even", head_bytes=0)
    time = step_time(Workload(model=model, seq=8192, batch=16), H100, stack, layouts)
    assert time.bubble[0] / time.compute[0] == pytest.approx(share * 3 / 16, rel=0.02)


def test_full_recomputation_runs_the_forward_again() -> None:
    workload = Workload(model=MODELS["llama3-8b"], seq=8192, batch=8)
    none, full = (
        step_time(workload, H100, STACKS["bagu"], Layouts.of(Layout(micro_batch=1, recompute=r)))  # type: ignore[arg-type]
        for r in ("none", "full")
    )
    assert full.compute[0] == none.compute[0]
    assert 0.25 * none.compute[0] < full.recompute[0] < 0.40 * none.compute[0]


def test_many_layouts_at_once_equal_each_alone() -> None:
    layouts = [
        Layout(dp=8, shard=8, zero=3, micro_batch=2),
        Layout(dp=2, tp=4, sequence_parallel=True, recompute="full"),
        Layout(dp=2, tp=2, pp=2, virtual=2, shard=2, zero=1, sequence_parallel=True),
        Layout(dp=8, shard=8, zero=1, micro_batch=2),
    ]
    workload = Workload(model=MODELS["llama3-8b"], seq=4096, batch=64)
    together = step_time(workload, H100, STACKS["bagu"], Layouts.of(*layouts)).total
    alone = [step_time(workload, H100, STACKS["bagu"], Layouts.of(one)).total[0] for one in layouts]
    assert together == pytest.approx(alone, rel=10 * np.finfo(float).eps)  # ten parts, summed in another order


def test_a_cpu_cluster_predicts_compute_and_all_reduce() -> None:
    """6M parameters at 20 GFLOP/s; two ranks add 4 bytes per parameter over the link."""
    one = plan_gloo.Measured(ranks=1, matmul_flops=2e10, copy_bytes_per_s=1e10, reduce_bytes_per_s=1e9, step_s=1.0)
    model = MODELS["cpu_6m"]
    alone = plan_gloo.predict(one, model, 4)
    products = 4 * plan_gloo.SEQ * model_cost(model).training_flops(plan_gloo.SEQ) / 2e10
    assert products < alone < 2 * products
    added = plan_gloo.predict(replace(one, ranks=2), model, 4) - alone
    reduce = 2 * 1 / 2 * 4 * model_cost(model).parameters / 1e9
    assert added == pytest.approx(reduce, rel=0.01)
