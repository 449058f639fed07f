"""`bagu bench layers`: layers of torch.nn beside their drop-in versions, under eager, torch.compile and ONNX Runtime.

Every implementation has the same weights and input. The passes are a forward in inference (evaluation mode, no
gradients), and a forward and backward in training from a random gradient of the output, or from 1 for a loss.
Implementations are timed in turn.

The time is that of a call among calls in a row, which a user sees: the host's or the GPU's, whichever is longer. On a
GPU, `device_s` is the GPU's time alone, with cold caches; on a CPU it is the time of a call with cold caches.

The error is the largest difference from the layer in fp64, over the largest value. Peak memory is that of one call
above the memory before it (GPU only).
"""

from __future__ import annotations

import copy
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from bagu.bench.harness import Rows, table
from bagu.bench.layer_list import LAYERS, Layer
from bagu.bench.onnx_runner import onnx_runner, why_no_onnx
from bagu.bench.ops_timing import peak_bytes
from bagu.bench.options import LayersBench, OpSetting
from bagu.bench.sas import read_sas, sas_lines, write_sas
from bagu.bench.sizing import dtype_named
from bagu.bench.units import duration
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.device import named_device
from bagu.machine.timing import Timing, flush_buffer, measure_in_turn, measure_rate
from bagu.nn import drop_in
from bagu.runs.plot_style import write_plot

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PASSES = {"forward": False, "forward+backward": True}  # whether the layer is in training mode
Run = Callable[[], object]


def main(given: LayersBench, setting: OpSetting) -> int:
    """Time the named layers, all by default, and record a row per layer, batch, pass and implementation."""
    names, batches, seconds = given.names, given.batch, given.seconds
    where = named_device(setting.device)
    layers = LAYERS["cuda" if where.type == "cuda" else "cpu"]
    for name in names:
        UnknownName.check("layer", name, layers)
    if min(batches, default=1) < 1 or not 0 <= seconds < math.inf:
        raise ArgumentError(
            f"batches {list(batches)}, {seconds} seconds", hint="a batch is 1 or more, the time 0 or more"
        )
    sizes = batches or ((1, 8, 32) if where.type == "cuda" else (1, 8))
    if given.write_sas is not None:
        written = write_sas(given.write_sas, {n: layers[n] for n in names or layers}, sizes)
        print(f"{given.write_sas}: {', '.join(written)} (no SAS was run here; see bagu/bench/sas.py)")
        return 0
    theirs = [] if given.read_sas is None else read_sas(given.read_sas)
    chosen = dtype_named(setting.dtype or ("bf16" if where.type == "cuda" else "fp32"))
    rows = Rows.of(setting, "layers")
    if (reason := why_no_onnx(where)) is not None:
        rows.console.print(f"[yellow]note[/]  no ONNX Runtime: {reason}")
    scrub = flush_buffer(where)
    for layer in (layers[name] for name in names or layers):
        for batch in sizes:
            found = _rows(layer, batch, chosen, where, compiled=given.compile, seconds=seconds, scrub=scrub)
            rows.add(found)
            rows.show(_table(layer, batch, found))
            for line in sas_lines(theirs, found):
                rows.console.print(line)
    if given.plot and rows.record is not None:
        reason = draw(rows.all, rows.record.parent / "plots" / rows.record.stem)
        rows.console.print(f"[dim]{len(rows.all)} rows → {rows.record}{f'; no plot: {reason}' if reason else ''}[/]")
    rows.finish(_summary(rows.all))
    return 0


def _rows(
    layer: Layer,
    batch: int,
    dtype: torch.dtype,
    device: torch.device,
    *,
    compiled: bool,
    seconds: float,
    scrub: torch.Tensor,
) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    exact = layer.build(nn).to(device, torch.float64).eval()
    shape = (batch, *layer.shape)
    wide = torch.randint(layer.tokens, shape) if layer.tokens else torch.randn(shape, dtype=torch.float64)
    wide = wide.to(device)
    with torch.no_grad():
        want = exact(wide)
    x = wide if layer.tokens else wide.to(dtype)
    if x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    models: dict[str, Any] = {}
    for name, kit in (("eager", nn), ("bagu", drop_in)):
        models[name] = model = layer.build(kit).to(device, dtype)
        model.load_state_dict(exact.state_dict())
        for weight in model.parameters():
            if weight.ndim == 4:
                weight.data = weight.data.contiguous(memory_format=torch.channels_last)
    if compiled:
        torch.compiler.reset()  # after several shapes it would compile for all shapes, and then stop compiling
        models["compile"] = torch.compile(copy.deepcopy(models["eager"]))
    session = onnx_runner(models["eager"], x)
    found = []
    for step, training in PASSES.items():
        runs = [_call(model.train(training), x, step) for model in models.values()]
        names = list(models)
        if session is not None and not training:
            runs, names = [*runs, session], [*names, "onnxruntime"]
        cold = measure_in_turn(runs, device, seconds=seconds, buffer=scrub)
        rates = measure_rate(runs, device, seconds=seconds)
        for name, run, t, alone in zip(names, runs, rates, cold, strict=True):
            row = _row(layer, batch, dtype, device, name, step, t)
            row["device_s"] = alone.median_s
            row["error"] = None if training else _difference(torch.as_tensor(run()), want)
            row["peak_bytes"] = peak_bytes(run, device)
            found.append(row)
    return found


def _row(
    layer: Layer, batch: int, dtype: torch.dtype, device: torch.device, name: str, step: str, t: Timing
) -> dict[str, Any]:
    return {
        "layer": layer.name, "batch": batch, "shape": list(layer.shape), "dtype": str(dtype).removeprefix("torch."),
        "device": device.type, "implementation": name, "pass": step, "median_s": t.median_s, "low_s": t.low_s,
        "high_s": t.high_s, "samples": t.samples, "per_s": batch / t.median_s, "device_s": None, "error": None,
        "peak_bytes": None,
    }  # fmt: skip


def _call(model: nn.Module, x: torch.Tensor, step: str) -> Run:
    if step == "forward":

        def forward() -> object:
            with torch.no_grad():
                return model(x)

        return forward
    leaf = x.detach().requires_grad_(x.is_floating_point())
    leaves = [*([leaf] if leaf.requires_grad else []), *model.parameters()]
    y = model(leaf)
    dy = torch.randn_like(y) if y.ndim else torch.ones_like(y)
    return lambda: torch.autograd.grad(model(leaf), leaves, dy)


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference over the largest value."""
    return ((got.to(want) - want).abs().max() / want.abs().max()).item()


def _table(layer: Layer, batch: int, rows: Sequence[Mapping[str, Any]]) -> Any:
    lines = []
    for row in rows:
        best = min(r["median_s"] for r in rows if r["pass"] == row["pass"] and r["implementation"] != "bagu")
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        error = "–" if row["error"] is None else f"{row['error']:.1e}"
        ratio = f"{best / row['median_s']:.2f}"
        per_s = f"{row['per_s']:,.0f}"
        lines.append(
            (
                row["implementation"],
                row["pass"],
                duration(row["median_s"]),
                duration(row["device_s"]),
                per_s,
                ratio,
                memory,
                error,
            )
        )
    heads = ("implementation", "pass", "time", "device", "inputs/s", "vs best peer", "peak MiB", "error")
    return table(f"{layer.name}, batch {batch} x {list(layer.shape)}", heads, lines)


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The geometric means, over layers, batches and passes, of the best peer's time over bagu's."""
    ratios: dict[str, list[float]] = {"median_s": [], "device_s": []}
    for row in rows:
        if row["implementation"] == "bagu" and row["layer"] != "int8_linear":
            same = [r for r in rows if all(r[k] == row[k] for k in ("layer", "batch", "pass"))]
            for time, found in ratios.items():
                found.append(min(r[time] for r in same if r["implementation"] in ("eager", "compile")) / row[time])
    if not ratios["median_s"]:
        return "no layer besides int8_linear was timed"
    mean, alone = (statistics.geometric_mean(found) for found in ratios.values())
    count = len(ratios["median_s"])
    return (
        f"bagu is {mean:.2f}x the best of torch eager and compile (geometric mean of {count}, without int8), and"
        f" {alone:.2f}x by the device's time alone"
    )


COLOURS = {"bagu": "#d55e00", "eager": "#0072b2", "compile": "#009e73", "onnxruntime": "#cc79a7"}


def draw(rows: Sequence[Mapping[str, Any]], folder: Path) -> str | None:
    """Write one picture per layer into `folder`. Returns the reason if nothing was drawn, else None."""
    reason = None
    for name in dict.fromkeys(row["layer"] for row in rows):
        plot = partial(_plot, rows=[row for row in rows if row["layer"] == name])
        reason = write_plot(plot, folder / name, (9, 3.6), {"svg.hashsalt": name})
    return reason


def _plot(figure: Figure, rows: Sequence[Mapping[str, Any]]) -> None:
    from matplotlib.ticker import LogLocator, NullLocator

    steps = list(dict.fromkeys(row["pass"] for row in rows))
    for axes, step in zip(figure.subplots(1, len(steps), squeeze=False)[0], steps, strict=True):
        for name, colour in COLOURS.items():
            points = sorted(
                (r["batch"], 1e3 * r["median_s"]) for r in rows if r["pass"] == step and r["implementation"] == name
            )
            if points:
                axes.plot(*zip(*points, strict=True), marker="o", color=colour, label=name)
        axes.set(title=step, xlabel="batch", ylabel="ms", xscale="log", yscale="log")
        batches = sorted({r["batch"] for r in rows})
        axes.set_xticks(batches, labels=list(map(str, batches)))
        axes.set_xticks([], minor=True)
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_locator(NullLocator())
        axes.grid(True)
        axes.legend()
    first = rows[0]
    figure.suptitle(f"{first['layer']} {first['shape']}, {first['dtype']}, {first['device']}", x=0.01, ha="left")
