"""`bagu bench layers`: layers of torch.nn beside their drop-in versions, under eager, torch.compile and ONNX Runtime.

Every implementation has the same weights and input. The error is the largest difference from the layer in fp64, over
the largest value. Peak memory is that of one call above the memory before it (GPU only).
"""

from __future__ import annotations

import copy
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bagu.bench.harness import RESULTS, Rows, table
from bagu.bench.layer_list import LAYERS, Layer
from bagu.bench.layer_plot import draw
from bagu.bench.onnx_runner import onnx_runner, why_no_onnx
from bagu.bench.ops_timing import peak_bytes
from bagu.bench.sizing import dtype_named
from bagu.bench.units import duration
from bagu.errors import UnknownName
from bagu.machine.device import default_device
from bagu.machine.timing import flush_buffer, measure
from bagu.nn import drop_in

__all__ = ["main"]

PASSES = ("forward", "forward+backward")
Run = Callable[[], object]


def main(
    names: Sequence[str] = (), *, batches: Sequence[int] = (), dtype: str | None = None, device: str | None = None,
    compiled: bool = True, seconds: float = 0.3, plot: bool = True, out: Path | None = None, as_json: bool = False,
) -> int:  # fmt: skip
    """Time the named layers, all by default, and record a row per layer, batch, pass and implementation."""
    where = torch.device(device) if device else default_device()
    layers = LAYERS["cuda" if where.type == "cuda" else "cpu"]
    for name in names:
        if name not in layers:
            raise UnknownName.among("layer", name, layers)
    chosen = dtype_named(dtype or ("bf16" if where.type == "cuda" else "fp32"))
    rows = Rows(out, default=RESULTS / "layers", as_json=as_json)
    if (reason := why_no_onnx(where)) is not None:
        rows.console.print(f"[yellow]note[/]  no ONNX Runtime: {reason}")
    scrub = flush_buffer(where)
    for layer in (layers[name] for name in names or layers):
        for batch in batches or ((1, 8, 32) if where.type == "cuda" else (1, 8)):
            found = _rows(layer, batch, chosen, where, compiled=compiled, seconds=seconds, scrub=scrub)
            rows.add(found)
            rows.console.print(_table(layer, batch, found))
    if plot and rows.record is not None:
        reason = draw(rows.all, rows.record.parent / "plots" / rows.record.stem)
        rows.console.print(f"[dim]{len(rows.all)} rows → {rows.record}{f'; no plot: {reason}' if reason else ''}[/]")
    rows.finish(_summary(rows.all))
    return 0


def _rows(
    layer: Layer, batch: int, dtype: torch.dtype, device: torch.device, *, compiled: bool, seconds: float,
    scrub: torch.Tensor,
) -> list[dict[str, Any]]:  # fmt: skip
    torch.manual_seed(0)
    exact = layer.build(nn).double()
    shape = (batch, *layer.shape)
    wide = torch.randint(layer.tokens, shape) if layer.tokens else torch.randn(shape, dtype=torch.float64)
    want = exact(wide).detach()
    x = wide.to(device) if layer.tokens else wide.to(device, dtype)
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
        models["compile"] = torch.compile(copy.deepcopy(models["eager"]))
    found = []
    for name, model in models.items():
        for step, run in _passes(model, x).items():
            t = measure(run, device, seconds=seconds, buffer=scrub)
            error = _error(model, x, want) if step == "forward" else None
            found.append(_row(layer, batch, dtype, device, name, step, t.median_s, t.low_s, t.high_s, error, run))
    if (session := onnx_runner(models["eager"], x)) is not None:
        t = measure(session, device, seconds=seconds, buffer=scrub)
        # the session has the eager model's statistics, and norms use them: unlike the others it cannot run in training
        # mode, in which their errors are measured
        same = copy.deepcopy(models["eager"]).cpu().double().eval()(wide).detach()
        error = _difference(torch.as_tensor(session()), same)
        found.append(_row(layer, batch, dtype, device, "onnxruntime", "forward", t.median_s, t.low_s, t.high_s, error))
    return found


def _row(
    layer: Layer, batch: int, dtype: torch.dtype, device: torch.device, name: str, step: str, median: float, low: float,
    high: float, error: float | None, run: Run | None = None,
) -> dict[str, Any]:  # fmt: skip
    return {
        "layer": layer.name, "batch": batch, "shape": list(layer.shape), "dtype": str(dtype).removeprefix("torch."),
        "device": device.type, "implementation": name, "pass": step, "median_s": median, "low_s": low, "high_s": high,
        "per_s": batch / median, "error": error, "peak_bytes": None if run is None else peak_bytes(run, device),
    }  # fmt: skip


def _passes(model: nn.Module, x: torch.Tensor) -> dict[str, Run]:
    def forward() -> object:
        with torch.no_grad():
            return model.eval()(x)

    leaf = x.detach().requires_grad_(x.is_floating_point())

    def both() -> object:
        model.train()(leaf).float().sum().backward()
        model.zero_grad(set_to_none=True)
        leaf.grad = None
        return None

    return dict(zip(PASSES, (forward, both), strict=True))


def _error(model: nn.Module, x: torch.Tensor, want: torch.Tensor) -> float:
    with torch.no_grad():
        return _difference(model.train()(x), want)


def _difference(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double().cpu() - want).abs().max() / want.abs().max()).item()


def _table(layer: Layer, batch: int, rows: Sequence[Mapping[str, Any]]) -> Any:
    lines = []
    for row in rows:
        best = min(r["median_s"] for r in rows if r["pass"] == row["pass"] and r["implementation"] != "bagu")
        memory = "–" if row["peak_bytes"] is None else f"{row['peak_bytes'] / 2**20:.1f}"
        error = "–" if row["error"] is None else f"{row['error']:.1e}"
        ratio = f"{best / row['median_s']:.2f}"
        per_s = f"{row['per_s']:,.0f}"
        lines.append((row["implementation"], row["pass"], duration(row["median_s"]), per_s, ratio, memory, error))
    heads = ("implementation", "pass", "time", "inputs/s", "vs best peer", "peak MiB", "error")
    return table(f"{layer.name}, batch {batch} x {list(layer.shape)}", heads, lines)


def _summary(rows: Sequence[Mapping[str, Any]]) -> str:
    """The geometric mean, over layers, batches and passes, of the best peer's time over bagu's."""
    ratios = []
    for row in rows:
        if row["implementation"] == "bagu" and row["layer"] != "int8_linear":
            same = [r for r in rows if all(r[k] == row[k] for k in ("layer", "batch", "pass"))]
            best = min(r["median_s"] for r in same if r["implementation"] in ("eager", "compile"))
            ratios.append(best / row["median_s"])
    if not ratios:
        return "no layer besides int8_linear was timed"
    mean = statistics.geometric_mean(ratios)
    return f"bagu is {mean:.2f}x the best of torch eager and compile (geometric mean of {len(ratios)}, without int8)"
