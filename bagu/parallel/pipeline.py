"""Pipeline parallelism with the schedules of torch.distributed.pipelining.

    schedule       stages per rank   bubble, idle / ideal time     what a rank runs
    gpipe          1                 (p - 1) / m                   all forwards, then all backwards
    1f1b           1                 (p - 1) / m                   alternates: p micro-batches are in memory, not m
    interleaved    v                 (p - 1) / (v m)               rank r has stages r, r + p, …: more exchanges
    zero_bubble    2                 near 0 for m >= 2p            ZBV: backward in two parts, stages r and 2p - 1 - r

for p ranks and m micro-batches (https://arxiv.org/abs/1811.06965, 2104.04473, 2401.10241). A boundary costs one tensor
[T, D] per micro-batch and direction; under tensor parallelism each rank sends its T / t tokens only.

    modules = build(model, cut(costs(config, context), stages), mine)         parallel/stages.py, this rank's
    for module in modules.values(): tensor_parallel(module, …)                if there is tp
    pipeline = Pipeline(modules, mesh, schedule="1f1b", micro_batches=8, tokens=T)
    part = pipeline.step(batches, loss)                                       the loss is the sum of `part` over pp
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from bagu.errors import ArgumentError, UnknownName
from bagu.parallel.actions import KINDS, Action
from bagu.parallel.mesh import Mesh
from bagu.parallel.stages import Stage
from bagu.types import Batch

if TYPE_CHECKING:
    from bagu.parallel.recorded_stage import RecordedStage

Schedule = Literal["gpipe", "1f1b", "interleaved", "zero_bubble"]
Loss = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]  # (hidden, head weight, targets) -> loss


def stages_of(schedule: Schedule, rank: int, ranks: int, per_rank: int = 2) -> list[int]:
    """The numbers of the stages of a rank. `per_rank` is v of an interleaved schedule."""
    UnknownName.check("pipeline schedule", schedule, get_args(Schedule))
    if schedule == "interleaved":
        return [rank + i * ranks for i in range(per_rank)]
    return [rank, 2 * ranks - 1 - rank] if schedule == "zero_bubble" else [rank]


def check_micro_batches(schedule: Schedule, micro_batches: int, ranks: int) -> None:
    """Raise if the schedule cannot run this many micro-batches."""
    if schedule == "1f1b" and micro_batches < ranks:
        raise ArgumentError(
            f"{micro_batches} micro-batches for a 1f1b pipeline of {ranks} ranks",
            hint=f"use at least {ranks} micro-batches, or gpipe",
        )
    if schedule == "interleaved" and micro_batches % max(1, micro_batches // ranks):
        raise ArgumentError(
            f"{micro_batches} micro-batches for an interleaved pipeline of {ranks} ranks",
            hint=f"use a multiple of {ranks} micro-batches",
        )


class Pipeline:
    """Runs steps of `micro_batches` micro-batches through this rank's stages.

    `tokens` is the number of tokens of a micro-batch on this rank: a part of them under context parallelism.
    `actions` holds what this rank did in the last step, if it is `timed`: a GPU is then synchronized after each action.
    `after_backward` is called when a micro-batch has given a stage all gradients of its weights.
    """

    def __init__(
        self,
        modules: Mapping[int, Stage],
        mesh: Mesh,
        *,
        schedule: Schedule,
        micro_batches: int,
        tokens: int,
        after_backward: Callable[[], None] = lambda: None,
        timed: bool = True,
    ) -> None:
        check_micro_batches(schedule, micro_batches, mesh.size("pp"))
        self.modules, self.mesh, self.micro_batches, self.tokens = modules, mesh, micro_batches, tokens
        self.actions: list[Action] = []
        self.after_backward, self.timed = after_backward, timed
        # torch.distributed.pipelining imports the compiler: 3 s of a slow core, which only a pipeline pays
        from bagu.parallel.recorded_stage import CLASSES

        stages = [self._stage(i, module, tokens) for i, module in modules.items()]
        single = schedule in ("gpipe", "1f1b")
        # the loss divides by the targets of the step, so gradients are sums
        self.schedule = CLASSES[schedule](
            stages[0] if single else stages, micro_batches, loss_fn=self._loss, scale_grads=False
        )

    def _stage(self, number: int, module: Stage, tokens: int) -> RecordedStage:
        from bagu.parallel.recorded_stage import RecordedStage

        config, dtype = module.config, next(module.blocks.parameters()).dtype
        rows = tokens // self.mesh.size("tp")  # the stream is divided by sequence parallelism
        stream = torch.empty(rows, config.hidden_size, dtype=dtype, device="meta", requires_grad=True)
        count = self.mesh.size("pp") * len(self.modules)
        return RecordedStage(
            module,
            number,
            count,
            self.mesh.device,
            mesh=self.mesh,
            actions=self.actions,
            after_backward=self.after_backward,
            timed=self.timed,
            input_args=torch.empty(1, tokens, dtype=torch.int64, device="meta") if module.is_first else stream,
            output_args=stream,
            group=self.mesh.group("pp"),
        )

    def _loss(self, hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        (last,) = (m for m in self.modules.values() if m.is_last)
        return self._loss_of(hidden, last.head_weight, targets[0])

    def step(self, batches: Sequence[Batch], loss: Loss, *, aux_scale: float = 1.0) -> torch.Tensor:
        """Run forward and backward of all micro-batches, adding to the gradients. Returns this rank's part of the loss:
        that of the targets on the last stage, and the balance losses of its layers times `aux_scale`.

        All ranks of pp pass the same batches, of equal numbers of tokens.
        """
        if len(batches) != self.micro_batches:
            raise ArgumentError(
                f"{len(batches)} micro-batches for a pipeline of {self.micro_batches}", hint="create another Pipeline"
            )
        self._loss_of = loss
        self.actions.clear()
        for module in self.modules.values():
            module.aux_scale = aux_scale
            module.aux_losses.clear()
            module.expert_loads.clear()
        inputs, targets = stacked(batches)
        ids = inputs.pop("ids")
        first = [ids] if any(m.is_first for m in self.modules.values()) else []
        losses: list[torch.Tensor] = []
        self.schedule.step(*first, target=targets, losses=losses, return_outputs=False, **inputs)
        parts = [x.detach() for x in losses] + [x for m in self.modules.values() for x in m.aux_losses]
        return torch.stack(parts).sum() if parts else torch.zeros((), dtype=torch.float64, device=self.mesh.device)


def stacked(batches: Sequence[Batch]) -> tuple[dict[str, Any], torch.Tensor]:
    """Micro-batches as tensors with a leading dimension, which the schedule cuts again; and their targets."""
    sizes = {b.num_tokens for b in batches}
    if len(sizes) > 1:
        raise ArgumentError(
            f"micro-batches of {sorted(sizes)} tokens in a pipeline", hint="use equal numbers of tokens"
        )
    longest = max(len(b.cu_seqlens) for b in batches)
    offsets = [torch.cat((b.cu_seqlens, b.cu_seqlens[-1:].expand(longest - len(b.cu_seqlens)))) for b in batches]
    inputs = {
        "ids": torch.stack([b.ids for b in batches]),
        "positions": torch.stack([b.positions for b in batches]),
        "cu_seqlens": torch.stack(offsets),
        "max_len": max(b.max_len for b in batches),
    }
    return inputs, torch.stack([b.targets for b in batches])


def gather_actions(actions: Sequence[Action], mesh: Mesh) -> list[list[Action]]:
    """The actions of every rank of pp, in rank order. Every rank of pp calls it."""
    group = mesh.group("pp")
    assert group is not None
    rows = torch.tensor([[KINDS.index(a.kind), *astuple(a)[1:]] for a in actions], dtype=torch.float64)
    rows = rows.view(len(actions), 5).to(mesh.device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=mesh.device) for _ in range(mesh.size("pp"))]
    dist.all_gather(sizes, torch.tensor([len(actions)], device=mesh.device), group=group)
    longest = max(int(size) for size in sizes)
    tables = [torch.empty(longest, 5, dtype=torch.float64, device=mesh.device) for _ in sizes]
    dist.all_gather(tables, torch.nn.functional.pad(rows, (0, 0, 0, longest - len(rows))), group=group)
    return [
        [Action(KINDS[int(kind)], int(stage), int(at), start, end) for kind, stage, at, start, end in table.tolist()]
        for table in (t[: int(n)] for t, n in zip(tables, sizes, strict=True))
    ]


def bubble(actions: Sequence[Sequence[Action]]) -> float:
    """The idle share of the time from the first start to the last end, over the actions of all ranks of a step."""
    every = [a for rank in actions for a in rank]
    span = max(a.end for a in every) - min(a.start for a in every)
    return 1 - sum(a.end - a.start for a in every) / (span * len(actions))
