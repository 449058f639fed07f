"""`python -m benchmarks.tools.plan_gloo`: predictions beside measurements for a small model on 1 to 4 Gloo ranks.

The cluster is this computer: matmul rate, memory bandwidth and all-reduce rate of one rank are measured first, with as
many ranks running as the step will have. A step is a forward and backward of each rank's micro-batch, one all-reduce of
all gradients, and AdamW.
"""

import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bagu.nn import Transformer, init_weights
from bagu.nn.config import ModelConfig
from bagu.nn.presets import preset
from bagu.parallel.planner.calibration import CALIBRATION
from bagu.parallel.planner.cluster import Cluster, Gpu
from bagu.parallel.planner.layouts import Layout, Layouts, Workload
from bagu.parallel.planner.software import Software
from bagu.parallel.planner.step import step_time

SEQ = 256
# fp32, eager, one all-reduce after the backward
EAGER = Software(
    name="eager PyTorch on a CPU", attention="flash2", stream_bytes=48, inner_bytes=12, head_bytes=40,
    overlap_gradients=False, bucket_mb=1e6,
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Rates of one rank while all ranks run, and seconds of a step."""

    ranks: int
    matmul_flops: float
    copy_bytes_per_s: float
    reduce_bytes_per_s: float  # bus bandwidth
    step_s: float


def measure(ranks: int, model: ModelConfig, sequences: int, *, steps: int = 5) -> Measured:
    """Start `ranks` processes of one thread each; the slowest rank counts."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        arguments = [(rank, ranks, str(Path(folder) / "store"), model, sequences, steps) for rank in range(ranks)]
        with context.Pool(ranks) as pool:
            found = pool.starmap(_rank, arguments, chunksize=1)
    matmul, copy, reduce, step = zip(*found, strict=True)
    return Measured(
        ranks=ranks, matmul_flops=min(matmul), copy_bytes_per_s=min(copy), reduce_bytes_per_s=min(reduce),
        step_s=max(step),
    )  # fmt: skip


def cpu_cluster(found: Measured) -> Cluster:
    """This computer as a cluster: one node, in which Gloo is the link."""
    cpu = Gpu(
        name="cpu", generation="cpu", memory_gib=4, hbm_tb_per_s=found.copy_bytes_per_s / 1e12 / CALIBRATION.hbm, sms=1,
        peak_bf16_tflops=found.matmul_flops / 1e12, matmul_bf16_tflops=found.matmul_flops / 1e12,
    )  # fmt: skip
    rate = found.reduce_bytes_per_s / 1e9
    return Cluster(gpu=cpu, gpus_per_node=max(found.ranks, 1), nvlink_gb_per_s=rate, network_gb_per_s=rate)


def predict(found: Measured, model: ModelConfig, sequences: int) -> float:
    """Seconds of a step. Ranks of one computer share a clock, so the wait for the slowest rank is left out."""
    workload = Workload(model=model, seq=SEQ, batch=sequences * found.ranks)
    layouts = Layouts.of(Layout(dp=found.ranks, micro_batch=sequences))
    time = step_time(workload, cpu_cluster(found), EAGER, layouts)
    return float(time.total[0] - time.host[0])


def _rank(
    rank: int, ranks: int, store: str, model: ModelConfig, sequences: int, steps: int
) -> tuple[float, float, float, float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    try:
        a, big = torch.randn(512, 512), torch.randn(1 << 22)
        matmul = 2 * 512**3 / _seconds(lambda: a @ a)
        copy = 2 * big.nbytes / _seconds(lambda: big.clone())
        share = 2 * (ranks - 1) / ranks
        reduce = share * big.nbytes / _seconds(lambda: dist.all_reduce(big)) if ranks > 1 else 1e9
        return matmul, copy, reduce, _step_seconds(rank, model, sequences, steps)
    finally:
        dist.destroy_process_group()


def _step_seconds(rank: int, config: ModelConfig, sequences: int, steps: int) -> float:
    model = init_weights(Transformer(config), seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    T = sequences * SEQ
    ids = torch.randint(config.vocab_size, (T,), generator=torch.Generator().manual_seed(rank))
    positions = torch.arange(SEQ).repeat(sequences)
    cu_seqlens = torch.arange(0, T + 1, SEQ, dtype=torch.int32)

    def one() -> None:
        hidden = model(ids, positions, cu_seqlens, SEQ).hidden
        torch.nn.functional.cross_entropy(model.logits(hidden), ids).backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        flat = torch.cat([g.reshape(-1) for g in gradients])
        dist.all_reduce(flat)
        optimizer.step()
        optimizer.zero_grad()

    return _seconds(one, repeat=steps)


def _seconds(call: Callable[[], Any], repeat: int = 5) -> float:
    """Median seconds of a call, after one that is not counted; all ranks start together."""
    call()
    found = []
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        call()
        found.append(time.perf_counter() - started)
    return statistics.median(found)


if __name__ == "__main__":
    chosen = preset("cpu_6m")
    print("ranks  measured, s  predicted, s  error, %")
    for count in (1, 2, 4):
        rates = measure(count, chosen, 4)
        seconds = predict(rates, chosen, 4)
        print(f"{count:5d}  {rates.step_s:11.3f}  {seconds:12.3f}  {100 * (seconds / rates.step_s - 1):+8.1f}")
