"""The engine's process: it reads messages, runs the steps of an engine and sends their events."""
