"""Incremental detokenization: whole characters, no lost text, and no text of a stop string."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from bagu.data import BpeTokenizer
from bagu.serve.request import Sampling, TokenEvent
from bagu.serve.stream import REPLACEMENT, ByteDetokenizer, SpanDetokenizer, StopStrings, TextStream, detokenizer

Kind = type[ByteDetokenizer] | type[SpanDetokenizer]


class Bytes:
    """A tokenizer whose tokens are bytes; 256 is the end of text."""

    vocab_size, eos_id, byte_level = 257, 256, True

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def encode_prompt(self, text: str) -> list[int]:
        return self.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self.bytes_of, ids)).decode(errors="replace")

    def bytes_of(self, id: int) -> bytes:
        return bytes([id]) if id < 256 else b""


@pytest.mark.parametrize("kind", [ByteDetokenizer, SpanDetokenizer])
@given(tokens=st.lists(st.integers(0, 256), max_size=40))
def test_deltas_of_any_bytes_join_to_the_full_decode(kind: Kind, tokens: list[int]) -> None:
    grows = kind(Bytes())
    deltas = [grows.push(t) for t in tokens] + [grows.flush()]
    assert "".join(deltas) == Bytes().decode(tokens)


@pytest.mark.parametrize("kind", [ByteDetokenizer, SpanDetokenizer])
@given(text=st.text(max_size=20))
def test_no_delta_of_valid_text_has_an_incomplete_character(kind: Kind, text: str) -> None:
    if kind is SpanDetokenizer:  # with `decode` alone, U+FFFD of a text looks like an incomplete character: it is held
        text = text.replace(REPLACEMENT, "")
    grows = kind(Bytes())
    deltas = [grows.push(t) for t in Bytes().encode(text)]
    assert "".join(deltas) == text and grows.flush() == ""
    assert all(len(d) <= 1 for d in deltas)


def tokenizer(pieces: list[str], decoder: decoders.Decoder) -> BpeTokenizer:
    made = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(pieces)}, merges=[]))
    made.decoder = decoder
    return BpeTokenizer(spec=made.to_str(), eos_token=pieces[0])


BYTE_LEVEL = tokenizer([*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġthe", "é"], decoders.ByteLevel())
SPACES_VOCAB = ["</s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "▁a", "b", "é"]
SPACES = tokenizer(
    SPACES_VOCAB,
    decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    ),
)


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size - 1), max_size=12))
def test_deltas_of_a_byte_level_tokenizer_join_to_its_decode(tokens: list[int]) -> None:
    grows = detokenizer(BYTE_LEVEL)
    assert isinstance(grows, ByteDetokenizer)
    assert "".join([*map(grows.push, tokens), grows.flush()]) == BYTE_LEVEL.decode(tokens)


@given(st.lists(st.sampled_from(["▁", "▁a", "b", "é"]) | st.characters(exclude_categories=["Cs"]), max_size=12))
def test_deltas_of_bytes_and_spaces_join_to_the_decode(pieces: list[str]) -> None:
    """As in SentencePiece: a character that is not in the vocabulary is encoded as its bytes."""
    ids = dict(zip(SPACES_VOCAB, range(len(SPACES_VOCAB)), strict=True))
    tokens = [i for p in pieces for i in ([ids[p]] if p in ids else [ids[f"<0x{b:02X}>"] for b in p.encode()])]
    grows = detokenizer(SPACES)
    assert isinstance(grows, SpanDetokenizer)
    assert "".join([*map(grows.push, tokens), grows.flush()]) == SPACES.decode(tokens)


TRAINED = BpeTokenizer.train(["def f(x):\n    return x\n", "hello world, 你好，世界 🙂 "] * 4, vocab_size=320)


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=30))
def test_the_bytes_of_the_tokens_join_to_the_text(text: str) -> None:
    assert b"".join(map(TRAINED.bytes_of, TRAINED.encode(text))) == text.encode()


def test_bytes_of_special_and_unknown_tokens() -> None:
    assert TRAINED.bytes_of(TRAINED.eos_id) == b"<|endoftext|>" and TRAINED.bytes_of(10**6) == b""
    ids = dict(zip(SPACES_VOCAB, range(len(SPACES_VOCAB)), strict=True))
    said = [SPACES.bytes_of(ids[piece]) for piece in ("<0xE4>", "▁a", "▁", "é", "</s>")]
    assert said == [b"\xe4", b" a", b" ", "é".encode(), b"</s>"]


def test_output_that_begins_inside_a_character_has_no_text_of_the_prompt() -> None:
    head, tail = list("é".encode())
    assert head == 0xC3  # the prompt ends here
    stream = TextStream(Bytes(), Sampling())
    assert stream.push(tail) + stream.push(ord("x"), last=True) == "�x"


@given(
    st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=3), min_size=1, max_size=3), st.booleans()
)
def test_stop_strings_are_found_however_the_text_is_cut(text: str, stops: list[str], include: bool) -> None:
    finder, sent, stop = StopStrings(stops, include=include), "", None
    for letter in text:
        piece, stop = finder.push(letter)
        sent += piece
        if stop is not None:
            break
    else:
        sent += finder.flush()
    ends = [(text.find(s) + len(s), s) for s in stops if s in text]
    if not ends:
        assert (sent, stop) == (text, None)
        return
    first = min(end for end, _ in ends)  # the end of the first complete stop string
    assert stop is not None and text[:first].endswith(stop)
    assert sent == text[: first if include else first - len(stop)]


def test_text_before_min_tokens_cannot_begin_a_stop_string() -> None:
    stream = TextStream(Bytes(), Sampling(stop=("ab",), min_tokens=2, max_tokens=9))
    assert "".join(stream.push(ord(c)) for c in "abxab") == "abx"
    assert stream.stop == "ab"


def test_a_stop_string_does_not_span_a_token_without_text() -> None:
    """A control token has no text in a response. The engine sees its name there, finds no stop string and goes on."""
    engine, response = (TextStream(Bytes(), Sampling(stop=("ab",))) for _ in range(2))
    for c in "xa#bz":
        engine.push(ord(c))
    texts = [response.push(ord(c), silent=c == "#", last=c == "z") for c in "xa#bz"]
    assert engine.stop is response.stop is None and "".join(texts) == "xabz"


def test_the_token_that_ends_a_text_is_left_out_unless_requested() -> None:
    end = TokenEvent("r", 0, ord("."), finish="stop", stop_reason=ord("."))
    shown = []
    for include in (False, True):
        stream = TextStream(Bytes(), Sampling(stop_token_ids=(ord("."),), include_stop=include))
        shown.append(stream.read(TokenEvent("r", 0, ord("a"))) + stream.read(end))
    assert shown == ["a", "a."]
