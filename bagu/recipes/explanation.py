"""`bagu train --explain`: what a mesh divides, holds and sends, predicted before the run and counted after it."""

import time
from collections import Counter
from collections.abc import Callable

from bagu.nn.lora import add_lora
from bagu.nn.model import Transformer
from bagu.parallel.explain import compare_bytes, compare_sockets, explain, step_bytes
from bagu.parallel.mesh import Mesh
from bagu.parallel.model_part import ModelPart, activation_bytes, model_part_of
from bagu.parallel.sockets import socket_bytes
from bagu.parallel.spread import EVERYWHERE
from bagu.parallel.timeline import draw_pipeline
from bagu.parallel.traffic import Kind, Tally
from bagu.parallel.zero import model_state_bytes
from bagu.recipes.run import Run
from bagu.recipes.summary import Summary
from bagu.train.loop import FitResult
from bagu.train.optim.optimizer import state_bytes


class Explanation:
    """The prediction of a run, by `before`, and what was counted beside it, by `after`. `say` prints a line."""

    def __init__(self, run: Run, say: Callable[[str], None]) -> None:
        self.run, self.say = run, say
        self.predicted: dict[tuple[Kind, str], int] = {}
        self._begin: tuple[float, float, int, dict[tuple[Kind, str], Tally]] = (0.0, 0.0, 0, {})
        self._sockets: int | None = None

    def before(self, summary: Summary, mesh: Mesh | None) -> None:
        """Print the prediction, before the first step."""
        train = self.run.train
        stage = train.zero_stage if train.mesh.shard > 1 else 0
        compute = 2 if self.run.dtype == "bf16" or summary.dtype == "bfloat16" else 4
        part = self._part(summary)
        inside = part.total - sum(part.root.values())
        held = state_bytes(train.optimizer.kind, matrices=inside, others=part.total - inside)
        states = model_state_bytes(
            part.total, stage=stage, ranks=train.mesh.shard, compute_bytes=compute, state_bytes=held // part.total
        )
        self.predicted = self._predicted(summary, part, stage, compute)
        has = ""
        if train.mesh.divides_model:
            has = f"rank 0 has {part.total:,} of {summary.trained:,} trained parameters, in {part.layers} layers"
        for line in explain(train.mesh, stage, states=states, predicted=self.predicted, part=has):
            self.say(line)
        if train.activation_checkpointing != "none" and train.mesh.divides_model:
            self.say("          recomputed blocks exchange activations again, which the formula leaves out")
        if mesh is not None:
            traffic = mesh.traffic
            self._begin = (time.perf_counter(), traffic.waited_s, summary.first_step, dict(traffic.tallies))
            self._sockets = socket_bytes() if mesh.device.type == "cpu" else None  # NCCL uses other ways too

    def _part(self, summary: Summary) -> ModelPart:
        """What rank 0 has of the model."""
        train = self.run.train
        if not train.mesh.divides_model:
            return ModelPart(
                parameters={EVERYWHERE: summary.trained},
                root={EVERYWHERE: summary.outside_blocks},
                layers=summary.model.num_layers,
                expert_layers=0,
            )
        model, lora = Transformer(summary.model, device="meta"), self.run.lora
        if lora is not None:
            add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
        return model_part_of(
            model,
            summary.model,
            train.mesh,
            schedule=train.schedule_of_pipeline,
            stages_per_rank=train.stages_per_rank or 2,
        )

    def _predicted(self, summary: Summary, part: ModelPart, stage: int, compute: int) -> dict[tuple[Kind, str], int]:
        train, data = self.run.train, self.run.data
        micro_batches = data.micro_batches // train.mesh.size("data")
        found: Counter[tuple[Kind, str]] = Counter()
        for spread, number in part.parameters.items():
            inside = number - part.root.get(spread, 0)
            found.update(
                step_bytes(
                    number,
                    root=part.root.get(spread, 0),
                    mesh=train.mesh,
                    stage=stage,
                    compute_bytes=compute,
                    backwards=micro_batches * part.stages,
                    spread=spread,
                    whole_matrices=inside if train.optimizer.kind == "muon" else 0,
                )
            )
        found.update(
            activation_bytes(
                part,
                summary.model,
                train.mesh,
                tokens=data.rows * data.context,
                micro_batches=micro_batches,
                compute_bytes=compute,
                method=train.context_method,
                schedule=train.schedule_of_pipeline,
            )
        )
        return {key: size for key, size in found.items() if size}

    def after(self, mesh: Mesh | None, done: FitResult) -> None:
        """Print the counted bytes of a step, the time that communication was not hidden, and the pipeline."""
        start, waited, first, tallies = self._begin
        if mesh is None or done.step == first:
            return
        steps, seconds = done.step - first, time.perf_counter() - start
        counted = mesh.traffic.since(tallies)
        for line in compare_bytes(counted, self.predicted, steps):
            self.say(line)
        if self._sockets is not None and (sockets := socket_bytes()) is not None:
            self.say(compare_sockets(counted, sockets - self._sockets, steps))
        exposed = mesh.traffic.waited_s - waited
        self.say(
            f"exposed   rank 0 waited {1000 * exposed / steps:.3g} ms a step for collectives, "
            f"{100 * exposed / seconds:.3g} % of the time"
            + (" (of the host; a GPU's stream waits elsewhere)" if mesh.device.type == "cuda" else "")
        )
        if done.timeline:
            for line in draw_pipeline(done.timeline):
                self.say(line)
