"""Write new keys or values to a paged cache. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.kv_write.spec import SPEC


def kv_write(
    cache: torch.Tensor,
    x: torch.Tensor,
    slots: torch.Tensor,
    *,
    scale: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Write row t of x[*T, G, D] to slot `slots[t]` of cache[N, B, G, D], in place: block slots // B, row slots % B.

    Slots are in [0, N * B). If two rows have the same slot, either of them may remain, so the padding rows of a batch
    use a slot of a block that is never read. An int8 or float8_e4m3fn cache has scale[N, B, G], which is written too.
    """
    call(SPEC, backend, x=x, slots=slots, cache=cache, scale=scale)
