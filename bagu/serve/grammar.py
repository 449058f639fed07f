"""Grammars: the set of texts that the output of a request must belong to.

A `Grammar` is a value of the request. The engine compiles it with llguidance (constrain/compiler.py) and samples only
tokens that keep the text a prefix of a member; the end-of-text token is allowed only when the text is a member.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from bagu.errors import ArgumentError
from bagu.serve.unicode import is_unicode, lone_escape

MAX_SIZE = 2**18  # characters
# White space in JSON, as options of llguidance: that of json.dumps, of templates and of most training data. With free
# white space a weak model writes blanks until max_tokens, and few tokens are forced (constrain/masks.py).
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
GrammarKind = Literal["json_object", "json_schema", "regex", "choice", "lark"]


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar in one of five notations; `text` is

    json_object  empty: any JSON object
    json_schema  the schema, as JSON
    regex        a regular expression (Rust's syntax) that the whole output matches
    choice       a JSON list of strings, one of which is the output
    lark         a grammar in llguidance's variant of Lark, whose start rule is `start`, or in GBNF, with `root`

    `whitespace` is a regular expression of what may stand between two tokens of JSON; None is that of json.dumps.
    """

    kind: GrammarKind
    text: str = ""
    whitespace: str | None = None

    def __post_init__(self) -> None:
        if self.kind not in get_args(GrammarKind):
            raise ArgumentError(f"grammar: kind = {self.kind!r}", hint=f"use {', '.join(get_args(GrammarKind))}")
        if not isinstance(self.text, str) or bool(self.text) == (self.kind == "json_object"):
            rule = "is empty" if self.kind == "json_object" else "is a non-empty string"
            raise ArgumentError(f"grammar: the text of kind {self.kind} is {self.text!r:.80}", hint=f"the text {rule}")
        if len(self.text) > MAX_SIZE:
            raise ArgumentError(
                f"grammar: the {self.kind} has {len(self.text)} characters", hint=f"at most {MAX_SIZE}: make it smaller"
            )
        escapes = lone_escape(self.text) if self.kind in ("json_schema", "choice") else None
        if escapes is not None or not is_unicode(self.text + (self.whitespace or "")):
            hint = "it has a surrogate without its pair: send Unicode text"
            raise ArgumentError(f"grammar: the {self.kind} is not UTF-8 text", hint=hint)
        if self.whitespace is not None and (not self.whitespace or not self.kind.startswith("json")):
            found = f"whitespace = {self.whitespace!r:.80} of kind {self.kind}"
            raise ArgumentError(f"grammar: {found}", hint="a regular expression, for json_object and json_schema")
        if self.kind == "choice":
            _check_choices(self.text)

    @property
    def json_options(self) -> dict[str, Any]:
        """What a schema is compiled with."""
        return SPACING if self.whitespace is None else {"whitespace_pattern": self.whitespace}

    @classmethod
    def json_object(cls, *, whitespace: str | None = None) -> Grammar:
        return cls("json_object", whitespace=whitespace)

    @classmethod
    def json_schema(cls, schema: Mapping[str, Any] | bool, *, whitespace: str | None = None) -> Grammar:
        """From a schema as Python values. The order of its properties is the order in which they are generated."""
        return cls("json_schema", json.dumps(schema if isinstance(schema, bool) else dict(schema)), whitespace)

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, choices: Sequence[str]) -> Grammar:
        return cls("choice", json.dumps(list(choices)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        return cls("lark", text)


def _check_choices(text: str) -> None:
    try:
        choices = json.loads(text)
    except ValueError:
        choices = None
    if not (isinstance(choices, list) and choices and all(isinstance(c, str) and c for c in choices)):
        raise ArgumentError(f"grammar: the choices are {text:.80}", hint="a JSON list of one or more non-empty strings")
