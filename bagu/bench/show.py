"""`bagu ops list` and `bagu ops show NAME`: meaning, arguments, cost and predicted time of an op on this machine.

`describe` returns a description as a value (also printed as JSON); `_render` turns it into text. The predicted time is
a lower bound: the larger of bytes / copy bandwidth and FLOPs / matmul rate, with ceilings measured here (`roofline`).
"""

import importlib
import importlib.util
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table

from bagu.bench import kernel_view
from bagu.bench.harness import RESULTS, plain
from bagu.bench.roofline import costs, floor
from bagu.bench.sizing import bench_inputs, dtype_named, first_tensor, parse_size, resize, shape_label
from bagu.bench.units import duration, si
from bagu.machine.ceilings import Ceilings, measure_ceilings
from bagu.machine.device import default_device, this_machine, triton_interprets
from bagu.ops import catalogue
from bagu.ops.contract.core import Case, OpSpec
from bagu.ops.contract.signature import EXACT, KINDS, TensorArg
from bagu.runs.record import read_rows

H200_BALANCE = kernel_view.H200_MATMUL / kernel_view.H200_COPY  # FLOP/byte at which an H200 becomes compute-bound


@dataclass(frozen=True, kw_only=True)
class Source:
    """Ceilings and their origin."""

    ceilings: Ceilings
    words: str


def list_ops(console: Console) -> None:
    """Print every op in one table."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim", expand=True)
    for name in ("op", "triton", "grads", "bound"):
        table.add_column(name, no_wrap=True)
    table.add_column("meaning", no_wrap=True, overflow="ellipsis", ratio=1)
    for name, spec in catalogue.SPECS.items():
        what = (importlib.import_module(f"bagu.ops.{name}.spec").__doc__ or "").split("\n")[0]
        yes = ("yes" if there else "no" for there in ("triton" in spec.backends, bool(spec.grads)))
        table.add_row(f"[bold]{name}[/]", *yes, _bound(spec), escape(what.partition(":")[0].rstrip(".")))
    console.print(table)
    console.print("[dim]All have a torch backend. bound: at the first benchmark case in bf16, on an H200.[/]")
    console.print("[bold]bagu ops show NAME[/] prints signature, formula, cost and predicted time.")


def _bound(spec: OpSpec) -> str:
    args = bench_inputs(spec, _bench_case(spec), torch.bfloat16, "meta")
    cost = costs(spec, spec.bind(args), first_tensor(spec, args).dtype)["fwd"]
    return "compute" if cost.intensity > H200_BALANCE else "memory"


def _bench_case(spec: OpSpec) -> Case:
    return next((c for c in spec.cases if c.bench), spec.cases[0])


def show_op(
    name: str,
    console: Console,
    *,
    size: str = "",
    dtype: str | None = None,
    as_json: bool = False,
    measure: bool = False,
    results: Path = RESULTS,
) -> None:
    """Print one op. The ceilings are the last recorded ones of this machine in `results`, else measured now."""
    spec, sizes = catalogue.spec(name), parse_size(size)
    device = default_device()
    kind = dtype_named(dtype) if dtype is not None else torch.bfloat16 if device.type == "cuda" else torch.float32
    case = resize(spec, _bench_case(spec), sizes)
    args = bench_inputs(spec, case, kind, "meta")  # raises for inconsistent sizes, before any measurement
    spec.bind(args)
    source = (None if measure else _recorded(results, device, kind)) or _measured(device, kind)
    facts = describe(spec, case, args, source)
    if as_json:
        print(json.dumps(facts, indent=1, ensure_ascii=False))
    else:
        console.print(_render(facts))


def show_op_kernels(
    name: str, console: Console, out: Path, *, size: str = "", dtype: str | None = None, arch: str = "sm_90",
    config: str = "", diff: tuple[str, str] | None = None, as_json: bool = False,
) -> None:  # fmt: skip
    """Print the compiled kernels of one op, or how they differ between two tunings."""
    spec = catalogue.spec(name)
    case = resize(spec, _bench_case(spec), parse_size(size))
    kind = torch.bfloat16 if dtype is None else dtype_named(dtype)
    if diff is not None:
        kernel_view.show_difference(spec, case, kind, console, out, arch=arch, tunings=diff)
    else:
        kernel_view.show_kernels(spec, case, kind, console, out, arch=arch, tuning=config, as_json=as_json)


def _recorded(results: Path, device: torch.device, dtype: torch.dtype) -> Source | None:
    """The ceilings of the last full benchmark of this machine, device and dtype."""
    path = results / f"{this_machine().name}.jsonl"
    if not path.exists():
        return None
    for row in reversed(read_rows(path)):
        there = row["ceilings"]
        if not row["quick"] and (there["device"], there["dtype"]) == (str(device), str(dtype).removeprefix("torch.")):
            known = {f.name: there[f.name] for f in fields(Ceilings)}
            return Source(ceilings=Ceilings(**known), words=f"ceilings measured {row['env']['time']} ({path})")
    return None


def _measured(device: torch.device, dtype: torch.dtype) -> Source:
    return Source(ceilings=measure_ceilings(device, dtype=dtype, quick=True), words="ceilings measured now, quickly")


def describe(spec: OpSpec, case: Case, args: Mapping[str, Any], source: Source) -> dict[str, Any]:
    """All facts about an op at one size, as JSON values."""
    first = first_tensor(spec, dict(args))
    passes = {}
    for step, cost in costs(spec, spec.bind(args), first.dtype).items():
        least = floor(cost, source.ceilings)
        passes[step] = {
            "flops": cost.flops,
            "bytes": cost.bytes,
            "flops_per_byte": cost.intensity,
            "bound": least.bound,
            "predicted_s": least.seconds,
        }
    return {
        "name": spec.name,
        "signature": spec.signature,
        "formula": (importlib.import_module(f"bagu.ops.{spec.name}.spec").__doc__ or "").strip(),
        "arguments": [_argument(spec, a) for a in spec.sig.inputs],
        "outputs": [str(o) for o in spec.sig.outputs],
        "residuals": [str(r) for r in spec.sig.residuals],
        "independent": list(spec.independent),
        "ulps": spec.ulps,
        "backends": {b: _backend(spec, b) for b in spec.backends},
        "automatic": _automatic(spec),
        "cases": [{"name": c.name, "why": c.why, "bench": c.bench} for c in spec.cases],
        "size": {"case": case.name, "shape": shape_label(spec, dict(args)), "dtype": str(first.dtype)[6:]},
        "cost": passes,
        "ceilings": asdict(source.ceilings) | {"source": source.words},
    }


def _argument(spec: OpSpec, arg: Any) -> dict[str, Any]:
    if not isinstance(arg, TensorArg):
        return {"name": arg.name, "is": str(arg), "kind": f"a scalar, {arg.kind}", "gradient": False}
    kind = KINDS.get(arg.dtype) or (str(EXACT[arg.dtype])[6:] if arg.dtype in EXACT else "fp32, or fp64 with fp64")
    if arg is spec.sig.tensors[0] and not arg.dtype:
        kind = "a float dtype"
    optional = ", may be None" if arg.optional else ""
    return {"name": arg.name, "is": str(arg), "kind": kind + optional, "gradient": arg.name in spec.grads}


def _backend(spec: OpSpec, backend: str) -> dict[str, Any]:
    """Whether a backend runs here, and its tunable parameters."""
    if backend == "torch":
        return {"runs": "yes", "tunable": {}}
    if importlib.util.find_spec("triton") is None:
        return {"runs": "no: Triton is not installed (pip install 'bagu[triton]')", "tunable": {}}
    runs = (
        "yes" if default_device().type == "cuda" else "in the interpreter only, slowly" if triton_interprets() else ""
    )
    tunable = getattr(spec.module(backend), "TUNABLE", {})
    return {
        "runs": runs or "no: it needs a CUDA device, or TRITON_INTERPRET=1 for its interpreter",
        "tunable": {fn: {k: list(v) for k, v in space.items()} for fn, space in tunable.items()},
    }


def _automatic(spec: OpSpec) -> list[dict[str, str]]:
    """What runs a call on a CUDA device where no backend is asked for; the first line that holds counts."""
    if "triton" not in spec.backends:
        return [{"when": "always", "runs": "the torch backend", "why": "it is the only one"}]
    rules = [{"when": r.when, "runs": f"{r.runs} (torch backend)", "why": r.why} for r in spec.prefer_torch]
    if spec.unsupported is not None:
        lacks = {"when": "what the Triton kernels do not take", "runs": "the torch backend", "why": "it says so once"}
        rules = [lacks, *rules]
    return [*rules, {"when": "otherwise" if rules else "always", "runs": "the Triton backend", "why": ""}]


def _render(facts: Mapping[str, Any]) -> Group:
    spaces = {
        name: [f"{fn}: " + ", ".join(f"{k} ∈ {v}" for k, v in points.items()) for fn, points in b["tunable"].items()]
        for name, b in facts["backends"].items()
    }
    runs = [(name, b["runs"], "\n".join(spaces[name]) or "nothing") for name, b in facts["backends"].items()]
    rules = [(escape(rule["when"]), rule["runs"], escape(rule["why"])) for rule in facts["automatic"]]
    automatic = plain(("automatic choice on CUDA", "runs", "why"), rules)
    chosen: list[Table | str] = [automatic, ""] if len(rules) > 1 else []
    arguments = [(escape(a["is"]), a["kind"], "yes" if a["gradient"] else "") for a in facts["arguments"]]
    cases = [(c["name"], escape(c["why"]), "yes" if c["bench"] else "") for c in facts["cases"]]
    work = [
        (
            step,
            si(p["flops"], "FLOP"),
            si(p["bytes"], "B"),
            f"{p['flops_per_byte']:,.1f}",
            p["bound"],
            f"≥ {duration(p['predicted_s'])}",
        )
        for step, p in facts["cost"].items()
    ]
    heads = ("pass", "work", "traffic", "FLOP/byte", "bound by", "predicted time")
    size, c = facts["size"], facts["ceilings"]
    results = ", ".join(facts["outputs"]) + (f"; saved: {', '.join(facts['residuals'])}" if facts["residuals"] else "")
    return Group(
        f"[bold]{facts['name']}[/]  {escape(facts['signature'])}\n",
        f"{escape(facts['formula'])}\n",
        plain(("argument", "type", "gradient"), arguments),
        f"\nreturns {escape(results)}; maximum error against fp64: {facts['ulps']:g} × its spacing",
        f"independent along {', '.join(facts['independent'])}\n",
        plain(("backend", "runs here", "tuning space"), runs),
        "",
        *chosen,
        plain(("case", "why", "timed"), cases),
        f"\n[bold]cost at {size['shape']}[/] in {size['dtype']} (case {size['case']})",
        plain(heads, work, right=(*heads[1:4], heads[5])),
        f"[dim]copy {si(c['copy'], 'B/s')}, matmul {si(c['matmul'], 'FLOP/s')} ({c['dtype']}) on "
        f"{c['device']}; {escape(c['source'])}[/]",
    )
