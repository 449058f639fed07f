"""The largest of many normal numbers, which is the range of a scale: predicts the error of rounding to integers.

Rounding with step t adds noise of variance t^2 / 12. With a scale per row, t is the largest magnitude of the row over
the number of steps, so the noise follows from the expected square of that maximum:

    P(max |x| <= u) = prod_i erf(u / (sqrt(2) s_i))        E[max^2] = integral of 2 u (1 - P(max |x| <= u)) du
"""

import torch

POINTS, REACH = 20_000, 10.0  # of the integral, and its end in standard deviations: 2^64 numbers stay below 10


def mean_square_peak(count: int, *, outliers: int = 0, outlier_std: float = 1.0) -> float:
    """E[max^2] of `count` normal numbers: `outliers` of them have standard deviation `outlier_std`, the others 1."""
    u = torch.linspace(0, REACH * max(outlier_std, 1.0), POINTS, dtype=torch.float64)
    below = (count - outliers) * _log_inside(u) + (outliers * _log_inside(u / outlier_std) if outliers else 0.0)
    return float(torch.trapezoid(2 * u * -torch.expm1(below), u))


def _log_inside(u: torch.Tensor) -> torch.Tensor:
    """log P(|N| <= u); at 0 the logarithm of the smallest number, because 0 times -inf would be NaN."""
    return torch.log1p(-torch.erfc(u / 2**0.5)).clamp(min=-700.0)
