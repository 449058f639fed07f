"""The terminal that every verb prints to: rich's console, which reads only bagu's own style tags as markup.

rich takes any word in brackets for a style and drops it: `pip install 'bagu[plot]'` came out as `pip install 'bagu'`.
"""

import re
from typing import Any

from rich.console import Console
from rich.text import Text

STYLES = ("bold", "dim", "red", "green", "yellow", "blue", "cyan")
# a bracket that begins neither a style nor its end, and is not escaped already
OTHER = re.compile(rf"(?<!\\)\[(?!/?(?:{'|'.join(STYLES)})?\])")


def counted(number: int, noun: str) -> str:
    """ "1 step", "1,200 steps"."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


class Terminal(Console):
    def render_str(self, text: str, **options: Any) -> Text:
        plain = options.get("markup") is False  # then rich shows an escape as it is
        return super().render_str(text if plain else OTHER.sub(r"\\[", text), **options)
