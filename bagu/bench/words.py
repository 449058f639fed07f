"""A tokenizer of any size without training, for benchmarks of models with random weights."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice, product

WORD = re.compile(rb"[ ]?[A-Za-z_]+|[ ]?[0-9]{1,3}|[ ]?[^A-Za-z_0-9\s]{1,4}|\s{1,8}")
LETTERS = b"etaoinshrdlucmfwypvbgkjqxz"


class WordTokenizer:
    """The 256 bytes, the most frequent words of some texts, then words of frequent letters, and end-of-text: the shape
    of a trained vocabulary. Texts are encoded by the longest tokens. Implements `types.Tokenizer`."""

    byte_level = True

    def __init__(self, texts: Iterable[bytes], vocab_size: int) -> None:
        counts = Counter(word for text in texts for word in WORD.findall(text))
        single = [bytes([b]) for b in range(256)]
        words = (word for word, _ in counts.most_common() if len(word) > 1)
        made = (b" " + bytes(letters) for letters in product(LETTERS, repeat=5))
        named = dict.fromkeys([*single, *islice(words, vocab_size)])
        for word in made:
            if len(named) >= vocab_size:
                break
            named[word] = None
        self._tokens = [*islice(named, vocab_size - 1), b"<|endoftext|>"]
        self._ids = {token: id for id, token in enumerate(self._tokens[:-1])}
        self._longest = max(map(len, self._ids))
        self.vocab_size, self.eos_id = len(self._tokens), len(self._tokens) - 1
        self.special_ids = {"<|endoftext|>": self.eos_id}

    def encode(self, text: str) -> list[int]:
        return list(self._split(text.encode()))

    encode_prompt = encode

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def bytes_of(self, id: int) -> bytes:
        return self._tokens[id]

    def _split(self, data: bytes) -> Iterator[int]:
        at = 0
        while at < len(data):
            size = next(n for n in range(min(self._longest, len(data) - at), 0, -1) if data[at : at + n] in self._ids)
            yield self._ids[data[at : at + size]]
            at += size
