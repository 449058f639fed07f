"""The parts of a pipeline that torch.distributed.pipelining provides: its schedules, and a stage that is recorded.

A module of its own, because importing torch.distributed.pipelining imports the compiler.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import pipelining
from torch.distributed.pipelining import PipelineStage

from bagu.parallel.actions import Action
from bagu.parallel.mesh import Mesh

CLASSES: Mapping[str, Any] = {  # by the name of the schedule
    "gpipe": pipelining.ScheduleGPipe,
    "1f1b": pipelining.Schedule1F1B,
    "interleaved": pipelining.ScheduleInterleaved1F1B,
    "zero_bubble": pipelining.ScheduleZBVZeroBubble,
}


class RecordedStage(PipelineStage):
    """A stage that records its actions, and counts the bytes that it sends to other ranks."""

    def __init__(
        self,
        *args: Any,
        mesh: Mesh,
        actions: list[Action],
        after_backward: Callable[[], None],
        timed: bool,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.mesh, self.actions, self.after_backward, self.timed = mesh, actions, after_backward, timed

    def _timed(self, kind: Any, micro_batch: int, run: Callable[[], Any]) -> Any:
        if not self.timed:
            return run()
        start = time.perf_counter()
        result = run()
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        self.actions.append(Action(kind, self.stage_index, micro_batch, start, time.perf_counter()))
        return result

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().forward_one_chunk
        return self._timed("F", fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        run, kind = super().backward_one_chunk, "B" if full_backward else "I"
        result = self._timed(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, loss, full_backward, last_backward))
        if full_backward:
            self.after_backward()
        return result

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().backward_weight_one_chunk
        result = self._timed("W", bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))
        self.after_backward()
        return result

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_fwd_send_ops(fwd_chunk_id))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        return self._counted(super().get_bwd_send_ops(bwd_chunk_id))

    def _counted(self, ops: list[dist.P2POp]) -> list[dist.P2POp]:
        for op in ops:
            self.mesh.traffic.add("send", "pp", op.tensor.nbytes, self.mesh.size("pp"))
        return ops
