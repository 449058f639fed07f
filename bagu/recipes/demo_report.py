"""The report and the last console lines of a demo."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import rich.box
import rich.table
from rich.console import Console

from bagu.data.corpus import STDLIB, TextCorpus
from bagu.data.source import Conversation
from bagu.nn import count
from bagu.recipes.baselines import CodeSamples, Compressors, judge_code
from bagu.recipes.catalogue import recipe
from bagu.recipes.demo_eval import WRITE, Evaluation, eval_table
from bagu.recipes.demo_later import Done
from bagu.recipes.demo_plan import Plan
from bagu.recipes.demo_sizes import Demo
from bagu.recipes.training import Trained
from bagu.runs.display import Table
from bagu.runs.progress import duration
from bagu.train.report import Card, Comparison, ReportData, read_run, write_report

COMPARED = ("before fine-tuning", "after all stages")


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The results of a demo. `stages` begins with pretraining; `before` are the answers of that model, `after` those of
    the last one."""

    size: Demo
    plan: Plan | None  # None if the size was given
    stages: tuple[Done, ...]
    bits: float  # bits per byte of all held-out text
    stock: Compressors  # gzip and xz on the same text
    asked: Sequence[Conversation]
    before: Sequence[str]
    after: Sequence[str]

    @property
    def base(self) -> Trained:
        return self.stages[0].trained

    @property
    def model(self) -> Path:
        """The folder of the last stage, whose model is served."""
        return self.stages[-1].trained.folder.path

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return tuple(stage.evaluation for stage in self.stages)


def against_gzip(bits: float, gzip: float) -> str:
    """Whether the model is better or worse than gzip, and by how much."""
    share = 100 * (bits / gzip - 1)
    return f"{abs(share):.0f} % {'below' if share < 0 else 'above'} gzip -9, which needs {gzip:.3f}"


def report(out: Path, done: Finished, seconds: float) -> Path:
    """Write `out`/report.html."""
    base, stock = done.base, done.stock
    first, last = done.evaluations[0], done.evaluations[-1]
    facts, judged = base.data.facts[STDLIB], (judge_code(done.before), judge_code(done.after))
    cards = (
        Card(name="Held-out text", value=f"{done.bits:.3f} bits/byte",
             note=against_gzip(done.bits, stock.gzip_bits_per_byte)),
        Card(name="Model", value=f"{count.parameters(base.model.config).total / 1e6:.2f} M parameters"),
        Card(name="Functions that pass", value=f"{100 * last.score(WRITE).mean:.0f} %",
             note=f"{100 * first.score(WRITE).mean:.0f} % before fine-tuning; names that were never trained on"),
        Card(name="Time", value=duration(seconds), note="all stages"),
    )  # fmt: skip
    questions = [c.messages[0]["content"] for c in done.asked]
    tables = (
        _sizes(done.bits, stock, done.size.context), eval_table(done.evaluations), _samples(judged),
        *_chosen(done, seconds), _data(facts, base), _later_data(done.stages[1:]),
    )  # fmt: skip
    data = ReportData(
        title="bagu demo", subtitle="A language model of the Python standard library, trained on this machine.",
        runs=[read_run(stage.trained.folder, stage.name) for stage in done.stages], cards=cards,
        references={
            "gzip -9": stock.gzip_bits_per_byte, "xz -6": stock.xz_bits_per_byte,
            "xz -6 primed with the training text": stock.primed_xz_bits_per_byte,
        },
        comparisons=tuple(
            Comparison(prompt=q, before=b, after=a)
            for q, b, a in zip(questions[:8], done.before, done.after, strict=False)
        ),
        compared=COMPARED, tables=tables,
    )  # fmt: skip
    return write_report(data, out / "report.html")


def _chosen(done: Finished, spent_s: float) -> tuple[Table, ...]:
    """Tables of the chosen plan and the reason; empty if the size was given. `spent_s` is the time until this page."""
    size, plan = done.size, done.plan
    if plan is None:
        return ()
    rows = [
        ("size", f"{size.name}: {size.num_layers} layers of {size.hidden_size}, a vocabulary of {size.vocab_size:,}"),
        ("computes in", done.base.folder.config()["dtype"]),
        ("time to be kept", duration(plan.budget_s)),
        ("time it took", f"{duration(spent_s)} until this page; {duration(plan.seconds)} were estimated in all"),
        ("pretraining", f"{size.pretrain_steps:,} steps of {size.tokens_per_step:,} tokens"),
        *((stage.name, f"{stage.trained.fit.step:,} steps") for stage in done.stages[1:]),
        ("because", plan.reason),
    ]
    note = (
        "Rates are of two steps before anything else; the steps were fitted to the real pace after an eighth of them."
    )
    return (Table(title="What was chosen for this machine", columns=("what", "value"), rows=rows, note=note),)


def _sizes(bits: float, stock: Compressors, context: int) -> Table:
    rows = [
        ("gzip -9", f"{stock.gzip_bits_per_byte:.3f}"),
        ("xz -6", f"{stock.xz_bits_per_byte:.3f}"),
        ("xz -6, primed with the training text", f"{stock.primed_xz_bits_per_byte:.3f}"),
        ("this model", f"{bits:.3f}"),
    ]
    note = (
        f"{stock.held_out_bytes / 1e6:.2f} MB of files the model never saw, laid end to end for the compressors; the "
        f"model sees at most {context} tokens of the same file. Priming: {stock.priming_bytes / 1e6:.1f} MB."
    )
    return Table(title="Held-out text, bits per byte", columns=("what", "bits per byte"), rows=rows, note=note)


def _samples(judged: Sequence[CodeSamples]) -> Table:
    rows = [
        (n, f"{j.parse_percent:.0f} %", f"{j.define_percent:.0f} %", f"{j.mean_characters:.0f}",
         f"{j.distinct_4gram_percent:.0f} %")
        for n, j in zip(COMPARED, judged, strict=True)
    ]  # fmt: skip
    note = f"{judged[0].count} held-out questions (docstring → function), temperature 0.6, the same for both."
    columns = ("model", "parse", "define a function", "mean length, characters", "distinct 4-grams")
    return Table(title="Answers as Python", columns=columns, rows=rows, note=note)


def _data(facts: Mapping[str, object], base: Trained) -> Table:
    shown = ("name", "python", "files", "bytes", "sha256", "train_documents", "train_tokens", "validation_documents")
    rows: list[tuple[str, object]] = [(key.replace("_", " "), facts[key]) for key in shown if key in facts]
    corpus = base.corpora[STDLIB]
    if isinstance(corpus, TextCorpus) and corpus.dedup is not None:
        rows.append(("near-duplicates removed", len(corpus.dedup.removed)))
    report = base.data.loader.report(base.fit.step)
    rows.append(("epochs seen", f"{report['sources'][STDLIB]['epochs']:.2f}"))
    rows.append(("padding", f"{report['padding_percent']:.1f} %"))
    return Table(title="Pretraining data", columns=("what", "value"), rows=rows)


def _later_data(stages: Sequence[Done]) -> Table:
    rows = []
    for stage in stages:
        trained = stage.trained
        size, report = trained.data.sources[STDLIB], trained.data.loader.report(trained.fit.step)
        epochs = f"{report['sources'][STDLIB]['epochs']:.2f}"
        rows.append((stage.name, f"{size.documents:,}", f"{size.tokens:,}", epochs))
    note = "Functions of the training files: chats, pairs of a real and a broken function, prompts."
    return Table(
        title="Data of the later stages", columns=("stage", "documents", "tokens", "epochs seen"), rows=rows, note=note
    )


def print_summary(console: Console, page: Path, out: Path, done: Finished, seconds: float) -> None:
    """Print the scores of all stages, the result in one line, and the next commands to try."""
    bits, stock = done.bits, done.stock
    console.print(terminal_table(eval_table(done.evaluations)))
    verdict = "beats" if bits < stock.gzip_bits_per_byte else "does not beat"
    console.print(
        f"\nThe model {verdict} gzip on held-out files: {bits:.3f} against {stock.gzip_bits_per_byte:.3f} bits/byte "
        f"(xz {stock.xz_bits_per_byte:.3f}, primed {stock.primed_xz_bits_per_byte:.3f}). {duration(seconds)} in all.",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"Report: {page}", highlight=False, soft_wrap=True)
    context = done.size.context
    fits = "" if context == recipe("small").data.context else f" --set data.context={context}"
    console.print(
        "Go on:\n"
        f"  bagu train --from {out / 'pretrain'} --set train.steps=2000{fits} --out runs/longer\n"
        f"  bagu serve {done.model}        # an OpenAI-compatible API, and a chat page\n"
        f"  bagu train --recipe grpo --from {done.model} --reward my_file.py:score{fits} --out runs/mine-rl\n"
        "  bagu train my_text.txt --out runs/mine     # any file or folder of text, JSON lines, Parquet\n"
        "  bagu lab list                              # textbook claims, measured",
        highlight=False,
        soft_wrap=True,
    )


def terminal_table(table: Table) -> rich.table.Table:
    """A table of the report, for the terminal. The first two columns are text."""
    drawn = rich.table.Table(  # without padding and edges it fits in 80 columns
        title=table.title, title_justify="left", box=rich.box.SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False
    )
    for number, column in enumerate(table.columns):
        drawn.add_column(column, justify="left" if number < 2 else "right", no_wrap=True)
    for row in table.rows:
        drawn.add_row(*map(str, row))
    return drawn
