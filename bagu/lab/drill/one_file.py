"""bagu's own Triton kernel as one file: the backend of an op with every function, class and constant that its forward
reaches in bagu, and a `forward` of the drill's signature. Read from the sources; nothing is imported, torch neither.

Definitions are copied as they are written, what is used before what uses it. Two of one name from different modules
get different names.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

from bagu.lab.drill.core import Drill
from bagu.lab.drill.signature import inputs_of, name_of

ROOT = Path(__file__).parents[3]
FOR_TOOLS = re.compile(r"  # (?:fmt: skip|type: ignore\[.*?\]|noqa: \w+)(?=\s|$)", re.MULTILINE)
Definition = ast.FunctionDef | ast.ClassDef | ast.Assign | ast.AnnAssign
Place = tuple[str, str]  # module, name


@dataclass(frozen=True)
class Module:
    """The top level of a module: what it imports and what it defines."""

    name: str
    lines: list[str]
    doc: str
    imports: dict[str, Place]  # local name -> module and name in it; "": the module itself
    definitions: dict[str, Definition]


@cache
def module(name: str) -> Module:
    path = ROOT.joinpath(*name.split("."))
    text = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text(encoding="utf-8")
    tree, imports, definitions = ast.parse(text), dict[str, Place](), dict[str, Definition]()
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            for a in node.names:
                whole = is_module(f"{node.module}.{a.name}")
                imports[a.asname or a.name] = (f"{node.module}.{a.name}", "") if whole else (str(node.module), a.name)
        elif isinstance(node, ast.Import):
            imports |= {a.asname or a.name: (a.name, "") for a in node.names}
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            definitions[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            definitions |= {n.id: node for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return Module(name, text.splitlines(), ast.get_docstring(tree) or "", imports, definitions)


def is_module(name: str) -> bool:
    """Whether a name of bagu's is a module."""
    path = ROOT.joinpath(*name.split("."))
    return name.startswith("bagu.") and (path.is_dir() or path.with_suffix(".py").is_file())


def own_kernel(drill: Drill) -> str:
    """The file: bagu's Triton backend of the drill's op, as an answer at level triton."""
    file = _File(reserved={"forward"})
    start = file.copied((f"bagu.ops.{drill.op}.triton_backend", "forward"))
    parts, results = inputs_of(drill.op)
    args = [name_of(p) for p in parts]
    given = [repr(drill.fixed[a]) if a in drill.fixed else a for a in args]
    record = module(f"bagu.ops.{drill.op}.spec").definitions.get("Args")
    called = ", ".join(given)
    if record is not None:
        called = f"{file.names[f'bagu.ops.{drill.op}.spec', 'Args']}({called})"
    kept = "[0]" if len(results) == 1 else f"[:{len(results)}]"
    head = module(f"bagu.ops.{drill.op}.triton_backend").doc
    adapter = f"def forward({', '.join(a for a in args if a not in drill.fixed)}):\n    return {start}({called}){kept}"
    return file.text(head, adapter)


@dataclass
class _File:
    """The file while it grows."""

    reserved: set[str]
    names: dict[Place, str] = field(default_factory=dict)  # of what is copied
    imports: dict[str, Place] = field(default_factory=dict)
    parts: list[str] = field(default_factory=list)

    def copied(self, place: Place) -> str:
        """The name in this file of a definition of bagu's. At its first use it is copied, after what it uses."""
        if place in self.names:
            return self.names[place]
        found, name = module(place[0]), place[1]
        if name not in found.definitions:  # imported there
            return self.copied(found.imports[name])
        taken = self.reserved | set(self.names.values()) | set(self.imports)
        stem = place[0].rpartition(".")[2].replace("triton_backend", place[0].split(".")[-2])
        self.names[place] = f"{stem}_{name.lstrip('_')}" if name in taken else name
        node = found.definitions[name]
        lines = source_of(found, node)
        first = node.lineno - (len(lines) - (_end(node) - node.lineno + 1))
        changes = list(self._changes(found, node))
        for line, begin, end, new in sorted(changes, reverse=True):
            old = lines[line - first].encode()
            lines[line - first] = (old[:begin] + new.encode() + old[end:]).decode()
        text = "\n".join(lines)
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and self.names[place] != name:
            text = re.sub(rf"^((?:def|class) ){name}\b", rf"\1{self.names[place]}", text, count=1, flags=re.MULTILINE)
        self.parts.append(FOR_TOOLS.sub("", text))
        return self.names[place]

    def _changes(self, found: Module, node: Definition) -> Iterator[tuple[int, int, int, str]]:
        """(line, first byte, last byte, new text) of the names in a definition that are others in this file."""
        local = _locals(node)
        modules = {n: p[0] for n, p in found.imports.items() if not p[1] and p[0].startswith("bagu.")}
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name) and part.value.id in modules:
                yield *_span(part), self.copied((modules[part.value.id], part.attr))
            if not isinstance(part, ast.Name) or part.id in local or part.id in modules:
                continue
            if part.id in found.definitions:
                new = self.names.get((found.name, part.id)) or self.copied((found.name, part.id))
            elif part.id in found.imports:
                new = self._imported(found.imports[part.id], part.id)
            else:
                continue  # a built-in
            if new != part.id:
                yield *_span(part), new

    def _imported(self, place: Place, name: str) -> str:
        if place[0].startswith("bagu."):
            return self.copied(place)
        self.imports.setdefault(name, place)
        return name

    def text(self, doc: str, adapter: str) -> str:
        whole = [f"import {m}" + (f" as {n}" if n != m else "") for n, (m, name) in self.imports.items() if not name]
        froms: dict[str, list[str]] = {}
        for n, (m, name) in self.imports.items():
            if name:
                froms.setdefault(m, []).append(name if n == name else f"{name} as {n}")
        imports = sorted(whole) + [f"from {m} import {', '.join(sorted(n))}" for m, n in sorted(froms.items())]
        head = f'"""{doc}\n"""\n\nfrom __future__ import annotations\n\n' + "\n".join(imports)
        return "\n\n\n".join([head, *self.parts, adapter]) + "\n"


def source_of(found: Module, node: Definition) -> list[str]:
    """The lines of a definition, with its decorators and the comment above it."""
    decorators = getattr(node, "decorator_list", [])
    first = min([node.lineno, *(d.lineno for d in decorators)]) - 1
    while first and found.lines[first - 1].startswith("#"):
        first -= 1
    return found.lines[first : _end(node)]


def _end(node: ast.AST) -> int:
    return int(node.end_lineno)  # type: ignore[attr-defined]


def _span(node: ast.expr) -> tuple[int, int, int]:
    assert node.end_col_offset is not None and node.lineno == node.end_lineno
    return node.lineno, node.col_offset, node.end_col_offset


def _locals(node: ast.AST) -> set[str]:
    """The parameters of a function and the names that it assigns."""
    if not isinstance(node, ast.FunctionDef):
        return set()
    parameters = {part.arg for part in ast.walk(node) if isinstance(part, ast.arg)}
    stored = {part.id for part in ast.walk(node) if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)}
    return parameters | stored - {n for part in ast.walk(node) if isinstance(part, ast.Global) for n in part.names}
