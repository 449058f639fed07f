"""`bagu demo`: train a tokenizer and a language model on the Python standard library, then teach the model to write
functions that are specified in words ("first double x, finally add 3"): fine-tuning, preferences, a verifiable reward.

It uses the same loader, model, trainer and report as a run of any size. Nothing is downloaded: the text is the standard
library, and the functions are made of verbs (bagu/data/composed.py). Answers to held-out questions are run in the
sandbox after every stage. Size and steps are chosen for the available time (`demo_plan`).
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console

from bagu.data.corpus import STDLIB, TextCorpus
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError, BaguError
from bagu.machine.device import default_device
from bagu.nn import count
from bagu.recipes.baselines import Compressors, compressors
from bagu.recipes.demo_data import StageData
from bagu.recipes.demo_eval import TASKS, suggested
from bagu.recipes.demo_later import LATER, Clock, LaterStages, changed_words, go_on, progress_of
from bagu.recipes.demo_pace import in_parts, seconds_of, tokens_per_s
from bagu.recipes.demo_plan import Pace, Plan, measured, revised
from bagu.recipes.demo_record import write_record
from bagu.recipes.demo_report import Finished, print_summary, report
from bagu.recipes.demo_server import ask, can_serve, running_server, wait_for_interrupt
from bagu.recipes.demo_sizes import CPU_SIZES, GPU, QUICK, Demo
from bagu.recipes.find import MODEL
from bagu.recipes.generation import suggest
from bagu.recipes.tokenizer import train_tokenizer
from bagu.recipes.training import Trained, train
from bagu.runs.progress import duration
from bagu.runs.stages import Stage, Stages
from bagu.train.cross_entropy import CrossEntropy

PROMPTS = ("def ", "import os\n", "class ")
MINUTES = 5.0  # default
PAIRS, QUESTIONS = 1000, 3000  # of preferences and of reinforcement
# Shares of the pretraining steps after which the pace is measured and their number adjusted. The second is before the
# cooldown: on a machine whose speed changes, pretraining otherwise takes the time of the later stages.
REVISIONS = (1 / 8, 3 / 8)


def demo(
    out: Path | None,
    *,
    quick: bool = False,
    minutes: float | None = None,
    seed: int = 0,
    serve: bool = True,
    keep: bool | None = None,
    console: Console | None = None,
) -> Path:
    """Run every stage into the folder `out`; return the report.

    Size and steps are chosen so that the demo takes at most `minutes`, by default 5 and no longer than needed. They are
    recorded in the runs' configs with their seeds, so that each run is reproducible. Without a folder, it uses the
    first of runs/demo, runs/demo-2, … that does not exist: nothing is overwritten. `serve` starts a server for the
    model at the end and asks it one question; `keep` leaves it running until Ctrl-C (by default on a terminal).
    """
    out = _folder(out)
    console = console or Console()
    clock = _clock(quick, minutes)
    serve = serve and can_serve()
    stages = Stages(5 + len(LATER) + (not quick) + serve, console=console)
    plan = None if clock.budget_s is None else _plan(stages, clock, clock.budget_s, out, seed)
    size = _placed(QUICK, out, seed) if plan is None else plan.size
    corpus, compressing = _read(stages, size)
    with stages.stage("Train a tokenizer") as stage:
        wanted = replace(size.pretrain().tokenizer, max_mb=size.tokenizer_mb)
        tokenizer = train_tokenizer({STDLIB: corpus}, wanted)
        stage.result = f"{tokenizer.vocab_size:,} tokens of byte-level BPE"
    with stages.stage("Pretrain a language model") as stage:
        size, base, pace = _pretrain(stage, out / "pretrain", size, plan, clock, corpus, tokenizer)
        bits = _held_out_bits(base, size)
        parameters = count.parameters(base.model.config).total
        changed = "" if plan is None else changed_words(plan.size.pretrain_steps, size.pretrain_steps)
        stage.result = (
            f"{parameters / 1e6:.1f} M parameters, {size.pretrain_steps:,} steps{changed}, {bits:.3f} bits/byte"
        )
    data = StageData.of(
        demonstrations=size.demonstrations, pairs=PAIRS, questions=QUESTIONS if plan else size.demonstrations, seed=seed
    )
    data.write(size.data)
    later = LaterStages(out, stages, clock, size, plan, pace, corpus, tokenizer)
    with stages.stage("Compare it with gzip and xz, evaluate it on held-out functions") as stage:
        stock = _stock_compressors(corpus, size) if compressing is None else compressing.result()
        stage.result = f"gzip {stock.gzip_bits_per_byte:.3f}, xz {stock.xz_bits_per_byte:.3f} bits/byte"
        later.evaluate("pretrain", base, stage)
    for each in LATER:
        later.train(each)
    with stages.stage("Compare with copying, write the report"):
        done = Finished(
            size=later.size,
            plan=plan,
            stages=tuple(later.done),
            bits=bits,
            stock=stock,
            copying={task: data.copying(task, size.compose_items) for task in TASKS},
        )
        last = later.done[-1]
        suggest(done.model / MODEL, suggested(last.trained.model, tokenizer, last.evaluation.folder))
        page = report(out, done, clock.spent())
        write_record(out, done, clock.spent())
    if not serve:
        print_summary(console, page, out, done, clock.spent())
        return page
    with ExitStack() as up:
        with stages.stage("Serve it and ask it a question") as stage:
            address = up.enter_context(running_server(done.model))
            answer = ask(address, str(done.asked[0][1]["messages"][0]["content"]), size.rl_tokens)
            stage.result = f"{address} answered: {' '.join(answer.split())[:60]}"
        print_summary(console, page, out, done, clock.spent())
        if console.is_terminal if keep is None else keep:
            wait_for_interrupt(address, console)
    return page


def _placed(size: Demo, out: Path, seed: int) -> Demo:
    return replace(size, data=out / "data", seed=seed)


def _folder(out: Path | None) -> Path:
    if out is None:
        names = ("runs/demo", *(f"runs/demo-{n}" for n in range(2, 1000)))
        return next(p for p in map(Path, names) if not p.exists())
    if out.exists() and any(out.iterdir()):
        raise BaguError(f"{out} is not empty", hint="give another folder with --out, or delete it")
    return out


def _clock(quick: bool, minutes: float | None) -> Clock:
    if quick and minutes is not None:
        raise ArgumentError(f"--quick is given with --minutes {minutes:g}", hint="leave one out")
    if minutes is not None and not 2 <= minutes < float("inf"):
        raise ArgumentError(f"--minutes is {minutes:g}", hint="2 or more; --quick takes less than one")
    budget = None if quick else 60 * (minutes or MINUTES)
    return Clock(began=time.monotonic(), budget_s=budget, fill=minutes is not None)


def _plan(stages: Stages, clock: Clock, budget_s: float, out: Path, seed: int) -> Plan:
    """Choose the size, which takes some seconds, and print the plan."""
    device = default_device()
    with stages.stage("Measure this machine") as stage:
        plan = Plan.of(measured((GPU,) if device.type == "cuda" else CPU_SIZES, budget_s, device), budget_s, clock.fill)
        size = plan.size
        stage.result = (
            f"about {duration(plan.seconds)} in all\n  {size.name} model, steps: pretraining {size.pretrain_steps:,}, "
            f"SFT {size.sft_steps:,}, DPO {size.dpo_steps:,}, GRPO {size.rl_steps:,}\n  {plan.reason}"
        )
    return replace(plan, size=_placed(size, out, seed))


def _read(stages: Stages, size: Demo) -> tuple[TextCorpus, Future[Compressors] | None]:
    """Read the text; on a GPU the compressors start at the same time."""
    run = size.pretrain()
    corpus = TextCorpus(STDLIB, run.sources[STDLIB], run.selection)
    with stages.stage("Read the standard library") as stage:
        text = sum(d.num_bytes for d in corpus.documents("train"))
        held = sum(d.num_bytes for d in corpus.documents("validation"))
        removed = len(corpus.dedup.removed) if corpus.dedup else 0
        stage.result = (
            f"{text / 1e6:.1f} MB to train on, {held / 1e6:.2f} MB held out, {removed} near-duplicate files left out"
        )
    return corpus, _compress_beside(corpus, size) if default_device().type == "cuda" else None


def _pretrain(
    stage: Stage, out: Path, size: Demo, plan: Plan | None, clock: Clock, corpus: TextCorpus, tokenizer: BpeTokenizer
) -> tuple[Demo, Trained, Pace | None]:
    """Pretrain; with a plan, adjust the number of steps to the pace of the first ones."""

    run = size.pretrain()

    def go(steps: int, *, resume: bool, pause_after: int | None) -> Trained:
        whole = replace(run, train=replace(run.train, steps=steps))
        shown = progress_of(stage, whole, quiet=("resume",))
        done = train(
            whole,
            out,
            resume=resume,
            pause_after=pause_after,
            progress=shown,
            prompts=PROMPTS,
            tokenizer=tokenizer,
            corpora={STDLIB: corpus},
        )
        go_on(done)
        return done

    if plan is None:
        return size, go(run.train.steps, resume=False, pause_after=None), None
    prepared_s: float | None = None

    def revise(done: int, begun: Trained) -> int:
        nonlocal size, prepared_s
        rows = begun.folder.metrics()
        prepared_s = clock.spent() - seconds_of(rows) if prepared_s is None else prepared_s
        pace = _pace(begun, rows, clock, prepared_s)
        size = revised(replace(plan, size=size), done, pace, fill=clock.fill)
        return size.pretrain_steps

    _, base = in_parts(size.pretrain_steps, REVISIONS, go, revise)
    rows = base.folder.metrics()
    return size, base, _pace(base, rows[len(rows) // 2 :], clock, prepared_s or clock.spent() - seconds_of(rows))


def _pace(begun: Trained, rows: Sequence[Mapping[str, Any]], clock: Clock, prepared_s: float) -> Pace:
    """The pace of these steps of a run."""
    held_out = begun.data.sources[STDLIB].validation_tokens
    return Pace(tokens_per_s=tokens_per_s(rows), left_s=clock.left(), prepared_s=prepared_s, held_out_tokens=held_out)


def _held_out_bits(base: Trained, size: Demo) -> float:
    """Bits per byte over all held-out files."""
    limit = size.validation_batches if size.name == QUICK.name else None
    bits = CrossEntropy().evaluate(base.model, base.data.held_out(limit))["val_bits_per_byte"]
    assert bits is not None, "the bytes of text are known"
    return bits


def _stock_compressors(corpus: TextCorpus, size: Demo) -> Compressors:
    training, left = [], size.priming_bytes
    for document in corpus.documents("train"):
        if left is not None and left <= 0:
            break
        training.append(document.text)
        left = None if left is None else left - len(document.text)
    return compressors(training, (d.text for d in corpus.documents("validation")))


def _compress_beside(corpus: TextCorpus, size: Demo) -> Future[Compressors]:
    """Run the compressors in a thread: they take 11 s of one core, and CPU cores are idle while a GPU trains."""
    thread = ThreadPoolExecutor(1)
    compressing = thread.submit(_stock_compressors, corpus, size)
    thread.shutdown(wait=False)  # accept no further task
    return compressing
