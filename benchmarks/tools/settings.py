"""docs/settings.md: every setting of a run, from the dataclasses that hold them.

python -m benchmarks.tools.settings [--check]
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import json
import re
import sys
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bagu.config.fields import describe, fields_of, members_of
from bagu.config.tree import dotted, to_dict
from bagu.recipes.run import Run

PAGE = Path(__file__).parents[2] / "docs/settings.md"
HEAD = """# Settings of a run

Every value of a training run, by its dotted key: `bagu train --set KEY=VALUE`, `bagu.fit(settings=["KEY=VALUE"])`, or
`config.json` of a run (`bagu train --config`). `--dry-run` prints the whole configuration without training. A recipe
(`--recipe`) sets other defaults than those below; `--steps`, `--lr` and `--device` are short for `train.steps`,
`train.optimizer.lr` and `device`. A key that does not exist is refused with the nearest name.

`null` is none, a list is `1,2` or `[1, 2]`, an object is JSON. The options of a command are in its `--help-all`. This
page is generated: `make tables`.
"""


def page() -> str:
    return "\n".join([HEAD, *_sections(Run, "")]).rstrip() + "\n"


def _sections(cls: Any, where: str) -> Iterator[str]:
    """The section of a dataclass, and those of the dataclasses in it. A union has one for each of its kinds."""
    hints = typing.get_type_hints(cls)
    kind = typing.get_args(hints.get("kind"))
    of_kind = f", `kind={kind[0]}`" if len(kind) == 1 else ""
    yield f"## {f'`{where}`' if where else 'The run'}{of_kind}\n\n{_prose(cls)}\n"
    inner: list[tuple[Any, str]] = []
    rows = []
    for name, field in fields_of(cls).items():
        key, hint = dotted(where, name), hints[name]
        values = typing.get_args(hint)[1:] if typing.get_origin(hint) is dict else members_of(hint)
        classes: set[Any] = {m for one in values for m in members_of(one) if dataclasses.is_dataclass(m)}
        if classes:
            inner += [
                (member, f"{key}.NAME" if typing.get_origin(hint) is dict else key)
                for member in sorted(classes, key=lambda c: c.__name__)
            ]
        elif len(kind) != 1 or name != "kind":
            rows.append(f"| `{key}` | {_kind(hint)} | {_default(field)} |")
    if rows:
        yield "\n".join(["| key | value | default |", "|---|---|---|", *rows, ""])
    for member, key in inner:
        yield from _sections(member, key)


def _prose(cls: Any) -> str:
    """The docstring of a dataclass; the one that Python makes, its signature, is none."""
    text = inspect.cleandoc(cls.__doc__ or "")
    if text.startswith(f"{cls.__name__}("):
        return f"`{cls.__name__}` in `{inspect.getmodule(cls).__name__}`."  # type: ignore[union-attr]
    return re.sub(r"<(\w+)>", r"`<\1>`", text)


def _kind(hint: Any) -> str:
    return describe(hint).replace("|", "\\|").replace("'", "`")


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default_factory is not dataclasses.MISSING:
        value = to_dict(field.default_factory())
    elif field.default is dataclasses.MISSING:
        return "must be set"
    else:
        value = to_dict(field.default)
    return f"`{json.dumps(value, ensure_ascii=False)}`"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="fail if the page is not current")
    if parser.parse_args().check:
        sys.exit(None if PAGE.read_text(encoding="utf-8") == page() else f"{PAGE} is not current: run make tables")
    PAGE.write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
