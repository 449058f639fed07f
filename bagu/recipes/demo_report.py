"""The report and the last console lines of a demo."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import rich.box
import rich.table
from rich.console import Console

from bagu.data.corpus import STDLIB, TextCorpus
from bagu.eval.compare import Row, read_side
from bagu.eval.intervals import Estimate
from bagu.eval.tasks.compose import COMPOSE, LONG
from bagu.nn import count
from bagu.recipes.baselines import Compressors
from bagu.recipes.catalogue import recipe
from bagu.recipes.demo_eval import SCALE, Evaluation, eval_table, learned
from bagu.recipes.demo_later import Done
from bagu.recipes.demo_plan import Plan
from bagu.recipes.demo_sizes import Demo
from bagu.recipes.training import Trained
from bagu.runs.display import Table
from bagu.runs.progress import duration
from bagu.train.report import Card, Comparison, ReportData, read_run, write_report

COMPARED = ("after pretraining", "after all stages")
SHOWN = 6  # questions at the top of the report
SHOWN_LINES = 9  # of an answer: a model that was not fine-tuned does not stop


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The results of a demo. `stages` begins with pretraining; `copying` has the scores of copied answers by task."""

    size: Demo
    plan: Plan | None  # None if the size was given
    stages: tuple[Done, ...]
    bits: float  # bits per byte of all held-out text
    stock: Compressors  # gzip and xz on the same text
    copying: Mapping[str, Estimate]

    @property
    def base(self) -> Trained:
        return self.stages[0].trained

    @property
    def model(self) -> Path:
        """The folder of the last stage, whose model is served."""
        return self.stages[-1].trained.folder.path

    @property
    def asked(self) -> list[tuple[Row, Row]]:
        """The rows of the first items of `compose`, one of `compose_long` after every two, after pretraining and after
        the last stage: in their order, and not chosen by how they were answered."""
        first, last = (read_side(self.evaluations[n].folder) for n in (0, -1))
        short, long = ([(first[t].rows[i], row) for i, row in last[t].rows.items()] for t in (COMPOSE, LONG))
        return [pair for at, longer in enumerate(long) for pair in (*short[2 * at : 2 * at + 2], longer)]

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        return tuple(stage.evaluation for stage in self.stages)


def against_stock(bits: float, stock: Compressors) -> str:
    """Whether the model is better or worse than gzip and xz, and by how much."""
    named = {"gzip -9": stock.gzip_bits_per_byte, "xz -6": stock.xz_bits_per_byte}
    return ", ".join(
        f"{abs(100 * (bits / of - 1)):.0f} % {'below' if bits < of else 'above'} {name} ({of:.3f})"
        for name, of in named.items()
    )


def report(out: Path, done: Finished, seconds: float) -> Path:
    """Write `out`/report.html."""
    base, stock = done.base, done.stock
    first, last = done.evaluations[0].score(COMPOSE), done.evaluations[-1].score(COMPOSE)
    copied, facts = done.copying[COMPOSE].mean, base.data.facts[STDLIB]
    cards = (
        Card(
            name="Right functions",
            value=f"{100 * last.mean:.0f} %",
            note=f"of {last.items} held-out questions, {SCALE.interval(last)} with 95 %; after pretraining "
            f"{100 * first.mean:.0f} %, by copying {100 * copied:.0f} %",
        ),
        Card(name="Held-out text", value=f"{done.bits:.3f} bits/byte", note=against_stock(done.bits, stock)),
        Card(name="Model", value=f"{count.parameters(base.model.config).total / 1e6:.2f} M parameters"),
        Card(name="Time", value=duration(seconds), note="all stages"),
    )
    tables = (
        eval_table(done.evaluations, done.copying),
        _learned(done),
        _sizes(done.bits, stock, done.size.context),
        *_chosen(done, seconds),
        _data(facts, base),
        _later_data(done.stages[1:]),
        _next(out, done),
    )
    data = ReportData(
        title="bagu demo",
        subtitle="A language model that learned Python from the standard library, and then to write functions from "
        "words, on this machine. These are the first held-out questions; every answer was run.",
        runs=[read_run(stage.trained.folder, stage.name) for stage in done.stages],
        cards=cards,
        references={
            "gzip -9": stock.gzip_bits_per_byte,
            "xz -6": stock.xz_bits_per_byte,
            "xz -6 primed with the training text": stock.primed_xz_bits_per_byte,
        },
        comparisons=[_compared(*rows) for rows in done.asked[:SHOWN]],
        compared=COMPARED,
        tables=tables,
    )
    return write_report(data, out / "report.html")


def _compared(before: Row, after: Row) -> Comparison:
    return Comparison(
        prompt=after["messages"][0]["content"],
        before=_cut(before["answers"][0]),
        after=_cut(after["answers"][0]),
        verdicts=(_verdict(before), _verdict(after)),
    )


def _verdict(row: Row) -> str:
    return "right" if row["grades"][0] == 1 else "wrong"


def _cut(text: str) -> str:
    lines = text.strip("\n").split("\n")
    return "\n".join(lines if len(lines) <= SHOWN_LINES else [*lines[:SHOWN_LINES], "…"])


def _learned(done: Finished) -> Table:
    rows = [(b.name, learned(a.evaluation, b.evaluation)) for a, b in pairwise(done.stages)]
    return Table(title="What each stage added", columns=("stage", "on compose"), rows=rows)


def _next(out: Path, done: Finished) -> Table:
    return Table(title="What to try next", columns=("to", "run"), rows=next_commands(out, done))


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
    note = "Rates are of two steps before anything else; the steps were fitted to the real pace inside each stage."
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
        seen = trained.data.loader.report(trained.fit.step)["sources"]
        for name, size in trained.data.sources.items():
            epochs = f"{seen[name]['epochs']:.2f}"
            rows.append((stage.name, name, f"{size.documents:,}", f"{size.tokens:,}", epochs))
    note = "SFT: chats. DPO: answers, a right and a wrong one for each question. GRPO: questions without answers."
    columns = ("stage", "source", "documents", "tokens", "epochs seen")
    return Table(title="Data of the later stages", columns=columns, rows=rows, note=note)


def next_commands(out: Path, done: Finished) -> list[tuple[str, str]]:
    """What to do with the result, as commands that work in the shell that ran the demo."""
    program, context = _program(), done.size.context
    fits = "" if context == recipe("small").data.context else f" --set data.context={context}"
    question = done.asked[0][1]["messages"][0]["content"]
    return [
        ("ask it", f'{program} chat {done.model} --prompt "{question}"'),
        ("chat in the browser, with an OpenAI-compatible API", f"{program} serve {done.model}"),
        ("score it again, item by item", f"{program} eval {done.model} {COMPOSE} --out {out / 'again'}"),
        ("train longer", f"{program} demo --minutes 26"),
        (
            "pretrain further",
            f"{program} train --from {out / 'pretrain'} --set train.steps=2000{fits} --out runs/longer",
        ),
        ("measure textbook claims", f"{program} lab list"),
    ]


def _program() -> str:
    """How this process was called: `bagu` if the shell finds it, else its path."""
    called = Path(sys.argv[0])
    if called.name != "bagu" or shutil.which("bagu") == str(called):
        return "bagu" if called.name == "bagu" else f"{sys.executable} -m bagu"
    here = Path.cwd()
    return str(called.relative_to(here) if called.is_relative_to(here) else called)


def print_summary(console: Console, page: Path, out: Path, done: Finished, seconds: float) -> None:
    """Print the scores of all stages, the result in one line, and the next commands to try."""
    console.print(terminal_table(eval_table(done.evaluations, done.copying)))
    first, last = (done.evaluations[n].score(COMPOSE) for n in (0, -1))
    say = partial(console.print, highlight=False, soft_wrap=True, markup=False)
    copied = SCALE.score(done.copying[COMPOSE])
    say(
        f"\nOf {last.items} held-out functions it writes {SCALE.score_and_interval(last)} rightly; after pretraining "
        f"it wrote {SCALE.score(first)}, and copying the nearest demonstration gives {copied}."
    )
    say(
        f"Held-out text: {done.bits:.3f} bits/byte, {against_stock(done.bits, done.stock)}. {duration(seconds)} in all."
    )
    say(f"From SFT to GRPO: {learned(done.evaluations[1], done.evaluations[-1])}.")
    say(f"Report: {page}\nGo on:")
    for purpose, command in next_commands(out, done):
        say(f"  {command}    # {purpose}")


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
