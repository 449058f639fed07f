"""A model as the embedder of an index: texts to vectors, as `/v1/embeddings` computes them."""

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from bagu.nn.digest import fingerprint_of
from bagu.recipes.loader import Loader
from bagu.serve.embedding import Encoder, embed, embed_last

BATCH_TOKENS = 8192
FLOOR = 0.4  # a passage with a smaller cosine is not offered; chosen, not calibrated


class ModelEmbedder:
    """A run, or another model that gives vectors. Long texts are cut at the model's longest sequence."""

    floor = FLOOR

    def __init__(self, name: str, *, device: str | None = None) -> None:
        self.name = str(Path(name).resolve()) if Path(name).exists() else name
        self.model, self.tokenizer, _ = Loader(model=name, device=device)()
        self.model.eval()
        self.size = len(self.embed(["size"])[0])

    @cached_property
    def digest(self) -> str:
        return fingerprint_of(dict(self.model.named_parameters()))

    def embed_query(self, text: str) -> np.ndarray:
        return np.asarray(self.embed([text])[0])

    def embed(self, texts: Sequence[str]) -> np.ndarray:
        longest = self.model.config.max_len
        ids = [self.tokenizer.encode(text)[:longest] or [self.tokenizer.eos_id] for text in texts]
        encoder = Encoder(self.model, BATCH_TOKENS, embed_last if self.model.config.causal else embed)
        encoder.add(0, ids)
        while encoder.has_work:
            if done := encoder.step():
                return np.array(done[0][1], dtype=np.float32)
        return np.zeros((0, self.size), dtype=np.float32)
