"""The settings that `bagu tune serve` searches over: options of `bagu serve` and the values to try."""

from collections.abc import Mapping, Sequence
from itertools import product

from bagu.errors import ArgumentError, UnknownName

Value = int | str | bool | None
Point = tuple[tuple[str, Value], ...]  # (option, value) pairs in the order of SETTINGS; None is the option's default

SETTINGS = (
    "max_num_seqs",
    "max_num_batched_tokens",
    "block_size",
    "threads",
    "enable_prefix_caching",
    "quantization",
    "speculative",
)
SCHEDULING = ("max_num_seqs", "max_num_batched_tokens", "enable_prefix_caching")  # they change what a step does
INTEGERS = SETTINGS[:4]
WORDS: Mapping[str, Value] = {"none": None, "default": None, "true": True, "on": True, "false": False, "off": False}


def default_space(cores: int, *, on_gpu: bool, shared_prefix: bool) -> dict[str, tuple[Value, ...]]:
    """Values for this machine. The prefix cache is searched if the load has shared prefixes: without, it only costs."""
    space: dict[str, tuple[Value, ...]] = {
        "max_num_seqs": (32, 64, 128, 256) if on_gpu else (4, 8, 16, 256),
        "max_num_batched_tokens": (2048, 8192, None) if on_gpu else (256, 512, None),
        "block_size": (None, 32),
        "quantization": (None, "fp8") if on_gpu else (None, "int8"),
        "speculative": (None, "ngram"),
    }
    if not on_gpu and cores > 1:
        space["threads"] = tuple(dict.fromkeys((None, cores)))
    if shared_prefix:
        space["enable_prefix_caching"] = (True, False)
    return space


def parse_space(texts: Sequence[str], base: Mapping[str, tuple[Value, ...]]) -> dict[str, tuple[Value, ...]]:
    """`base` with settings such as "max_num_seqs=4,16" replaced; one value keeps a setting fixed."""
    space = dict(base)
    for text in texts:
        name, sign, values = text.partition("=")
        name = name.strip().replace("-", "_")
        UnknownName.check("setting to tune", name, SETTINGS)
        parts = [p.strip() for p in values.split(",")]
        if not sign or not all(parts) or len(set(parts)) < len(parts):
            raise ArgumentError(f"{text!r} has no list of values", hint=f"write {name}=4,16 with different values")
        space[name] = tuple(_value(name, part) for part in parts)
    return {name: space[name] for name in SETTINGS if name in space}


def _value(name: str, text: str) -> Value:
    if text.lower() in WORDS and (WORDS[text.lower()] is None or name == "enable_prefix_caching"):
        return WORDS[text.lower()]
    if name in INTEGERS:
        if not text.isdecimal() or int(text) < 1:
            raise ArgumentError(f"{name}={text}", hint="use a whole number of 1 or more, or default")
        return int(text)
    if name == "enable_prefix_caching":
        raise ArgumentError(f"{name}={text}", hint="use on or off")
    return text


def points_of(space: Mapping[str, Sequence[Value]]) -> list[Point]:
    """Every combination that an engine accepts: a step needs a token for every running sequence."""
    every = [tuple(zip(space, values, strict=True)) for values in product(*space.values())]

    def fits(point: Point) -> bool:
        one = dict(point)
        tokens, seqs = one.get("max_num_batched_tokens"), one.get("max_num_seqs") or 256
        return not isinstance(tokens, int) or tokens >= int(seqs)

    points = [p for p in every if fits(p)]
    if not points:
        raise ArgumentError(
            "no combination of the settings is valid", hint="max_num_batched_tokens is at least max_num_seqs"
        )
    return points


def label(point: Point) -> str:
    """`max_num_seqs 16, quantization int8`; defaults are left out."""
    return ", ".join(f"{name} {value}" for name, value in point if value is not None) or "the defaults"
