"""Labs about serving: the KV cache, batches, queues, drafts, grammars."""
