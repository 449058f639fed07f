"""The CPU cores that this process may use. Imports nothing heavy: the command line asks for them too."""

import os


def available_cores() -> int:
    """The number of cores in the affinity mask, which taskset, Slurm and containers make smaller than the machine."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
