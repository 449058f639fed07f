"""Text to token batches: sources, tokenizer, chat templates, packing, mixing, cursor."""

from bagu.data.dedup import DedupReport, deduplicate
from bagu.data.source import (
    ChatJsonlSource,
    Conversation,
    Document,
    JsonlSource,
    ParquetSource,
    TextSource,
    open_source,
)
from bagu.data.split import Split, hold_out
from bagu.data.stdlib import StdlibSource, sft_pairs
from bagu.data.store import TokenDocument, TokenStore, build, in_memory, on_disk, tokenize
from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer

__all__ = [
    "SPECIAL_TOKENS",
    "BpeTokenizer",
    "ChatJsonlSource",
    "Conversation",
    "DedupReport",
    "Document",
    "JsonlSource",
    "ParquetSource",
    "Split",
    "StdlibSource",
    "TextSource",
    "TokenDocument",
    "TokenStore",
    "build",
    "deduplicate",
    "hold_out",
    "in_memory",
    "on_disk",
    "open_source",
    "sft_pairs",
    "tokenize",
]
