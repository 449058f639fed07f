"""`bagu lab list`. Imports no lab and not torch."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bagu.lab import catalogue

__all__ = ["list_labs"]


def list_labs(console: Console) -> None:
    """Print every lab with its claim."""
    table = Table(box=None, padding=(0, 2, 1, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name in catalogue.names():
        lab = catalogue.words(name)
        need = "\n[yellow]needs a GPU[/]" if lab["needs_gpu"] else ""
        claim = f"“{escape(lab['claim_en'])}”\n“{escape(lab['claim_zh'])}”"
        title = f"{escape(lab['title_en'])} · {escape(lab['title_zh'])}"
        table.add_row(f"[bold]{name}[/]", f"{title}\n[dim]{claim}[/]{need}")
    console.print(table)
    console.print("Run labs with bagu lab run NAME…; bagu lab report writes one page with all results.")
