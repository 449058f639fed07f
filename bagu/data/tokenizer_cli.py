"""`bagu tokenizer train` and `bagu tokenizer stats`: train a tokenizer, and measure one."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from rich.table import Table

from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.source import Source, open_source
from bagu.data.split import sample
from bagu.data.stdlib import StdlibSource
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import BaguError
from bagu.machine.terminal import Terminal

MB = 1_000_000


@dataclass(frozen=True, kw_only=True)
class TokenizerStats:
    """Measurements of a tokenizer on some texts."""

    texts: int
    bytes: int
    tokens: int
    encode_seconds: float
    changed: tuple[int, ...]  # texts that decoding did not restore
    vocab_size: int
    vocab_used: int  # number of tokens that occur

    @property
    def bytes_per_token(self) -> float:
        return self.bytes / self.tokens

    @property
    def encode_mb_per_second(self) -> float:
        return self.bytes / MB / self.encode_seconds


def stats(tokenizer: BpeTokenizer, texts: Sequence[str]) -> TokenizerStats:
    """Encode and decode `texts`, and measure."""
    if not any(texts):
        raise BaguError("there is no text to measure the tokenizer on", hint="give documents with text")
    _ = tokenizer.encode(texts[0])  # parses the tokenizer before the timing
    start = time.perf_counter()
    encoded = tokenizer.encode_batch(texts)
    seconds = time.perf_counter() - start
    pairs = enumerate(zip(texts, encoded, strict=True))
    return TokenizerStats(
        texts=len(texts),
        bytes=sum(len(text.encode()) for text in texts),
        tokens=sum(map(len, encoded)),
        encode_seconds=seconds,
        changed=tuple(i for i, (text, ids) in pairs if tokenizer.decode(ids) != text),
        vocab_size=tokenizer.vocab_size,
        vocab_used=len(np.unique(np.concatenate([np.asarray(ids, np.int64) for ids in encoded]))),
    )


def train_main(out: Path, *, path: Path | None = None, vocab_size: int = 4096, max_mb: float = 64) -> BpeTokenizer:
    """Train on `path` (default: the standard library), at most `max_mb` of it, and save to the folder `out`.

    The tokenizer gets bagu's chat template; its vocabulary has the template's control tokens.
    """
    console, texts = Terminal(), _texts(path, max_mb)
    size = sum(len(text.encode()) for text in texts)
    with console.status(f"training on {size / MB:.1f} MB of text"):
        start = time.perf_counter()
        tokenizer = BpeTokenizer.train(texts, vocab_size=vocab_size, chat_template=DEFAULT_TEMPLATE)
        seconds = time.perf_counter() - start
    tokenizer.save(out)
    console.print(f"{tokenizer.vocab_size} tokens from {size / MB:.1f} MB in {seconds:.1f} s, saved in {out}")
    if tokenizer.vocab_size < vocab_size:
        console.print(f"the text has no more merges to learn: {vocab_size} tokens were requested")
    console.print(f"next: bagu tokenizer stats {out}", highlight=False, soft_wrap=True)
    return tokenizer


def stats_main(tokenizer: Path, *, path: Path | None = None, max_mb: float = 8) -> TokenizerStats:
    """Print how the tokenizer in a folder (or file) does on `path` (default: the standard library)."""
    result = stats(BpeTokenizer.load(tokenizer), _texts(path, max_mb))
    Terminal().print(_table(result))
    return result


def _texts(path: Path | None, max_mb: float) -> list[str]:
    if not 0 < max_mb < float("inf"):
        raise BaguError(f"--max-mb is {max_mb}", hint="give a number above 0; 64 is common")
    source: Source = StdlibSource() if path is None else open_source(path)
    if source.note:
        Terminal(stderr=True).print(source.note, highlight=False, markup=False, soft_wrap=True)
    total = source.describe()["bytes"]  # on disk: in a compressed corpus the sample favours the first files
    texts = list(sample(source.documents(), max_bytes=int(max_mb * MB), total_bytes=total))
    if not texts:
        raise BaguError(f"a sample of {max_mb} MB of {total / MB:.1f} MB has no text", hint="give a larger --max-mb")
    return texts


def _table(result: TokenizerStats) -> Table:
    table = Table(show_header=False, box=None)
    table.add_row("text", f"{result.texts} pieces, {result.bytes / MB:.1f} MB")
    table.add_row("tokens", f"{result.tokens:,}")
    table.add_row("compression", f"{result.bytes_per_token:.3f} bytes/token")
    table.add_row("encoding", f"{result.encode_mb_per_second:.1f} MB/s")
    used = result.vocab_used / result.vocab_size
    table.add_row("vocabulary", f"{result.vocab_used} of {result.vocab_size} tokens occur ({used:.0%})")
    changed = f"{len(result.changed)} of {result.texts} pieces were not restored by decoding"
    table.add_row("round trip", changed if result.changed else "exact")
    return table
