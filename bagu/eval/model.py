"""The interface of a model for evaluation: an engine in this process or a server over HTTP.

recipes/eval_models.py and recipes/eval_server.py implement them; a test may implement its own.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

Message = Mapping[str, str]  # role and content


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How answers are generated. Temperature 0 is greedy, so more than one sample per item is useless."""

    max_tokens: int = 256
    temperature: float = 0.0
    samples: int = 1
    stop: tuple[str, ...] = ()
    seed: int = 0

    def seed_of(self, prompt: Sequence[int] | Sequence[Message]) -> int:
        """The seed of the answers to one prompt. With one seed for all prompts, the same random numbers would draw the
        answers to each: they would not be independent of each other, as intervals assume."""
        key = json.dumps([self.seed, list(prompt)], default=dict)
        return int.from_bytes(blake2b(key.encode(), digest_size=6).digest())  # 48 bits: exact in any JSON parser


class Model(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def max_len(self) -> int:
        """Tokens of the longest sequence, prompt and answer together."""
        ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, with the control tokens that the model expects at its beginning."""
        ...

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """The prompt for the assistant's next turn. Raises if the model has no chat template."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], starts: Sequence[int]) -> list[list[float]]:
        """For each sequence the log-probabilities of ids[start:], in nats; start is 1 or more."""
        ...

    def generate(self, prompts: Sequence[Sequence[int]], decoding: Decoding) -> list[list[str]]:
        """For each prompt `decoding.samples` answers."""
        ...

    def generate_chat(self, chats: Sequence[Sequence[Message]], decoding: Decoding) -> list[list[str]]:
        """For each chat `decoding.samples` next turns of the assistant, each ending where the turn ends."""
        ...
