"""Text to token batches: sources, tokenizer, chat templates, packing, mixing, loader."""

from bagu.data.chat import ChatEncoder, ChatTemplate, EncodedChat
from bagu.data.chat_corpus import ChatCorpus
from bagu.data.chat_source import ChatJsonlSource
from bagu.data.chat_template import DEFAULT_TEMPLATE
from bagu.data.corpus import Corpus, Selection, SourceConfig, TextCorpus
from bagu.data.dedup import DedupReport, deduplicate
from bagu.data.document import Document
from bagu.data.loader import DataConfig, Loader, check_vocab, evaluation_batches
from bagu.data.masked import mask_batch
from bagu.data.mix import MixConfig, MixPoint, Mixture
from bagu.data.pack import Packing
from bagu.data.prefetch import Prefetch
from bagu.data.prompts import Prompt, PromptCorpus
from bagu.data.source import (
    Conversation,
    JsonlSource,
    ParquetSource,
    TextSource,
    open_source,
)
from bagu.data.split import Split, hold_out
from bagu.data.stdlib import StdlibSource, sft_pairs
from bagu.data.store import TokenDocument, TokenStore
from bagu.data.store_writer import build, in_memory, on_disk
from bagu.data.tokenize import tokenize
from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer

__all__ = [
    "DEFAULT_TEMPLATE",
    "SPECIAL_TOKENS",
    "BpeTokenizer",
    "ChatCorpus",
    "ChatEncoder",
    "ChatJsonlSource",
    "ChatTemplate",
    "Conversation",
    "Corpus",
    "DataConfig",
    "DedupReport",
    "Document",
    "EncodedChat",
    "JsonlSource",
    "Loader",
    "MixConfig",
    "MixPoint",
    "Mixture",
    "Packing",
    "ParquetSource",
    "Prefetch",
    "Prompt",
    "PromptCorpus",
    "Selection",
    "SourceConfig",
    "Split",
    "StdlibSource",
    "TextCorpus",
    "TextSource",
    "TokenDocument",
    "TokenStore",
    "build",
    "check_vocab",
    "deduplicate",
    "evaluation_batches",
    "hold_out",
    "in_memory",
    "mask_batch",
    "on_disk",
    "open_source",
    "sft_pairs",
    "tokenize",
]
