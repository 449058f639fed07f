"""Numbers with a readable prefix: 8.01 MB, 52.3 GFLOP/s, 800.8 µs; and times as a user writes them: 300ms, 5m."""

import math
import re

from bagu.errors import ArgumentError

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


def si(value: float, unit: str) -> str:
    """Three digits and a prefix: 8008000, "B" -> "8.01 MB"."""
    scale, prefix = next(((s, p) for s, p in PREFIXES if value >= 0.9995 * s), (1.0, ""))  # 999,900 is 1 M, not 1e+03 k
    return f"{value / scale:.3g} {prefix}{unit}"


def duration(seconds: float) -> str:
    """Microseconds below 10 ms, milliseconds below 10 s, else seconds."""
    if seconds < 1e-2:
        return f"{1e6 * seconds:,.1f} µs"
    return f"{1e3 * seconds:,.1f} ms" if seconds < 10 else f"{seconds:,.1f} s"


def tera(value: float) -> str:
    """A number of TFLOP/s: 532.5, and two digits below 1, for a CPU core: 0.047."""
    return f"{value:,.1f}" if value >= 1 else f"{value:.2g}"


def parse_ms(text: str) -> float:
    """Milliseconds of `300ms`, `0.3s` or `300`."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*(ms|s)?", text.strip().lower())
    value = float(found[1]) * (1e3 if found[2] == "s" else 1.0) if found else 0.0
    if not 0 < value < math.inf:
        raise ArgumentError(f"{text!r} is not a time limit", hint="write 300ms, 0.3s, or a number of milliseconds")
    return value


def parse_seconds(text: str) -> float:
    """Seconds of `300s`, `5m`, `1h` or `300`."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?|\.\d+)\s*([smh])?", text.strip().lower())
    value = float(found[1]) * {"m": 60.0, "h": 3600.0}.get(found[2], 1.0) if found else 0.0
    if not 0 < value < math.inf:
        raise ArgumentError(f"{text!r} is not a length of time", hint="write 300s, 5m, 1h, or a number of seconds")
    return value
