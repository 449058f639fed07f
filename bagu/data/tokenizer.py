"""Byte-level BPE: any text to ids and back, without loss.

A pattern splits text into words, words are split into bytes, and the most frequent neighbours are merged until the
vocabulary is full. It contains all 256 bytes, so there is no unknown token. Training and encoding use Hugging Face
`tokenizers`; this file guarantees what bagu relies on:

* Text cannot become a control token: "<|endoftext|>" inside a document is encoded as ordinary characters.
  `encode_markup` is for trusted text (a chat template) in which control tokens are intended.
* `bytes_of` returns the bytes of text of a token: a character may span several tokens. `token_bytes` returns their
  number, so that losses of different tokenizers can be compared.
* `fingerprint` is the hash of tokenizer.json; it prevents using the tokens of one tokenizer with the model of another.
"""

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

from bagu.config import write_atomic
from bagu.errors import BaguError

END_OF_TEXT = "<|endoftext|>"
SPECIAL_TOKENS = (END_OF_TEXT, "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")
MASK_TOKENS = ("<|mask|>", "[MASK]", "<mask>")  # bagu, BERT, RoBERTa
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")

# A word includes one symbol or space before it: "(self", ".append", " return". Digits are grouped by three. On the
# standard library with a vocabulary of 4096: 3.58 bytes per token; GPT-2's pattern gives 3.48 and GPT-4's 3.47.
WORDS = r"(?: |[^\s\p{L}\p{N}])?\p{L}+| ?\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

LONG_TEXT = 2**14  # characters, about a millisecond of work

# End-of-document tokens of other tokenizers, tried in order if tokenizer_config.json names none.
KNOWN_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>", "<|eot_id|>", "<|im_end|>", "[SEP]")


@dataclass(frozen=True, kw_only=True)
class BpeTokenizer:
    """A tokenizer.json with the additions of tokenizer_config.json. Implements `types.Tokenizer`."""

    spec: str  # the content of tokenizer.json
    eos_token: str
    chat_template: str | None = None
    # bos_token, cls_token, …: other token names from tokenizer_config.json
    named: Mapping[str, str] = field(default_factory=dict, hash=False)

    def __repr__(self) -> str:
        chat = "no" if self.chat_template is None else "a"
        return f"BpeTokenizer({self.vocab_size:,} tokens, eos_token={self.eos_token!r}, {chat} chat template)"

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

        A small corpus may have fewer merges than requested; the `vocab_size` of the result is the actual size.
        """
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        least = len(alphabet) + len(special_tokens)
        if vocab_size < least:
            parts = f"{len(alphabet)} bytes and {len(special_tokens)} special tokens"
            raise BaguError(f"a vocabulary of {vocab_size} is too small", hint=f"give at least {least}: {parts}")
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
        """Load a tokenizer.json, or a folder that has one; a tokenizer_config.json next to it is read too."""
        path = Path(path)
        file = path / FILES[0] if path.is_dir() else path
        try:
            spec = file.read_text(encoding="utf-8")
            special = [token["content"] for token in json.loads(spec)["added_tokens"] if token["special"]]
        except FileNotFoundError as error:
            hint = "create one with bagu tokenizer train, or use the folder of a Hugging Face model"
            raise BaguError(f"there is no tokenizer at {file}", hint=hint) from error
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            raise BaguError(f"{file} is not a tokenizer.json: {error!r}", hint="download or train it again") from error
        config = _read_config(file.with_name(FILES[1]))
        eos = _content(config.get("eos_token")) or next((end for end in KNOWN_ENDS if end in special), None)
        if eos is None:
            found = ", ".join(special) or "none"
            hint = f'write {{"eos_token": "..."}} to {FILES[1]} in its folder; special tokens: {found}'
            raise BaguError(f"{file} does not define the token that ends a document", hint=hint)
        template = _template(file.with_name(FILES[2]), config)
        loaded = cls(spec=spec, eos_token=eos, chat_template=template, named=_names(config, special))
        _ = loaded.eos_id  # parses the file and finds the token, so that a broken file is refused here
        return loaded

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tokenizer.json and tokenizer_config.json in the format of `transformers.AutoTokenizer`.

        Each file is replaced atomically, tokenizer.json last: a folder that has it is complete, also after a kill.
        """
        folder = Path(folder)
        config: dict[str, Any] = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            **self.variables,
            "clean_up_tokenization_spaces": False,  # True would change " ." to "." when decoding
        }
        if self.chat_template is not None:
            config["chat_template"] = self.chat_template
        write_atomic(folder / FILES[1], json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        write_atomic(folder / FILES[0], self.spec)

    @property
    def variables(self) -> dict[str, str]:
        """The control tokens that a chat template may use, by name."""
        return {**self.named, "eos_token": self.eos_token}

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokenizer.json."""
        return hashlib.sha256(self.spec.encode()).hexdigest()

    @property
    def token_facts(self) -> dict[str, Any]:
        """What decides the tokens of a text: keys of token caches are made from it. Models may share tokenizer.json and
        differ in the token that ends a text."""
        return {"tokenizer": self.fingerprint, "variables": self.variables}

    @cached_property
    def vocab_size(self) -> int:
        """One more than the largest id, added tokens included; some ids may be unused."""
        return max(self._plain.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def special_ids(self) -> Mapping[str, int]:
        """The control tokens; encoding text never produces them."""
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
        """The ids of a text. Nothing is added before or after it, and no part of it becomes a control token."""
        _check_unicode(text, 0)
        return encoded(self._plain, text).ids

    def encode_prompt(self, text: str) -> list[int]:
        """`encode`, plus the tokens that the tokenizer adds to any text: Llama's <|begin_of_text|>, BERT's [CLS],
        [SEP]."""
        _check_unicode(text, 0)
        return encoded(self._plain, text, wrapped=True).ids

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """`encode` of each text, on all cores."""
        for number, text in enumerate(texts):
            _check_unicode(text, number)
        return [encoding.ids for encoding in self._plain.encode_batch_fast(texts, add_special_tokens=False)]

    def encode_markup(self, text: str) -> list[int]:
        """The ids of a text in which names of control tokens become these tokens. Do not use it for untrusted text."""
        _check_unicode(text, 0)
        return encoded(self._markup, text).ids

    def decode(self, ids: Sequence[int]) -> str:
        """The text, with control tokens by name. Bytes that are not UTF-8 (a partial character) become U+FFFD."""
        if isinstance(ids, str):
            raise BaguError("decode: expected token ids, and found a str", hint="encode turns a text into ids")
        return self._plain.decode(list(ids), skip_special_tokens=False)

    def bytes_of(self, id: int) -> bytes:
        """The bytes of text of a token, the name of a control token, or b"" for an unused id. If the vocabulary is
        byte-level, b"".join(map(bytes_of, encode(text))) == text.encode()."""
        found = self._known.get(id)
        if found is None:
            found = self._known[id] = _text_bytes(self._plain.id_to_token(id) or "", byte_level=self._of_bytes)
        return found

    @cached_property
    def byte_level(self) -> bool:
        """Whether `decode` is the concatenated bytes of the tokens, decoded as UTF-8. Other decoders strip spaces."""
        return self._of_bytes and isinstance(self._plain.decoder, decoders.ByteLevel)

    @cached_property
    def token_bytes(self) -> np.ndarray:
        """[vocab_size] int32: bytes of text of each id; 0 for control tokens and unused ids."""
        sizes = np.array([len(self.bytes_of(id)) for id in range(self.vocab_size)], np.int32)
        sizes[list(self.special_ids.values())] = 0
        return sizes

    @cached_property
    def _of_bytes(self) -> bool:
        """Whether the vocabulary represents a byte as one character of GPT-2's alphabet."""
        parts = (self._plain.pre_tokenizer, self._plain.decoder)
        return any(part is not None and b'"ByteLevel"' in part.__getstate__() for part in parts)

    @cached_property
    def _known(self) -> dict[int, bytes]:
        """A cache for `bytes_of`: a server calls it for every streamed token."""
        return {}

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        tokenizer = self._parse()
        tokenizer.encode_special_tokens = True  # encodes their names as text
        return tokenizer

    @cached_property
    def _markup(self) -> tokenizers.Tokenizer:
        return self._parse()

    def _parse(self) -> tokenizers.Tokenizer:
        try:
            tokenizer = tokenizers.Tokenizer.from_str(self.spec)
        except Exception as error:  # `tokenizers` raises bare Exception
            raise BaguError(f"cannot use this tokenizer.json: {error}", hint="download or train it again") from error
        tokenizer.no_padding()  # some files contain the settings that their author used last
        tokenizer.no_truncation()
        return tokenizer


def _check_unicode(text: str, number: int) -> None:
    if not isinstance(text, str):
        raise BaguError(f"encode: expected a str, and found a {type(text).__name__}", hint="decode turns ids into text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        found = f"text {number} has a lone surrogate, {text[error.start]!r}, at character {error.start}"
        hint = "it was decoded wrongly; text.encode('utf-16', 'surrogatepass').decode('utf-16') joins surrogates"
        raise BaguError(f"only Unicode text can be encoded: {found}", hint=hint) from error


def encoded(tokenizer: tokenizers.Tokenizer, text: str, *, wrapped: bool = False) -> tokenizers.Encoding:
    """Encode a long text as a batch of one: `encode` would hold the GIL, and block other threads, until it ends."""
    if len(text) < LONG_TEXT:
        return tokenizer.encode(text, add_special_tokens=wrapped)
    return tokenizer.encode_batch([text], add_special_tokens=wrapped)[0]


def _text_bytes(token: str, *, byte_level: bool) -> bytes:
    """The text of one vocabulary entry, depending on how the vocabulary is written."""
    if byte_level:  # one character is one byte; an added token with other characters is stored as it is
        known = _byte_alphabet()
        return bytes(known[c] for c in token) if all(c in known for c in token) else token.encode()
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):  # a byte in SentencePiece
        return bytes.fromhex(token[3:5])
    return token.removeprefix("##").replace("▁", " ").encode()  # WordPiece's continuation; SentencePiece's space


@cache
def _byte_alphabet() -> Mapping[str, int]:
    """GPT-2's characters for the 256 bytes: printable bytes map to themselves, the rest to U+0100 and up."""
    printed = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in set(printed)]
    return {chr(b): b for b in printed} | {chr(0x100 + i): b for i, b in enumerate(hidden)}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BaguError(f"{path} is not JSON: {error}", hint="correct or delete it") from error
    if not isinstance(config, dict):
        raise BaguError(f"{path} is not a JSON object")
    return config


def _content(token: Any) -> str | None:
    """A token in tokenizer_config.json: a string, or an object; None for an entry that is no token (add_bos_token)."""
    word = token.get("content") if isinstance(token, Mapping) else token
    return word if isinstance(word, str) and word else None


def _names(config: Mapping[str, Any], special: Sequence[str]) -> dict[str, str]:
    """The token names of a config, except the one that ends documents; plus a mask token, found by its usual name."""
    mask = next((token for token in MASK_TOKENS if token in special), None)
    names = {"mask_token": mask} | {name: _content(value) for name, value in config.items() if name.endswith("_token")}
    return {name: word for name, word in names.items() if word is not None and name != "eos_token"}


def _template(file: Path, config: Mapping[str, Any]) -> str | None:
    """The chat template: since 2025 a separate file, before that an entry; of a list, the one named "default"."""
    try:
        if file.exists():
            return file.read_text(encoding="utf-8")
        value = config.get("chat_template")
        if isinstance(value, list):
            value = next((entry["template"] for entry in value if entry["name"] == "default"), None)
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise BaguError(f"the chat template of {file.parent} cannot be read: {error!r}", hint="correct it") from error
    if value is not None and not isinstance(value, str):
        hint = f"in {FILES[1]} it is a text, or a list of objects with name and template"
        raise BaguError(f"the chat template of {file.parent} is a {type(value).__name__}", hint=hint)
    return value
