"""The first meeting of the ranks of a job: all are there, and they have the same facts.

The store may hold keys of an earlier start: torchrun restarts ranks in place and keeps its store, and its count of
restarts differs between machines (pytorch#135712). So each process writes a new random name, rank 0 publishes the list
of names it sees, and the hash of a list that everyone has confirmed is the prefix of all keys of this start.
"""

import hashlib
import json
import secrets
import time
from collections.abc import Mapping

import torch.distributed as dist

from bagu import config as configs
from bagu.errors import BaguError

POLL_S = 0.02
READ_S = 5.0  # that rank 0, which may serve the store, waits for the others to read why nothing starts


class PeerFailed(BaguError):
    """Another rank is the reason why this one ends."""


def meet(store: dist.Store, rank: int, ranks: int, facts: Mapping[str, object], timeout: float) -> dist.Store:
    """Wait for all ranks and compare their facts; the store of this start. Every rank raises the same sentence."""
    name = secrets.token_hex(8)
    store.set(f"name/{rank}", name)
    if rank > 0:
        return _follow(store, rank, name, facts, timeout + 30)
    start, missing = _gather(store, ranks, name, facts, timeout)
    here = [other for other in range(1, ranks) if other not in missing]
    try:
        if missing:
            raise BaguError(
                f"{len(missing)} of {ranks} ranks did not start within {timeout:.0f} s: "
                f"rank {', '.join(map(str, missing))}",
                hint="start them with the same address and port; BAGU_START_TIMEOUT sets the seconds to wait",
            )
        compare([json.loads(start.get(f"facts/{other}")) for other in range(ranks)])
    except BaguError as error:
        start.set("verdict", json.dumps([str(error), error.hint]))
        _wait_for(start, [f"read/{other}" for other in here], READ_S)
        raise
    start.set("verdict", "go")
    return start


def _gather(
    store: dist.Store, ranks: int, name: str, facts: Mapping[str, object], timeout: float
) -> tuple[dist.Store, list[int]]:
    """Rank 0: publish the names until all ranks have confirmed them; the store of this start and the missing ranks."""
    deadline = time.monotonic() + timeout
    names: list[str | None] = []
    start = store
    while True:
        found = [_read(store, f"name/{other}") for other in range(ranks)]
        if found != names:  # a rank has come, or come again
            names = found
            store.set("names", json.dumps(names))
            start = dist.PrefixStore(_key(names), store)
            start.set("facts/0", json.dumps(facts))
        if _wait_for(start, [f"facts/{other}" for other in range(ranks)], 10 * POLL_S):
            return start, []
        if time.monotonic() > deadline:
            return start, [other for other in range(ranks) if not start.check([f"facts/{other}"])]


def _follow(store: dist.Store, rank: int, name: str, facts: Mapping[str, object], timeout: float) -> dist.Store:
    """Other ranks: confirm each list that has this rank's name, and wait for the verdict of rank 0."""
    deadline, seen, start = time.monotonic() + timeout, "", store
    try:
        while time.monotonic() < deadline:
            listed = _read(store, "names") or "[]"
            names = json.loads(listed)
            if listed != seen and rank < len(names) and names[rank] == name:
                seen, start = listed, dist.PrefixStore(_key(names), store)
                start.set(f"facts/{rank}", json.dumps(facts))
            if seen and start.check(["verdict"]):
                verdict = start.get("verdict").decode()
                start.set(f"read/{rank}", "")
                if verdict == "go":
                    return start
                said, hint = json.loads(verdict)
                raise PeerFailed(said, hint=hint)
            time.sleep(POLL_S)
    except RuntimeError as error:
        raise PeerFailed("rank 0 ended before the start", hint="see its log") from error
    raise PeerFailed(f"rank 0 did not start within {timeout:.0f} s", hint="see its log")


def _key(names: list[str | None]) -> str:
    return hashlib.sha256(json.dumps(names).encode()).hexdigest()[:16]


def _read(store: dist.Store, key: str) -> str | None:
    return store.get(key).decode() if store.check([key]) else None


def _wait_for(store: dist.Store, keys: list[str], seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not (there := store.check(keys)) and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return there


def compare(facts: list[dict[str, object]]) -> None:
    """Raise for the first rank whose facts are not those of rank 0."""
    for rank, other in enumerate(facts):
        if other != facts[0]:
            different = configs.diff(facts[0], other)
            more = f" and {len(different) - 1} more" if len(different) > 1 else ""
            raise BaguError(
                f"rank {rank} differs from rank 0: {different[0]}{more}",
                hint="start every rank with the same code, configuration, data and kind of device",
            )
