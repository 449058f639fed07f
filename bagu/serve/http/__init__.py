"""The HTTP server: OpenAI's routes, the engine's process, metrics, and connections."""
