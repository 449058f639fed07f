"""Truths: each module yields the trials of a drill."""
