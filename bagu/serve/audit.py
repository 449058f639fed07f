"""The scheduler's invariants, checked from outside: what must be true between any two calls."""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq

from bagu.serve.kv.blocks import Blocks, IntegrityError
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import Sequence

__all__ = ["audit"]


def audit(
    config: SchedulerConfig,
    blocks: Blocks,
    holders: Set[Sequence],
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    requests: Mapping[str, Seq[Sequence]],
    free_seats: Seq[int],
) -> None:
    """Raise IntegrityError, with all that does not hold. `holders` run, or are named by a plan in flight."""
    queues, B = (running, waiting), blocks.block_size
    seats = [s.seat for h in holders for s in (h, *h.forks)]
    queued = {s for queue in queues for h in queue for s in (h, *h.forks)}
    tables = {h: h.table for h in holders if h.table is not None}
    checks = {
        "who runs has a table, and no one else": len(tables) == len(holders) and set(tables.values()) == blocks.tables,
        "seats are taken once": sorted([*seats, *free_seats]) == list(range(config.max_num_seqs)),
        "queues are in the order of rank": all(list(q) == sorted(q, key=lambda s: s.rank) for q in queues),
        "who is alive runs or waits": queued == {s for choices in requests.values() for s in choices},
        "who waits holds nothing": all(s.table is None and not s.planned and not s.in_flight for s in waiting),
        "tables cover what is planned": all(h.planned <= len(t.blocks) * B for h, t in tables.items()),
        "only what no window sees is given back": all(
            t.dead <= config.dead_blocks(h.computed, B) for h, t in tables.items()
        ),
        "blocks hold the tokens of their sequence": all(_holds_its_tokens(blocks, h) for h in tables),
    }
    broken = [name for name, holds in checks.items() if not holds]
    if broken:
        raise IntegrityError(f"the scheduler contradicts itself: not true that {'; '.join(broken)}")


def _holds_its_tokens(blocks: Blocks, sequence: Sequence) -> bool:
    """Whether every registered block of its table was computed from its tokens."""
    table, B = sequence.table, blocks.block_size
    assert table is not None
    for at in range(table.dead, len(table.blocks)):
        content = blocks.contents[table.blocks[at]]
        if content is not None and content.tokens != tuple(sequence.tokens[at * B : (at + 1) * B]):
            return False
    return True
