"""Text as it grows: whole characters, nothing lost, and nothing that a stop string takes back."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from bagu.serve.request import Sampling, TokenEvent
from bagu.serve.stream import Detokenizer, StopStrings, TextStream


class Bytes:
    """A tokenizer whose tokens are bytes; 256 ends a text."""

    vocab_size, eos_id = 257, 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < 256).decode(errors="replace")


@given(st.lists(st.integers(0, 255), max_size=40))
def test_deltas_of_any_bytes_sum_to_the_whole_decode(tokens: list[int]) -> None:
    detokenizer = Detokenizer(Bytes())
    deltas = [detokenizer.push(t) for t in tokens] + [detokenizer.flush()]
    assert "".join(deltas) == Bytes().decode(tokens)


@given(st.text(max_size=20))
def test_no_delta_of_valid_text_shows_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(Bytes())
    deltas = [detokenizer.push(t) for t in Bytes().encode(text)]
    assert "".join(deltas) == text and detokenizer.flush() == ""
    assert all(len(d) <= 1 for d in deltas)


def test_output_that_begins_inside_a_character_shows_nothing_of_the_prompt() -> None:
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
    first = min(end for end, _ in ends)  # the letter with which the first stop string is complete
    assert stop is not None and text[:first].endswith(stop)
    assert sent == text[: first if include else first - len(stop)]


def test_text_before_min_tokens_cannot_begin_a_stop_string() -> None:
    stream = TextStream(Bytes(), Sampling(stop=("ab",), min_tokens=2, max_tokens=9))
    assert "".join(stream.push(ord(c)) for c in "abxab") == "abx"
    assert stream.stop == "ab"


def test_the_token_that_ends_a_text_is_not_shown_unless_asked() -> None:
    end = TokenEvent("r", 0, ord("."), finish="stop", stop_reason=ord("."))
    shown = []
    for include in (False, True):
        stream = TextStream(Bytes(), Sampling(stop_token_ids=(ord("."),), include_stop=include))
        shown.append(stream.read(TokenEvent("r", 0, ord("a"))) + stream.read(end))
    assert shown == ["a", "a."]
