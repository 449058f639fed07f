"""`bagu plan`, `bagu plan validate` and `bagu plan --serve`: read the arguments, print a table or JSON, write pages."""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rich.table import Table

from bagu.errors import ArgumentError, UnknownName
from bagu.machine.terminal import Terminal, counted
from bagu.nn.config import ModelConfig
from bagu.parallel.plan import Plan, best
from bagu.parallel.planner.cluster import Cluster, cluster_of
from bagu.parallel.planner.explain import explain, mesh_line
from bagu.parallel.planner.kernels import Precision
from bagu.parallel.planner.layouts import Workload
from bagu.parallel.planner.models import model_of
from bagu.parallel.planner.page import plan_page, validation_page
from bagu.parallel.planner.plots import draw_plan, draw_validation
from bagu.parallel.planner.serving import Deployment, Traffic, deployments
from bagu.parallel.planner.validate import Report, validate


def plan(
    *,
    model: str,
    gpus: int,
    gpu: str,
    seq: int,
    batch: int,
    tokens: float | None,
    precision: str,
    top: int,
    as_json: bool,
    out: Path | None,
    model_settings: Callable[[ModelConfig], Sequence[str]],
) -> None:
    """`model_settings` are those of `bagu train` that make the model."""
    UnknownName.check("precision", precision, get_args(Precision))
    if top < 1:
        raise ArgumentError(f"top is {top}", hint="give 1 or more")
    if tokens is not None and not tokens > 0:
        raise ArgumentError(f"tokens is {tokens:g}", hint="give a number of tokens to train on, such as 2e12")
    chosen: Literal["bf16", "fp8"] = "fp8" if precision == "fp8" else "bf16"
    config = model_of(model)
    config = replace(config, max_len=max(config.max_len, seq))  # the command sets it
    workload = Workload(model=config, seq=seq, batch=batch, precision=chosen)
    cluster = cluster_of(gpu)
    found = best(workload, cluster, gpus)
    title = f"{model} on {gpus} × {cluster.gpu.name}: {seq} tokens, batch {batch}, {precision}"
    if as_json:
        print(json.dumps(_as_json(found, top, tokens), indent=1))
    else:
        _print(found, top, tokens, title, train_command(found, model_settings(config)))
    if out is not None:
        drawn = draw_plan(found, out / "plan", title)
        _write(out / "plan.html", plan_page(found, title, None if drawn else out / "plan.svg"), drawn, quiet=as_json)


def serve(
    *, model: str, gpu: str, rate: float, input_tokens: int, output_tokens: int, token_ms: float, first_token_ms: float,
    as_json: bool, gpus: int | None = None, quantization: str | None = None,
) -> None:  # fmt: skip
    traffic = Traffic(
        requests_per_s=rate,
        input_tokens=input_tokens,
        output_tokens=output_tokens,
        token_ms=token_ms,
        first_token_ms=first_token_ms,
    )
    cluster = cluster_of(gpu)
    found = deployments(model_of(model), cluster, traffic, gpus=gpus, quantization=quantization)
    if as_json:
        print(json.dumps([asdict(d) | {"gpus": d.gpus} for d in found], indent=1))
        return
    stored = "" if quantization is None else f", {quantization} weights"
    _print_serving(found, f"{model} on {cluster.gpu.name}{stored}", traffic)
    words = [f"bagu serve {model}", f"--tp {found[0].tp}" if found[0].tp > 1 else ""]
    words += [f"--quantization {quantization}" if quantization is not None else ""]
    print("\n" + " ".join(filter(None, words)))


def validation(*, out: Path | None, as_json: bool) -> None:
    report = validate()
    if as_json:
        print(json.dumps(_report_json(report), indent=1))
    else:
        _print_report(report)
    if out is not None:
        drawn = draw_validation(report.done, out / "validation")
        page = validation_page(report, None if drawn else out / "validation.svg")
        _write(out / "validation.html", page, drawn, quiet=as_json)


def _write(path: Path, page: str, missing: str | None, *, quiet: bool) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page, encoding="utf-8")
    console = Terminal(stderr=quiet)
    if missing:
        console.print(f"no plot: {missing}")
    console.print(f"wrote {path}", soft_wrap=True)


def train_command(found: Plan, settings: Sequence[str]) -> str:
    """The whole command of the winner. torchrun runs on every node; DATA and TOKENIZER are the user's."""
    nodes, per_node = -(-found.gpus // found.cluster.gpus_per_node), min(found.gpus, found.cluster.gpus_per_node)
    if nodes == 1:
        start, launched = "bagu train", f" --nproc {found.gpus}" if found.gpus > 1 else ""
    else:
        start = f"torchrun --nnodes {nodes} --nproc-per-node {per_node} --rdzv-backend c10d --rdzv-endpoint HOST:29400"
        start, launched = f"{start} --max-restarts 3 -m bagu train", " --resume auto"
    workload = found.workload
    line = mesh_line(found.winner.layout, workload.batch, precision=workload.precision)
    words = [f"data.context={workload.seq}", "tokenizer.path=TOKENIZER", "tokenizer.vocab_size=null", *settings]
    return f"{start} DATA --out runs/plan{launched} {line}" + "".join(f" --set {word}" for word in words)


def _print(found: Plan, top: int, tokens: float | None, title: str, train: str) -> None:
    console = Terminal()
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    table.add_column("layout", overflow="fold")
    for name in ("s/step", "from–to", "MFU %", "tokens/s", "GiB/GPU", *(("days", "USD") if tokens else ())):
        table.add_column(name, justify="right")
    for choice in found.distinct(top):
        cells = [choice.layout.words(), f"{choice.step_s:.3f}"]
        cells += [f"{choice.between_s[0]:.3g}–{choice.between_s[1]:.3g}", f"{100 * choice.mfu:.1f}"]
        cells += [f"{choice.tokens_per_s:,.0f}", f"{choice.memory_gib:.1f}"]
        if tokens:
            days = choice.days(tokens)
            cells += [f"{days:,.1f}" if days >= 1 else f"{days:.2g}", f"{_cost(found.cluster, found.gpus, days):,.0f}"]
        table.add_row(*cells)
    console.print(table)
    console.print()
    for sentence in explain(found):
        console.print(sentence, highlight=False)
    console.print(f"\n{train}", highlight=False, soft_wrap=True, markup=False)


def _cost(cluster: Cluster, gpus: int, days: float) -> float:
    return days * 24 * gpus * cluster.gpu.usd_per_hour


def _as_json(found: Plan, top: int, tokens: float | None) -> dict[str, Any]:
    def one(choice: Any) -> dict[str, Any]:
        row = {
            "layout": asdict(choice.layout),
            "mesh": mesh_line(choice.layout, found.workload.batch, precision=found.workload.precision),
            "step_s": choice.step_s,
            "between_s": choice.between_s,
            "mfu": choice.mfu,
            "tokens_per_s": choice.tokens_per_s,
            "memory_gib": choice.memory_gib,
            "seconds": choice.seconds,
            "memory_bytes": choice.memory_bytes,
        }
        if tokens:
            days = choice.days(tokens)
            row |= {"days": days, "usd": _cost(found.cluster, found.gpus, days)}
        return row

    return {
        "considered": len(found.considered),
        "fit": len(found),
        "explanation": explain(found),
        "layouts": [one(choice) for choice in found.distinct(top)],
    }


def _print_serving(found: Sequence[Deployment], title: str, traffic: Traffic) -> None:
    console = Terminal()
    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    names = ("tp", "batch", "KV tokens", "requests/s", "ms/token", "ms to first", "replicas", "GPUs", "USD/M tokens")
    for name in names:
        table.add_column(name, justify="right")
    for d in found:
        table.add_row(
            str(d.tp),
            str(d.batch),
            f"{d.kv_tokens:,}",
            f"{d.requests_per_s:.2f}",
            f"{d.token_ms:.1f}",
            f"{d.first_token_ms:.0f}",
            str(d.replicas),
            str(d.gpus),
            f"{d.usd_per_million_tokens:.2f}",
        )
    console.print(table)
    first = found[0]
    console.print(
        f"\n{counted(first.replicas, 'replica')} of tp {first.tp} ({counted(first.gpus, 'GPU')}) "
        f"serve{'s' * (first.replicas == 1)} {traffic.requests_per_s:g} requests/s "
        f"of {traffic.input_tokens} + {traffic.output_tokens} tokens at {first.token_ms:.1f} ms per token; the KV "
        f"cache of a replica holds {first.kv_tokens:,} tokens.",
        highlight=False,
    )


def _print_report(report: Report) -> None:
    console = Terminal()
    table = Table(title="Step time beside published measurements", title_justify="left", box=None, pad_edge=False)
    for name in ("source", "used for", "rows", "mean error %", "signed %"):
        table.add_column(name, justify="left" if name in ("source", "used for") else "right")
    for name, (judges, rows, error, bias) in report.errors.items():
        table.add_row(
            name, "judging" if judges else "calibration", str(rows), f"{100 * error:.1f}", f"{100 * bias:+.1f}"
        )
    console.print(table)
    for name, value in report.summary():
        console.print(f"{name}: {value:.1f}" if isinstance(value, float) else f"{name}: {value}", highlight=False)
    for title, _, _, sets in report.rankings:
        for one in sets:
            share = 100 * one.right / one.pairs
            console.print(f"  {title}: {one.name}: {share:.0f} % of {one.pairs} pairs", highlight=False, soft_wrap=True)
    for name, (rows, error, bias) in report.memory.items():
        console.print(f"memory, {name}: {100 * error:.1f} % ({100 * bias:+.1f} %) of {rows} rows", highlight=False)
    console.print(report.out_of_memory, highlight=False)
    for own in report.own:
        console.print(
            f"bagu, {own.model} on one {own.gpu}, {own.micro_batches} "
            f"micro-batch{'es' * (own.micro_batches != 1)}: step {own.predicted_s:.3f} s "
            f"({100 * own.time_error:+.1f} %), peak {own.predicted_bytes / 1e9:.1f} GB "
            f"({100 * own.memory_error:+.1f} %)",
            highlight=False,
            soft_wrap=True,
        )


def _report_json(report: Report) -> dict[str, Any]:
    return {
        "judged_mean_error": report.judged_error,
        "sources": {
            name: {"judges": judges, "rows": rows, "mean_error": error, "signed_error": bias}
            for name, (judges, rows, error, bias) in report.errors.items()
        },
        "ranking": [
            {"grouping": title, "share_right": share, "pairs": pairs, "sets": [asdict(one) for one in sets]}
            for title, share, pairs, sets in report.rankings
        ],
        "memory": {
            name: {"rows": rows, "mean_error": error, "signed_error": bias}
            for name, (rows, error, bias) in report.memory.items()
        },
        "own": [asdict(one) for one in report.own],
    }
