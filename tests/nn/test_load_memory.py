"""Loading a checkpoint in shards takes the memory of the model and of one tensor: files are mapped, not read whole.

The child process reads its own private memory (RssAnon) at each tensor, before and after it is copied to its place.
Pages of the mapped files are not private: the system drops them when memory is short.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bagu.nn import ModelConfig, Transformer
from bagu.nn.weights import save_pretrained

CHILD = """
import sys, torch
from bagu.nn.families.core import Part
from bagu.nn.weights import from_pretrained

def private():
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) * 1024

seen, load = [], Part.load

def watched(self, tensor):
    seen.append(private())
    load(self, tensor)
    seen.append(private())

Part.load = watched
dtype = getattr(torch, sys.argv[3])
from_pretrained(sys.argv[1], dtype=dtype)  # a small one: it imports what loading needs
seen.clear()
before = private()
model = from_pretrained(sys.argv[2], dtype=dtype)
sizes = [p.numel() * p.element_size() for p in model.parameters()]
print(sum(sizes), max(sizes), seen[0] - before, max(seen) - seen[0])
"""


@pytest.mark.skipif(sys.platform != "linux", reason="private memory is read from /proc")
def test_peak_memory_is_the_model_and_one_tensor(tmp_path: Path) -> None:
    """At the first tensor the model is allocated: 1.5 times its size leaves room for the allocator (1.25 times were
    measured; the reason is not known), and not for a second copy. From there on a copy of a shard of 16 MiB would show.
    """
    small, large = tmp_path / "small", tmp_path / "large"
    for folder, layers in ((small, 1), (large, 12)):
        config = ModelConfig(
            vocab_size=2048, hidden_size=512, num_layers=layers, num_heads=8, num_kv_heads=8, head_dim=64,
            intermediate_size=1024, max_len=64, tie_embeddings=True,
        )  # fmt: skip
        model = Transformer(config, dtype=torch.bfloat16)
        with torch.no_grad():
            for p in model.parameters():
                p.fill_(0.5)
        save_pretrained(model, folder, max_shard_bytes=16 * 2**20)
    assert len(list(large.glob("*.safetensors"))) >= 4
    for dtype in ("bfloat16", "float32"):
        command = [sys.executable, "-c", CHILD, str(small), str(large), dtype]
        found = subprocess.run(command, check=True, capture_output=True).stdout
        total, largest, first, growth = map(int, found.split())
        assert first <= 1.5 * total, f"{dtype}: {first} bytes before the first tensor, for a model of {total}"
        assert growth <= largest + 8 * 2**20, f"{dtype}: {growth} bytes more while tensors of {largest} are read"
