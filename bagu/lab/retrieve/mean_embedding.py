"""The mean vector of a masked language model as an embedding, beside words: docstrings and their functions again.

words      BM25
MLM        the mean hidden state of an encoder that has learned to fill in masked tokens
tokens     the mean of its input vectors: a bag of words without its layers
untrained  the mean hidden state before training
"""

import random
from collections.abc import Iterator, Sequence
from sqlite3 import connect

import numpy as np
import torch

from bagu.data import BpeTokenizer, DataConfig, Document, StdlibSource, in_memory, tokenize
from bagu.data.docstrings import first_sentence
from bagu.data.masked import Masking, mask_batch
from bagu.data.stdlib import Function, documented_functions
from bagu.eval.intervals import estimate
from bagu.lab.core import Claim, Kind, Row, Setting, Verdict, number, where
from bagu.lab.parts.more_steps import go_on, new
from bagu.lab.parts.tiny import tiny
from bagu.lab.plot import Bars, Panel
from bagu.nn import Transformer, count
from bagu.retrieve import postings
from bagu.retrieve.words import runs, terms
from bagu.serve.embedding import embed

VOCAB, CONTEXT, ROWS, WIDTH = 2048, 128, 8, 96
STEPS, FUNCTIONS, TEST_BYTES = 500, 600, 600
MASKED = 0.15


def run(setting: Setting) -> Iterator[Row]:
    quick = setting.quick
    documents = list(StdlibSource().documents())[:: 24 if quick else 2]
    functions = list(documented_functions(documents, max_bytes=TEST_BYTES))
    functions = random.Random(0).sample(functions, min(len(functions), 30 if quick else FUNCTIONS))
    tokenizer = BpeTokenizer.train((d.text for d in documents), vocab_size=400 if quick else VOCAB)
    gains: dict[str, list[float]] = {"words": by_words(functions)}
    seeds, steps = ((1,), 2) if quick else ((1, 2, 3), STEPS)
    config = tiny(
        tokenizer.vocab_size, WIDTH, heads=3, ffn=3 * WIDTH, max_len=CONTEXT, causal=False, tie_embeddings=True
    )
    for seed in setting.track(seeds):
        model = new(config, seed, setting.device)
        gains[f"untrained {seed}"] = by_vectors(functions, tokenizer, model)
        learn(model, documents, tokenizer, steps, seed)
        gains[f"MLM {seed}"] = by_vectors(functions, tokenizer, model)
        gains[f"tokens {seed}"] = by_vectors(functions, tokenizer, model, layers=False)
    files, words = [f.file for f in functions], np.array(gains["words"])
    for name, found in gains.items():
        ranking, _, seed_of = name.partition(" ")
        score, more = estimate(found, files), estimate(list(np.array(found) - words), files)
        yield {
            "ranking": ranking, "seed": int(seed_of or 0) or None, "seeds": len(seeds), "functions": len(functions),
            "steps": steps, "parameters": count.parameters(config).total, "mrr": score.mean, "low": score.low,
            "high": score.high, "more": more.mean, "more_low": more.low, "more_high": more.high,
        }  # fmt: skip


def learn(model: Transformer, documents: Sequence[Document], tokenizer: BpeTokenizer, steps: int, seed: int) -> None:
    """Masked language modelling on the modules, functions and docstrings among them."""
    store = in_memory(tokenize(documents, tokenizer), token_bytes=tokenizer.token_bytes)
    masking = Masking.of(tokenizer, rate=MASKED, seed=seed)
    data = DataConfig(context=CONTEXT, rows=ROWS, seed=seed, packing="whole")
    go_on(model, store, data, steps=steps, seed=seed, change=lambda batch, *place: mask_batch(batch, masking, *place))


def gain(scores: np.ndarray, i: int) -> float:
    """1 / rank of document i, 0 past the tenth; of equal scores the earlier counts as better."""
    rank = 1 + np.count_nonzero(scores > scores[i]) + np.count_nonzero(scores[:i] == scores[i])
    return 1 / rank if rank <= 10 else 0.0


def by_words(functions: Sequence[Function]) -> list[float]:
    db = connect(":memory:")
    db.executescript(postings.SCHEMA)
    postings.write_segment(db, 0, [runs(f.answer) for f in functions])
    lexicon = postings.Lexicon.load(db)
    return [gain(lexicon.score(db, terms(first_sentence(f.docstring)))[0], i) for i, f in enumerate(functions)]


def by_vectors(
    functions: Sequence[Function], tokenizer: BpeTokenizer, model: Transformer, *, layers: bool = True
) -> list[float]:
    """Cosines of mean vectors: of the last hidden states, or of the input vectors."""

    def vectors(texts: Sequence[str]) -> np.ndarray:
        ids = [tokenizer.encode(text)[:CONTEXT] or [tokenizer.eos_id] for text in texts]
        if layers:
            return np.array(
                [v for first in range(0, len(ids), 32) for v in embed(model.eval(), ids[first : first + 32])]
            )
        table = model.embedding.weight.detach().float().cpu()
        return np.array(
            [torch.nn.functional.normalize(table[i].mean(0), dim=0).numpy() for i in map(torch.tensor, ids)]
        )

    passages, queries = (
        vectors([f.answer for f in functions]),
        vectors([first_sentence(f.docstring) for f in functions]),
    )
    return [gain(passages @ query, i) for i, query in enumerate(queries)]


def verdict(rows: Sequence[Row]) -> Verdict:
    """Held if the mean vector of every seed ranks above the words, with its interval; holds only where some do."""
    mlm = where(rows, ranking="MLM")
    above = [number(row, "more_low") > 0 for row in mlm]
    kind: Kind = "held" if all(above) else "holds only where" if any(above) else "did not hold"
    mean = {
        n: sum(number(r, "mrr") for r in own) / len(own)
        for n in ("words", "MLM", "tokens", "untrained")
        if (own := where(rows, ranking=n))
    }
    said = Verdict.say(
        kind,
        "MRR@10 of words {words:.3f}; of mean vectors {mlm:.3f} after masked language modelling ({low:+.3f} to "
        "{high:+.3f} to words), {tokens:.3f} of its input vectors, {untrained:.3f} before training.",
        "MRR@10：词 {words:.3f}；平均向量在掩码语言建模之后 {mlm:.3f}（比词 {low:+.3f} 至 {high:+.3f}），"
        "其输入向量 {tokens:.3f}，训练之前 {untrained:.3f}。",
        words=mean["words"],
        mlm=mean["MLM"],
        tokens=mean["tokens"],
        untrained=mean["untrained"],
        low=min(number(r, "more_low") for r in mlm),
        high=max(number(r, "more_high") for r in mlm),
    )
    if all(number(r, "more_low") > 0 or number(r, "more_high") < 0 for r in mlm):
        return said
    return said.undecided(
        "more functions, until each interval of the difference leaves out 0.", "更多函数，直到差值的区间都不含 0。"
    )


def plot(rows: Sequence[Row]) -> list[Panel]:
    names = ("words", "MLM", "tokens", "untrained")
    own = [where(rows, ranking=name) for name in names]
    means = [sum(number(r, "mrr") for r in found) / len(found) for found in own]
    ends = [(min(number(r, "low") for r in found), max(number(r, "high") for r in found)) for found in own]
    bars = Bars(means, colour="each", text="{:.3f}", ends=ends)
    return [Panel([bars], "Docstring to function", y="MRR@10", xnames=names)]


LAB = Claim(
    title_en="The mean vector as an embedding",
    title_zh="用平均向量作嵌入",
    claim_en="The mean hidden state of a masked language model is a good vector of a text.",
    claim_zh="掩码语言模型隐藏状态的平均值是很好的文本向量。",
    regime=f"An encoder of 2 layers, width {WIDTH}, {STEPS} steps of masked language modelling on the standard "
    f"library; {FUNCTIONS} functions without their docstrings; queries are the first sentences; 3 seeds.",
    varies="The ranking: BM25, cosine of mean hidden states, of mean input vectors, of an untrained encoder.",
    measures="MRR@10, and the paired difference to BM25 with its 95 % interval over files; above it counts as good.",
    evidence="training",
    published_en="On sentence similarity BERT's mean vectors are below averaged GloVe vectors until they are trained "
    "on pairs: Spearman 54.8, 61.3 and 74.9 (Reimers and Gurevych 2019, arXiv:1908.10084, table 1).",
    published_zh="在句子相似度上，BERT 的平均向量在用句对训练之前低于 GloVe 的平均：Spearman 54.8、61.3、74.9"
    "（Reimers 与 Gurevych，2019，arXiv:1908.10084，表 1）。",
)
