"""Tasks of `bagu eval` while a model trains: an engine over its weights answers them in every evaluation of the run."""

from collections.abc import Mapping, Sequence

from bagu.data.chat import ChatEncoder
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError, UnknownName
from bagu.eval.score import evaluate, few_shot, main_metric
from bagu.eval.task import Task, checked_items
from bagu.eval.words import scale_of
from bagu.nn.change import evaluating
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.ops.call.eager import force_eager
from bagu.recipes.eval_models import CPU_BLOCK_SIZE, EngineModel
from bagu.recipes.evaluate import find_task
from bagu.recipes.run import Run
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.train.report import TASK, task_metric

GPU_SHARE = 0.5  # of the memory, for the weights and the KV cache; the rest is the trainer's


def run_tasks(run: Run, model: ModelConfig, tokenizer: BpeTokenizer) -> list[Task]:
    """The tasks that `run` evaluates. Raises for an unknown one, for items that cannot be read, and for tasks that the
    model cannot answer."""
    if run.eval_tasks and (model.score_head or not model.causal):
        what = "has a score head" if model.score_head else "is an encoder"
        raise BaguError(
            f"eval_tasks asks for {', '.join(run.eval_tasks)}, and the model {what}: it gives no probability of the "
            "next token",
            hint="leave eval_tasks out",
        )
    found = [find_task(name, model.max_len) for name in run.eval_tasks]
    for task in found:
        if task.chat and tokenizer.chat_template is None:
            raise BaguError(
                f"task {task.name} asks in chats, and the model has no chat template",
                hint="leave it out, or train on chats",
            )
        few_shot(task, checked_items(task, run.eval_items), seed=0)
    wanted, scores = run.train.best.metric, [score_metric(task) for task in found]
    if wanted is not None and wanted.startswith(TASK) and wanted not in scores:
        raise UnknownName.among("train.best.metric", wanted, scores)
    names = [task.name for task in found]
    if double := next((name for name in names if names.count(name) > 1), None):
        raise BaguError(f"two tasks of eval_tasks have the name {double!r}", hint="rename one, or leave it out")
    return found


def score_metric(task: Task) -> str:
    """The name of the logged score of a task."""
    return task_metric(task.name, main_metric(task))


def task_formats(tasks: Sequence[Task]) -> dict[str, str]:
    """The texts of the scores on the progress line."""
    scales = ((task, scale_of(main_metric(task))) for task in tasks)
    return {
        score_metric(task): f"{task.name} {{:.{scale.digits}f}}{scale.sign or ' bits/byte'}" for task, scale in scales
    }


class TaskEvaluation:
    """The scores of the tasks as metrics, task_NAME_METRIC. The engine is made for the first evaluation."""

    def __init__(self, run: Run, tasks: list[Task], tokenizer: BpeTokenizer) -> None:
        self.tasks, self.items, self.tokenizer = tasks, run.eval_items, tokenizer
        self._asked: EngineModel | None = None

    def __call__(self, model: Transformer) -> Mapping[str, float]:
        with evaluating(model), force_eager():  # blocks are compiled for the shapes of training
            asked = self._engine(model)
            results = [evaluate(asked, task, limit=self.items) for task in self.tasks]
        return {
            score_metric(task): scale_of(main_metric(task)).factor * result.metrics[main_metric(task)].mean
            for task, result in zip(self.tasks, results, strict=True)
        }

    def _engine(self, model: Transformer) -> EngineModel:
        if self._asked is None:
            on_cpu = model.embedding.weight.device.type == "cpu"
            config = EngineConfig(
                max_model_len=model.config.max_len,
                gpu_memory_utilization=GPU_SHARE,
                block_size=CPU_BLOCK_SIZE if on_cpu else None,
            )
            chat = None if self.tokenizer.chat_template is None else ChatEncoder(self.tokenizer)
            self._asked = EngineModel(Engine(model, self.tokenizer, config), self.tokenizer, chat, "the trained model")
        else:
            self._asked.engine.weights_changed()
        return self._asked
