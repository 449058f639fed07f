"""`python -m benchmarks.tools.house [FOLDER]`: the size of each part of bagu in a checkout, by default in this one.

Lines and files; header: the lines up to the last import at the top of a file; `# fmt: skip`; functions of more than ten
parameters, kernels (`@triton.jit`, `@gluon.jit`) aside.
"""

import ast
import sys
from collections import Counter, defaultdict
from pathlib import Path

COLUMNS = ("files", "lines", "header", "fmt: skip", "over ten")


def is_header(statement: ast.stmt, first: bool) -> bool:
    if isinstance(statement, ast.If):
        return ast.unparse(statement.test).endswith("TYPE_CHECKING")
    return isinstance(statement, ast.Import | ast.ImportFrom) or (first and isinstance(statement, ast.Expr))


def measured(path: Path) -> Counter[str]:
    text = path.read_text(encoding="utf-8")
    tree, header = ast.parse(text), 0
    for i, statement in enumerate(tree.body):
        if not is_header(statement, i == 0):
            break
        header = statement.end_lineno or header
    found = Counter(files=1, lines=len(text.splitlines()), header=header)
    found["fmt: skip"] = text.count("# fmt: skip")
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = len(node.args.posonlyargs) + len(node.args.args) + len(node.args.kwonlyargs)
            kernel = any("jit" in ast.unparse(d) for d in node.decorator_list)
            found["over ten"] += count > 10 and not kernel
    return found


def main(folder: Path) -> None:
    parts: dict[str, Counter[str]] = defaultdict(Counter)
    for path in sorted((folder / "bagu").rglob("*.py")):
        part = path.relative_to(folder / "bagu").parts[0]
        found = measured(path)
        parts["root modules" if part.endswith(".py") else part].update(found)
        parts["all"].update(found)
    print("".join(["part".ljust(14), *(name.rjust(11) for name in COLUMNS)]))
    for part, found in sorted(parts.items(), key=lambda item: item[0] == "all"):
        print("".join([part.ljust(14), *(f"{found[name]:11,}" for name in COLUMNS)]))
    print(f"headers are {parts['all']['header'] / parts['all']['lines']:.1%} of the lines")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
