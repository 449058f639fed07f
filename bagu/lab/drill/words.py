"""What the commands print, in both languages. Imports no torch."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from bagu.errors import ArgumentError
from bagu.lab.drill import catalogue
from bagu.lab.drill.core import Drill, Text, in_triton
from bagu.lab.drill.progress import Progress

if TYPE_CHECKING:
    from bagu.lab.drill.grade import Grade

TOPIC_NAMES = {
    "kernels": Text("kernels", "算子"),
    "model": Text("model", "模型"),
    "decoding": Text("decoding", "解码"),
    "data": Text("data", "数据"),
    "evaluation": Text("evaluation", "评测"),
    "parallel": Text("parallel", "并行"),
    "training": Text("training", "训练"),
    "serving": Text("serving", "推理服务"),
    "basics": Text("basics", "基础"),
}
LETTERS = {
    "A": Text("every trial is right", "全部正确"),
    "B": Text("every trial is right, it compiles clean; speed: `bagu drill time`", "全部正确，kernel 编译无瑕疵"),
    "C": Text("every trial is right; the compiler finds fault with the kernel", "全部正确；编译器对 kernel 有意见"),
    "D": Text("only edge cases are wrong", "只有边界情况出错"),
    "E": Text("wrong", "错误"),
}


def listing(language: str, *, every: bool = False) -> Iterator[str]:
    """The lines of `bagu drill list`."""
    progress = Progress.read()
    topic = ""
    for drill in catalogue.written().values():
        if drill.topic != topic:
            topic = drill.topic
            yield TOPIC_NAMES[topic](language)
        best = progress.best(drill.name)
        mark = f" {best.letter}{'*' if best.shown else ''}" if best else "  "
        due = Text("  due again", "  该复习了")(language) if progress.is_due(drill.name) else ""
        levels = ", ".join(drill.levels)
        yield f" {mark} {drill.name:<18} {'●' * drill.difficulty:<5} {drill.title(language)} [{levels}]{due}"
    others = catalogue.ops()
    if every:
        yield Text("every other op, from its spec", "其余算子（由 spec 生成）")(language)
        yield from (f"    {name}" for name in others)
    yield Text(
        f"{len(catalogue.written())} drills, and {len(others)} more made from the specs of ops (--all)."
        " Begin: bagu drill start softmax",
        f"{len(catalogue.written())} 道题，另有 {len(others)} 道由 spec 生成（--all）。开始：bagu drill start softmax",
    )(language)


def start(drill: Drill, level: str, folder: Path, language: str) -> Path:
    """Write the stub; a file that was changed is not written over."""
    file = folder / catalogue.file_name(drill, level)
    source = stub(drill, level, file, language)
    if file.exists() and file.read_text(encoding="utf-8", errors="replace") != source:
        raise ArgumentError(f"{file} exists, and has your work in it", hint="move it away, or give --out FOLDER")
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(source, encoding="utf-8")
    return file


def stub(drill: Drill, level: str, file: Path, language: str) -> str:
    """The stub, its task in the language, and how to grade it."""
    source = drill.stubs[level]
    first, comment = drill.task.zh.splitlines()[0], "//" if level == "cuda" else "#"
    if language == "zh":
        source = f"// {first}\n{source}" if level == "cuda" else source.replace('"""', f'"""{first}\n\n', 1)
    return f"{source.rstrip()}\n\n\n{comment} bagu drill check {file.as_posix()}\n"


def verdict(grade: Grade, language: str) -> Iterator[str]:
    """The lines of `bagu drill check`."""
    en = language != "zh"
    count = grade.passed + len(grade.failures)
    yield f"{grade.drill} [{grade.level}]: {grade.letter}: {LETTERS[grade.letter](language)}"
    if grade.failures:
        first = grade.failures[0]
        yield f"  {first.message}"
        yield f"  {'this trial exists because' if en else '此用例的意义'}: {first.why(language)}"
        yield f"  {'a guess of the cause' if en else '可能的原因'}: {first.guess(language)}"
        others = [f.trial for f in grade.failures[1:]]
        if others:
            text = f"  {'also wrong' if en else '另有错误'}: {', '.join(others)}"
            yield from textwrap.wrap(text, 118, subsequent_indent="    ")
    yield from (f"  {note}" for note in grade.notes)
    truth = "Triton's interpreter (no races, no shared memory)" if in_triton(grade.level) else "fp64"
    where = grade.isolation or ("none: this system permits none" if en else "无（系统不允许）")
    yield (
        f"  {count} {'trials' if en else '个用例'}, {grade.passed} {'right' if en else '正确'}; "
        f"{'truth' if en else '真值'}: {truth}; {'isolation' if en else '隔离'}: {where}; "
        f"seed {grade.seed}; {grade.seconds:.1f} s"
    )


def day(when: float) -> str:
    return datetime.fromtimestamp(when).strftime("%Y-%m-%d")
