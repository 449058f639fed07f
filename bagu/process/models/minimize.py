"""BFGS with backtracking, for smooth functions of a few dozen numbers."""

from collections.abc import Callable

import numpy as np

from bagu.errors import BaguError

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]


def minimize(function: Function, start: np.ndarray, *, steps: int, tolerance: float = 1e-5) -> tuple[np.ndarray, float]:
    """A local minimum of `function`, which returns its value and gradient, and the value there."""
    x = start.copy()
    value, gradient = function(x)
    inverse = np.eye(len(x))
    for _ in range(steps):
        step = -inverse @ gradient
        if step @ gradient >= 0:  # rounding: begin again with the steepest descent
            inverse = np.eye(len(x))
            step = -gradient
        step *= min(1.0, 2.0 / max(np.abs(step).max(), 1e-12))
        rate, moved = 1.0, None
        while rate > 1e-6:
            try:
                after, slope = function(x + rate * step)
            except BaguError:  # not positive definite there
                after, slope = np.inf, gradient
            if after <= value + 1e-4 * rate * float(step @ gradient):
                moved = after, slope
                break
            rate *= 0.5
        if moved is None:
            break
        s, change = rate * step, moved[1] - gradient
        gain = value - moved[0]
        x, (value, gradient) = x + s, moved
        if gain < tolerance * (1 + abs(value)):
            break
        if (product := float(s @ change)) > 1e-10:
            left = np.eye(len(x)) - np.outer(s, change) / product
            inverse = left @ inverse @ left.T + np.outer(s, s) / product
    return x, float(value)
