"""`bagu drill predict`: small questions whose answers are computed when they are asked."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from bagu.errors import UnknownName
from bagu.lab.drill.core import Text

KINDS = ("struct", "generator", "occupancy", "bytes")


@dataclass(frozen=True, kw_only=True)
class Puzzle:
    question: Text
    answer: str  # as the user should type it

    def right(self, said: str) -> bool:
        return said.split() == self.answer.split()


def puzzle(kind: str, seed: int) -> Puzzle:
    """The question of this kind and seed, with its answer."""
    makers = {"struct": _struct, "generator": _generator, "occupancy": _occupancy, "bytes": _bytes}
    if kind not in makers:
        raise UnknownName.among("kind of question", kind, KINDS)
    return makers[kind](Random(f"{kind} {seed}"))


C_NAMES = {"pointer": "void *"}


def _struct(rng: Random) -> Puzzle:
    from bagu.lab.drill.oracles.basics import TYPES, c_layout

    fields = [(rng.choice(list(TYPES)), rng.choice((0, 0, 0, 2, 3))) for _ in range(rng.randint(3, 6))]
    lines = [f"    {C_NAMES.get(k, k + ' ')}m{i}{f'[{n}]' if n else ''};" for i, (k, n) in enumerate(fields)]
    code = "struct S {\n" + "\n".join(lines) + "\n};"
    _, size, _ = c_layout(fields, False)
    return Puzzle(
        question=Text(
            f"{code}\nsizeof(struct S) on a 64-bit machine?", f"{code}\n64 位机器上 sizeof(struct S) 是多少？"
        ),
        answer=str(size),
    )


def _generator(rng: Random) -> Puzzle:
    """The truth is CPython's own output, in the sandbox."""
    from bagu.machine.sandbox import Sandbox

    a, b, c = (rng.randint(1, 9) for _ in range(3))
    body = rng.choice(
        (
            f"def inner():\n    yield {a}\n    return {b}\n\ndef outer():\n    got = yield from inner()\n    yield got + {c}\n\nprint(list(outer()))",
            f"def count(n):\n    while True:\n        sent = yield n\n        n = n + 1 if sent is None else sent\n\ng = count({a})\nprint(next(g), g.send({b}), next(g))",
            f"def f():\n    try:\n        yield {a}\n        yield {b}\n    finally:\n        print('end')\n\ng = f()\nprint(next(g))\ng.close()\nprint(list(g))",
            f"def f(n):\n    if n:\n        yield n\n        yield from f(n - 1)\n    return {b}\n\nprint(sum(f({a})), list(f(0)))",
            f"def f():\n    print('start')\n    yield {a}\n\ng = f()\nprint('made')\nprint(next(g))\nprint(next(g, {c}))",
            f"g = (x * {a} for x in range({b}) if x % 2)\nprint({a} in g)\nprint(list(g))",
        )
    )
    with Sandbox(workers=1) as sandbox:
        said = sandbox.run(body).stdout.strip()
    return Puzzle(question=Text(f"{body}\n\nWhat is printed?", f"{body}\n\n输出是什么？"), answer=said)


def _occupancy(rng: Random) -> Puzzle:
    from bagu.bench.occupancy import occupancy

    registers, warps, shared = (
        rng.choice((32, 64, 96, 128, 168, 255)),
        rng.choice((4, 8)),
        rng.choice((0, 8, 24, 48, 96)),
    )
    found = occupancy("sm_90", registers=registers, shared=shared << 10, warps=warps)
    what = f"{registers} registers per thread, {warps} warps and {shared} KiB of shared memory per program, on sm_90"
    return Puzzle(
        question=Text(
            f"{what}: how many programs run on a multiprocessor at once?", f"{what}：一个 SM 同时运行多少个 program？"
        ),
        answer=str(found.programs),
    )


def _bytes(rng: Random) -> Puzzle:
    """The truth is the cost of the ops' specs."""
    from bagu.ops.catalogue import SPECS

    sizes = {"M": rng.choice((1024, 4096)), "N": rng.choice((2048, 4096, 8192))}
    name = rng.choice(("softmax", "rms_norm", "layer_norm"))
    cost = SPECS[name].cost(sizes, 2)
    sizes_text = ", ".join(f"{k} = {v}" for k, v in sizes.items())
    return Puzzle(
        question=Text(
            f"How many bytes must {name} move at {sizes_text} in bf16 (read once, write once)?",
            f"{name} 在 {sizes_text}、bf16 下至少要移动多少字节（读一次、写一次）？",
        ),
        answer=str(cost.bytes),
    )
