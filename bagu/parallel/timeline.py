"""A picture of what the ranks of a pipeline did in a step, from the recorded times, in characters."""

from collections.abc import Sequence

from bagu.parallel.pipeline import Action, bubble

LEGEND = (
    "forward of micro-batch 0-9, backward (or its part for the input) a-j, part for the weights A-J; "
    "later ones begin again, a dot is idle"
)
FIRST = {"F": "0", "B": "a", "I": "a", "W": "A"}  # the letter of micro-batch 0


def draw_pipeline(actions: Sequence[Sequence[Action]], width: int = 96) -> list[str]:
    """A line for each rank: a character is a slice of the time from the first start to the last end, and shows what the
    rank did most in it. The last line has the idle share over all ranks."""
    every = [a for rank in actions for a in rank]
    start, end = min(a.start for a in every), max(a.end for a in every)
    slot = (end - start) / width
    lines = [f"pipeline  the last step, {1000 * (end - start):.3g} ms: {LEGEND}"]
    for number, rank in enumerate(actions):
        row = [_most(rank, start + i * slot, start + (i + 1) * slot) for i in range(width)]
        stages = ", ".join(str(stage) for stage in sorted({a.stage for a in rank}))
        lines.append(f"          pp {number} (stage {stages})  {''.join(row)}")
    return [*lines, f"          idle: {100 * bubble(actions):.1f} % of the time of all ranks"]


def _most(actions: Sequence[Action], start: float, end: float) -> str:
    """The character of the action that has most of [start, end); a dot if none has half of it."""
    shares = [(min(a.end, end) - max(a.start, start), a) for a in actions if a.start < end and a.end > start]
    busy = sum(share for share, _ in shares)
    if not shares or busy < (end - start) / 2:
        return "."
    _, action = max(shares, key=lambda pair: pair[0])
    return chr(ord(FIRST[action.kind]) + action.micro_batch % 10)
