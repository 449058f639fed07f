"""`bagu demo`: a tokenizer, a language model and its fine-tuning, from nothing but the Python that runs this.

Everything is real and small: the same loader, model, trainer and report as a run of any size. The text is the standard
library, so nothing is downloaded, and the yardsticks are honest: held-out files, stock compressors, a parser.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console

from bagu.data.chat import ChatEncoder
from bagu.data.loader import DataConfig, evaluation_batches
from bagu.data.source import Conversation
from bagu.data.tokenizer import BpeTokenizer
from bagu.device import default_device
from bagu.errors import BaguError
from bagu.nn import count
from bagu.nn.config import ModelConfig
from bagu.nn.model import Transformer
from bagu.nn.sample import generate
from bagu.progress import Stages, duration
from bagu.recipes.corpus import Corpus, conversations, train_tokenizer
from bagu.recipes.run import STDLIB, Run, SourceConfig, TokenizerConfig
from bagu.recipes.served import ask, can_serve, served, stay
from bagu.recipes.training import Trained, train
from bagu.recipes.yardsticks import CodeSamples, Compressors, compressors, judge_code
from bagu.train.evaluate import held_out_loss
from bagu.train.optim import OptimizerConfig
from bagu.train.report import Card, Comparison, ReportData, Table, read_run, write_report
from bagu.train.schedule import ScheduleConfig
from bagu.train.state import TrainConfig

__all__ = ["FULL", "GPU", "QUICK", "Demo", "demo"]

PROMPTS = ("def ", "import os\n", "class ")


@dataclass(frozen=True, kw_only=True)
class Demo:
    """The sizes of a demo. `priming_bytes` bounds the text that xz is primed with: its time is xz's, not ours."""

    hidden_size: int
    num_layers: int
    vocab_size: int
    context: int
    rows: int
    pretrain_steps: int
    sft_steps: int
    questions: int
    new_tokens: int
    tokenizer_mb: float
    validation_batches: int
    priming_bytes: int | None

    def model(self) -> ModelConfig:
        heads = self.hidden_size // 64
        return ModelConfig(
            vocab_size=self.vocab_size, hidden_size=self.hidden_size, num_layers=self.num_layers, num_heads=heads,
            num_kv_heads=heads, head_dim=64, intermediate_size=self.hidden_size * 11 // 4, max_len=self.context,
            tie_embeddings=True,
        )  # fmt: skip

    def pretrain(self) -> Run:
        n = self.pretrain_steps
        return Run(
            stage="pretrain", model=self.model(), tokenizer=TokenizerConfig(vocab_size=self.vocab_size),
            data=DataConfig(context=self.context, rows=self.rows), eval_batches=self.validation_batches,
            train=TrainConfig(
                steps=n, eval_every=max(n // 4, 1), sample_every=max(n // 3, 1), save_every=max(n // 3, 1),
                optimizer=OptimizerConfig(kind="muon", lr=0.007),
                schedule=ScheduleConfig(kind="wsd", warmup_steps=max(n // 20, 1), decay_share=0.5),
            ),
        )  # fmt: skip

    def sft(self, base: Path) -> Run:
        n = self.sft_steps
        return Run(
            stage="sft", init_from=str(base), sources={STDLIB: SourceConfig(max_bytes=2 * self.context)},
            data=DataConfig(context=self.context, rows=self.rows, packing="whole"),
            eval_batches=self.validation_batches,
            train=TrainConfig(
                steps=n, eval_every=max(n // 3, 1), save_every=n,
                optimizer=OptimizerConfig(kind="muon", lr=0.003),
                schedule=ScheduleConfig(kind="linear", warmup_steps=max(n // 20, 1)),
            ),
        )  # fmt: skip


FULL = Demo(
    hidden_size=256, num_layers=6, vocab_size=4096, context=256, rows=16, pretrain_steps=300, sft_steps=64,
    questions=32, new_tokens=120, tokenizer_mb=16, validation_batches=12, priming_bytes=None,
)  # fmt: skip
# A step of 4096 tokens or of 16384 takes a GPU the same 40 ms, which are the host's: fewer and larger ones.
GPU = replace(FULL, rows=64, pretrain_steps=160, sft_steps=48)
QUICK = Demo(
    hidden_size=64, num_layers=2, vocab_size=512, context=128, rows=8, pretrain_steps=12, sft_steps=6,
    questions=4, new_tokens=24, tokenizer_mb=1, validation_batches=4, priming_bytes=1_000_000,
)  # fmt: skip


def demo(
    out: Path | None,
    *,
    quick: bool = False,
    serve: bool = True,
    keep: bool | None = None,
    console: Console | None = None,
) -> Path:
    """Run every stage into the folder `out`; returns the report. Fixed seeds: the same machine, the same numbers.

    Without a folder, the first of runs/demo, runs/demo-2, … that is free: nothing is written over. `serve` ends with a
    server of the model, which is asked one question; `keep` leaves it up until Ctrl-C (by default on a terminal).
    """
    if out is None:
        names = ("runs/demo", *(f"runs/demo-{n}" for n in range(2, 1000)))
        out = next(p for p in map(Path, names) if not p.exists())
    if out.exists() and any(out.iterdir()):
        raise BaguError(f"{out} is not empty", hint="give another folder with --out, or delete it")
    console = console or Console()
    on_gpu, began = default_device().type == "cuda", time.monotonic()
    size = QUICK if quick else GPU if on_gpu else FULL
    serve = serve and can_serve()
    stages = Stages(7 if serve else 6, console=console)
    run = size.pretrain()
    corpus = Corpus(STDLIB, run.sources[STDLIB], run)
    with stages.stage("Read the standard library") as stage:
        text = sum(len(d.text.encode()) for d in corpus.split.train)
        held = sum(len(d.text.encode()) for d in corpus.split.validation)
        removed = len(corpus.dedup.removed) if corpus.dedup else 0
        stage.result = (
            f"{text / 1e6:.1f} MB to train on, {held / 1e6:.2f} MB held out, {removed} near-duplicate files left out"
        )
    compressing = _compress_beside(corpus, size) if on_gpu else None
    with stages.stage("Train a tokenizer") as stage:
        tokenizer = train_tokenizer({STDLIB: corpus}, replace(run.tokenizer, max_mb=size.tokenizer_mb))
        stage.result = f"{tokenizer.vocab_size:,} tokens of byte-level BPE"
    with stages.stage("Pretrain a language model") as stage:
        base = train(
            run, out / "pretrain", progress=stage.training(run.train.steps), prompts=PROMPTS, tokenizer=tokenizer,
            corpora={STDLIB: corpus},
        )  # fmt: skip
        bits = _held_out_bits(base, size)
        stage.result = (
            f"{count.parameters(run.model or size.model()).total / 1e6:.1f} M parameters, {bits:.3f} bits/byte"
        )
    tune = size.sft(out / "pretrain")
    pairs = corpus.for_run(tune)
    with stages.stage("Answer held-out questions, before fine-tuning") as stage:
        asked = _questions(pairs, size.questions)
        before = answers(base.model, tokenizer, asked, size.new_tokens)
        stage.result = f"{judge_code(before).parse_percent:.0f} % of {len(asked)} answers parse"
    with stages.stage("Fine-tune it on docstring → function") as stage:
        tuned = train(tune, out / "sft", progress=stage.training(tune.train.steps), corpora={STDLIB: pairs})
        after = answers(tuned.model, tokenizer, asked, size.new_tokens)
        stage.result = f"{judge_code(after).parse_percent:.0f} % of {len(asked)} answers parse"
    with stages.stage("Compare with gzip and xz, write the report") as stage:
        rivals = _rivals(corpus, size) if compressing is None else compressing.result()
        report = _report(out, size, base, tuned, bits, rivals, asked, before, after, time.monotonic() - began)
        stage.result = f"gzip {rivals.gzip_bits_per_byte:.3f}, xz {rivals.xz_bits_per_byte:.3f} bits/byte"
    if not serve:
        _farewell(console, report, out, bits, rivals, time.monotonic() - began)
        return report
    with ExitStack() as up:
        with stages.stage("Serve it and ask it a question") as stage:
            address = up.enter_context(served(out / "sft"))
            answer = ask(address, str(asked[0].messages[0]["content"]), size.new_tokens)
            stage.result = f"{address} answered: {' '.join(answer.split())[:60]}"
        _farewell(console, report, out, bits, rivals, time.monotonic() - began)
        if console.is_terminal if keep is None else keep:
            stay(address, console)
    return report


def _questions(pairs: Corpus, number: int) -> list[Conversation]:
    """Questions from all over the held-out files, not from the first one alone."""
    held_out = list(conversations(pairs, "validation"))
    return held_out[:: max(1, len(held_out) // number)][:number]


def answers(model: Transformer, tokenizer: BpeTokenizer, asked: Sequence[Conversation], new_tokens: int) -> list[str]:
    """What the model says to each question; one whose prompt leaves no room gets no answer."""
    encoder, room = ChatEncoder(tokenizer), model.config.max_len - new_tokens
    prompts = [encoder.prompt(c.messages[:1])[-room:] for c in asked]
    end = tokenizer.token_id("<|end|>")
    new = generate(model, prompts, new_tokens, temperature=0.6, top_p=0.95, eos_id=end)
    return [tokenizer.decode(ids) for ids in new]


def _held_out_bits(base: Trained, size: Demo) -> float:
    """Bits per byte over all held-out files."""
    store = base.tokens.validation[STDLIB]
    data = base.tokens.loader.config
    limit = size.validation_batches if size is QUICK else None
    evaluate = held_out_loss(lambda: evaluation_batches(store, data, limit=limit))
    return evaluate(base.model)["val_bits_per_byte"]


def _rivals(corpus: Corpus, size: Demo) -> Compressors:
    training, left = [], size.priming_bytes
    for document in corpus.split.train:
        if left is not None and left <= 0:
            break
        training.append(document.text)
        left = None if left is None else left - len(document.text)
    return compressors(training, (d.text for d in corpus.split.validation))


def _compress_beside(corpus: Corpus, size: Demo) -> Future[Compressors]:
    """In a thread of its own: they take 11 s of one core, and while a GPU trains there are cores to spare."""
    thread = ThreadPoolExecutor(1)
    compressing = thread.submit(_rivals, corpus, size)
    thread.shutdown(wait=False)  # no further task
    return compressing


def _report(
    out: Path, size: Demo, base: Trained, tuned: Trained, bits: float, rivals: Compressors,
    asked: Sequence[Conversation], before: Sequence[str], after: Sequence[str], seconds: float,
) -> Path:  # fmt: skip
    facts, judged = base.tokens.facts[STDLIB], (judge_code(before), judge_code(after))
    share = 100 * (1 - bits / rivals.gzip_bits_per_byte)
    cards = (
        Card(name="Held-out text", value=f"{bits:.3f} bits/byte", note=f"{share:.0f} % below gzip -9"),
        Card(name="Model", value=f"{count.parameters(base.model.config).total / 1e6:.2f} M parameters"),
        Card(name="Answers that parse", value=f"{judged[1].parse_percent:.0f} %",
             note=f"{judged[0].parse_percent:.0f} % before fine-tuning"),
        Card(name="Time", value=duration(seconds), note="all stages"),
    )  # fmt: skip
    questions = [c.messages[0]["content"] for c in asked]
    data = ReportData(
        title="bagu demo", subtitle="A language model of the Python standard library, trained on this machine.",
        runs=(read_run(base.folder, "pretraining"), read_run(tuned.folder, "fine-tuning")), cards=cards,
        references={
            "gzip -9": rivals.gzip_bits_per_byte, "xz -6": rivals.xz_bits_per_byte,
            "xz -6 primed with the training text": rivals.primed_xz_bits_per_byte,
        },
        comparisons=tuple(
            Comparison(prompt=q, before=b, after=a) for q, b, a in zip(questions[:8], before, after, strict=False)
        ),
        compared=("before fine-tuning", "after fine-tuning"),
        tables=(_sizes(bits, rivals, size.context), _samples(judged), _data(facts, base), _data_sft(tuned)),
    )  # fmt: skip
    return write_report(data, out / "report.html")


def _sizes(bits: float, rivals: Compressors, context: int) -> Table:
    rows = [
        ("gzip -9", f"{rivals.gzip_bits_per_byte:.3f}"), ("xz -6", f"{rivals.xz_bits_per_byte:.3f}"),
        ("xz -6, primed with the training text", f"{rivals.primed_xz_bits_per_byte:.3f}"),
        ("this model", f"{bits:.3f}"),
    ]  # fmt: skip
    note = (
        f"{rivals.held_out_bytes / 1e6:.2f} MB of files the model never saw, laid end to end for the compressors; the "
        f"model sees at most {context} tokens of the same file. Priming: {rivals.priming_bytes / 1e6:.1f} MB."
    )
    return Table(title="Held-out text, bits per byte", columns=("what", "bits per byte"), rows=rows, note=note)


def _samples(judged: Sequence[CodeSamples]) -> Table:
    names = ("before fine-tuning", "after fine-tuning")
    rows = [
        (n, f"{j.parse_percent:.0f} %", f"{j.define_percent:.0f} %", f"{j.mean_characters:.0f}",
         f"{j.distinct_4gram_percent:.0f} %")
        for n, j in zip(names, judged, strict=True)
    ]  # fmt: skip
    note = f"{judged[0].count} held-out questions (docstring → function), temperature 0.6, the same for both."
    columns = ("model", "parse", "define a function", "mean length, characters", "distinct 4-grams")
    return Table(title="Answers as Python", columns=columns, rows=rows, note=note)


def _data(facts: Mapping[str, object], base: Trained) -> Table:
    shown = ("name", "python", "files", "bytes", "sha256", "train_documents", "train_tokens", "validation_documents")
    rows: list[tuple[str, object]] = [(key.replace("_", " "), facts[key]) for key in shown if key in facts]
    dedup = base.corpora[STDLIB].dedup
    if dedup is not None:
        rows.append(("near-duplicates removed", len(dedup.removed)))
    report = base.tokens.loader.report(base.fit.step)
    rows.append(("epochs seen", f"{report['sources'][STDLIB]['epochs']:.2f}"))
    rows.append(("padding", f"{report['padding_percent']:.1f} %"))
    return Table(title="Pretraining data", columns=("what", "value"), rows=rows)


def _data_sft(tuned: Trained) -> Table:
    report = tuned.tokens.loader.report(tuned.fit.step)
    store = tuned.tokens.loader.stores[STDLIB]
    rows = [
        ("pairs", f"{store.num_documents:,}"), ("tokens", f"{store.num_tokens:,}"),
        ("tokens that count", f"{100 * float(store.loss_mask.mean()) if store.loss_mask is not None else 100:.0f} %"),
        ("epochs seen", f"{report['sources'][STDLIB]['epochs']:.2f}"),
        ("padding", f"{report['padding_percent']:.1f} %"),
    ]  # fmt: skip
    return Table(title="Fine-tuning data", columns=("what", "value"), rows=rows)


def _farewell(console: Console, report: Path, out: Path, bits: float, rivals: Compressors, seconds: float) -> None:
    verdict = "beats" if bits < rivals.gzip_bits_per_byte else "does not beat"
    console.print(
        f"\nThe model {verdict} gzip on held-out files: {bits:.3f} against {rivals.gzip_bits_per_byte:.3f} bits/byte "
        f"(xz {rivals.xz_bits_per_byte:.3f}, primed {rivals.primed_xz_bits_per_byte:.3f}). {duration(seconds)} in all.",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
    console.print(f"Report: {report}", highlight=False, soft_wrap=True)
    console.print(
        "Go on:\n"
        f"  bagu train --from {out / 'pretrain'} --set train.steps=2000 --out runs/longer\n"
        f"  bagu serve {out / 'sft'}        # an OpenAI-compatible API, and a page to talk to it\n"
        "  bagu train my_text.txt --out runs/mine     # any file or folder of text, JSON lines, Parquet\n"
        "  bagu lab list                              # textbook claims, measured",
        highlight=False, soft_wrap=True,
    )  # fmt: skip
