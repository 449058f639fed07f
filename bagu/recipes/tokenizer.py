"""The tokenizer of a run: the configured one, that of its initial model, or one trained on its text."""

import hashlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import tokenizers

from bagu.data.chat_corpus import ChatCorpus
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import Corpus, TextCorpus
from bagu.data.document import AnyDocument
from bagu.data.split import sample
from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.cache import cache_folder
from bagu.recipes.models import tokenizer_folder
from bagu.recipes.run import Run, TokenizerConfig

TOKENIZER = "tokenizer"  # in the folder of a run
MB = 1_000_000


def run_tokenizer(run: Run, start: Path | None, corpora: Mapping[str, Corpus], out: Path) -> BpeTokenizer:
    """The configured one, the initial model's, the one that this run trained before an interruption, or a new one."""
    if run.tokenizer.path is not None:
        return BpeTokenizer.load(run.tokenizer.path)
    if start is not None:
        return BpeTokenizer.load(tokenizer_folder(start) or start)  # with `start`, the error names the missing file
    if (out / TOKENIZER / "tokenizer.json").is_file():  # written last: without it the run was killed while it saved
        return BpeTokenizer.load(out / TOKENIZER)
    facts = {
        "corpora": {name: dict(corpus.facts) for name, corpus in corpora.items()},
        "vocab_size": run.tokenizer.vocab_size,
        "max_mb": run.tokenizer.max_mb,
        "special": SPECIAL_TOKENS,
        "template": DEFAULT_TEMPLATE,
        "tokenizers": tokenizers.__version__,
    }
    key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    cached = cache_folder() / "tokenizers" / key  # training is deterministic: the same inputs give the same merges
    if not (cached / "tokenizer.json").is_file():
        train_tokenizer(corpora, run.tokenizer).save(cached)
    return BpeTokenizer.load(cached)


def train_tokenizer(corpora: Mapping[str, Corpus], config: TokenizerConfig) -> BpeTokenizer:
    """A byte-level BPE with bagu's chat template, trained only on the training text, or on the messages of chats."""
    texts: list[TextCorpus | ChatCorpus] = []
    for name, corpus in corpora.items():
        if not isinstance(corpus, TextCorpus | ChatCorpus):
            raise BaguError(
                f"a tokenizer is trained on text, and source {name!r} is not text",
                hint="set tokenizer.path, or start from a model that has a tokenizer (init_from)",
            )
        texts.append(corpus)

    def documents() -> Iterator[AnyDocument]:
        return (document for corpus in texts for document in corpus.documents("train"))

    total = sum(document.num_bytes for document in documents())
    chosen = sample(documents(), max_bytes=round(config.max_mb * MB), total_bytes=total)
    return BpeTokenizer.train(chosen, vocab_size=config.vocab_size or 4096, chat_template=DEFAULT_TEMPLATE)
