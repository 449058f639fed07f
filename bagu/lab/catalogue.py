"""The labs: every module in the folder of a theme. Its name is the lab's, and it defines `LAB`, `run`, `verdict` and
`plot`. Listing labs imports none of them."""

import ast
import hashlib
import importlib
import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from bagu.errors import BaguError, UnknownName
from bagu.lab.core import Lab

HERE = Path(__file__).parent
THEMES = ("numerics", "model", "train", "post_train", "eval", "parallel", "serve", "gpu", "retrieve", "process")
FRAME = {HERE / f"{name}.py" for name in ("core", "plot", "rows")}  # shared by all labs: no part of one lab's code
START = "\nLAB = Claim("
CALLED = {f.__name__: f for f in (len, map, max, min, range, str, tuple, zip)}  # by constants and texts of labs


@cache
def sources() -> dict[str, Path]:
    """The file of every lab by its name: sorted by theme, then by name."""
    found: dict[str, Path] = {}
    for theme in THEMES:
        files = [*(HERE / theme).glob("*.py"), *(HERE / theme).glob("*/__init__.py")]
        labs = {file.parent.name if file.parent.name != theme else file.stem: file for file in files}
        found |= {name: labs[name] for name in sorted(labs) if name != "__init__"}
    return found


def names() -> list[str]:
    """The names of all labs, sorted."""
    return sorted(sources())


@cache
def theme_of(name: str) -> str:
    return sources()[name].relative_to(HERE).parts[0]


def load(name: str) -> Lab:
    """The lab `name`. An unknown name raises UnknownName with the closest one."""
    if name not in sources():
        raise UnknownName.among("lab", name, names())
    module = importlib.import_module(f"bagu.lab.{theme_of(name)}.{name}")
    missing = [part for part in ("LAB", "run", "verdict", "plot") if not hasattr(module, part)]
    if missing:
        raise BaguError(f"{module.__name__} has no {', '.join(missing)}", hint="bagu/lab/core.py says what a lab is")
    return Lab(name=name, run=module.run, verdict=module.verdict, plot=module.plot, **vars(module.LAB))


def words(name: str, *, whole: bool = True) -> dict[str, Any]:
    """The texts in `LAB = Claim(...)` of a lab: titles, claims, evidence, whether it needs a GPU; and, unless
    `whole` is False, regime, varies and measures, which have constants of the module in them.

    They are read from the source: importing the code that a lab measures takes seconds.
    """
    source = sources()[name].read_text(encoding="utf-8")
    if START not in source:
        raise BaguError(f"{sources()[name]} has no LAB", hint="define LAB = Claim(...) in the module")
    (statement,) = ast.parse(source[source.index(START) :]).body
    assert isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Call)
    found = {str(k.arg): k.value for k in statement.value.keywords}
    plain: dict[str, Any] = {key: node.value for key, node in found.items() if isinstance(node, ast.Constant)}
    if whole and len(plain) < len(found):
        known = constants(sources()[name])
        for key in found.keys() - plain.keys():
            plain[key] = eval(compile(ast.Expression(found[key]), str(sources()[name]), "eval"), known)
    return {"name": name, "evidence": "counting", "needs_gpu": False} | plain


@cache
def constants(file: Path) -> dict[str, Any]:
    """The constants at the top of a file that follow from literals; for a lab also those that it imports."""
    known: dict[str, Any] = {"__builtins__": CALLED}
    for statement in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.ImportFrom):
            module = _file(str(statement.module)) if file.is_relative_to(HERE) else None
            if module is None:
                continue
            for alias in statement.names:
                below = _file(f"{statement.module}.{alias.name}")
                found = SimpleNamespace(**constants(below)) if below else constants(module).get(alias.name)
                known |= {} if found is None else {alias.name: found}
        elif isinstance(statement, ast.Assign | ast.AnnAssign) and statement.value is not None:
            try:
                exec(compile(ast.Module([statement], []), str(file), "exec"), known)
            except Exception:  # needs what the file imports: not a constant
                continue
    return known


def _file(module: str) -> Path | None:
    """The file of a module of bagu."""
    if not module.startswith("bagu."):
        return None
    path = HERE.parent.joinpath(*module.split(".")[1:])
    return next((f for f in (path.with_suffix(".py"), path / "__init__.py") if f.exists()), None)


@cache
def code_digest(name: str) -> str:
    """A digest of the lab's files and of the labs' files that they import, without their layout. A record with another
    one is stale."""
    found: dict[str, str] = {}
    todo = [*sources()[name].parent.glob("*.py")] if sources()[name].stem == "__init__" else [sources()[name]]
    while todo:
        file = todo.pop()
        source = file.read_text(encoding="utf-8")
        if str(file) not in found and file not in FRAME:
            found[str(file)] = source
            for module, imported in re.findall(r"^ *from (bagu\.lab[\w.]*) import ([^\n(]*)", source, flags=re.M):
                modules = [module, *(f"{module}.{name.strip()}" for name in imported.split(","))]
                todo += [file for file in map(_file, modules) if file is not None]
    text = "\n".join(found[file] for file in sorted(found, key=lambda file: Path(file).relative_to(HERE).as_posix()))
    return hashlib.sha256(_without_layout(text).encode()).hexdigest()[:16]


def _without_layout(source: str) -> str:
    """White space, and what the formatter adds or reads: a comma before a closing bracket, `# fmt: skip`."""
    return re.sub(r",(?=[)\]}])", "", "".join(source.replace("# fmt: skip", "").split()))
