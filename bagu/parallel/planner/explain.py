"""A plan in sentences: the winner, why it beats the runner-up, what other strategies would cost, what does not fit."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bagu.parallel.mesh import MeshConfig
from bagu.parallel.planner.kernels import Precision
from bagu.parallel.planner.layouts import Layout
from bagu.parallel.planner.memory import room

if TYPE_CHECKING:
    from bagu.parallel.plan import Choice, Plan

GiB = 2**30
CAUSES = {  # fields of StepTime, in words
    "compute": "computation",
    "recompute": "recomputation",
    "tp": "tensor-parallel communication",
    "cp": "context-parallel communication",
    "ep": "expert all-to-all",
    "bubble": "pipeline bubble",
    "p2p": "pipeline sends",
    "dp": "data-parallel communication",
    "optimizer": "optimizer",
    "host": "host",
}


def explain(plan: Plan) -> list[str]:
    winner, *others = plan.distinct(2)
    said = [_winner(plan, winner)]
    if others:
        said.append(_against(winner, others[0]))
    said += _strategies(plan, winner)
    said += _misfits(plan)
    return said


def seconds(value: float) -> str:
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)):
        if value >= scale:
            return f"{value / scale:.3g} {unit}"
    return "no time"


def mesh_of(layout: Layout) -> MeshConfig:
    """The trainer's mesh: its dp counts replicas of the shards, and its ep divides the data-parallel ranks."""
    data = layout.dp // layout.ep
    shard = min(layout.shard, data) if layout.zero else 1
    return MeshConfig(pp=layout.pp, dp=data // shard, shard=shard, ep=layout.ep, cp=layout.cp, tp=layout.tp)


def mesh_line(layout: Layout, batch: int | None = None, *, precision: Precision = "bf16") -> str:
    """The arguments of `bagu train` that ask for this layout: the mesh, fp8, the ZeRO stage, the pipeline,
    recomputation, and for a global `batch` of sequences the micro-batches."""
    mesh = mesh_of(layout)
    line = f"--mesh {mesh}"
    settings: dict[str, object] = {}
    if precision == "fp8":
        settings["train.precision"] = precision
    if mesh.shard > 1:
        settings["train.zero"] = layout.zero
    if layout.pp > 1 and layout.schedule == "zero_bubble":
        settings["train.pipeline"] = layout.schedule
    elif layout.pp > 1 and layout.virtual > 1:
        settings |= {"train.pipeline": "interleaved", "train.stages_per_rank": layout.virtual}
    if layout.recompute != "none":
        settings["train.activation_checkpointing"] = "block" if layout.recompute == "full" else "selective"
    if batch is not None:
        settings |= {"data.rows": layout.micro_batch, "data.micro_batches": batch // layout.micro_batch}
    return line + "".join(f" --set {name}={value}" for name, value in settings.items())


def _winner(plan: Plan, winner: Choice) -> str:
    parts = sorted(winner.seconds.items(), key=lambda item: -item[1])
    name, most = parts[0] if parts[0][0] != "compute" else parts[1]
    share = 100 * winner.seconds["compute"] / winner.step_s
    return (
        f"{winner.layout.words()} is fastest: {seconds(winner.step_s)} per step ({seconds(winner.between_s[0])} to "
        f"{seconds(winner.between_s[1])} by published runs of its kind), {100 * winner.mfu:.1f} % MFU, "
        f"{winner.memory_gib:.1f} of {plan.cluster.gpu.memory_gib:.0f} GiB. {share:.0f} % of the step is computation; "
        f"the next largest part is {CAUSES[name]} ({seconds(most)}, {100 * most / winner.step_s:.1f} %)."
    )


def _against(winner: Choice, other: Choice) -> str:
    """Why the winner beats the runner-up: the causes that differ most."""
    slower = {name: other.seconds[name] - winner.seconds[name] for name in CAUSES}
    lost = sorted((name for name in slower if slower[name] > 0), key=lambda name: -slower[name])[:2]
    saved = sorted((name for name in slower if slower[name] < 0), key=lambda name: slower[name])[:1]
    text = (
        f"The runner-up, {other.layout.words()}, takes {seconds(other.step_s)} "
        f"(+{100 * (other.step_s / winner.step_s - 1):.1f} %)"
    )
    if lost:
        text += ": it spends " + " and ".join(f"{seconds(slower[name])} more on {CAUSES[name]}" for name in lost)
    if saved and -slower[saved[0]] > 0.001 * winner.step_s:
        text += f", and saves {seconds(-slower[saved[0]])} of {CAUSES[saved[0]]}"
    return text + "."


def _strategies(plan: Plan, winner: Choice) -> list[str]:
    """The best layout of well-known strategies, or by how much they do not fit."""
    x = plan.considered
    flat = (x.tp == 1) & (x.pp == 1) & (x.cp == 1) & (x.ep == 1)
    known = {
        "Data parallelism without ZeRO": flat & (x.zero == 0),
        "ZeRO-3 alone (FSDP)": flat & (x.zero == 3),
        "Tensor parallelism without a pipeline": (x.tp > 1) & (x.pp == 1),
        "Tensor, pipeline and data parallelism (3D)": (x.tp > 1) & (x.pp > 1) & (x.dp > 1),
    }
    said = []
    for name, mask in known.items():
        if not mask.any() or mask[np.flatnonzero(plan.fits)[plan.order[0]]]:
            continue
        inside = plan.fits & mask
        if inside.any():
            best = float(plan.times.total[inside[plan.fits]].min())
            said.append(f"{name}: {seconds(best)} at best (+{100 * (best / winner.step_s - 1):.1f} %).")
        else:
            least = float(plan.needs.total[mask].min()) / GiB
            said.append(f"{name} does not fit: at least {least:.0f} GiB per GPU.")
    return said


def _misfits(plan: Plan) -> list[str]:
    misfit = ~plan.fits
    if not misfit.any():
        return []
    needs = plan.needs
    states = needs.weights + needs.gradients + needs.optimizer
    by_states = int((misfit & (states > room(plan.cluster.gpu))).sum())
    by_rest = int(misfit.sum()) - by_states
    text = f"{int(misfit.sum()):,} of {len(plan.considered):,} layouts do not fit"
    reasons = []
    if by_states:
        reasons.append(
            f"{by_states:,} because weights, gradients and optimizer alone exceed "
            f"{room(plan.cluster.gpu) / GiB:.0f} GiB"
        )
    if by_rest:
        reasons.append(f"{by_rest:,} because of activations and buffers")
    return [f"{text}: {', '.join(reasons)}."]
