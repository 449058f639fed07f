"""The KV cache: its pool of blocks, who holds which block, and the view a step attends through."""
