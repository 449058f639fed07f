"""Triton's interpreter must be chosen before Triton is imported, and only where there is no GPU to compile for."""

from __future__ import annotations

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
