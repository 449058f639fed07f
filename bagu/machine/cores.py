"""The CPU cores that this process may use. Imports nothing heavy: the command line asks for them too."""

import os


def usable_cores() -> tuple[int, ...]:
    """The cores in the affinity mask, which taskset, Slurm and containers make smaller than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def available_cores() -> int:
    """How many cores this process may use."""
    return len(usable_cores())
