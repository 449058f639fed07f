"""Drills: write a part by hand, have it graded by the truth, and run the stack with it (docs/drills.md)."""
