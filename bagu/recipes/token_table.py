"""The recipe `token_table`: an embedder for two CPU cores, a vector per term (retrieve/table.py), from pairs of query
and passage. Training is InfoNCE over the pairs of a batch, as in the recipe `contrastive`.

    bagu train pairs.jsonl --recipe token_table --out runs/table      # your own pairs
    bagu train installed --recipe token_table --out runs/table        # docstrings of the installed packages
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from bagu.data.corpus import Selection, SourceConfig
from bagu.data.docstrings import docstring_pairs, installed_folders
from bagu.data.pairs import Pair, PairCorpus
from bagu.errors import ArgumentError
from bagu.recipes.verbs import TrainOptions
from bagu.retrieve.table import packed, save
from bagu.retrieve.words import terms
from bagu.train.objectives.contrastive import contrastive_nll, first_of_each

TAKEN = ("data", "recipe", "steps", "lr", "out")  # options of `bagu train` that this recipe has
MIN_PAIRS = 32


@dataclass(frozen=True, kw_only=True)
class TableConfig:
    steps: int = 200
    batch: int = 1024  # pairs; each has the others as negatives
    size: int = 256
    lr: float = 3e-3
    scale: float = 20.0  # 1 / temperature
    rare: int = 3  # pairs that a term must be in
    drop_query: float = 0.1  # share of terms left out in training, against learning pairs by heart
    drop_passage: float = 0.3
    seed: int = 0


class Table(nn.Module):
    """Vectors of V terms for passages, what queries add to them, and the logarithms of the terms' weights."""

    def __init__(self, idf: torch.Tensor, size: int) -> None:
        super().__init__()
        self.base = nn.Parameter(torch.randn(len(idf), size) * size**-0.5)
        self.query = nn.Parameter(torch.zeros(len(idf), size))
        self.weights = nn.Parameter(torch.stack((idf.log(), idf.log())))  # of passages, of queries

    def table(self, *, query: bool) -> torch.Tensor:
        rows = self.base + self.query if query else self.base
        return rows * self.weights[int(query)].exp().unsqueeze(1)

    def forward(self, ids: torch.Tensor, times: torch.Tensor, starts: torch.Tensor, *, query: bool) -> torch.Tensor:
        rows = self.base + self.query if query else self.base
        own = times * self.weights[int(query)].exp()[ids]
        return F.normalize(F.embedding_bag(ids, rows, starts, per_sample_weights=own, mode="sum"), dim=1)


class Bags:
    """Texts as bags of term numbers, from which batches are drawn."""

    def __init__(self, texts: Sequence[str], codes: dict[str, int]) -> None:
        ids, times, starts = packed(texts, codes)
        self.ids, self.times = torch.from_numpy(ids), torch.from_numpy(times)
        self.ends = [*starts.tolist(), len(ids)]

    def batch(
        self, rows: Sequence[int], drop: float, rng: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        parts = [slice(self.ends[row], self.ends[row + 1]) for row in rows]
        sizes = torch.tensor([part.stop - part.start for part in parts])
        times = torch.cat([self.times[part] for part in parts])
        times = times * (torch.rand(len(times), generator=rng) >= drop)
        return torch.cat([self.ids[part] for part in parts]), times, sizes.cumsum(0) - sizes


def train_table(
    pairs: Sequence[tuple[str, str]],
    config: TableConfig,
    report: Callable[[int, float], None] = lambda step, loss: None,
) -> tuple[list[str], np.ndarray, np.ndarray]:
    """The terms, and their vectors for passages and for queries."""
    found = Counter(term for query, passage in pairs for term in dict.fromkeys((*terms(query), *terms(passage))))
    words = [term for term, count in found.items() if count >= config.rare]
    codes = {term: i for i, term in enumerate(words)}
    if len(pairs) < MIN_PAIRS or not words:
        raise ArgumentError(f"{len(pairs)} pairs with {len(words)} terms", hint=f"at least {MIN_PAIRS} pairs")
    rng = torch.Generator().manual_seed(config.seed)
    torch.manual_seed(config.seed)
    idf = torch.tensor([np.log1p(len(pairs) / found[term]) for term in words], dtype=torch.float32)
    table = Table(idf, config.size)
    queries, passages = (Bags([pair[side] for pair in pairs], codes) for side in (0, 1))
    keys = torch.tensor([[hash(text) for text in pair] for pair in pairs])
    groups = [
        {"params": [table.base, table.query], "lr": config.lr},
        {"params": [table.weights], "lr": 3 * config.lr},
    ]
    optimizer = torch.optim.Adam(groups)
    size, order = min(config.batch, len(pairs)), torch.empty(0, dtype=torch.long)
    for step in range(1, config.steps + 1):
        if len(order) < size:
            order = torch.randperm(len(pairs), generator=rng)
        rows, order = order[:size], order[size:]
        q = table(*queries.batch(rows.tolist(), config.drop_query, rng), query=True)
        p = table(*passages.batch(rows.tolist(), config.drop_passage, rng), query=False)
        keep = first_of_each(keys[rows, 0]) & first_of_each(keys[rows, 1])
        loss = contrastive_nll(q, p, config.scale, keep).sum() / keep.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        report(step, loss.item())
    with torch.no_grad():
        return words, table.table(query=False).numpy(), table.table(query=True).numpy()


def main(given: TrainOptions) -> int:
    """`bagu train DATA --recipe token_table`."""
    defaults = TrainOptions()
    other = [
        f.name for f in fields(given) if f.name not in TAKEN and getattr(given, f.name) != getattr(defaults, f.name)
    ]
    if other:
        raise ArgumentError(f"token_table has no option {other[0]}", hint=f"it has {', '.join(TAKEN)}")
    began, pairs = time.monotonic(), list(read_pairs(given.data or ("stdlib",)))
    usual = TableConfig()
    config = replace(usual, steps=given.steps or usual.steps, lr=given.lr or usual.lr)
    print(f"{len(pairs):,} pairs; {config.steps} steps of {min(config.batch, len(pairs)):,}", flush=True)

    def report(step: int, loss: float) -> None:
        if step % 20 == 0 or step == config.steps:
            print(f"step {step} of {config.steps}, loss {loss:.3f} nats, {time.monotonic() - began:.0f} s", flush=True)

    words, passages, queries = train_table([(pair.query, pair.passage) for pair in pairs], config, report)
    save(given.out, words, passages, queries)
    print(f"{given.out}: {len(words):,} terms; bagu index FOLDER --embedder {given.out}")
    return 0


def read_pairs(data: Iterable[str]) -> Iterable[Pair]:
    """`installed`: docstrings of the installed packages; a folder: of its Python files; else pairs as for
    `contrastive`."""
    for name in data:
        if name == "installed":
            yield from docstring_pairs(installed_folders())
        elif Path(name).is_dir():
            yield from docstring_pairs([Path(name)])
        else:
            source = SourceConfig() if name == "stdlib" else SourceConfig(path=name)
            corpus = PairCorpus.of("pairs", source, Selection(dedup="auto", validation=0.0, seed=0))
            yield from corpus.pairs("train")
