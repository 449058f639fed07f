"""Constrained decoding: grammars compiled to masks of the tokens that may follow."""
