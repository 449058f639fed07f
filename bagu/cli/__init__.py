"""The program `bagu`."""

from bagu.cli.app import app, main

__all__ = ["app", "main"]
