"""`python -m benchmarks.tools.tables [--check | --demo FOLDER]`: write the tables of the documents.

It owns the text between the two marks of a document and makes it from benchmarks/results: the rows of GPU machines, in
docs/benchmarks.md every case, in docs/benchmarks.zh.md each op at its first benchmark case. The numbers of one line
come from one run, the latest that has the case, so that bagu and its peers are compared within a run. `--check` writes
nothing and fails if a document is out of date. `--demo` first adds the record that `bagu demo` left in a folder.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bagu.errors import BaguError
from bagu.ops.tuning.store import Store
from bagu.runs.record import append_rows, read_rows
from benchmarks.tools import (
    demo_table,
    formats_table,
    parallel_table,
    plan_table,
    quantization_table,
    serve_table,
    train_table,
    tune_table,
)
from benchmarks.tools.markdown import markdown_table


def marks_of(name: str) -> tuple[str, str]:
    """The lines around the table `name` in a document."""
    return f"<!-- bench:{name}:begin -->", f"<!-- bench:{name}:end -->"


PEERS = ("eager", "compile", "liger")

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Words:
    """The texts around the numbers in one language."""

    head: tuple[str, ...]
    caption: str
    host: str
    host_head: tuple[str, ...]
    nothing: str
    failed: str
    fault: str
    language: str


ENGLISH = Words(
    head=("op", "shape", "pass", "bagu", "of ceiling", "torch eager", "torch.compile", "Liger"),
    caption="Measured on **{machine}** in {dtype} at commit {commit} (torch {torch}, Triton {triton}); copy bandwidth "
    "{copy} GB/s and matmul {matmul} TFLOP/s in the same run. Higher is better. Reproduce with `bagu bench ops`.",
    host="Host time of a call with tiny tensors, in the same runs: µs of a forward without a graph / of forward and "
    "backward. Lower is better.",
    host_head=("op", "bagu", "torch eager", "torch.compile", "Liger"),
    nothing="No GPU results are recorded yet: `bagu bench ops` on a GPU machine writes them to `benchmarks/results`.",
    failed="failed",
    fault="fault",
    language="en",
)
CHINESE = Words(
    head=("算子", "形状", "阶段", "bagu", "占上限", "torch eager", "torch.compile", "Liger"),
    caption="测于 **{machine}**，{dtype}，提交 {commit}（torch {torch}，Triton {triton}）；同一次运行中实测拷贝带宽 "
    "{copy} GB/s，矩阵乘 {matmul} TFLOP/s。数值越高越好；用 `bagu bench ops` 复现。",
    host="同一批运行中，极小张量时一次调用的主机耗时：不建图的前向 / 前向加反向，单位 µs，越低越好。",
    host_head=("算子", "bagu", "torch eager", "torch.compile", "Liger"),
    nothing="尚无 GPU 结果：在 GPU 机器上运行 `bagu bench ops`，结果写入 `benchmarks/results`。",
    failed="失败",
    fault="测量有误",
    language="zh",
)
FILES = {"docs/benchmarks.md": (ENGLISH, True), "docs/benchmarks.zh.md": (CHINESE, False)}


def render(rows: Sequence[Row], words: Words, *, every: bool = False) -> str:
    """The text between the marks: a caption and a table per GPU machine and dtype, for `every` case or the first."""
    rows = [r for r in rows if r["device"].startswith("cuda") and not r["quick"]]
    parts = []
    for machine, dtype in sorted({(r["env"]["machine"], r["dtype"]) for r in rows}):
        mine = latest([r for r in rows if (r["env"]["machine"], r["dtype"]) == (machine, dtype)])
        mine.sort(key=lambda r: r["op"])  # independent of the order in the record
        firsts = dict(reversed([(r["op"], r["case"]) for r in mine]))  # keeps the first case of each op
        shown = mine if every else _short([r for r in mine if r["case"] == firsts[r["op"]]])
        parts += [_caption(mine, words), _table(shown, words)]
        if timed := [r for r in mine if r.get("host_s") is not None]:
            parts += [words.host, _host_table(timed, words)]
    return "\n\n".join(parts) or words.nothing


def latest(rows: Sequence[Row]) -> list[Row]:
    """The rows of the latest run per op and case, but not of a run with only the torch backend."""
    runs: dict[tuple[str, str], dict[str, list[Row]]] = {}
    for row in rows:
        runs.setdefault((row["op"], row["case"]), {}).setdefault(row["env"]["time"], []).append(row)
    chosen = []
    for by_time in runs.values():
        full = [t for t, run in by_time.items() if any(r["backend"] not in (None, "torch") for r in run)]
        chosen += by_time[max(full or by_time)]
    return chosen


def _short(rows: Sequence[Row]) -> list[Row]:
    """Separate passes for memory-bound ops; both together for compute-bound ops, which may move work between them."""
    compute = {r["op"] for r in rows if r["bound"] == "compute"}
    return [r for r in rows if (r["pass"] == "fwd+bwd") == (r["op"] in compute)]


def _caption(rows: Sequence[Row], words: Words) -> str:
    last = max(rows, key=lambda r: r["env"]["time"])
    env, ceilings = last["env"], last["ceilings"]
    commits = sorted({_commit(r["env"]["commit"]) for r in rows})
    return words.caption.format(
        machine=env["machine"],
        dtype=last["dtype"],
        commit=", ".join(commits),
        torch=env["torch"],
        triton=env["triton"],
        copy=f"{ceilings['copy'] / 1e9:,.0f}",
        matmul=f"{ceilings['matmul'] / 1e12:,.0f}",
    )


def _commit(commit: str | None) -> str:
    if commit is None:
        return "?"
    short, dash, dirty = commit.partition("-")
    return f"`{short[:9]}{dash}{dirty}`"


def _table(rows: Sequence[Row], words: Words) -> str:
    lines: list[list[str]] = []
    by_work: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        by_work.setdefault((row["op"], row["case"], row["pass"]), []).append(row)
    seen = ""
    for (op, _, step), work in by_work.items():
        ours = [r for r in work if r["backend"]]
        best = next((r for r in ours if r["backend"] != "torch"), ours[0] if ours else None)
        peers = [next((r for r in work if r["peer"] == p), None) for p in PEERS]
        name = f"`{op}`" if op != seen else ""
        share = _fraction(best, [r for r in work if r["yardstick"]]) if best else ""
        cells = [f"**{_rate(best, words)}**" if best else "", share, *(_rate(p, words) for p in peers)]
        lines.append([name, work[0]["shape"], step, *cells])
        seen = op
    return markdown_table(words.head, lines, names=3)


def _host_table(rows: Sequence[Row], words: Words) -> str:
    """An op a line; `rows` are those that have a host time."""
    lines: list[list[str]] = []
    for op in dict.fromkeys(r["op"] for r in rows):
        mine = [r for r in rows if r["op"] == op]
        backends = [r["backend"] for r in mine if r["backend"]]
        ours = next((b for b in backends if b != "torch"), "torch")
        cells = [_host([r for r in mine if r["backend"] == ours])]
        cells += [_host([r for r in mine if r["peer"] == p]) for p in PEERS]
        lines.append([f"`{op}`", f"**{cells[0]}**", *cells[1:]])
    return markdown_table(words.host_head, lines, names=1)


def _host(rows: Sequence[Row]) -> str:
    """ "14 / 120": of one implementation, forward and forward with backward."""
    by_pass = {r["pass"]: f"{1e6 * r['host_s']:.0f}" for r in rows}
    return " / ".join(by_pass[p] for p in ("fwd", "fwd+bwd") if p in by_pass) or "–"


def _fraction(row: Row, yardsticks: Sequence[Row]) -> str:
    """ "0.84 matmul, 0.91× four_gemms": the fraction of its ceiling, and its speed relative to the yardsticks."""
    if row["share"] is None or row["fault"]:
        return ""
    times = [f"{y['median_s'] / row['median_s']:.2f}× {y['peer']}" for y in yardsticks if y["median_s"]]
    return ", ".join([f"{row['share']:.2f} {row['ceiling']}", *times])


def _rate(row: Row | None, words: Words) -> str:
    if row is None:
        return "–"
    if row["median_s"] is None:
        return words.failed
    if row["fault"]:
        return words.fault
    if row["gb_per_s"] is not None:
        return f"{row['gb_per_s']:,.0f} GB/s"
    return (
        f"{row['tflop_per_s']:,.1f} TFLOP/s" if row["tflop_per_s"] is not None else f"{1e3 * row['median_s']:,.2f} ms"
    )


def updated(text: str, inside: str, name: str, part: str = "ops") -> str:
    """`text`, of the document `name`, with `inside` between the marks of `part`."""
    first, last = marks_of(part)
    before, begin, rest = text.partition(first)
    _, end, after = rest.partition(last)
    if not begin or not end:
        raise BaguError(f"{name} has no marks for the table", hint=f"add the lines {first} and {last}")
    return f"{before}{first}\n{inside}\n{last}{after}"


def main(argv: Sequence[str] | None = None) -> int:
    """Rewrite the documents, or only compare with --check. Exit status 1: out of date, 2: a document is not
    readable."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tools.tables",
        description="generate the tables in the documents from benchmarks/results",
    )
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if a document is out of date")
    parser.add_argument("--root", type=Path, default=Path(), help="the checkout (default: the current folder)")
    parser.add_argument("--demo", type=Path, help="the folder of a demo: add its record to benchmarks/results/demo")
    asked = parser.parse_args(argv)
    try:
        if asked.demo is not None:
            record_demo(asked.demo, asked.root)
        return _update(asked.root, check=asked.check)
    except BaguError as error:
        print(f"{error}\n  -> {error.hint}" if error.hint else error, file=sys.stderr)
        return 2


def record_demo(folder: Path, root: Path) -> None:
    """Add the record of a demo to the results of the machine that it ran on."""
    from bagu.recipes.demo_record import RECORD  # imports what a demo needs, which --check does not

    path = folder / RECORD
    if not path.exists():
        raise BaguError(f"{path} does not exist", hint="a demo that has ended leaves it: bagu demo --out FOLDER")
    rows = read_rows(path)
    results = root / "benchmarks/results/demo" / f"{rows[0]['env']['machine']}.jsonl"
    if results.exists() and rows[0] in read_rows(results):
        raise BaguError(f"{results} has the record of {folder} already", hint="give the folder of another demo")
    append_rows(results, rows)


def _texts(root: Path) -> dict[str, dict[str, str]]:
    """What stands between the marks: by document, and by the name of its marks."""
    results = root / "benchmarks/results"
    rows, trained, inference, parallel, demos = (
        [row for path in sorted(results.glob(f"{where}*.jsonl")) for row in read_rows(path)]
        for where in ("", "train/", "serve/", "parallel/", "demo/")
    )

    def recorded(where: str) -> list[Any]:
        return [json.loads(p.read_text(encoding="utf-8")) for p in sorted(results.glob(where))]

    texts = {
        name: {
            "ops": render(rows, words, every=every),
            "train": train_table.render(trained, words.language),
            "serve": serve_table.render(inference, words.language),
            "demo": demo_table.render(demos, words.language),
        }
        for name, (words, every) in FILES.items()
    }
    quality = [row for found in recorded("formats/*.json") for row in found["rows"]]
    labs = {lab: recorded(f"labs/*/{lab}/result.json") for lab in quantization_table.LABS}
    shipped = Store(root / "bagu/ops/tuning/shipped.jsonl").records()
    return texts | {
        "docs/parallel/data_parallel.md": {"parallel": parallel_table.render(parallel)},
        "docs/formats.md": {"formats": formats_table.render(inference, quality)},
        "docs/planner.md": {"plan": plan_table.render(inference)},
        "docs/quantization.md": {"quantization": quantization_table.render(labs)},
        "docs/tuning.md": {"tuning": tune_table.render(shipped)},
    }


def _update(root: Path, *, check: bool) -> int:
    stale = []
    for name, parts in _texts(root).items():
        path = root / name
        if not path.exists():
            raise BaguError(f"{path} does not exist", hint="run it in the checkout, or give --root")
        text = new = path.read_text(encoding="utf-8")
        for part, inside in parts.items():
            new = updated(new, inside, name, part)
        if new != text:
            stale.append(name)
            if not check:
                path.write_text(new, encoding="utf-8")
    if check and stale:
        print(f"{' and '.join(stale)}: out of date; run python -m benchmarks.tools.tables", file=sys.stderr)
        return 1
    if not check:
        print(f"rewrote {' and '.join(stale)}" if stale else "nothing to rewrite")
    return 0


if __name__ == "__main__":
    sys.exit(main())
