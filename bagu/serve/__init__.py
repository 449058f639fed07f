"""Serving: the engine (scheduler, paged KV cache, model runner, sampler), its HTTP server, and the chat clients."""
