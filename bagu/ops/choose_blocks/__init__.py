"""The blocks that queries of block-sparse attention choose. spec.py has the definition and the cost."""

import torch

from bagu.ops.call.dispatch import call
from bagu.ops.choose_blocks.spec import SPEC


def choose_blocks(
    q: torch.Tensor,
    means: torch.Tensor,
    block_tables: torch.Tensor,
    cu_seqlens: torch.Tensor,
    context_lens: torch.Tensor,
    max_len: int,
    max_context: int,
    *,
    size: int,
    top: int,
    near: int,
    dense_below: int,
    pages: bool = False,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(blocks[T, G, K], lengths[T, G]): for each of the new tokens q[T, H, D] and each key head the numbers of the
    blocks of its sequence that it attends to, ascending, then -1; and how many keys it sees in them.

    means[N, G, D] are the mean keys of full blocks; block j of sequence s is means[block_tables[s, j]]. Chosen are the
    token's own block, the `near` ones before it, the first, and the `top` others whose mean key has the largest product
    with the sum of the queries of the key head. A token before position `dense_below` attends to all blocks. With
    `pages` the result has the blocks' numbers in `means`: a table for `paged_attention`. The other arguments are as
    there. There are no gradients.
    """
    return call(
        SPEC, backend, q=q, means=means, block_tables=block_tables, cu_seqlens=cu_seqlens, context_lens=context_lens,
        max_len=max_len, max_context=max_context, size=size, top=top, near=near, dense_below=dense_below,
        pages=pages,
    )  # fmt: skip
