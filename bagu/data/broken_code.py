"""Break a Python function in a way that a programmer might: the rejected side of a preference for the real one.

    other_body       the body of another function under this name and these arguments
    swap_names       one use of a variable becomes another variable of the function
    change_operator  == becomes !=, < becomes <=, + becomes -, `and` becomes `or`, ...
    change_constant  a number is off by one, True becomes False, None becomes 0
    drop_statement   one statement is missing
    cut_end          the last statements are missing
    drop_bracket     a closing bracket is missing: a syntax error
    shift_line       a line is indented by one level too many or too few: a syntax error

The edits are made in the text, so comments and layout stay as they are. Which one is a function of the code and `seed`.
"""

import ast
import hashlib
import io
import random
import tokenize
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from bagu.data.stdlib import parsed

OPERATORS: dict[type[ast.AST], tuple[str, ...]] = {
    ast.Eq: ("==", "!="), ast.NotEq: ("!=", "=="), ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="),
    ast.GtE: (">=", ">"), ast.Is: ("is", "is not"), ast.IsNot: ("is not", "is"), ast.In: ("in", "not in"),
    ast.NotIn: ("not in", "in"), ast.Add: ("+", "-"), ast.Sub: ("-", "+"), ast.Mult: ("*", "+"),
    ast.Div: ("/", "//"), ast.FloorDiv: ("//", "/"), ast.Mod: ("%", "//"), ast.And: ("and", "or"),
    ast.Or: ("or", "and"),
}  # fmt: skip


class Broken(NamedTuple):
    code: str
    kind: str


class Edit(NamedTuple):
    """Replace the characters `start` to `end` of a text by `new`."""

    start: int
    end: int
    new: str

    def apply(self, code: str) -> str:
        return code[: self.start] + self.new + code[self.end :]


def broken(code: str, *, others: Sequence[str] = (), seed: int = 0) -> Broken | None:
    """`code`, one function, with one thing wrong; None if nothing can be broken. `others` are other functions.

    Kinds are tried in an order drawn from the code. The result differs from `code` also without comments and layout.
    """
    tree = parsed(code)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.FunctionDef):
        return None
    key = hashlib.sha256(f"{seed}\0{code}".encode()).digest()
    draw = random.Random(int.from_bytes(key[:8]))
    source = Source(code, tree.body[0], others)
    for kind in draw.sample(list(KINDS), len(KINDS)):
        found = list(dict.fromkeys(KINDS[kind](source)))
        for edit in draw.sample(found, min(len(found), 8)):
            new = edit.apply(code)
            changed = parsed(new)
            if (changed is None) == (kind in SYNTAX_ERRORS) and (
                changed is None or ast.dump(changed) != ast.dump(tree)
            ):
                return Broken(new, kind)
    return None


class Source:
    """A function as text and as a tree."""

    def __init__(self, code: str, function: ast.FunctionDef, others: Sequence[str]) -> None:
        self.code, self.function, self.others = code, function, others
        lines = _lines(code)
        self._lines = [line.encode() for line in lines]
        self._starts = [0]
        for line in lines:
            self._starts.append(self._starts[-1] + len(line))

    def at(self, line: int, column: int) -> int:
        """The character at a position of `ast`, whose columns are bytes of UTF-8."""
        return self._starts[line - 1] + len(self._lines[line - 1][:column].decode())

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return self.at(node.lineno, node.col_offset), self.at(node.end_lineno, node.end_col_offset)

    def whole_lines(self, first: ast.stmt, last: ast.stmt) -> tuple[int, int]:
        """The lines of statements, from the first column on and with the last newline."""
        assert last.end_lineno is not None
        return self._starts[first.lineno - 1], self._starts[last.end_lineno]

    def nodes(self) -> Iterator[ast.AST]:
        """The nodes of the body."""
        return (node for statement in self.function.body for node in ast.walk(statement))

    def blocks(self) -> Iterator[list[ast.stmt]]:
        """The lists of two or more statements, each statement on lines of its own."""
        for node in ast.walk(self.function):
            for field in ("body", "orelse", "finalbody"):
                block = getattr(node, field, None)
                if isinstance(block, list) and len(block) > 1 and isinstance(block[0], ast.stmt):
                    ends = [s.end_lineno or s.lineno for s in block]
                    if all(a < s.lineno for a, s in zip(ends, block[1:], strict=False)):
                        yield block


def _lines(code: str) -> list[str]:
    """The lines as `ast` counts them; splitlines() also splits at form feeds."""
    return code.replace("\n", "\n\0").split("\0")


def _other_body(source: Source) -> Iterator[Edit]:
    """The body of each other function whose indentation is the same."""
    own = source.function.body[0]
    start = source.at(own.lineno, 0)
    for other in source.others:
        tree = parsed(other)
        if tree is None or not isinstance(tree.body[0], ast.FunctionDef):
            continue
        first = tree.body[0].body[0]
        one_line = first.lineno == tree.body[0].lineno or own.lineno == source.function.lineno
        if not one_line and first.col_offset == own.col_offset:
            yield Edit(start, len(source.code), "".join(_lines(other)[first.lineno - 1 :]))


def _swap_names(source: Source) -> Iterator[Edit]:
    """Another variable of the function for a use of one. Functions that are called keep their names."""
    uses = [n for n in source.nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    called = {id(n.func) for n in source.nodes() if isinstance(n, ast.Call)}
    stored = {n.id for n in source.nodes() if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    args = source.function.args
    names = sorted(stored | {a.arg for a in (*args.posonlyargs, *args.args, *args.kwonlyargs)})
    for use in uses:
        if id(use) not in called and use.id in names:
            yield from (Edit(*source.span(use), name) for name in names if name != use.id)


def _change_operator(source: Source) -> Iterator[Edit]:
    for node in source.nodes():
        if isinstance(node, ast.BinOp):
            yield from _between(source, node.left, node.op, node.right)
        elif isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
                yield from _between(source, left, op, right)
        elif isinstance(node, ast.BoolOp):
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from _between(source, left, node.op, right)


def _between(source: Source, left: ast.expr, op: ast.AST, right: ast.expr) -> Iterator[Edit]:
    """The operator between two expressions, unless a comment or a bracket hides it."""
    if type(op) not in OPERATORS:
        return
    old, new = OPERATORS[type(op)]
    start, end = source.span(left)[1], source.span(right)[0]
    at = source.code.find(old, start, end)
    if at >= 0 and "#" not in source.code[start:end]:
        yield Edit(at, at + len(old), new)


def _change_constant(source: Source) -> Iterator[Edit]:
    for node in source.nodes():
        if isinstance(node, ast.Constant):
            match node.value:
                case bool():
                    yield Edit(*source.span(node), str(not node.value))
                case None:
                    yield Edit(*source.span(node), "0")
                case int() if abs(node.value) < 1000:
                    yield Edit(*source.span(node), str(node.value + 1))
                    if node.value > 0:
                        yield Edit(*source.span(node), str(node.value - 1))


def _drop_statement(source: Source) -> Iterator[Edit]:
    for block in source.blocks():
        for statement in block:
            if not isinstance(statement, (ast.FunctionDef, ast.ClassDef, ast.Import, ast.ImportFrom, ast.Global)):
                yield Edit(*source.whole_lines(statement, statement), "")


def _cut_end(source: Source) -> Iterator[Edit]:
    body = source.function.body
    for i in range(1, len(body)):
        if body[i - 1].end_lineno != body[i].lineno:
            yield Edit(source.whole_lines(body[i], body[-1])[0] - 1, len(source.code), "")


def _drop_bracket(source: Source) -> Iterator[Edit]:
    """Brackets of the body, by the tokenizer: not those in strings and comments."""
    for token in tokenize.generate_tokens(io.StringIO(source.code).readline):
        if token.type == tokenize.OP and token.string in ")]}" and token.start[0] >= source.function.body[0].lineno:
            at = source._starts[token.start[0] - 1] + token.start[1]
            yield Edit(at, at + 1, "")


def _shift_line(source: Source) -> Iterator[Edit]:
    for block in source.blocks():
        for statement in block[1:]:
            start = source.at(statement.lineno, 0)
            yield Edit(start, start, "    ")
            if statement.col_offset > 4:
                yield Edit(start, start + 2, "")


KINDS: dict[str, Callable[[Source], Iterator[Edit]]] = {
    "other_body": _other_body,
    "swap_names": _swap_names,
    "change_operator": _change_operator,
    "change_constant": _change_constant,
    "drop_statement": _drop_statement,
    "cut_end": _cut_end,
    "drop_bracket": _drop_bracket,
    "shift_line": _shift_line,
}
SYNTAX_ERRORS = frozenset({"drop_bracket", "shift_line"})
