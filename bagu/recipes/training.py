"""Train a `Run`: create or load the model, prepare the data, fit, save the result in the run's folder."""

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from bagu import config as configs
from bagu.config import write_atomic
from bagu.data import BpeTokenizer, Corpus
from bagu.errors import BaguError
from bagu.machine.cores import available_cores
from bagu.machine.device import named_device
from bagu.machine.fast_dtype import compute_dtype_name
from bagu.machine.hub import RUN_ADAPTER, WeightsError, is_adapter
from bagu.nn import ModelConfig, Transformer, count, init_weights
from bagu.nn.choices import NEWER
from bagu.nn.digest import digest_of
from bagu.nn.families import family_for
from bagu.nn.hollow import Values, hollow
from bagu.nn.init import initial_values
from bagu.nn.lora import add_lora, merge
from bagu.nn.peft import save_adapter
from bagu.nn.sample import generate
from bagu.nn.score import with_score_head
from bagu.parallel.agree import check_equal, check_shared
from bagu.parallel.collectives import from_rank_0
from bagu.parallel.launch import code_digest
from bagu.parallel.mesh import Mesh
from bagu.recipes.find import MODEL
from bagu.recipes.inputs import DATA, Inputs, facts_of, read_inputs, source_facts
from bagu.recipes.models import NATIVE, load_model, opened_model, save_model
from bagu.recipes.rollout import open_reward, with_rollouts
from bagu.recipes.run import Run
from bagu.recipes.summary import Summary, matmul_rate, summarise
from bagu.recipes.task_evaluation import TaskEvaluation, run_tasks, task_formats
from bagu.recipes.tokenizer import TOKENIZER
from bagu.runs.folder import RunFolder, RunRecorder
from bagu.runs.observer import Observer, WeightsAndBiases
from bagu.runs.progress import TrainProgress
from bagu.train import FitResult, checkpoint, fit
from bagu.train.cross_entropy import CrossEntropy
from bagu.train.loss import Loss, Metrics
from bagu.train.memory.divided import DividedModel
from bagu.train.memory.divided_forward import divided_generate
from bagu.train.objective import TrainingData
from bagu.train.objectives.token_objective import TokenObjective
from bagu.train.rl.loader import RolloutLoader
from bagu.train.rl.policy_objective import PolicyObjective
from bagu.train.served.worker import Served


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A finished (or interrupted) run. `idle` is why it has learned nothing, None if that is not known."""

    folder: RunFolder
    model: Transformer
    tokenizer: BpeTokenizer
    data: TrainingData[Any]
    corpora: Mapping[str, Corpus]
    fit: FitResult
    idle: str | None = None


def check(
    run: Run, out: Path, *, resume: bool = False, accept_data_change: bool = False, fit_context: bool = False
) -> Summary:
    """Run all checks that `train` makes before it loads weights, and return the summary. Does not change `out`."""
    folder = RunFolder(out)
    folder.check_free(resume=resume)
    if run.wandb is not None:
        WeightsAndBiases.check()
    _check_offload(run)
    inputs = read_inputs(run, out, accept_data_change=accept_data_change, fit_context=fit_context)
    run_tasks(run, inputs.model, inputs.tokenizer)
    if isinstance(run.objective, PolicyObjective):
        open_reward(run.objective, inputs.device).close()  # raises for a reward that cannot be loaded
    newest, _ = checkpoint.newest_good(folder.checkpoints) if resume else (None, [])
    return summarise(inputs.run, inputs, first_step=0 if newest is None else checkpoint.state_of(newest)["step"])


def train(
    run: Run,
    out: Path,
    *,
    resume: bool = False,
    accept_data_change: bool = False,
    pause_after: int | None = None,
    progress: Observer | None = None,
    announce: Callable[[Summary], None] | None = None,
    prompts: Sequence[str] = (),
    tokenizer: BpeTokenizer | None = None,
    corpora: Mapping[str, Corpus] | None = None,
    mesh: Mesh | None = None,
    timeline: bool = False,
    fit_context: bool = False,
    served: Served | None = None,
) -> Trained:
    """Train a run in folder `out`. `prompts` are continued every `train.sample_every` steps; a run with rollouts shows
    some of its answers instead.

    `announce` is called with the summary before the first step. A given tokenizer and given corpora are not read again.
    `pause_after` stops after this many steps; a call with `resume` continues. Nothing in the folder changes until
    everything is checked, including the checkpoint of a resume. With a `mesh` every rank calls it; rank 0 alone writes
    to the folder, except the ranks' parts of checkpoints. `timeline` records the last step of a pipeline. `fit_context`
    lets the objective choose the context by the model and the data (fine-tuning: that of the longest chat). `served` is
    this process as a worker of a parameter server; worker 0 writes.
    """
    folder = RunFolder(out)
    first = (mesh is None or mesh.rank == 0) and (served is None or served.first)
    if first:
        folder.check_free(resume=resume)
        if run.wandb is not None:
            WeightsAndBiases.check()
    run = resolved(run, named_device(run.device))
    _check_offload(run)
    check_shared(mesh, out)
    with _rank_0_first(mesh):  # it trains the tokenizer and fills the caches, and the others read them
        inputs = read_inputs(
            run,
            out,
            accept_data_change=accept_data_change,
            tokenizer=tokenizer,
            corpora=corpora,
            fit_context=fit_context,
        )
    run = inputs.run
    check_equal(mesh, {"data": source_facts(inputs), "tokenizer": inputs.tokenizer.fingerprint})
    tasks = run_tasks(run, inputs.model, inputs.tokenizer)
    peak = matmul_rate(inputs.device, inputs.dtype) * (1 if mesh is None else mesh.config.ranks)
    if served is not None:  # workers beyond the cores take turns
        peak *= max(1, min(served.config.workers, available_cores() // torch.get_num_threads()))
    with contextlib.ExitStack() as stack:
        values: Values | None = None
        if _divides(run, inputs, mesh):
            model, values = stack.enter_context(_hollow_model(run, inputs))
        else:
            model = _model(run, inputs)
        auxiliary = _auxiliary_models(inputs)
        with _rank_0_first(mesh):
            needed = values is not None and run.objective.whole_model == "prepare"
            initial = _model(run, inputs) if needed else model  # whole, and released before the first step
            data = run.objective.prepare(inputs.data, initial, steps=run.train.steps, eval_batches=run.eval_batches)
            del initial
        loss = run.objective.loss(model, auxiliary)
        data = stack.enter_context(with_rollouts(run, data, inputs, model, loss))
        task_scores = TaskEvaluation(run, tasks, inputs.tokenizer) if tasks else None
        evaluate = partial(_evaluate, loss, data, run.eval_batches, task_scores) if run.train.eval_every else None
        sample = _sampler(inputs, prompts, data) if run.train.sample_every and (served is None or first) else None
        if first:
            folder = RunFolder.claim(out, resume=resume)
            stack.callback(folder.close)

        def begin(step: int) -> list[Observer]:
            if announce is not None:
                announce(summarise(run, inputs, first_step=step, peak_flops=peak))
            recorder = _record(run, inputs, folder, progress, task_formats(tasks))
            stack.callback(recorder.close)
            if inputs.data_changes:
                recorder.on_event("data_changed", step, sources=list(inputs.data_changes))
            return [recorder]

        result = fit(
            run.train if sample else replace(run.train, sample_every=None), model, data.loader, loss=loss,
            folder=folder.checkpoints, resume=resume, pause_after=pause_after, begin=begin,
            evaluate=evaluate, sample=sample, settings={"objective": configs.to_dict(run.objective)},
            identity=_identity(inputs, model, auxiliary), mesh=mesh, timeline=timeline,
            values=values, gathers=not isinstance(loss, CrossEntropy), served=served,
            flops_per_token=count.flops(model.config, run.data.context).training, peak_flops=peak,
        )  # fmt: skip
        run.objective.finish(model)
        if first or values is None:  # the model of other ranks is hollow
            _save(run, model, inputs, out, writes=first)
        from_rank_0(mesh, 0)  # ranks end together: one that ends early would look like a lost one
    idle = data.loader.taught_nothing(result.updates) if isinstance(data.loader, RolloutLoader) else None
    return Trained(
        folder=folder, model=model, tokenizer=inputs.tokenizer, data=data, corpora=inputs.corpora, fit=result, idle=idle
    )


@contextlib.contextmanager
def _rank_0_first(mesh: Mesh | None) -> Iterator[None]:
    """Run the body on rank 0, and then on the others."""
    if mesh is not None and mesh.rank > 0:
        from_rank_0(mesh, 0)
    yield
    if mesh is not None and mesh.rank == 0:
        from_rank_0(mesh, 0)


def _record(
    run: Run, inputs: Inputs, folder: RunFolder, progress: Observer | None, formats: Mapping[str, str]
) -> RunRecorder:
    """Write config, tokenizer and data facts to the folder, and open the recorder of its metrics."""
    trackers = []
    if run.wandb is not None:  # first, because it may raise, for example without a login
        trackers.append(WeightsAndBiases(folder.path, project=run.wandb, config=configs.to_dict(run)))
    folder.begin(run, code=code_digest())
    kept, known = folder.path / TOKENIZER, inputs.tokenizer.fingerprint
    if not (kept / "tokenizer.json").is_file() or BpeTokenizer.load(kept).fingerprint != known:
        inputs.tokenizer.save(kept)
    configs.save(inputs.model, folder.path / NATIVE)
    write_atomic(folder.path / DATA, json.dumps(facts_of(run, inputs), indent=2) + "\n")
    formats = {**run.objective.display().progress, **formats}
    shown = progress or TrainProgress(run.train.steps, name=run.objective.kind, formats=formats)
    return RunRecorder(folder, progress=shown, trackers=trackers)


def resolved(run: Run, device: torch.device) -> Run:
    """The run with explicit dtypes: if it is resumed on another machine, it must not change to the fast dtype there."""
    optimizer = run.train.optimizer.resolved(device)
    return replace(run, dtype=run.dtype or compute_dtype_name(device), train=replace(run.train, optimizer=optimizer))


def _check_offload(run: Run) -> None:
    if run.train.offload and named_device(run.device).type == "cpu":
        raise BaguError(
            "train.offload is set, and the run is on the CPU, whose memory holds the states already",
            hint="leave it out, or train on a GPU",
        )


def _divides(run: Run, inputs: Inputs, mesh: Mesh | None) -> bool:
    """Whether each rank fills only its part of the model. Some losses need the initial weights; ZeRO keeps the base of
    LoRA whole, and int8 rounds it, as merging changes that of an adapter. Evaluation by a loss that is no cross-entropy
    gathers what tp, cp, pp and ep divide."""
    if mesh is None or run.objective.whole_model == "loss":
        return False
    if run.train.mesh.divides_model and not isinstance(run.objective, TokenObjective):
        return False
    if run.lora is not None and (run.lora.base is not None or not run.train.mesh.divides_model):
        return False
    if inputs.start is not None and is_adapter(inputs.start):
        return False
    return run.train.mesh.divides_model or run.train.mesh.shard > 1


@contextlib.contextmanager
def _hollow_model(run: Run, inputs: Inputs) -> Iterator[tuple[Transformer, Values]]:
    """The model of a run without memory for its weights, and the weights that a rank takes its part of."""
    with contextlib.ExitStack() as stack:
        if inputs.start is not None:
            opened = opened_model(inputs.start, dtype=inputs.dtype, device=inputs.device)
            model, values = stack.enter_context(opened)
            if inputs.model.score_head and model.score is None:
                with_score_head(model)  # its weights are zero, not hollow
        else:
            with hollow():
                model = Transformer(inputs.model, device=inputs.device, dtype=inputs.dtype)
            values = initial_values(model, run.train.seed)
        _add_lora(run, model)
        yield model, values


def _model(run: Run, inputs: Inputs) -> Transformer:
    """The model of a run."""
    int8 = run.lora is not None and run.lora.base == "int8"
    if inputs.start is not None:  # int8 weights are rounded on the host, so that a GPU never holds the others
        model = load_model(inputs.start, dtype=inputs.dtype, device="cpu" if int8 else inputs.device)
        if inputs.model.score_head and model.score is None:
            with_score_head(model)
    else:
        model = init_weights(Transformer(inputs.model, device=inputs.device, dtype=inputs.dtype), run.train.seed)
    _add_lora(run, model)
    return model.to(inputs.device)


def _add_lora(run: Run, model: Transformer) -> None:
    if (lora := run.lora) is not None:
        add_lora(model, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=run.train.seed, base=lora.base)


def _auxiliary_models(inputs: Inputs) -> dict[str, Transformer]:
    """The other models of the objective by role, frozen."""
    return {
        role: load_model(folder, dtype=inputs.dtype, device=inputs.device).requires_grad_(False)
        for role, folder in inputs.auxiliary.items()
    }


def _identity(inputs: Inputs, model: Transformer, auxiliary: Mapping[str, Transformer]) -> dict[str, str]:
    """What must be the same when the run is resumed: tokenizer, configuration of the model, weights of the others."""
    weights = {role: digest_of(other.state_dict()) for role, other in auxiliary.items()}
    return {"tokenizer": inputs.tokenizer.fingerprint, "model": _model_id(model.config), **weights}


def _model_id(config: ModelConfig) -> str:
    """The fingerprint in checkpoints. A field that is newer than some of them counts only where it is used."""
    return configs.fingerprint(_used(config))


def _used(config: Any) -> dict[str, Any]:
    """`to_dict`, without the fields that are NEWER and have their default."""
    plain: dict[str, Any] = configs.to_dict(config)
    for field in fields(config):
        value = getattr(config, field.name)
        if field.metadata == NEWER and value == field.default:
            del plain[field.name]
        elif is_dataclass(value):
            plain[field.name] = _used(value)
    return plain


def _save(run: Run, model: Transformer, inputs: Inputs, out: Path, *, writes: bool) -> None:
    """Merge the adapters on every rank; write the adapter and the model on the rank that `writes`."""
    if run.lora is not None:
        if writes:
            _save_adapter(model, inputs, out / RUN_ADAPTER)
        merge(model)
    if writes:
        save_model(model, inputs.tokenizer, out / MODEL, start=inputs.start)


def _save_adapter(model: Transformer, inputs: Inputs, folder: Path) -> None:
    """Save the adapter alone in PEFT's format, if the base belongs to a Hugging Face family.

    Not for a model with a score head: its base has none, so an adapter alone would not be the model.
    """
    assert inputs.start is not None, "Run refuses lora without init_from"
    if model.score is not None:
        return
    try:
        family_for(model.config)
    except WeightsError:
        return  # PEFT has no names for its linear layers; model/ always contains the merged weights
    save_adapter(model, folder, base=str(inputs.start.resolve()))


def _evaluate(
    loss: Loss[Any, Any], data: TrainingData[Any], limit: int, task_scores: TaskEvaluation | None, model: Any
) -> Metrics:
    return {**loss.evaluate(model, data.held_out(limit)), **({} if task_scores is None else task_scores(model))}


def _sampler(inputs: Inputs, prompts: Sequence[str], data: TrainingData[Any]) -> Callable[[Any], list[str]] | None:
    """A function that continues the prompts, each text beginning with its prompt; or that shows answers of the last
    rollout. None if there are no prompts."""
    if isinstance(data.loader, RolloutLoader):
        loader = data.loader
        return lambda model: loader.texts()
    if not prompts:
        return None
    tokenizer, max_len = inputs.tokenizer, inputs.model.max_len
    ids = [tokenizer.encode(p) or [tokenizer.eos_id] for p in prompts]
    room = max_len - max(map(len, ids))
    if room < 1:
        raise BaguError(
            f"a prompt to continue has {max_len - room} tokens, and the model has positions for {max_len}",
            hint="give a shorter --prompt",
        )

    def sample(model: Transformer | DividedModel) -> list[str]:
        make: Any = divided_generate if isinstance(model, DividedModel) else generate
        new = make(model, ids, min(96, room), temperature=0.8, top_p=0.95, eos_id=tokenizer.eos_id)
        return [p + tokenizer.decode(n) for p, n in zip(prompts, new, strict=True)]

    return sample
