"""The server as clients see it: the official client, curl, raw sockets; every refusal with its status."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from typing import Any

import httpx
import openai
import pytest
from conftest import KEY, ORIGIN
from tiny_server import MAX_LEN, MODEL, Running, eventually

from bagu.errors import ArgumentError
from bagu.serve.http import fields, server
from bagu.serve.http.calls import ApiError
from bagu.serve.http.openai import CompletionBody, parse

ASK = [{"role": "user", "content": "hello world, 你好"}]
ALL: dict[str, Any] = {"extra_body": {"ignore_eos": True}}  # a random model may say the end at any time
LONG: dict[str, Any] = {"max_tokens": 3000, **ALL}
JSON = {"Content-Type": "application/json"}
HEADERS = {"Authorization": f"Bearer {KEY}", **JSON}


def post(tiny: Running, path: str, body: Any, **options: Any) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    return tiny.http.post(path, content=content, **{"headers": HEADERS, **options})


def head(path: str, length: int, version: str = "1.1") -> bytes:
    """Of a request on a raw socket, with a JSON body of this length."""
    lines = [f"POST {path} HTTP/{version}", "Host: x", *(f"{name}: {value}" for name, value in HEADERS.items())]
    return "\r\n".join([*lines, f"Content-Length: {length}", "", ""]).encode()


def get(tiny: Running, path: str, **options: Any) -> httpx.Response:
    return tiny.http.get(path, **options)


def idle(tiny: Running) -> bool:
    stats = tiny.get("/engine")
    return stats["blocks"]["used"] == stats["running"] == stats["waiting"] == 0


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL).model_dump()
    assert found["max_model_len"] == MAX_LEN
    assert (found["default_sampling"]["temperature"], found["default_sampling"]["max_tokens"]) == (1.0, None)


def test_a_chat_streamed_and_whole_say_the_same(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 24, "seed": 7, "n": 2} | ALL
    whole = client.chat.completions.create(**ask)
    texts = ["", ""]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert texts[0] != texts[1]  # a seed has a draw for each choice
    assert whole.usage is not None and whole.usage.completion_tokens == 48
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_chunks_have_every_key_and_one_finish_reason_a_choice(tiny: Running) -> None:
    ask = {"messages": ASK, "max_tokens": 5, "stream": True, "n": 3, "ignore_eos": True}
    answer = post(tiny, "/v1/chat/completions", ask)
    assert answer.headers["content-type"].startswith("text/event-stream")
    *events, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(e.removeprefix("data: ")) for e in events]
    assert {c["object"] for c in chunks} == {"chat.completion.chunk"} and len({c["id"] for c in chunks}) == 1
    choices = [c["choices"][0] for c in chunks]
    assert all({"index", "delta", "logprobs", "finish_reason"} <= c.keys() for c in choices)
    assert [c["delta"]["role"] for c in choices if "role" in c["delta"]] == ["assistant"] * 3
    ends = [(c["index"], c["finish_reason"]) for c in choices if c["finish_reason"] is not None]
    assert sorted(ends) == [(0, "length"), (1, "length"), (2, "length")]


def test_logprobs_of_a_chat(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 6, "logprobs": True, "top_logprobs": 3} | ALL
    whole = client.chat.completions.create(**ask, temperature=0).choices[0].logprobs
    assert whole is not None and whole.content is not None and len(whole.content) == 6
    for entry in whole.content:
        assert len(entry.top_logprobs) == 3
        best = max(t.logprob for t in entry.top_logprobs)
        assert entry.logprob == pytest.approx(best, abs=1e-5) and best < 0  # greedy takes the likeliest
    streamed = []
    for chunk in client.chat.completions.create(**ask, temperature=0, stream=True):
        found = chunk.choices[0].logprobs
        streamed += found.content if found and found.content else []
    assert streamed == whole.content


def test_the_bytes_of_logprobs_make_the_text(client: openai.OpenAI) -> None:
    """Also of tokens that are a part of a character: a random model writes many."""
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 40, "seed": 3, "logprobs": True}
    choice = client.chat.completions.create(**ask, extra_body={"ignore_eos": True, "skip_special_tokens": False})
    assert choice.choices[0].logprobs is not None and choice.choices[0].logprobs.content is not None
    entries = choice.choices[0].logprobs.content
    assert all(entry.bytes is not None for entry in entries)
    said = b"".join(bytes(entry.bytes or []) for entry in entries)
    assert said.decode(errors="replace") == choice.choices[0].message.content
    assert any("\N{REPLACEMENT CHARACTER}" in entry.token for entry in entries), "no character was cut"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("chat", [False, True])
def test_usage_says_what_the_prefix_cache_gave(client: openai.OpenAI, chat: bool, stream: bool) -> None:
    words = f"{chat} {stream} " + "hello world, " * 20

    def cached() -> tuple[int, int]:
        ask: dict[str, Any] = {"model": MODEL, "max_tokens": 3, "n": 2} | ALL
        if stream:
            ask |= {"stream": True, "stream_options": {"include_usage": True}}
        made: Any = client.chat.completions if chat else client.completions
        prompt: Any = {"messages": [{"role": "user", "content": words}]} if chat else {"prompt": words}
        answer = made.create(**ask, **prompt)
        usage = [*answer][-1].usage if stream else answer.usage
        return usage.prompt_tokens_details.cached_tokens, usage.prompt_tokens

    assert cached()[0] <= 16  # the head of a chat may be there
    found, prompt = cached()
    assert found == (prompt - 1) // 16 * 16  # all full blocks but the one of the last token, whose logits are needed


def test_completions_with_several_prompts_and_token_ids(client: openai.OpenAI, tiny: Running) -> None:
    ids = post(tiny, "/tokenize", {"prompt": "hello"}).json()["tokens"]
    ask: dict[str, Any] = {"model": MODEL, "max_tokens": 4, "temperature": 0} | ALL
    texts = [c.text for c in client.completions.create(prompt=["hello", "def f"], n=1, **ask).choices]
    assert client.completions.create(prompt=ids, **ask).choices[0].text == texts[0]
    both = client.completions.create(prompt=[ids, ids], n=2, **ask)
    assert [c.text for c in both.choices] == [texts[0]] * 4 and [c.index for c in both.choices] == [0, 1, 2, 3]
    assert both.usage is not None and both.usage.prompt_tokens == 2 * len(ids)


def test_echo_scores_a_prompt(client: openai.OpenAI) -> None:
    text = "def f(x):\n    return x"
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=1).choices[0]
    assert scored.text == text and scored.logprobs is not None
    tokens, logprobs = scored.logprobs.tokens, scored.logprobs.token_logprobs
    assert tokens is not None and logprobs is not None and "".join(tokens) == text
    assert logprobs[0] is None and all(p < 0 for p in logprobs[1:]) and len(logprobs) == len(tokens)
    more = client.completions.create(model=MODEL, prompt=text, max_tokens=3, echo=True, logprobs=1, **ALL).choices[0]
    assert more.logprobs is not None and more.logprobs.token_logprobs is not None
    assert more.logprobs.token_logprobs[1 : len(tokens)] == pytest.approx(logprobs[1:], abs=1e-5)
    assert more.text.startswith(text) and len(more.logprobs.token_logprobs) == len(tokens) + 3


def test_text_offsets_count_characters_that_are_spread_over_tokens(client: openai.OpenAI) -> None:
    text = "日本語 é def"
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert (
        scored.logprobs is not None and scored.logprobs.tokens is not None and scored.logprobs.text_offset is not None
    )
    assert "\ufffd" in scored.logprobs.tokens, "a character is spread"
    for token, at in zip(scored.logprobs.tokens, scored.logprobs.text_offset, strict=True):
        assert "\ufffd" in token or text.startswith(token, at)
    assert scored.logprobs.text_offset == sorted(scored.logprobs.text_offset)


def test_stop_strings_are_cut_in_both_modes(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", "max_tokens": 40, "temperature": 0} | ALL
    whole = client.completions.create(**ask).choices[0].text
    stop = whole[11:13]
    cut = client.completions.create(**ask, stop=[stop]).choices[0]
    assert cut.text == whole[: whole.index(stop)] and cut.finish_reason == "stop"
    assert cut.model_dump()["stop_reason"] == stop
    streamed = "".join(c.choices[0].text for c in client.completions.create(**ask, stop=stop, stream=True))
    assert streamed == cut.text


def test_tokenize_and_detokenize(tiny: Running) -> None:
    text = "def f(x): 你好 🙂 <|end|>"
    tokens = post(tiny, "/tokenize", {"prompt": text}).json()
    assert tokens["count"] == len(tokens["tokens"]) and tokens["max_model_len"] == MAX_LEN
    assert post(tiny, "/detokenize", {"tokens": tokens["tokens"]}).json() == {"prompt": text}
    chat = post(tiny, "/tokenize", {"messages": ASK}).json()["tokens"]
    assert post(tiny, "/tokenize", {"prompt": "a" * 9000}).json()["count"] > MAX_LEN  # to be told how much too long
    assert "<|assistant|>" in post(tiny, "/detokenize", {"tokens": chat}).json()["prompt"]


def test_the_developer_role_is_the_templates_system_role(tiny: Running) -> None:
    def tokens(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, *ASK]
        found: list[int] = post(tiny, "/tokenize", {"messages": messages}).json()["tokens"]
        return found

    assert tokens("developer") == tokens("system")
    answer = post(tiny, CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *ASK], "max_tokens": 2})
    assert answer.status_code == 200


CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DEEP = b'{"messages": [{"role": "user", "content": "a", "x": ' + b"[" * 600 + b"]" * 600 + b"}]}"
REFUSED: list[tuple[str, Any, int, str]] = [
    (TEXT, b'{"prompt": "hi"', 400, "not JSON"),
    (TEXT, b'{"prompt": "\xff"}', 400, "UTF-8"),
    (TEXT, b"[" * 100_000, 400, ""),
    (TEXT, b'{"prompt": "\\ud800"}', 400, "UTF-8"),
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
    (TEXT, {"prompt": "a" * 50_000}, 400, "the first 32768 of the text's 50000 characters are"),
    (TEXT, {"prompt": "a" * 7_000_000}, 400, "the text has 7000000 characters"),
    (TEXT, {"prompt": [[10**9]] * 2048, "n": 128}, 400, "262144 choices"),  # before any of the prompts is looked at
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
    (CHAT, DEEP, 400, "nested"),
    (CHAT, {"messages": [*ASK, {"role": "user", "content": "a" * 60_000}]}, 400, "characters"),
    (CHAT, {"messages": [{"role": "wizard", "content": "a"}]}, 400, "wizard"),
    (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages"),
    (CHAT, {"messages": ASK, "top_logprobs": 2}, 400, "logprobs"),
    (CHAT, {"messages": ASK, "tools": [{}]}, 400, "tools"),
    (CHAT, {"messages": ASK, "response_format": {"type": "json_object"}}, 400, "response_format"),
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
def test_refusals_are_openai_shaped(tiny: Running, path: str, body: Any, status: int, says: str) -> None:
    answer = post(tiny, path, body)
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"} and says in error["message"]


def test_a_million_wrong_values_are_one_error() -> None:
    """Each of them as an error of its own took forty seconds, and the loop stands still for that."""
    with pytest.raises(ApiError, match="token ids") as found:
        parse(CompletionBody, b'{"prompt": [' + b",".join([b"-1"] * 1_000_000) + b"]}")
    assert len(str(found.value)) < 1000


def test_no_number_ends_the_engine(client: openai.OpenAI, tiny: Running) -> None:
    """Each of these is in range, and once ended the engine under every other request."""
    for ask in ({"top_p": 1e-50}, {"temperature": 1e-46, "logprobs": 2}, {"temperature": 1e-46, "presence_penalty": 1},
                {"min_tokens": 3, "stop_token_ids": list(range(4096)), "logprobs": 1}):  # fmt: skip
        answer = post(tiny, TEXT, {"prompt": "a", "max_tokens": 4, "ignore_eos": True, **ask})
        assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("stream", [True, False])
def test_more_choices_than_can_run_are_refused_with_the_limit_and_its_flag(tiny: Running, stream: bool) -> None:
    answer = post(tiny, TEXT, {"prompt": "a", "n": 9, "stream": stream})  # 8 run, and 8 more may wait
    error = answer.json()["error"]
    assert (answer.status_code, error["type"], error["param"]) == (400, "invalid_request_error", "n")
    assert error["message"].startswith("n = 9, and 8 choices can run at once") and "--max-num-seqs" in error["message"]
    assert "cmpl-" not in error["message"]  # the engine's own name for the request means nothing to a client


def preflight(tiny: Running, origin: str) -> httpx.Response:
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,content-type"}
    return tiny.http.options(CHAT, headers={"Origin": origin, **asked})


def test_pages_of_allowed_origins_may_call_and_no_others(tiny: Running) -> None:
    answer = preflight(tiny, ORIGIN)  # a browser sends it without the key
    assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == ORIGIN
    assert "POST" in answer.headers["access-control-allow-methods"]
    assert {"authorization", "content-type"} <= set(answer.headers["access-control-allow-headers"].split(","))
    body: dict[str, Any] = {"messages": ASK, "max_tokens": 2, "stream": True}
    for key, status in ((KEY, 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}", **JSON}
        answer = post(tiny, CHAT, body, headers=headers)
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (status, ORIGIN)
    refused = preflight(tiny, "http://elsewhere.example")
    assert refused.status_code == 400 and "access-control-allow-origin" not in refused.headers
    answer = get(tiny, "/health", headers={"Origin": "http://elsewhere.example"})
    assert answer.status_code == 200 and "access-control-allow-origin" not in answer.headers


def test_origins_come_one_by_one_or_as_a_json_list() -> None:
    assert server._origins(['["http://a", "http://b:1"]', "https://c"]) == ("http://a", "http://b:1", "https://c")
    for wrong in ("localhost", "http://a/path", "[1]", '["http://a"'):
        with pytest.raises(ArgumentError, match="allowed origins"):
            server._origins([wrong])


def test_null_is_the_default_and_unknown_fields_pass(tiny: Running) -> None:
    body = {
        "prompt": "a",
        "max_tokens": 2,
        "temperature": None,
        "stop": None,
        "n": None,
        "logit_bias": None,
        "user": "me",
    }
    assert post(tiny, TEXT, body).status_code == 200


SILENT = {  # fields of other servers that were once taken and ignored
    "guided_choice", "guided_grammar", "grammar", "regex", "ebnf", "json_schema", "echo", "logits_processors",
    "repeat_penalty", "typical_p", "reasoning_effort", "prediction", "audio", "web_search_options",
}  # fmt: skip


@pytest.mark.parametrize(("path", "listed"), [(CHAT, fields.CHAT), (TEXT, fields.COMPLETION)])
def test_a_field_of_another_server_is_refused_by_its_name(tiny: Running, path: str, listed: fields.Fields) -> None:
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


def test_other_bodies_refuse_what_they_would_ignore(tiny: Running) -> None:
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
def test_tools_that_are_not_to_be_called_change_nothing(tiny: Running, asked: dict[str, Any]) -> None:
    ask = {"messages": ASK, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    assert post(tiny, CHAT, {**ask, **asked}).json()["choices"] == post(tiny, CHAT, ask).json()["choices"]


def test_a_number_without_a_fraction_is_an_integer(tiny: Running) -> None:
    ask = b'{"prompt": [5.0, 6], "max_tokens": 3.0, "seed": 1e1, "ignore_eos": true}'
    assert post(tiny, TEXT, ask).json()["usage"]["completion_tokens"] == 3
    for wrong in (b"2.5", b"1e400", b"1e30"):
        assert post(tiny, TEXT, b'{"prompt": "a", "max_tokens": ' + wrong + b"}").status_code == 400


def test_without_max_tokens_an_answer_ends_where_the_context_does(tiny: Running) -> None:
    answer = post(tiny, TEXT, {"prompt": [5] * (MAX_LEN - 3), "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("last", ["-1", "x", "9" * 5000])
def test_the_panel_refuses_what_is_no_count(tiny: Running, last: str) -> None:
    assert get(tiny, f"/engine?last={last}").status_code == 400


@pytest.mark.parametrize("header", [{}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Basic {KEY}"}])
def test_the_key_guards_what_costs(tiny: Running, header: dict[str, str]) -> None:
    for path, body in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
        answer = post(tiny, path, body, headers=header)
        assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
    assert get(tiny, "/health", headers=header).status_code == 200


def test_a_full_queue_says_429_and_when_to_come_back(client: openai.OpenAI, tiny: Running) -> None:
    ask: dict[str, Any] = {"model": MODEL, "prompt": "hello", **LONG}
    streams = [client.completions.create(**ask, n=8, stream=True) for _ in range(2)]
    try:
        with pytest.raises(openai.RateLimitError) as refused:
            client.completions.create(model=MODEL, prompt="one too many")
        assert int(refused.value.response.headers["retry-after"]) >= 1
    finally:
        for stream in streams:
            stream.close()
    eventually(lambda: idle(tiny), "the closed streams gave their blocks back")
    assert client.completions.create(model=MODEL, prompt="now").choices


def test_a_client_that_hangs_up_frees_its_blocks_streaming_or_not(client: openai.OpenAI, tiny: Running) -> None:
    with client.completions.create(model=MODEL, prompt="hello", stream=True, **LONG) as stream:
        next(iter(stream))
        assert tiny.get("/engine")["blocks"]["used"] > 0
    eventually(lambda: idle(tiny), "the blocks of a closed stream are free")
    body = json.dumps({"prompt": "hello", "max_tokens": 3000, "ignore_eos": True}).encode()
    with tiny.raw(head(TEXT, len(body)) + body):
        eventually(lambda: tiny.get("/engine")["running"], "the call without a stream runs")
    eventually(lambda: idle(tiny), "the blocks of a call without a stream are free")


def test_metrics_count_what_happened(client: openai.OpenAI, tiny: Running) -> None:
    def value(name: str) -> float:
        text = get(tiny, "/metrics").text
        return sum(float(v) for v in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", text, re.M))

    names = ["vllm:generation_tokens_total", "vllm:request_success_total", "vllm:time_to_first_token_seconds_count"]
    names += ["vllm:inter_token_latency_seconds_count", "vllm:request_prompt_tokens_count"]
    before = [value(name) for name in names]
    client.completions.create(model=MODEL, prompt="hello", max_tokens=5, **ALL)
    assert [value(n) - b for n, b in zip(names, before, strict=True)] == [5, 1, 1, 4, 1]
    assert value("vllm:num_requests_running") == 0
    assert 'handler="/v1/completions"' in get(tiny, "/metrics").text
    for line in get(tiny, "/metrics").text.splitlines():
        assert re.fullmatch(r'# (HELP|TYPE) .+|[a-z0-9_:]+(\{([a-z_]+="[^"]*",?)+\})? [-+0-9.e]+', line), line


@pytest.mark.parametrize("kind", [None, "text/plain", "application/x-www-form-urlencoded", "application/jsonp"])
def test_a_body_that_does_not_say_it_is_json_is_refused(tiny: Running, kind: str | None) -> None:
    """A page of any origin may send such a body without asking first."""
    headers = {"Authorization": f"Bearer {KEY}"} | ({} if kind is None else {"Content-Type": kind})
    for path, body in ((TEXT, {"prompt": "a"}), ("/tokenize", {"prompt": "a"})):
        answer = post(tiny, path, body, headers=headers)
        assert answer.status_code == 415 and "application/json" in answer.json()["error"]["message"]
    spelled = {**headers, "Content-Type": "Application/JSON; charset=utf-8"}
    assert post(tiny, "/tokenize", {"prompt": "a"}, headers=spelled).status_code == 200


def test_a_stream_to_a_client_of_http_1_0_has_no_chunks_and_ends_with_its_connection(tiny: Running) -> None:
    body = json.dumps({"prompt": "hello", "max_tokens": 5, "stream": True, "ignore_eos": True}).encode()
    with tiny.raw(head(TEXT, len(body), "1.0") + body) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, stream = answer.partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in top.lower() and b"connection: close" in top.lower()
    assert stream.startswith(b"data: {") and stream.endswith(b"data: [DONE]\n\n")
    with tiny.raw(b"GET /version HTTP/1.0\r\n\r\n") as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    top, _, whole = answer.partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(whole) in top.lower() and json.loads(whole)["version"]


def test_queue_prefill_and_decode_times_are_parts_of_the_whole(client: openai.OpenAI, tiny: Running) -> None:
    def total(name: str) -> tuple[float, float]:
        text = get(tiny, "/metrics").text
        found = [re.search(rf"^vllm:{name}_seconds_{part}{{.*}} (\S+)$", text, re.M) for part in ("sum", "count")]
        assert found[0] is not None and found[1] is not None, name
        return float(found[0][1]), float(found[1][1])

    names = ["request_queue_time", "request_prefill_time", "request_decode_time", "e2e_request_latency"]
    before = [total(name) for name in names]
    # eight run at once: of nine requests one waits until another has ended
    client.completions.create(model=MODEL, prompt=[[5] * 300] * 9, max_tokens=40, **ALL)
    spent = [(s - b, c - n) for (s, c), (b, n) in zip(map(total, names), before, strict=True)]
    assert [count for _, count in spent] == [9] * 4
    queue, prefill, decode, whole = (seconds for seconds, _ in spent)
    assert min(queue, prefill, decode) > 0 and queue + prefill + decode <= whole


def test_the_page_and_the_panel(tiny: Running) -> None:
    page = get(tiny, "/")
    assert page.status_code == 200 and "<html" in page.text and "Content-Security-Policy" in page.headers
    for name in re.findall(r'(?:src|href)="/?([\w.]+)"', page.text):
        assert get(tiny, f"/{name}").status_code == 200, name
    stats = tiny.get("/engine")
    blocks = stats["blocks"]
    assert len(blocks["map"]) == blocks["total"] and blocks["map"].count("c") == blocks["cached"]
    assert {"tokens_per_s", "running", "waiting", "batch_size", "ttft_ms_p50"} <= stats.keys()
    assert tiny.get("/version")["version"]


def test_an_idle_engine_makes_no_step(tiny: Running) -> None:
    eventually(lambda: idle(tiny), "nothing runs")
    steps = {tiny.get("/engine")["steps"] for _ in range(20)}  # each question wakes the engine's loop
    assert len(steps) == 1


def test_curl(tiny: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 3, "stream": True})
    asked = [curl, "-sSN", "--max-time", "60", f"{tiny.url}{CHAT}", "-d", body]
    asked += [word for name, value in HEADERS.items() for word in ("-H", f"{name}: {value}")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert said.startswith('data: {"id":"chatcmpl-') and said.endswith("data: [DONE]\n\n")
