"""RoPE's inner product depends on m - n only, within the precision of the arithmetic.

    <R(m) q, R(n) k> = <R(m + s) q, R(n + s) k>        for all shifts s

The error comes from the angle, position times frequency: its rounding error grows with the position, which makes cos
and sin those of another angle. bf16 has 8 bits: it cannot represent position 257 and rounds it to 256.
"""

import torch

from bagu import ops
from bagu.lab.core import Row
from bagu.nn.config import Rope
from bagu.nn.positions import rope_speeds

HEAD, DRAWS = 128, 256
DISTANCES = (0, 1, 8, 64, 512)
# dtype of the angles, dtype of cos and sin, dtype of q and k
ARITHMETIC: dict[str, tuple[torch.dtype, torch.dtype, torch.dtype]] = {
    "fp64 angles": (torch.float64, torch.float32, torch.float32),  # as in bagu.nn
    "fp32 angles": (torch.float32, torch.float32, torch.float32),
    "bf16 angles": (torch.bfloat16, torch.bfloat16, torch.float32),
    "bf16 cos and sin": (torch.float64, torch.bfloat16, torch.float32),
    "bf16 q and k": (torch.float64, torch.float32, torch.bfloat16),
}


def measure(arithmetic: str, shifts: tuple[int, ...], device: str) -> list[Row]:
    """The change of the inner product with the shift, over random q and k at several distances."""
    still = products(arithmetic, 0, device)
    rows: list[Row] = []
    for shift in shifts:
        drift = (products(arithmetic, shift, device) - still).abs()
        rows.append(
            {
                "part": "shift",
                "arithmetic": arithmetic,
                "shift_tokens": shift,
                "drift_mean_percent": 100 * drift.mean().item(),
                "drift_max_percent": 100 * drift.max().item(),
            }
        )
    return rows


def products(arithmetic: str, shift: int, device: str) -> torch.Tensor:
    """[distances, draws]: <R(shift + distance) q, R(shift) k> / |q||k|, summed in fp64."""
    dtype = ARITHMETIC[arithmetic][2]
    generator = torch.Generator().manual_seed(0)  # the same q and k for every shift and precision
    q, k = torch.randn(2, DRAWS, HEAD, generator=generator).to(device, dtype).unbind()
    distances = torch.tensor(DISTANCES, device=device)
    turned_q, turned_k = (
        ops.rope(x.expand(len(distances), -1, -1), *tables(arithmetic, positions)).double()
        for x, positions in ((q, shift + distances), (k, torch.full_like(distances, shift)))
    )
    return (turned_q * turned_k).sum(-1) / (q.double().norm(dim=-1) * k.double().norm(dim=-1))


def tables(arithmetic: str, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin) [positions, pairs] as `ops.rope` expects them: fp32, after rounding to the narrower dtypes."""
    made, kept, _ = ARITHMETIC[arithmetic]
    speeds, _ = rope_speeds(Rope(), HEAD)
    angle = positions.to(made).outer(speeds.to(positions.device, made))
    return angle.cos().to(kept).float(), angle.sin().to(kept).float()
