"""What cannot be planned, one sentence each: what was given, and what would work."""

from dataclasses import replace

import numpy as np

from bagu.errors import ArgumentError
from bagu.parallel.planner.cluster import Cluster
from bagu.parallel.planner.layouts import Layouts, Workload
from bagu.parallel.planner.memory import FREE, Memory, memory, room
from bagu.parallel.planner.search import candidates
from bagu.parallel.planner.software import Software

GiB = 2**30
MOST_GPUS = 2**20  # where the search for a larger cluster ends


def check(workload: Workload, cluster: Cluster, gpus: int) -> None:
    for name, value in (("gpus", gpus), ("seq", workload.seq), ("batch", workload.batch)):
        if value < 1:
            raise ArgumentError(f"{name} is {value}", hint="give 1 or more")
    if workload.precision == "fp8" and cluster.gpu.matmul_fp8_tflops is None:
        raise ArgumentError(f"fp8 on {cluster.gpu.name}, which has no fp8 tensor cores", hint="use bf16")


def no_layout(workload: Workload, cluster: Cluster, gpus: int) -> ArgumentError:
    """No division of the GPUs leaves a number of data-parallel ranks that divides the batch."""
    nearby = sorted(range(max(1, gpus - 64), gpus + 65), key=lambda n: (abs(n - gpus), n))
    better = next((n for n in nearby if n != gpus and len(candidates(workload, cluster, n))), None)
    try_gpus = f"use {better} GPUs, or " if better is not None else ""
    if workload.batch < gpus:
        return ArgumentError(
            f"a batch of {workload.batch} sequences has no layout on {gpus} GPUs: every layout has more data-parallel "
            f"ranks than sequences, or a number that does not divide the batch",
            hint=f"{try_gpus}raise the batch to a multiple of {gpus}",
        )
    return ArgumentError(
        f"{gpus} GPUs cannot be divided so that the data-parallel ranks divide a batch of {workload.batch}",
        hint=f"{try_gpus}use a batch that is a multiple of {gpus}",
    )


def does_not_fit(
    workload: Workload, cluster: Cluster, gpus: int, software: Software, layouts: Layouts, needs: Memory
) -> ArgumentError:
    """No layout fits: the smallest one, what fills it, and how many GPUs would do."""
    i = int(np.argmin(needs.total))
    parts = {name: float(part[i]) for name, part in vars(needs).items()}
    largest = max(parts, key=lambda name: parts[name])
    more = _enough(workload, cluster, gpus, software)
    ways = []
    if more is not None:
        ways.append(f"use {more[0]} GPUs" + (f" and a batch of {more[1]}" if more[1] != workload.batch else ""))
    if workload.seq > 2048 and largest in ("activations", "buffers"):
        ways.append("shorten the sequences")
    ways.append("use a GPU with more memory")
    return ArgumentError(
        f"no layout fits: the smallest ({layouts[i].words()}) needs {needs.total[i] / GiB:.0f} GiB per GPU, "
        f"{parts[largest] / GiB:.0f} of them {largest}, and {cluster.gpu.name} has {cluster.gpu.memory_gib:.0f} "
        f"({100 * FREE:.0f} % is left free)",
        hint=", or ".join(ways),
    )


def _enough(workload: Workload, cluster: Cluster, gpus: int, software: Software) -> tuple[int, int] | None:
    """The smallest doubling of the GPUs that fits, and the batch it was tried with."""
    count = gpus
    while count < MOST_GPUS:
        count *= 2
        for batch in (workload.batch, max(workload.batch, count)):
            tried = replace(workload, batch=batch)
            layouts = candidates(tried, cluster, count)
            if len(layouts):
                needs = memory(tried, software, layouts)
                if (needs.total <= room(cluster.gpu)).any():
                    return count, batch
    return None
