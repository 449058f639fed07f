"""How long an idle OpenMP thread spins before it sleeps.

After every parallel region of torch its threads wait. A decode step has a hundred regions, 10 to 50 us apart. On a
virtual machine with two cores, waking a thread costs 10 us after 0.1 ms of sleep, and 50 to 200 us after a few ms.
With OMP_WAIT_POLICY=PASSIVE threads sleep at once. libgomp's default spins for about 5 ms, which takes the core away
from the server and the tokenizer. Values in between:

    GOMP_SPINCOUNT     spins for       decode, 8M model, 1 / 32 streams (tokens/s, runs in sequence)
    0                  not at all      253 / 2154
    1,000              15 us           304 / 2420
    10,000             150 us          497 / 2921

The value chosen below keeps threads awake during a step and between two steps; an idle engine sleeps after 0.5 ms.
"""

import os
from collections.abc import Mapping

SPINS = "30000"  # 0.45 ms: the longest pause between two steps, during which the engine plans and samples


def wait_briefly() -> dict[str, str]:
    """Set the spin time for child processes, and for this process if torch is not imported yet, unless the user has
    set it. Return the environment from before, for child processes that should see the user's settings."""
    before = dict(os.environ)
    if "OMP_WAIT_POLICY" not in before:
        os.environ.setdefault("GOMP_SPINCOUNT", SPINS)
    return before


def settings(environ: Mapping[str, str]) -> dict[str, str]:
    """The OpenMP variables in `environ`, for the record of a benchmark."""
    return {name: value for name, value in sorted(environ.items()) if name.startswith(("OMP_", "GOMP_"))}
