"""The truth of the drills without tensors: plain second implementations, `ctypes` for structs, CPython for generators."""

from __future__ import annotations

import ctypes
import math
import random
import string
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from bagu.lab.drill.core import Drill, Text
from bagu.lab.drill.oracles.values import value_trial
from bagu.lab.drill.trial import Trial


def trials(drill: Drill, level: str, seed: int) -> Iterator[Trial]:
    makers: dict[str, Callable[[random.Random], Iterator[Trial]]] = {
        "tree_traversal": tree_trials,
        "struct_layout": struct_trials,
        "generators": generator_trials,
        "evaluation": evaluation_trials,
    }
    yield from makers[drill.name](random.Random(seed))


# Trees


def _tree(rng: random.Random, nodes: int, kind: str) -> tuple[list[int], list[int]]:
    left, right, open_places = [-1] * nodes, [-1] * nodes, [(0, 0), (0, 1)] if nodes else []
    for node in range(1, nodes):
        at = rng.randrange(len(open_places)) if kind == "random" else len(open_places) - (1 if kind == "right" else 2)
        parent, side = open_places.pop(at)
        (left, right)[side][parent] = node
        open_places = [*open_places, (node, 0), (node, 1)] if kind == "random" else [(node, 0), (node, 1)]
    return left, right


def _walk(left: list[int], right: list[int]) -> tuple[list[int], list[int], list[int]]:
    """Pre-, in- and post-order in one walk of events."""
    pre, middle, post = list[int](), list[int](), list[int]()
    todo: list[tuple[int, int]] = [(0, 0)] if left else []
    while todo:
        node, state = todo.pop()
        (pre, middle, post)[state].append(node)
        if state < 2:
            todo.append((node, state + 1))
            child = (left, right)[state][node]
            if child >= 0:
                todo.append((child, 0))
    return pre, middle, post


def _levels(left: list[int], right: list[int]) -> list[list[int]]:
    depth, out = {0: 0}, list[list[int]]()
    order = [0] if left else []
    for node in order:
        out += [[]] if depth[node] == len(out) else []
        out[depth[node]].append(node)
        for child in (left[node], right[node]):
            if child >= 0:
                depth[child] = depth[node] + 1
                order.append(child)
    return out


def tree_trials(rng: random.Random) -> Iterator[Trial]:
    empty, deep = (
        Text("the empty tree", "空树"),
        Text("50,000 nodes in one line: recursion fails", "50,000 层的链：递归会失败"),
    )
    for name, why, nodes, kind, edge, cause in (
        ("random", Text("a random tree", "随机树"), 60, "random", False, "order"),
        ("one", Text("one node", "一个节点"), 1, "random", True, "edge"),
        ("empty", empty, 0, "random", True, "empty"),
        ("left_line", deep, 50_000, "left", True, "recursion"),
        ("right_line", deep, 50_000, "right", True, "recursion"),
    ):
        left, right = _tree(rng, nodes, kind)
        pre, middle, post = _walk(left, right)
        for function, want in (
            ("preorder", pre),
            ("inorder", middle),
            ("postorder", post),
            ("levels", _levels(left, right)),
        ):
            yield value_trial(
                f"{name}: {function}", why, function, [left, right], want, edge=edge, cause=cause, usual="order"
            )


# Structs

TYPES: dict[str, Any] = {
    "char": ctypes.c_char,
    "short": ctypes.c_int16,
    "int": ctypes.c_int32,
    "long long": ctypes.c_int64,
    "float": ctypes.c_float,
    "double": ctypes.c_double,
    "pointer": ctypes.c_uint64,
}
Fields = Sequence[tuple[Any, int]]


def c_layout(fields: Fields, packed: bool) -> tuple[list[int], int, int]:
    made = _c_struct(fields, packed)
    offsets = [getattr(made, f"f{i}").offset for i in range(len(fields))]
    return offsets, ctypes.sizeof(made), max(1, ctypes.alignment(made))


def _c_struct(fields: Fields, packed: bool) -> Any:
    listed = []
    for i, (kind, count) in enumerate(fields):
        one = TYPES[kind] if isinstance(kind, str) else _c_struct(kind, packed)
        listed.append((f"f{i}", one * count if count else one))
    return type("S", (ctypes.Structure,), {"_fields_": listed, **({"_pack_": 1} if packed else {})})


def _fields(rng: random.Random, *, arrays: bool, depth: int) -> list[tuple[Any, int]]:
    out: list[tuple[Any, int]] = []
    for _ in range(rng.randint(1, 6)):
        kind: Any = rng.choice(list(TYPES))
        if depth and rng.random() < 0.3:
            kind = _fields(rng, arrays=arrays, depth=depth - 1)
        out.append((kind, rng.choice((0, 1, 2, 3, 5)) if arrays else 0))
    return out


def struct_trials(rng: random.Random) -> Iterator[Trial]:
    one = [("char", 0), ("int", 0)]
    groups: list[tuple[str, Text, str, bool, list[tuple[Fields, bool]]]] = [
        ("padding", Text("an int after a char begins at 4", "char 之后的 int 从 4 开始"), "padding", False, [(one, False), (one[::-1], False)]),
        ("plain", Text("random members", "随机成员"), "padding", False, [(_fields(rng, arrays=False, depth=0), False) for _ in range(50)]),
        ("arrays", Text("an array aligns as its element", "数组按元素对齐"), "padding", False, [(_fields(rng, arrays=True, depth=0), False) for _ in range(50)]),
        ("nested", Text("a nested struct aligns as its widest member", "嵌套结构体按最宽成员对齐"), "padding", True, [(_fields(rng, arrays=True, depth=2), False) for _ in range(50)]),
        ("packed", Text("packed: no padding, also inside", "packed：内部也没有填充"), "ignored", True, [(_fields(rng, arrays=True, depth=2), True) for _ in range(50)]),
        ("empty", Text("no member", "没有成员"), "empty", True, [([], False), ([], True)]),
    ]  # fmt: skip
    for name, why, cause, edge, structs in groups:
        for i, (fields, packed) in enumerate(structs):
            yield value_trial(
                f"{name} {i}", why, "layout", [list(fields), packed], c_layout(fields, packed), cause=cause, edge=edge
            )


# Generators


def _nested(rng: random.Random, depth: int) -> list[Any]:
    return [
        rng.randint(0, 9) if depth == 0 or rng.random() < 0.6 else _nested(rng, depth - 1)
        for _ in range(rng.randint(0, 4))
    ]


def _flat(items: list[Any]) -> list[Any]:
    out, todo = [], list(reversed(items))
    while todo:
        item = todo.pop()
        if isinstance(item, list):
            todo += reversed(item)
        else:
            out.append(item)
    return out


def generator_trials(rng: random.Random) -> Iterator[Trial]:
    def trial(
        function: str, name: str, why: Text, args: list[Any], want: Any, edge: bool = False, cause: str = ""
    ) -> Trial:
        return value_trial(f"{function}: {name}", why, function, args, want, edge=edge, cause=cause, kind="iterate")

    plain = Text("a plain case", "普通情况")
    nested = [1, [2, [3, 4], 5], [], [[6]], 7]
    yield trial("flatten", "plain", plain, [nested], _flat(nested))
    yield trial("windows", "plain", plain, [[1, 2, 3, 4], 2], [(1, 2), (2, 3), (3, 4)])
    yield trial("both", "plain", plain, [[1, 2], [3]], [1, 2, 3])
    yield trial(
        "report",
        "return",
        Text("the returned value arrives through yield from", "返回值经 yield from 传出"),
        [[1, 2], [3]],
        [1, 2, 3, 3],
        cause="tail",
    )
    yield trial("inverses", "plain", plain, [[1, 2, 4]], [1.0, 0.5, 0.25])
    for i in range(5):
        items = _nested(rng, 4)
        yield trial("flatten", f"random {i}", plain, [items], _flat(items))
    yield trial(
        "inverses",
        "zero",
        Text("a zero in the middle does not end it", "中间的零不会终止"),
        [[1, 0, 2, 0]],
        [1.0, None, 0.5, None],
        True,
        "edge",
    )
    yield trial(
        "flatten",
        "strings",
        Text("a string is a value, not a list", "字符串是值而不是列表"),
        [["ab", ["c"]]],
        ["ab", "c"],
        True,
        "special",
    )
    yield trial("windows", "long", Text("a window larger than the list", "窗口大于列表"), [[1, 2], 3], [], True, "edge")
    yield trial(
        "windows",
        "all",
        Text("a window as long as the list", "窗口与列表等长"),
        [[1, 2], 2],
        [(1, 2)],
        True,
        "off_by_one",
    )
    yield trial("report", "empty", Text("nothing but the count", "只有计数"), [[], []], [0], True, "empty")
    deep: list[Any] = [1]
    for _ in range(2000):
        deep = [deep, 2]
    yield trial(
        "flatten",
        "deep",
        Text("lists nested deep: recursion fails", "嵌套很深：递归失败"),
        [deep],
        _flat(deep),
        True,
        "recursion",
    )
    why = Text("n <= 0 raises at the first next", "n <= 0 在第一次 next 时抛出")

    def raises(answer: Any) -> Any:
        from bagu.lab.drill.answers import AnswerFault, Reply

        try:
            answer.call("windows", [[1, 2], 0], kind="iterate")
        except AnswerFault as fault:
            return Reply(value="ValueError" in str(fault))
        return Reply(value=False)

    def judge(reply: Any) -> None:
        from bagu.lab.drill.trial import Wrong

        if not reply.value:
            raise Wrong("windows([1, 2], 0) did not raise ValueError", cause="edge")

    yield Trial(name="windows: zero", why=why, ask=raises, judge=judge, edge=True)


# Evaluation


def evaluation_trials(rng: random.Random) -> Iterator[Trial]:
    def choice(name: str, why: Text, choices: list[tuple[str, list[float]]], how: str, edge: bool, cause: str) -> Trial:
        def score(text: str, logprobs: list[float]) -> float:
            size = {"none": 1, "tokens": len(logprobs), "bytes": len(text.encode())}[how]
            return sum(logprobs) / size if logprobs else -math.inf

        scores = [score(*c) for c in choices]
        want = max(range(len(scores)), key=lambda i: (scores[i], -i))
        return value_trial(f"choose: {name}", why, "choose", [choices, how], want, edge=edge, cause=cause)

    short_long = [(" yes", [-3.0]), (" certainly it is", [-1.5, -1.4, -0.6])]
    yield choice("sum", Text("the largest sum", "和最大"), short_long, "none", False, "normalize")
    yield choice(
        "tokens",
        Text("divided by tokens, the longer one wins", "按词元归一化"),
        short_long,
        "tokens",
        False,
        "normalize",
    )
    wide = [(" 四个字呢", [-6.0]), (" four", [-2.6])]
    yield choice(
        "bytes",
        Text("divided by UTF-8 bytes, not characters", "按 UTF-8 字节而不是字符"),
        wide,
        "bytes",
        True,
        "special",
    )
    yield choice(
        "long",
        Text("tokens and bytes differ", "词元数与字节数不同"),
        [(" aaaaaaaaaa", [-2.0, -2.0]), (" b", [-1.9])],
        "tokens",
        False,
        "normalize",
    )
    yield choice(
        "equal", Text("equal scores: the first", "并列取第一个"), [("a", [-1.0]), ("b", [-1.0])], "none", True, "ties"
    )
    yield choice(
        "empty",
        Text("a choice without tokens never wins", "没有词元的选项不会胜出"),
        [("", []), ("b", [-9.0])],
        "none",
        True,
        "empty",
    )
    cuts: list[tuple[str, Text, list[str], list[str], str, bool, str]] = [
        ("plain", Text("the text before the stop string", "停止串之前的文本"), ["An", "swer", "\n", "Q:"], ["\n"], "Answer", False, "formula"),
        ("first", Text("the stop string that comes first", "最先出现的停止串"), ["a b c d"], ["d", "b"], "a ", False, "order"),
        ("across", Text("a stop string spans two pieces", "停止串跨两个词元"), ["so", " Q", ": more"], ["Q:"], "so ", True, "edge"),
        ("none", Text("no stop string occurs", "没有出现停止串"), ["all", " of it"], ["###"], "all of it", True, "edge"),
        ("void", Text("an empty stop string never stops", "空停止串不起作用"), ["all"], ["", "zz"], "all", True, "empty"),
        ("nothing", Text("no piece", "没有片段"), [], ["x"], "", True, "empty"),
    ]  # fmt: skip
    for name, why, pieces, stops, want, edge, cause in cuts:
        yield value_trial(f"cut: {name}", why, "cut", [pieces, stops], want, edge=edge, cause=cause)
    for name, why, a, b, right, edge in (
        ("case", Text("upper and lower case", "大小写"), "Paris", "paris", True, False),
        ("other", Text("another answer", "不同答案"), "Paris", "Rome", False, False),
        ("marks", Text("punctuation and articles", "标点与冠词"), "The  Eiffel Tower.", "eiffel tower", True, True),
        ("inside", Text("an article inside a word stays", "词内的 the 保留"), "theatre", "atre", False, True),
        ("blank", Text("white space of all kinds", "各种空白"), " a\tbig  dog\n", "big dog", True, True),
        (
            "all",
            Text(f"every mark of {string.punctuation[:5]}…", "全部标点"),
            string.punctuation + "x",
            "x",
            True,
            True,
        ),
    ):
        yield value_trial(f"match: {name}", why, "match", [a, b], right, edge=edge, cause="edge" if edge else "formula")
    for flags in ([True, False, True, True], [True] * 5, [rng.random() < 0.7 for _ in range(50)]):
        mean = sum(flags) / len(flags)
        error = math.sqrt(mean * (1 - mean) / (len(flags) - 1))
        why = Text("the error divides by n - 1", "标准误除以 n - 1")
        yield value_trial("accuracy", why, "accuracy", [list(flags)], (float(mean), float(error)), cause="off_by_one")
    yield value_trial(
        "accuracy: one",
        Text("one item has no error", "一道题没有误差"),
        "accuracy",
        [[True]],
        (1.0, None),
        edge=True,
        cause="edge",
    )
    yield value_trial(
        "accuracy: none", Text("no item", "没有题目"), "accuracy", [[]], (None, None), edge=True, cause="empty"
    )
