"""Serving: requests, block accounting and scheduling, the paged cache, the sampler, the engine, and its HTTP server."""
