r"""Formulas: a small part of TeX to MathML, which browsers draw without a script.

    \frac{a}{b}   \sqrt{a}   \text{words}   x_i   x^2   x_i^2   {a b}

A run of letters is one name: `L d` is a product, `Ld` is not. Other symbols are written as themselves: · × ≤ √ Σ α.
"""

import re
from html import escape

from bagu.errors import BaguError

TOKEN = re.compile(r"\\text\{[^}]*\}|\\[a-z]+|[A-Za-z]+|[0-9][0-9,.]*(?<![,.])|[Ͱ-Ͽ]|\S")
OPERATOR = set("+-−·×/=<>≤≥≈≠()[]|,;:→∝…∼!")


def mathml(source: str, *, block: bool = False) -> str:
    """The element <math> of a formula."""
    tokens = TOKEN.findall(source)
    inner = _row(tokens, end="")
    if tokens:
        raise BaguError(f"the formula {source!r} has a }} without a {{")
    attribute = ' display="block"' if block else ""
    return f"<math{attribute}>{inner}</math>"


def _row(tokens: list[str], end: str) -> str:
    found: list[str] = []
    while tokens and tokens[0] != end:
        if tokens[0] == "}":
            return f"<mrow>{''.join(found)}</mrow>"
        base, low, high = _atom(tokens), "", ""
        while tokens and tokens[0] in ("_", "^"):
            below = tokens.pop(0) == "_"
            script = _atom(tokens)
            low, high = (script, high) if below else (low, script)
        kind = {(True, False): "msub", (False, True): "msup", (True, True): "msubsup"}.get((bool(low), bool(high)))
        found.append(f"<{kind}>{base}{low}{high}</{kind}>" if kind else base)
    if end and not tokens:
        raise BaguError("a formula has a { without a }")
    return f"<mrow>{''.join(found)}</mrow>"


def _atom(tokens: list[str]) -> str:
    if not tokens:
        raise BaguError("a formula ends where a term is needed")
    token = tokens.pop(0)
    if token == "{":
        inner = _row(tokens, "}")
        tokens.pop(0)
        return inner
    if token == r"\frac":
        return f"<mfrac>{_atom(tokens)}{_atom(tokens)}</mfrac>"
    if token == r"\sqrt":
        return f"<msqrt>{_atom(tokens)}</msqrt>"
    if token.startswith(r"\text"):
        return f"<mtext>{escape(token[6:-1])}</mtext>"
    if token.startswith("\\"):
        raise BaguError(f"a formula has {token}", hint="write the symbol itself")
    if token[0].isdigit():
        return f"<mn>{token}</mn>"
    return f"<mo>{escape(token)}</mo>" if token in OPERATOR else f"<mi>{escape(token)}</mi>"
