"""The messages between the HTTP process and the engine's process, and their encoding."""
