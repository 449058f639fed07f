"""Set the constants of calibration.py: `python -m benchmarks.tools.plan_calibrate` prints them.

The loss is the mean of |log(predicted / measured)| of step times over the calibration rows (rows.CALIBRATE). Each
constant has a physical range; coordinate descent tries steps up and down, and halves them when none helps.
"""

from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np

from bagu.parallel.planner.calibration import CALIBRATION, Calibration
from bagu.parallel.planner.rows import CALIBRATE, Row, read_rows
from bagu.parallel.planner.validate import compare

RANGES: dict[str, tuple[float, float]] = {
    "matmul_ampere": (0.8, 1.05),
    "matmul_hopper": (0.75, 1.05),
    "ramp_k": (32.0, 512.0),
    "hbm": (0.6, 0.92),
    "network": (0.5, 0.92),
    "interference": (0.05, 0.5),
    "tp_hidden": (0.0, 0.9),
    "launch_us": (3.0, 15.0),
    "step_ms": (5.0, 100.0),
}


def calibration_rows() -> list[Row]:
    return [row for row in read_rows() if row.source in CALIBRATE]


def loss(calibration: Calibration, rows: Sequence[Row]) -> float:
    return float(np.mean([abs(np.log1p(x.error)) for x in compare(rows, calibration)]))


def fit(start: Calibration, rows: Sequence[Row], *, steps: Sequence[float] = (0.15, 0.05, 0.02)) -> Calibration:
    best, lowest = start, loss(start, rows)
    for step in steps:
        moved = True
        while moved:
            moved = False
            for field in fields(Calibration):
                for factor in (1 + step, 1 / (1 + step)):
                    low, high = RANGES[field.name]
                    value = round(float(np.clip(getattr(best, field.name) * factor, low, high)), 4)
                    tried = replace(best, **{field.name: value})
                    found = loss(tried, rows)
                    if found < lowest - 1e-6:
                        best, lowest, moved = tried, found, True
    return best


if __name__ == "__main__":
    found = fit(CALIBRATION, calibration_rows())
    print(found, f"mean |log error| {loss(found, calibration_rows()):.4f}")
