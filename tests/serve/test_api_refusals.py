"""Requests that the API refuses: every one with a status and an error in OpenAI's shape."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from api_client import ASK, CHAT, TEXT, get, post
from hypothesis import given
from hypothesis import strategies as st
from tiny_server import KEY, MAX_LEN, Running, load

from bagu.serve.http.bodies import fields
from bagu.serve.http.bodies.chat import ChatBody
from bagu.serve.http.bodies.openai import CompletionBody
from bagu.serve.http.bodies.parse import MAX_DEPTH, MAX_FLOATS, parse
from bagu.serve.http.calls import ApiError
from bagu.serve.unicode import is_unicode, lone_escape
from bagu.serve.wire.messages import Ready

DEEP_TOOL = (
    b'{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", "function": {"name": "f", '
    b'"parameters": {"default": ' + b"[" * 900 + b"]" * 900 + b"}}}]}"
)


def nested(depth: int) -> bytes:
    value = b"[" * (depth - 3) + b"]" * (depth - 3)  # in the body, the list of messages and a message
    return b'{"max_tokens": 1, "messages": [{"role": "user", "content": "a", "x": ' + value + b"}]}"


REFUSED: list[tuple[str, Any, int, str]] = [
    (TEXT, b'{"prompt": "hi"', 400, "not JSON"),
    (TEXT, b'{"prompt": "\xff"}', 400, "UTF-8"),
    (TEXT, b"[" * 100_000, 400, ""),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "UTF-8"),
    (TEXT, '{"prompt": "hi"}'.encode("utf-16"), 400, "UTF-8"),
    (TEXT, b'{"prompt": "a", "user": "\xed\xa0\x80"}', 400, "UTF-8"),  # the bytes of a surrogate
    (TEXT, b'{"prompt": "a", "structured_outputs": {"regex": "a\xed\xa0\x80"}}', 400, "UTF-8"),
    (TEXT, b'{"prompt": "a", "structured_outputs": {"grammar": "start: \\"\xed\xa0\x80\\""}}', 400, "UTF-8"),
    (TEXT, b'{"prompt": "a", "structured_outputs": {"choice": ["\xed\xb0\x80"]}}', 400, "UTF-8"),
    (TEXT, {"prompt": "a", "structured_outputs": {"json": '{"const": "\\ud800"}'}}, 400, "not UTF-8 text"),
    ("/v1/responses", b'{"input": "a", "stream": true, "metadata": {"\xed\xa0\x80": "a"}}', 400, "UTF-8"),
    (TEXT, b'{"prompt": "a", "x": 1e999}', 400, "too large for a number"),
    (TEXT, b'{"prompt": "a", "x": [' + b"[]," * 40_000 + b"1]}", 400, "40002 objects and lists (at most 32768)"),
    (TEXT, b'{"prompt": [' + b"1," * 600_000 + b"1]}", 400, "600000 values (at most 524288)"),
    (TEXT, b'{"prompt": "a", "temperature": NaN}', 400, "NaN"),
    (TEXT, b"x" * 10_000_000, 413, "bytes"),
    (TEXT, [], 400, "dictionary"),
    (TEXT, {}, 400, "prompt"),
    (TEXT, {"prompt": 5}, 400, "prompt"),
    (TEXT, {"prompt": []}, 400, "prompt"),
    (TEXT, {"prompt": ""}, 400, "empty"),
    (TEXT, {"prompt": [10**9]}, 400, "vocabulary"),
    (TEXT, {"prompt": [-1]}, 400, "token ids (0 or more)"),
    (TEXT, {"prompt": ["a", 1]}, 400, "a list of texts"),
    (TEXT, {"prompt": [5] * MAX_LEN}, 400, f"the prompt has {MAX_LEN} tokens (this"),
    (TEXT, {"prompt": "a" * 9000, "max_tokens": 1}, 400, str(MAX_LEN)),
    (TEXT, {"prompt": "a" * 50_000}, 400, "the first 16384 of the text's 50000 characters are"),
    (TEXT, {"prompt": "a" * 7_000_000}, 400, "the text has 7000000 characters"),
    (TEXT, {"prompt": [[10**9]] * 2048, "n": 128}, 400, "262144 choices"),  # refused before a prompt is checked
    (TEXT, {"prompt": "a", "max_tokens": MAX_LEN}, 400, str(MAX_LEN)),
    (TEXT, {"prompt": "a", "max_tokens": -1}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "max_tokens": "5"}, 400, "max_tokens"),
    (TEXT, {"prompt": "a", "temperature": -0.1}, 400, "temperature"),
    (TEXT, {"prompt": "a", "temperature": "hot"}, 400, "temperature"),
    (TEXT, {"prompt": "a", "top_p": 0}, 400, "top_p"),
    (TEXT, {"prompt": "a", "n": 10**9}, 400, "n"),
    (TEXT, {"prompt": "a", "n": 17}, 400, "17 choices (this server takes 16 at a time"),
    (TEXT, {"prompt": "a", "n": True}, 400, "n"),
    (TEXT, {"prompt": "a", "logprobs": 10**6}, 400, "logprobs"),
    (TEXT, {"prompt": "a", "stop": [""]}, 400, "stop"),
    (TEXT, {"prompt": "a", "logit_bias": {"x": 1}}, 400, "logit_bias"),
    (TEXT, {"prompt": "a", "logit_bias": {"1" * 5000: 1}}, 400, "logit_bias"),
    (TEXT, b'{"prompt": "a", "max_tokens": ' + b"9" * 4300 + b"}", 400, "max_tokens"),
    (TEXT, {"prompt": ["a"] * 3000}, 400, "2048"),
    (TEXT, {"prompt": "a", "repetition_penalty": 1e-300}, 400, "repetition_penalty"),
    (TEXT, {"prompt": "a", "seed": 2**70}, 400, "seed"),
    (TEXT, {"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream"),
    (TEXT, {"prompt": "a", "stream": True, "prompt_logprobs": 1}, 400, "prompt_logprobs"),
    (TEXT, {"prompt": "a", "model": "gpt-9"}, 404, "gpt-9"),
    (CHAT, {"messages": []}, 400, "messages"),
    (CHAT, nested(MAX_DEPTH + 1), 400, "nested"),
    (CHAT, DEEP_TOOL, 400, "nested"),
    (CHAT, {"messages": [*ASK, {"role": "user", "content": "a" * 60_000}]}, 400, "characters"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "wizard"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": ASK, "top_logprobs": 2}, 400, "logprobs"),
    (CHAT, {"messages": ASK, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": ASK, "chat_template_kwargs": {"messages": []}}, 400, "chat_template_kwargs"),
    ("/v1/embeddings", {"input": "a"}, 400, "embeddings"),
    ("/v1/nothing", {}, 404, "nothing"),
    ("/v1/models", {}, 405, "models"),
    ("/tokenize", {"prompt": "a" * 7_000_000}, 400, "the text has 7000000 characters"),
    ("/tokenize", {"messages": [{"role": "user", "content": "a" * 60_000}]}, 400, "characters"),
    ("/detokenize", {"tokens": [-1]}, 400, "tokens"),
    ("/detokenize", {"tokens": [5] * 20_000}, 400, "20000 tokens (at most 16384; "),
]


@pytest.mark.parametrize(("path", "body", "status", "says"), REFUSED, ids=lambda v: str(v)[:40])
def test_refusals_have_openais_error_shape(tiny: Running, path: str, body: Any, status: int, says: str) -> None:
    answer = post(tiny, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and says in error["message"]


def test_the_deepest_body_is_served(tiny: Running) -> None:
    assert post(tiny, CHAT, nested(MAX_DEPTH)).status_code == 200


@pytest.mark.parametrize(
    ("text", "valid"),
    [(r"\ud83d\ude42", True), (r"\uD83D\uDE42\u4f60", True), (r"\\ud800", True), ("[,{:" * 50_000, True),
     (r"\\\ud800", False), (r"\ude42", False), (r"\ud83d\\\ude42", False), (r"\ud83d\ud83d\ude42", False),
     (r"\ud83d\ude42\ude42", False)],
)  # fmt: skip
def test_only_a_surrogate_without_its_pair_is_refused(text: str, valid: bool) -> None:
    raw = f'{{"prompt": "{text}"}}'.encode()
    if valid:
        assert parse(CompletionBody, raw).prompt == json.loads(raw)["prompt"]
    else:
        with pytest.raises(ApiError, match="not UTF-8 text: a surrogate without its pair"):
            parse(CompletionBody, raw)


@given(st.lists(st.sampled_from([r"\ud83d", r"\uDBFF", r"\uDC00", r"\ude42", r"\u4f60", r"\\", r"\n", "a", "你"])))
def test_lone_escapes_are_those_that_python_cannot_encode(parts: list[str]) -> None:
    text = f'"{"".join(parts)}"'
    assert (lone_escape(text) is None) == is_unicode(json.loads(text))


def test_more_fractions_than_a_body_may_have_are_refused() -> None:
    assert parse(CompletionBody, b'{"prompt": [16.0, 1e1]}').prompt == [16, 10]
    with pytest.raises(ApiError, match=f"more than {MAX_FLOATS} numbers with a fraction or an exponent"):
        parse(CompletionBody, b'{"prompt": [' + b",".join([b"1e1"] * (MAX_FLOATS + 1)) + b"]}")


def test_half_a_million_wrong_values_give_one_error() -> None:
    """One error for each of them took twenty seconds, which blocks the event loop."""
    with pytest.raises(ApiError, match="token ids") as found:
        parse(CompletionBody, b'{"prompt": [' + b",".join([b"-1"] * 500_000) + b"]}")
    assert len(str(found.value)) < 1000


def test_no_number_crashes_the_engine(client: openai.OpenAI, tiny: Running) -> None:
    """Each of these is in range, and once crashed the engine and with it all other requests."""
    for ask in ({"top_p": 1e-50}, {"temperature": 1e-46, "logprobs": 2}, {"temperature": 1e-46, "presence_penalty": 1},
                {"min_tokens": 3, "stop_token_ids": list(range(4096)), "logprobs": 1}):  # fmt: skip
        answer = post(tiny, TEXT, {"prompt": "a", "max_tokens": 4, "ignore_eos": True, **ask})
        assert answer.status_code == 200, answer.text


def test_stop_tokens_outside_the_vocabulary_do_not_reach_the_engine() -> None:
    """With min_tokens a step visits all of them: 700,000 took 54 ms (ARM), for all requests."""
    _, tokenizer, chat = load()
    ready = Ready(
        tokenizer=tokenizer, chat=chat, generates=True, max_model_len=512, vocab_size=tokenizer.vocab_size
    )  # fmt: skip
    ids = [7, 3, 7, tokenizer.vocab_size, *range(2**40, 2**40 + 1000)]
    text = parse(CompletionBody, json.dumps({"prompt": "a", "stop_token_ids": ids}).encode()).to_job(ready)
    assert text.requests[0].sampling.stop_token_ids == (7, 3)
    message = {"role": "user", "content": "a"}
    said = parse(ChatBody, json.dumps({"messages": [message], "stop_token_ids": ids}).encode()).to_job(ready)
    assert set(said.requests[0].sampling.stop_token_ids) == {3, 7, *chat.turn_ends}


@pytest.mark.parametrize("stream", [True, False])
def test_more_choices_than_can_run_are_refused_with_the_limit_and_its_flag(tiny: Running, stream: bool) -> None:
    answer = post(tiny, TEXT, {"prompt": "a", "n": 9, "stream": stream})  # 8 choices run, and 8 more may wait
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "n")
    assert error["message"].startswith("n = 9, and 8 choices can run at once") and "--max-num-seqs" in error["message"]
    assert "cmpl-" not in error["message"]  # the client does not know the engine's request id


SILENT = {  # fields of other servers that earlier versions ignored
    "guided_choice", "guided_grammar", "grammar", "regex", "ebnf", "json_schema", "echo", "logits_processors",
    "repeat_penalty", "typical_p", "reasoning_effort", "prediction", "audio", "web_search_options",
}  # fmt: skip


@pytest.mark.parametrize(("path", "listed"), [(CHAT, fields.CHAT), (TEXT, fields.COMPLETION)])
def test_unsupported_fields_of_other_servers_are_refused_by_name(
    tiny: Running, path: str, listed: fields.Fields
) -> None:
    assert path == TEXT or not SILENT - listed.keys()
    body = {"messages": ASK} if path == CHAT else {"prompt": "a"}
    for name, harmless in listed.items():
        answer = post(tiny, path, {**body, "max_tokens": 1, name: ["wanted"]})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, name) and name in error["message"], answer.text
        for value in (None, *harmless):
            assert post(tiny, path, {**body, "max_tokens": 1, name: value}).status_code == 200, (name, value)


def test_true_is_not_one(tiny: Running) -> None:
    assert post(tiny, TEXT, {"prompt": "a", "best_of": True}).status_code == 400


def test_other_endpoints_refuse_unsupported_fields(tiny: Running) -> None:
    stream = {"prompt": "a", "stream": True, "stream_options": {"continuous_usage_stats": True}}
    for path, body, name in (
        (TEXT, stream, "stream_options.continuous_usage_stats"),
        ("/tokenize", {"prompt": "a", "return_token_strs": True}, "return_token_strs"),
        ("/tokenize", {"messages": ASK, "add_special_tokens": True}, "add_special_tokens"),
        ("/detokenize", {"tokens": [5], "skip_special_tokens": True}, "skip_special_tokens"),
    ):
        answer = post(tiny, path, body)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, name)


TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.mark.parametrize(
    "asked",
    [{"tools": []}, {"tools": [], "tool_choice": "auto"}, {"tools": [TOOL], "tool_choice": "none"},
     {"functions": [TOOL["function"]], "function_call": "none"}],
)  # fmt: skip
def test_tools_are_accepted_with_tool_choice_none(tiny: Running, asked: dict[str, Any]) -> None:
    ask = {"messages": ASK, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert post(tiny, CHAT, {**ask, **asked}).json()["choices"] == post(tiny, CHAT, ask).json()["choices"]


@pytest.mark.parametrize("last", ["-1", "x", "9" * 5000])
def test_engine_stats_refuse_an_invalid_count(tiny: Running, last: str) -> None:
    assert get(tiny, f"/engine?last={last}").status_code == 400


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_body_without_the_json_content_type_is_refused(tiny: Running, kind: str | None) -> None:
    """A page of any origin can send such a body without a CORS preflight request."""
    headers = {"Authorization": f"Bearer {KEY}"} | ({} if kind is None else {"Content-Type": kind})
    for path, body in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        answer = post(tiny, path, body, headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    spelled = {**headers, "Content-Type": "Application/JSON; charset=utf-8"}
    assert post(tiny, "/tokenize", {"prompt": "a"}, headers=spelled).status_code == 200
