"""Generators."""

from __future__ import annotations

from bagu.lab.drill.core import Drill, Planted, Question, Text

STUB = '''"""Generators: yield, yield from, return, exceptions. Each function is a generator.

flatten(items)          the values of nested lists, depth first. Lists are nested up to 5,000 deep: no recursion.
windows(items, n)       tuples of n neighbours, moved by one: 1 2 3 by 2 gives (1, 2) (2, 3); n <= 0 raises ValueError at the
                        first next, n larger than the list gives none
both(first, second)     the values of the first list, then of the second; *returns* how many there were
report(first, second)   yields what both(first, second) yields, then what it returned, by `yield from`
inverses(items)         1 / x of each number, None where x is 0, and goes on
"""


def flatten(items):
    raise NotImplementedError
    yield


def windows(items, n):
    raise NotImplementedError
    yield


def both(first, second):
    raise NotImplementedError
    yield


def report(first, second):
    raise NotImplementedError
    yield


def inverses(items):
    raise NotImplementedError
    yield
'''
SOLUTION = """def flatten(items):
    stack = [iter(items)]
    while stack:
        for item in stack[-1]:
            if isinstance(item, list):
                stack.append(iter(item))
                break
            yield item
        else:
            stack.pop()


def windows(items, n):
    if n <= 0:
        raise ValueError("n must be positive")
    for i in range(len(items) - n + 1):
        yield tuple(items[i : i + n])


def both(first, second):
    yield from first
    yield from second
    return len(first) + len(second)


def report(first, second):
    count = yield from both(first, second)
    yield count


def inverses(items):
    for x in items:
        try:
            y = 1 / x
        except ZeroDivisionError:
            y = None
        yield y
"""

DRILL = Drill(
    name="generators",
    topic="basics",
    difficulty=2,
    title=Text("generators: yield from, return, exceptions", "生成器：yield from、return、异常"),
    task=Text(STUB.split('"""')[1], "写五个生成器：展平嵌套列表（不递归）、滑动窗口、带返回值、yield from、异常之后继续。\n" + STUB.split('"""')[1]),
    stubs={"python": STUB},
    solutions={"python": SOLUTION},
    oracle="basics",
    functions=("flatten", "windows", "both", "report", "inverses"),
    modules=("itertools", "more_itertools"),
    hints=(
        Text("Where does the value of `return` in a generator go?", "生成器中 return 的值去了哪里？"),
        Text("`yield from g` has a value: what g returned.", "`yield from g` 本身有值：g 的返回值。"),
        Text("flatten: a stack of iterators; on a list push its iterator and break, on the end of one pop (for … else).", "flatten：用迭代器栈；遇到列表压栈并 break，迭代器耗尽时弹出（for…else）。"),
    ),
    questions=(
        Question("When does a generator's code begin to run?", "生成器的代码何时开始执行？", "bagu drill predict generator"),
        Question("Which value has StopIteration?", "StopIteration 带什么值？", "bagu drill predict generator"),
    ),
    planted=(
        Planted("python", "    stack = [iter(items)]\n", "    for item in items:\n        if isinstance(item, list):\n            yield from flatten(item)\n        else:\n            yield item\n    return\n    stack = [iter(items)]\n", "recursion"),
        Planted("python", "                break\n", "", "order|formula|type"),
        Planted("python", "            stack.pop()", "            return", "formula|tail"),
        Planted("python", "isinstance(item, list)", "isinstance(item, (list, str)) and item", "type|hangs|special|raises|edge"),
        Planted("python", "range(len(items) - n + 1)", "range(len(items) - n)", "off_by_one|formula"),
        Planted("python", "range(len(items) - n + 1)", "range(0, len(items) - n + 1, n)", "formula"),
        Planted("python", "        raise ValueError(\"n must be positive\")", "        return", "edge|type"),
        Planted("python", "tuple(items[i : i + n])", "items[i : i + n]", "type"),
        Planted("python", "    count = yield from both(first, second)\n    yield count", "    yield from both(first, second)", "tail|formula|off_by_one"),
        Planted("python", "    return len(first) + len(second)", "    yield len(first) + len(second)", "type|tail|formula|off_by_one"),
        Planted("python", "    yield from first\n    yield from second", "    yield first\n    yield second", "type|formula"),
        Planted("python", "    for x in items:\n        try:\n            y = 1 / x\n        except ZeroDivisionError:\n            y = None\n        yield y", "    try:\n        for x in items:\n            yield 1 / x\n    except ZeroDivisionError:\n        yield None", "edge|tail|formula|off_by_one"),
        Planted("python", "        except ZeroDivisionError:\n            y = None\n        yield y", "        except ZeroDivisionError:\n            continue\n        yield y", "edge|formula|off_by_one"),
        Planted("python", "def inverses(items):\n    for x in items:", "def inverses(items):\n    return [1 / x if x else None for x in items]\n    for x in ():", "edge|formula"),
        Planted("python", "def windows(items, n):\n", "def windows(items, n):\n    return [tuple(items[i : i + n]) for i in range(len(items) - n + 1)]\n\n\ndef unused(items, n):\n", "type"),
    ),
)  # fmt: skip
