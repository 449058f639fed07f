"""Byte-level BPE: any text to ids and back, byte for byte.

Text is cut into words by a pattern, words into bytes, and the most frequent neighbours are merged until the vocabulary
is full. All 256 bytes are in it, so there is no unknown token. Training and encoding are Hugging Face `tokenizers`;
this file decides what bagu needs to be sure of:

* Text cannot become a control token: "<|endoftext|>" inside a document is encoded as the characters it is made of.
  `encode_markup` is for text one has written oneself (a chat template), where control tokens are meant.
* `bytes_of` says which bytes of text a token stands for: a character may be spread over several tokens. `token_bytes`
  says how many, so that losses of different tokenizers compare.
* `fingerprint` is the hash of tokenizer.json, so that tokens of one tokenizer never meet the model of another.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from bagu.config import write_whole
from bagu.errors import BaguError

__all__ = ["MASK_TOKENS", "SPECIAL_TOKENS", "BpeTokenizer"]

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")
MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")  # bagu's, BERT's, RoBERTa's
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# A word takes one sign or space before it: "(self", ".append", " return". Digits go by three. On the standard library,
# vocabulary 4096: 3.58 bytes per token, against 3.48 with GPT-2's pattern and 3.47 with GPT-4's.
WORDS = r"(?: |[^\s\p{L}\p{N}])?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

LONG_TEXT = 2**14  # characters, a millisecond or so of work

# What other tokenizers end a document with, tried in order where tokenizer_config.json does not say.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class BpeTokenizer:
    """A tokenizer.json, and what tokenizer_config.json adds. Satisfies `types.Tokenizer`."""

    spec: str  # the content of tokenizer.json
    eos_token: str
    chat_template: str | None = None
    # bos_token, cls_token, …: what tokenizer_config.json calls its other tokens
    named: Mapping[str, str] = field(default_factory=dict, hash=False)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        vocab_size: int,
        special_tokens: Sequence[str] = SPECIAL_TOKENS,
        chat_template: str | None = None,
    ) -> Self:
        """Learn merges from `texts`. The first special token ends documents. The same texts give the same tokenizer.

        A small corpus may have fewer merges than asked for; `vocab_size` of the result is what came out.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        least = len(alphabet) + len(special_tokens)
        if vocab_size < least:
            parts = f"{len(alphabet)} bytes and {len(special_tokens)} special tokens"
            raise BaguError(f"a vocabulary of {vocab_size} is too small", hint=f"at least {least}: {parts}")
        tokenizer = tokenizers.Tokenizer(models.BPE())
        words = pre_tokenizers.Split(tokenizers.Regex(WORDS), behavior="isolated")
        to_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, to_bytes])
        tokenizer.decoder = decoders.ByteLevel()
        trainer = trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=list(special_tokens),
            initial_alphabet=sorted(alphabet),
            show_progress=False,
        )
        tokenizer.train_from_iterator(texts, trainer)
        named, eos = _names({}, special_tokens), special_tokens[0]
        return cls(spec=tokenizer.to_str(), eos_token=eos, chat_template=chat_template, named=named)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """From a tokenizer.json, or a folder that has one; tokenizer_config.json beside it is read too."""
        path = Path(path)
        file = path / FILES[0] if path.is_dir() else path
        try:
            spec = file.read_text(encoding="utf-8")
            known = json.loads(spec)["added_tokens"]
        except FileNotFoundError as error:
            hint = "bagu tokenizer train makes one; a Hugging Face model folder has one"
            raise BaguError(f"there is no tokenizer at {file}", hint=hint) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BaguError(f"{file} is not a tokenizer.json: {error!r}", hint="download or train it again") from error
        config = _read_config(file.with_name(FILES[1]))
        special = [token["content"] for token in known if token["special"]]
        eos = _content(config.get("eos_token")) or next((end for end in KNOWN_ENDS if end in special), None)
        if eos is None:
            found = ", ".join(special) or "none"
            hint = f'write {{"eos_token": "..."}} into {FILES[1]} beside it; special tokens: {found}'
            raise BaguError(f"{file} does not say which token ends a document", hint=hint)
        template = _template(file.with_name(FILES[2]), config)
        loaded = cls(spec=spec, eos_token=eos, chat_template=template, named=_names(config, special))
        _ = loaded.eos_id  # parses the file and finds the token, so that a broken one is refused here
        return loaded

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json, as `transformers.AutoTokenizer` reads them.

        Each is replaced whole, tokenizer.json last: a folder that has one has the rest too, also after a kill.
        """
        folder = Path(folder)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.variables,
            "clean_up_tokenization_spaces": False,  # it would rewrite " ." to "." when decoding
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_whole(folder / FILES[1], json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        write_whole(folder / FILES[0], self.spec)

    @property
    def variables(self) -> dict[str, str]:
        """The names of control tokens that a chat template may write."""
        return {**self.named, "eos_token": self.eos_token}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json."""
        return hashlib.sha256(self.spec.encode()).hexdigest()

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included: a vocabulary may have holes."""
        return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The control tokens, which text cannot make."""
        added = self._plain.get_added_tokens_decoder()
        return {token.content: id for id, token in sorted(added.items()) if token.special}

    @cached_property
    def eos_id(self) -> int:
        return self.token_id(self.eos_token)

    def token_id(self, token: str) -> int:
        """The id of a token by its name in the vocabulary, such as "<|end|>"."""
        id = self._plain.token_to_id(token)
        if id is None:
            raise BaguError(
                f"the tokenizer has no token {token!r}", hint=f"special tokens: {', '.join(self.special_ids)}"
            )
        return id

    def encode(self, text: str) -> list[int]:
        """The ids of a text; nothing is put before or after it, and no part of it becomes a control token."""
        _check_unicode(text, 0)
        return encoded(self._plain, text).ids

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, with what the tokenizer puts around any text: Llama's <|begin_of_text|>, BERT's [CLS] and [SEP]."""
        _check_unicode(text, 0)
        return encoded(self._plain, text, wrapped=True).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for number, text in enumerate(texts):
            _check_unicode(text, number)
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_markup(self, text: str) -> list[int]:
        """The ids of a text in which the names of control tokens mean these tokens. Never for text from outside."""
        _check_unicode(text, 0)
        return encoded(self._markup, text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, control tokens by name. Bytes that are not UTF-8 (a cut character) become U+FFFD."""
        return self._plain.decode(list(ids), skip_special_tokens=False)

    def bytes_of(self, id: int) -> bytes:
        """The bytes of text a token stands for, a control token's name; none for an id without a token. Of text,
        b"".join(map(bytes_of, encode(text))) is text.encode() where the vocabulary is of bytes."""
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = _text_bytes(self._plain.id_to_token(id) or "", byte_level=self._of_bytes)
        return found

    @cached_property
    def byte_level(self) -> bool:
        """Whether `decode` is the bytes of the tokens one after another, read as UTF-8: other decoders strip spaces."""
        return self._of_bytes and isinstance(self._plain.decoder, decoders.ByteLevel)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int32: bytes of text each id stands for; 0 for control tokens and holes."""
        sizes = np.array([len(self.bytes_of(id)) for id in range(self.vocab_size)], np.int32)
        sizes[list(self.special_ids.values())] = 0
        return sizes

    @cached_property
    def _of_bytes(self) -> bool:
        """Whether the vocabulary writes a byte as one character of GPT-2's alphabet."""
        parts = (self._plain.pre_tokenizer, self._plain.decoder)
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)

    @cached_property
    def _known(self) -> dict[int, bytes]:
        """What `bytes_of` has said: a server asks for every token it streams."""
        return {}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        tokenizer = self._parse()
        tokenizer.encode_special_tokens = True  # their names are text
        return tokenizer

    @cached_property
    def _markup(self) -> tokenizers.Tokenizer:
        return self._parse()

    def _parse(self) -> tokenizers.Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.spec)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise BaguError(f"the tokenizer.json cannot be used: {error}", hint="download or train it again") from error
        tokenizer.no_padding()  # some files carry what their author last used
        tokenizer.no_truncation()
        return tokenizer


def _check_unicode(text: str, number: int) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"text {number} has half of a surrogate pair, {text[error.start]!r}, at character {error.start}"
        hint = "it was decoded wrongly; text.encode('utf-16', 'surrogatepass').decode('utf-16') joins halves"
        raise BaguError(f"only Unicode text can be encoded: {found}", hint=hint) from error


def encoded(tokenizer: tokenizers.Tokenizer, text: str, *, wrapped: bool = False) -> tokenizers.Encoding:
    """A batch of one where the text is long: `encode` keeps the GIL, and with it every other thread, to its end."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=wrapped)
    return tokenizer.encode_batch([text], add_special_tokens=wrapped)[0]


def _text_bytes(token: str, *, byte_level: bool) -> bytes:
    """The text of one vocabulary entry, by how the vocabulary writes it."""
    if byte_level:  # one character stands for one byte; an added token with others is written as it is
        known = _byte_alphabet()
        return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):  # SentencePiece's spelling of a byte
        return bytes.fromhex(token[3:5])
    return token.removeprefix("##").replace("▁", " ").encode()  # WordPiece's inner piece; SentencePiece's space


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's characters for the 256 bytes: those that print stand for themselves, the rest follow from U+0100 on."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(b): b for b in printed} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BaguError(f"{path} is not JSON: {error}", hint="mend it, or delete it") from error
    if not isinstance(config, dict):
        raise BaguError(f"{path} is not a JSON object")
    return config


def _content(token: Any) -> str | None:
    """A token as tokenizer_config.json writes it: a string, or an object; None for what is no token (add_bos_token)."""
    word = token.get("content") if isinstance(token, Mapping) else token
    return word if isinstance(word, str) and word else None


def _names(config: Mapping[str, Any], special: Sequence[str]) -> dict[str, str]:
    """What a config calls its tokens, but for the one that ends documents; and a mask by its usual name."""
    mask = next((token for token in MASK_TOKENS if token in special), None)
    names = {"mask_token": mask} | {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: word for name, word in names.items() if word is not None and name != "eos_token"}


def _template(file: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: a file of its own since 2025, before that an entry; a list of them names one "default"."""
    if file.exists():
        return file.read_text(encoding="utf-8")
    value = config.get("chat_template")
    if isinstance(value, list):
        return next((entry["template"] for entry in value if entry["name"] == "default"), None)
    return value
