"""The paged KV cache: its size, the block allocator with the prefix cache, and the tensors."""
