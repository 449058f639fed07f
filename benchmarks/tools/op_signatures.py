"""How often the signature of an op is stated: `python -m benchmarks.tools.op_signatures`.

A statement is the spec's line, or a function, record or assignment in the op's folder that names three quarters or more
of its inputs, or of what its backward receives. Kernels are not counted: their parameters are pointers and strides.
"""

import ast
import statistics
from collections.abc import Iterator
from pathlib import Path

import bagu.ops
from bagu.ops.call.link import received
from bagu.ops.catalogue import SPECS
from bagu.ops.contract.core import OpSpec

ROOT = Path(bagu.ops.__file__).parent
SHARE = 0.75


def statements(spec: OpSpec) -> list[str]:
    """The places that state the inputs of an op."""
    lists = [{a.name for a in spec.sig.inputs}, {a.name for a in received(spec)} if spec.grads else set()]
    found = ["spec.py: signature"]
    for path in sorted((ROOT / spec.name).glob("*.py")):
        for where, names in _named(ast.parse(path.read_text(encoding="utf-8"))):
            if any(wanted and len(names & wanted) >= SHARE * len(wanted) for wanted in lists):
                found.append(f"{path.name}: {where}")
    return found


def _named(tree: ast.AST) -> Iterator[tuple[str, set[str]]]:
    """The names that each function, record and assignment declares."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef) and not any("jit" in ast.unparse(d) for d in node.decorator_list):
            yield node.name, {a.arg for a in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)}
        elif isinstance(node, ast.ClassDef):
            fields = [s.target for s in node.body if isinstance(s, ast.AnnAssign)]
            yield node.name, {f.id for f in fields if isinstance(f, ast.Name)}
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Tuple) and len(node.targets[0].elts) > 2:
            yield f"line {node.lineno}", {e.id for e in node.targets[0].elts if isinstance(e, ast.Name)}


def main() -> None:
    found = {name: statements(spec) for name, spec in SPECS.items()}
    for name, places in sorted(found.items(), key=lambda item: len(item[1])):
        print(f"{len(places):3} {name:26} {', '.join(places)}")
    counts = [len(places) for places in found.values()]
    print(f"{len(counts)} ops: median {statistics.median(counts):g}, most {max(counts)}, together {sum(counts)}")


if __name__ == "__main__":
    main()
