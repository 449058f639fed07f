"""Cells of a table as numbers and times."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

MISSING = {
    "", "nan", "na", "n/a", "#n/a", "null", "none", "nil", "-", "--", "?", ".", "#div/0!", "#value!", "#ref!", "#name?",
    "#num!", "#null!", "inf", "-inf", "bad", "bad input", "i/o timeout", "no data", "缺失", "无",
}  # fmt: skip
NUMBER = re.compile(r"^([-+]?(?:\d[\d ,.'\u00a0\u202f]*|[.,]\d+)(?:[eE][-+]?\d+)?)\s*([^\d\s][^\d]{0,11})?$")
DATE = re.compile(
    r"^(\d{1,4})[-/.年](\d{1,2})[-/.月](\d{1,4})日?"
    r"(?:[T ]+(\d{1,2}):(\d{2})(?::(\d{2})(?:[.,]\d+)?)?\s*(AM|PM|am|pm)?)?(?:Z|[+-]\d{2}:?\d{2})?$"
)


@dataclass(frozen=True)
class Numbers:
    values: np.ndarray
    unit: str = ""
    other_units: tuple[str, ...] = ()


def number_columns(cells: Sequence[str], *, decimal_comma: bool) -> Numbers:
    """Numbers of a column; NaN for what is none. `decimal_comma`: a single comma may be the decimal point."""
    try:
        values = np.array([cell or "nan" for cell in cells], dtype=np.float64)
        return Numbers(np.where(np.isfinite(values), values, np.nan))
    except ValueError:
        pass
    found = [None if cell.casefold() in MISSING else NUMBER.match(cell) for cell in cells]
    texts = [match[1] for match in found if match]
    comma = _comma_is_decimal(texts, decimal_comma)
    values = np.array([_number(match[1], comma) if match else np.nan for match in found])
    units = Counter(match[2].strip() for match in found if match and match[2])
    ordered = [unit for unit, _ in units.most_common()]
    return Numbers(values, ordered[0] if ordered else "", tuple(ordered[1:]))


def _comma_is_decimal(texts: Sequence[str], allowed: bool) -> bool:
    """Whether the comma is the decimal point: the last mark of a number that has both, or one that never stands before
    exactly three digits. "1,234" alone is a thousand."""
    with_comma = [text for text in texts if "," in text]
    if not with_comma:
        return False
    if both := [text for text in with_comma if "." in text]:
        return both[0].rfind(",") > both[0].rfind(".")
    return allowed or not all(re.fullmatch(r"[-+]?\d{1,3}(?:,\d{3})+", text) for text in with_comma)


def _number(text: str, comma: bool) -> float:
    plain = re.sub(r"[ '\u00a0\u202f]", "", text)
    plain = plain.replace(".", "").replace(",", ".") if comma and "," in plain else plain.replace(",", "")
    try:
        value = float(plain)
    except ValueError:
        return float("nan")
    return value if np.isfinite(value) else float("nan")


def times(cells: Sequence[str]) -> tuple[np.ndarray | None, str]:
    """Seconds since 1970 (no time zone), or None if the cells are not dates; and a note where the order of day and
    month had to be assumed."""
    found = [None if cell.casefold() in MISSING else DATE.match(cell) for cell in cells]
    filled = sum(cell.casefold() not in MISSING for cell in cells)
    dates = [match for match in found if match]
    if not dates or len(dates) < 0.8 * filled:
        return None, ""
    if all(len(match[1]) == 4 for match in dates):
        return _seconds(found, "ymd"), ""
    first, second = (max(int(match[i]) for match in dates) for i in (1, 2))
    if first > 12 or second > 12:
        return _seconds(found, "dmy" if first > 12 else "mdy"), ""
    as_days, as_months = _seconds(found, "dmy"), _seconds(found, "mdy")
    turns = [int((np.diff(stamps[np.isfinite(stamps)]) < 0).sum()) for stamps in (as_days, as_months)]
    if turns[0] != turns[1]:  # rows of a log are mostly in order
        return (as_days, "") if turns[0] < turns[1] else (as_months, "")
    return as_days, "day and month cannot be told apart; read as day, month, year"


def _seconds(found: Sequence[re.Match[str] | None], order: str) -> np.ndarray:
    values = np.full(len(found), np.nan)
    for i, match in enumerate(found):
        if match is None:
            continue
        part = dict(zip(order, (int(match[1]), int(match[2]), int(match[3])), strict=True))
        hour = int(match[4] or 0)
        if match[7]:
            hour = hour % 12 + (12 if match[7].casefold() == "pm" else 0)
        year = part["y"] + (2000 if part["y"] < 70 else 1900) if part["y"] < 100 else part["y"]
        try:
            stamp = datetime.datetime(year, part["m"], part["d"], hour, int(match[5] or 0), int(match[6] or 0))
        except ValueError:
            continue
        values[i] = (stamp - datetime.datetime(1970, 1, 1)).total_seconds()
    return values
