"""Tables in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def markdown_table(head: Sequence[str], lines: Iterable[Sequence[str]], *, names: int) -> str:
    """The first `names` columns are text, the others are numbers, to the right."""
    rule = ["---"] * names + ["--:"] * (len(head) - names)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *lines))


def commit_words(commits: Iterable[object]) -> str:
    """ "`012345678`, `89abcdef0`": different commits, shortened."""
    return ", ".join(f"`{c}`" for c in sorted({str(c)[:9] for c in commits}))
