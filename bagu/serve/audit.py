"""The scheduler's invariants: conditions that hold between any two calls of its methods."""

from __future__ import annotations

from collections.abc import Mapping, Set
from collections.abc import Sequence as Seq

from bagu.serve.kv.blocks import Blocks, IntegrityError
from bagu.serve.limits import SchedulerConfig
from bagu.serve.plan import Sequence


def audit(
    config: SchedulerConfig,
    blocks: Blocks,
    holders: Set[Sequence],
    running: Seq[Sequence],
    waiting: Seq[Sequence],
    requests: Mapping[str, Seq[Sequence]],
    free_rows: Seq[int],
) -> None:
    """Raise IntegrityError with the names of all violated invariants. `holders` are the sequences that are running or
    in a plan in flight.
    """
    queues, B = (running, waiting), blocks.block_size
    rows = [s.table_row for h in holders for s in (h, *h.forks)]
    queued = {s for queue in queues for h in queue for s in (h, *h.forks)}
    tables = {h: h.table for h in holders if h.table is not None}
    checks = {
        "exactly the running sequences have a table": len(tables) == len(holders)
        and set(tables.values()) == blocks.tables,
        "rows of the block tables are taken once": sorted([*rows, *free_rows]) == list(range(config.max_num_seqs)),
        "queues are sorted by rank": all(list(q) == sorted(q, key=lambda s: s.rank) for q in queues),
        "every unfinished sequence is in a queue": queued == {s for choices in requests.values() for s in choices},
        "waiting sequences hold no blocks": all(s.table is None and not s.planned and not s.in_flight for s in waiting),
        "tables cover all planned positions": all(h.planned <= len(t.blocks) * B for h, t in tables.items()),
        "only blocks outside the window are released": all(
            t.dead <= config.dead_blocks(h.computed, B) for h, t in tables.items()
        ),
        "registered blocks have the tokens of their sequence": all(_holds_its_tokens(blocks, h) for h in tables),
    }
    broken = [name for name, holds in checks.items() if not holds]
    if broken:
        raise IntegrityError(f"the scheduler's state is inconsistent; violated: {'; '.join(broken)}")


def _holds_its_tokens(blocks: Blocks, sequence: Sequence) -> bool:
    """Whether every registered block of the sequence's table was computed from the sequence's tokens."""
    table, B = sequence.table, blocks.block_size
    assert table is not None
    for at in range(table.dead, len(table.blocks)):
        content = blocks.contents[table.blocks[at]]
        if content is not None and content.tokens != tuple(sequence.tokens[at * B : (at + 1) * B]):
            return False
    return True
