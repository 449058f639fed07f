"""What a mesh divides, what each rank holds, and what it sends: predictions, and a picture of the mesh."""

from collections.abc import Mapping

from bagu.machine.terminal import counted
from bagu.parallel.mesh import DIMS, MeshConfig
from bagu.parallel.spread import EVERYWHERE, Spread
from bagu.parallel.traffic import Kind, Tally, gloo_bytes, sent_bytes

MEANING = {
    "pp": "pipeline stages",
    "dp": "replicas, each with its own micro-batches",
    "tp": "parts of each layer",
    "shard": "model states are divided by it, each with its own micro-batches",
    "ep": "parts of the experts",
    "cp": "parts of each sequence",
}
STAGES = {
    0: "every rank holds all of parameters, gradients and optimizer state",
    1: "ZeRO-1: masters and optimizer state are divided",
    2: "ZeRO-2: masters, optimizer state and gradients are divided",
    3: "ZeRO-3: masters, optimizer state, gradients and parameters are divided",
}


def step_bytes(
    parameters: int,
    *,
    root: int,
    mesh: MeshConfig,
    stage: int,
    compute_bytes: int,
    backwards: int,
    master_bytes: int = 4,
    whole_matrices: int = 0,
    spread: Spread = EVERYWHERE,
) -> dict[tuple[Kind, str], int]:
    """The predicted bytes that one rank sends in a step for the states of parameters of one spread, by kind and group.

    `root` counts the parameters outside the blocks, which ZeRO-3 gathers once a micro-batch: embedding, last norm,
    head.
    `backwards` is the number of micro-batches of one rank. Gradients travel in the masters' dtype. `whole_matrices`
    counts the parameters whose gradients are gathered for the update: the blocks' under a divided Muon.
    """
    grads, values = parameters * master_bytes, parameters * compute_bytes
    data, replicas = spread.data_group(mesh), spread.replica_group(mesh)
    if stage == 0:
        return {("all_reduce", data): sent_bytes("all_reduce", grads, mesh.size(data))}
    reduced = 1 if stage == 1 else backwards
    found = {
        ("reduce_scatter", "shard"): reduced * sent_bytes("reduce_scatter", grads, mesh.shard),
        ("all_gather", "shard"): sent_bytes("all_gather", values, mesh.shard),
        ("all_reduce", replicas): sent_bytes("all_reduce", grads // mesh.shard, mesh.size(replicas)),
    }
    if stage == 3:
        gathered = backwards * (2 * (parameters - root) + root)
        found["all_gather", "shard"] = sent_bytes("all_gather", gathered * compute_bytes, mesh.shard)
    found["all_gather", "shard"] += sent_bytes("all_gather", whole_matrices * master_bytes, mesh.shard)
    return {key: size for key, size in found.items() if size}  # type: ignore[misc]


def draw_mesh(mesh: MeshConfig) -> list[str]:
    """The ranks by their coordinates: a line for each rank."""
    names = [name for name in DIMS if mesh.size(name) > 1]
    return [
        f"rank {rank:<3} " + "  ".join(f"{name} {mesh.coordinate(name, rank)}" for name in names)
        for rank in range(mesh.ranks)
    ]


def explain(
    mesh: MeshConfig, stage: int, *, states: int, predicted: Mapping[tuple[Kind, str], int], part: str = ""
) -> list[str]:
    """What the mesh divides and costs, as lines of text. `states` are the predicted bytes of one rank; `part` says
    what it has of the model, if that is divided."""
    lines = [f"mesh      {mesh}: {counted(mesh.ranks, 'rank')}"]
    lines += [f"          {name}={mesh.size(name)}: {MEANING[name]}" for name in DIMS if mesh.size(name) > 1]
    lines += [f"          {line}" for line in draw_mesh(mesh)]
    lines += [f"model     {part}"] if part else []
    held = "a rank holds gradients and optimizer state of its parameters" if part and not stage else STAGES[stage]
    lines += [f"states    {held}: {_size(states)} a rank"]
    lines += [f"sends     {_size(sum(predicted.values()))} a rank and step"]
    lines += [f"          {kind} over {group}: {_size(size)}" for (kind, group), size in predicted.items()]
    return lines


def compare_bytes(
    counted: Mapping[tuple[Kind, str], Tally], predicted: Mapping[tuple[Kind, str], int], steps: int
) -> list[str]:
    """The counted bytes of a step beside the predicted ones, a line for each kind and group."""
    lines = [f"{'collective':<24} {'calls':>7} {'sent':>12} {'formula':>12}  ratio"]
    for kind, group in sorted(counted.keys() | predicted.keys()):
        tally, formula = counted.get((kind, group), Tally()), predicted.get((kind, group), 0)
        ratio = f"{tally.sent / steps / formula:.4f}" if formula else "-"
        name = f"{kind} {group}"
        lines.append(
            f"{name:<24} {tally.calls / steps:>7.1f} {_size(tally.sent / steps):>12} {_size(formula):>12}  {ratio}"
        )
    return lines


def compare_sockets(counted: Mapping[tuple[Kind, str], Tally], sockets: int, steps: int) -> str:
    """The bytes that the kernel has sent for a step beside those that were counted, and those of Gloo's algorithms."""
    sent, gloo = sum(tally.sent for tally in counted.values()), gloo_bytes(counted)
    if not sent:
        return f"sockets   {_size(sockets / steps)} a rank and step over TCP"
    line = f"sockets   {_size(sockets / steps)} a rank and step over TCP, {sockets / sent:.2f} times the sum above"
    return line if gloo == sent else f"{line}: Gloo reduce-scatters by an all-reduce ({sockets / gloo:.2f} with it)"


def _size(number: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if number < 1000:
            return f"{number:.4g} {unit}"
        number /= 1000
    return f"{number:.4g} TB"
