"""How long a thread of OpenMP waits awake for its next piece of work.

Every parallel region of torch ends with threads that wait. A decode step has a hundred regions, 10 to 50 us apart; on a
virtual machine of two cores it costs a sleeping thread 10 us to come back after 0.1 ms, and 50 to 200 us after some ms.
OMP_WAIT_POLICY=PASSIVE lets them sleep at once; libgomp's own choice keeps them awake for some 5 ms, which takes the
core away from the server and the tokenizer. Between the two:

    GOMP_SPINCOUNT     awake for       decode, 8M model, 1 / 32 streams (tokens/s, one run after the other)
    0                  not at all      253 / 2154
    1,000              15 us           304 / 2420
    10,000             150 us          497 / 2921

So a thread stays awake through a step and from one step to the next, and an idle engine sleeps after half a ms.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

__all__ = ["settings", "wait_briefly"]

SPINS = "30000"  # 0.45 ms: the longest pause between two steps, in which the engine plans and samples


def wait_briefly() -> dict[str, str]:
    """Set it for this process, if torch is not imported yet, and for those that it starts, unless the user has chosen.
    Returns the environment as it was, for a child that shall have the user's own."""
    before = dict(os.environ)
    if "OMP_WAIT_POLICY" not in before:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    return before


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """What an environment says to OpenMP, for the record of a benchmark."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(("OMP_", "GOMP_"))}
