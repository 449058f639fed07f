"""What a drill is. Imports no torch: `bagu drill list`, `start` and `hint` answer at once.

A drill names an oracle: a module with `trials(drill, level, seed)`, which yields what is asked of an answer, from the
simple to the edges. `grade.grade(drill, source, level)` runs them.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

from bagu.lab.drill.cuda_source import stub as cuda_stub
from bagu.lab.drill.signature import gradients_of, inputs_of, name_of, read_spec

LEVELS = ("torch", "triton", "triton_grad", "cuda")  # of ops; other drills name theirs
TOPICS = ("kernels", "model", "decoding", "data", "evaluation", "parallel", "training", "serving", "basics")


class Text(NamedTuple):
    """A text in both languages."""

    en: str
    zh: str

    def __call__(self, language: str) -> str:
        return self.zh if language == "zh" else self.en


class Question(NamedTuple):
    """What interviewers ask about the part, and the command of bagu that shows the answer."""

    en: str
    zh: str
    command: str


class Planted(NamedTuple):
    """A wrong answer: the solution of a level with `old` replaced by `new`. `cause` names the causes (keys of
    diagnose.CAUSES, separated by |) of which one is the right guess."""

    level: str
    old: str
    new: str
    cause: str


def in_triton(level: str) -> bool:
    return level.startswith("triton")


def language(asked: str | None = None) -> str:
    """`en` or `zh`: as asked, else by the locale."""
    if asked is not None:
        return asked
    locale = os.environ.get("LC_ALL") or os.environ.get("LC_MESSAGES") or os.environ.get("LANG") or ""
    return "zh" if locale.startswith("zh") else "en"


@dataclass(frozen=True, kw_only=True)
class Drill:
    """A part to write by hand."""

    name: str
    topic: str
    difficulty: int  # 1 to 5
    title: Text
    task: Text  # what to write, with the formula and the shapes
    stubs: Mapping[str, str]  # source that a learner starts from, by level; the first level is the default
    hints: tuple[Text, Text, Text]  # from vague to exact
    questions: Sequence[Question] = ()
    solutions: Mapping[str, str] = field(default_factory=dict)  # bagu's own answers, by level
    planted: Sequence[Planted] = ()
    oracle: str = "ops"  # a module of bagu.lab.drill.oracles
    functions: Sequence[str] = ()  # what an answer must define
    forbidden: Sequence[str] = ()  # ATen operations and functions of torch that would be the answer itself
    modules: Sequence[str] = ()  # further modules that an answer may not import
    op: str = ""  # the op whose spec is the truth
    fixed: Mapping[str, Any] = field(default_factory=dict)  # arguments of the op that the drill leaves out

    @property
    def levels(self) -> tuple[str, ...]:
        return tuple(self.stubs)

    def wrong(self, planted: Planted) -> str:
        """The source of a planted answer."""
        source = self.solutions[planted.level]
        assert source.count(planted.old) >= 1, f"{self.name}: {planted.old!r} is not in its solution"
        return source.replace(planted.old, planted.new, 1)

    @classmethod
    def of(cls, spec: Any, **more: Any) -> Self:
        """The drill of an op, from its spec (or its name): task from the docstring, stubs from the signature; the
        cases with their reasons, the tolerances and the cost are read from the spec when an answer is graded."""
        name: str = getattr(spec, "name", spec)
        doc, _ = read_spec(name)
        fixed = more.get("fixed", {})
        first = doc.splitlines()[0]
        levels = ("torch", "triton", *(level for level in LEVELS[2:] if level in more.get("solutions", ())))
        stubs = {level: op_stub(name, doc, level, fixed) for level in levels}
        base: dict[str, Any] = {
            "name": name,
            "op": name,
            "topic": "kernels",
            "difficulty": 3,
            "functions": ("forward",),
            "title": Text(first, first),
            "task": Text(doc, doc),
            "stubs": stubs,
            "hints": GENERIC_HINTS,
        }
        if "task_zh" in more:
            base["task"] = Text(doc, f"{more.pop('task_zh')}\n\n{doc.partition(chr(10))[2].strip(chr(10))}")
        return cls(**(base | more))


GENERIC_HINTS = (
    Text(
        "Write the formula for one row in fp32, then ask which rows and columns do not exist.",
        "先在 fp32 里写出一行的公式，再问哪些行和列并不存在。",
    ),
    Text(
        "Every load needs a mask, and the value outside of it must be neutral for the reduction that follows.",
        "每次 load 都要 mask；mask 之外的值必须是后续归约的单位元。",
    ),
    Text(
        "Run `bagu drill check`: the first failing case names its reason; start from the smallest one.",
        "运行 `bagu drill check`：第一个失败的用例会说明原因；从最小的用例开始。",
    ),
)


def op_stub(name: str, doc: str, level: str, fixed: Mapping[str, Any]) -> str:
    """The file that a learner starts from."""
    inputs, results = inputs_of(name)
    kept = [p for p in inputs if name_of(p) not in fixed]
    given = ", ".join(f"{n} = {v!r}" for n, v in fixed.items())
    left_out = f"\nHere {given}: they are not passed.\n" if fixed else ""
    shapes = "\n".join(f"    {p}" for p in kept)
    task = f"""{doc}
{left_out}
The arguments, with shapes (`?`: may be None; no dtype: that of the first tensor) and the result:

{shapes}
    -> {", ".join(results)}
"""
    if level == "cuda":
        return cuda_stub(task, kept, results)
    names = ", ".join(map(name_of, kept))
    triton = "Write a Triton kernel; torch may allocate, view and copy. Offsets that are masked still count."
    imports = "import torch\n" if level == "torch" else "import torch\nimport triton\nimport triton.language as tl\n"
    rule = f"Write it with torch's elementary operations, without the function {name} itself."
    file = f'''"""{task}
{rule if level == "torch" else triton}
Any stride may come in, and there may be no row at all. Inputs stay unchanged. Accumulate in fp32.
"""

{imports}

def forward({names}):
    raise NotImplementedError
'''
    if level != "triton_grad":
        return file
    flows = ", ".join(f"d{name_of(r)}" for r in results)
    made = ", ".join(f"d{g}" for g in gradients_of(name, fixed))
    return f'''{file}

def backward({flows}, {names}):
    """From the gradient of the result and forward's arguments: {made}, in their dtypes; None for what is None."""
    raise NotImplementedError
'''
