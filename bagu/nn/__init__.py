"""The model: one Transformer for one device; its config selects every component.

>>> model = init_weights(Transformer(config, dtype=torch.bfloat16), seed=0)
>>> out = model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
>>> logits = model.logits(out.hidden)
"""

from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Output, Transformer
from bagu.nn.presets import preset

__all__ = ["ModelConfig", "Output", "Transformer", "init_weights", "preset"]
