"""The table of a demo's scores in the documents, from the records that `bagu demo` leaves in its folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.tools.markdown import commit_words, markdown_table

Row = Mapping[str, Any]
WORDS = {
    "en": {
        "head": ("machine", "task", "items", "different"),
        "caption": "Share of correct items after each stage, with 95 % intervals by the bootstrap over files; **bold** "
        "where the interval of the paired change from the stage before is above 0. `compose`: write a function that is "
        "specified in words, of an order of verbs and with a name that no stage trains on; `compose_long`: of more "
        "verbs than any that is trained on. `write`: write a function of the library with a name that no training "
        "file has; it must pass every check. `different`: the share of different function "
        "bodies in the answers of the last stage. At commit {commit}. Reproduce with `bagu demo`.",
        "machine": "{machine}, `--minutes {limit:.0f}`: {parameters:.1f} M parameters, {tokens:.1f} M tokens, "
        "{bits:.3f} bits/byte (gzip {gzip:.3f}), {time}",
        "time": "{minutes:d} min {seconds:02d} s",
        "nothing": "No demo is recorded yet: `python -m benchmarks.tools.tables --demo runs/demo` records one.",
    },
    "zh": {
        "head": ("机器", "任务", "题数", "互不相同"),
        "caption": "每个阶段之后答对的比例，附按文件做自助法（bootstrap）得到的 95 % 区间；与上一阶段的配对差的区间高于"
        " 0 的用**粗体**。`compose`：按文字说明写函数，其动词的顺序和函数名在任何阶段都没有训练过；"
        "`compose_long`：动词比训练过的都多。`write`：写一个训练文件里没有的名字的函数，须通过全部检查；“互不相同”：最后一阶段的回答中"
        "不同函数体所占的比例。提交 {commit}。用 `bagu demo` 复现。",
        "machine": "{machine}，`--minutes {limit:.0f}`：{parameters:.1f} M 参数，{tokens:.1f} M token，"
        "{bits:.3f} bits/byte（gzip {gzip:.3f}），{time}",
        "time": "{minutes:d} 分 {seconds:02d} 秒",
        "nothing": "尚无演示记录：`python -m benchmarks.tools.tables --demo runs/demo` 会写入一条。",
    },
}


def render(rows: Sequence[Row], language: str) -> str:
    """The latest demo of each machine and time limit: a line for each task, a column for each stage."""
    words: dict[str, Any] = WORDS[language]
    rows = [r for r in rows if not r["quick"]]
    if not rows:
        return str(words["nothing"])
    latest: dict[tuple[str, float], list[Row]] = {}
    for row in sorted(rows, key=lambda r: str(r["env"]["time"])):  # of one run all rows have one time
        key = row["env"]["machine"], row["budget_s"]
        run = latest.setdefault(key, [])
        if run and run[0]["env"]["time"] != row["env"]["time"]:
            run = latest[key] = []
        run.append(row)
    stages = list(dict.fromkeys(r["stage"] for run in latest.values() for r in run))
    machine, task, items, different = words["head"]
    lines = [line for name in sorted(latest, reverse=True) for line in _block(latest[name], stages, words)]
    caption = words["caption"].format(commit=commit_words(run[0]["env"]["commit"] for run in latest.values()))
    return f"{caption}\n\n" + markdown_table([machine, task, items, *stages, different], lines, names=2)


def _block(run: Sequence[Row], stages: Sequence[str], words: Mapping[str, Any]) -> list[list[str]]:
    lines: list[list[str]] = []
    for task in dict.fromkeys(r["task"] for r in run):
        by_stage = {r["stage"]: r for r in run if r["task"] == task}
        last = by_stage[next(s for s in reversed(stages) if s in by_stage)]
        cells = [_score(by_stage[s]) if s in by_stage else "–" for s in stages]
        different = "–" if last["different"] is None else f"{100 * last['different']:.0f} %"
        machine = "" if lines else _machine(run[0], words)
        lines.append([machine, f"`{task}`", str(last["items"]), *cells, different])
    return lines


def _score(row: Row) -> str:
    text = f"{100 * row['score']:.0f} % ({100 * row['low']:.0f}–{100 * row['high']:.0f})"
    return f"**{text}**" if row["change_low"] is not None and row["change_low"] > 0 else text


def _machine(row: Row, words: Mapping[str, Any]) -> str:
    minutes, seconds = divmod(round(row["seconds"]), 60)
    return str(
        words["machine"].format(
            machine=row["env"]["machine"], limit=row["budget_s"] / 60, parameters=row["parameters"] / 1e6,
            tokens=row["pretrain_tokens"] / 1e6, bits=row["bits_per_byte"], gzip=row["gzip_bits_per_byte"],
            time=words["time"].format(minutes=minutes, seconds=seconds),
        )
    )  # fmt: skip
