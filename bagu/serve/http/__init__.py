"""The HTTP server: the OpenAI API, the engine process, metrics and connections."""
