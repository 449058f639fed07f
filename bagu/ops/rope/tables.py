"""The angles of rotary position embedding."""

import torch


def rope_tables(
    length: int, pairs: int, base: float = 10000.0, *, device: torch.device | str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(cos, sin), each fp32 [length, pairs]: the angle of pair r at position p is p * base^(-r / pairs).

    Angles are computed in fp64: at position 100,000 an fp32 angle has an error of up to 0.004 radians.
    """
    speed = base ** (-torch.arange(pairs, dtype=torch.float64, device=device) / pairs)
    angle = torch.arange(length, dtype=torch.float64, device=device).outer(speed)
    return angle.cos().float(), angle.sin().float()
