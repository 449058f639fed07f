"""The API with the official client and curl: chats, completions, logprobs, tokenization."""

from __future__ import annotations

import json
import shutil
import subprocess
from typing import Any

import openai
import pytest
from api_client import ALL, ASK, CHAT, HEADERS, TEXT, post
from tiny_server import MAX_LEN, MODEL, Running


def test_models(client: openai.OpenAI) -> None:
    assert [m.id for m in client.models.list()] == [MODEL]
    found = client.models.retrieve(MODEL).model_dump()
    assert found["max_model_len"] == MAX_LEN
    assert (found["default_sampling"]["temperature"], found["default_sampling"]["max_tokens"]) == (1.0, None)


def test_a_streamed_chat_equals_an_unstreamed_one(client: openai.OpenAI) -> None:
    ask: dict[str, Any] = {"model": MODEL, "messages": ASK, "max_tokens": 24, "seed": 7, "n": 2} | ALL
    whole = client.chat.completions.create(**ask)
    texts = ["", ""]
    chunks = list(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [c.message.content for c in whole.choices]
    assert texts[0] != texts[1]  # the choices of a seed differ
    assert whole.usage is not None and whole.usage.completion_tokens == 48
    assert chunks[-1].choices == [] and chunks[-1].usage == whole.usage


def test_chunks_have_all_keys_and_one_finish_reason_per_choice(tiny: Running) -> None:
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
        assert entry.logprob == pytest.approx(best, abs=1e-5) and best < 0  # greedy takes the most probable token
    streamed = []
    for chunk in client.chat.completions.create(**ask, temperature=0, stream=True):
        found = chunk.choices[0].logprobs
        streamed += found.content if found and found.content else []
    assert streamed == whole.content


def test_the_bytes_of_logprobs_join_to_the_text(client: openai.OpenAI) -> None:
    """Also for tokens that are a part of a character: a random model generates many of them."""
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
def test_usage_reports_cached_prompt_tokens(client: openai.OpenAI, chat: bool, stream: bool) -> None:
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

    assert cached()[0] <= 16  # the beginning of the chat template may be cached
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


def test_text_offsets_count_characters_that_span_tokens(client: openai.OpenAI) -> None:
    text = "日本語 é def"
    scored = client.completions.create(model=MODEL, prompt=text, max_tokens=0, echo=True, logprobs=0).choices[0]
    assert (
        scored.logprobs is not None and scored.logprobs.tokens is not None and scored.logprobs.text_offset is not None
    )
    assert "\ufffd" in scored.logprobs.tokens, "a character is spread"
    for token, at in zip(scored.logprobs.tokens, scored.logprobs.text_offset, strict=True):
        assert "\ufffd" in token or text.startswith(token, at)
    assert scored.logprobs.text_offset == sorted(scored.logprobs.text_offset)


def test_stop_strings_are_removed_with_and_without_streaming(client: openai.OpenAI) -> None:
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
    assert post(tiny, "/tokenize", {"prompt": "a" * 9000}).json()["count"] > MAX_LEN  # a too long text is counted
    assert "<|assistant|>" in post(tiny, "/detokenize", {"tokens": chat}).json()["prompt"]


def test_the_developer_role_is_the_templates_system_role(tiny: Running) -> None:
    def tokens(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, *ASK]
        found: list[int] = post(tiny, "/tokenize", {"messages": messages}).json()["tokens"]
        return found

    assert tokens("developer") == tokens("system")
    answer = post(tiny, CHAT, {"messages": [{"role": "developer", "content": "Be brief."}, *ASK], "max_tokens": 2})
    assert answer.status_code == 200


def test_null_means_default_and_unknown_fields_are_ignored(tiny: Running) -> None:
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


def test_a_chat_accepts_store_and_metadata(client: openai.OpenAI, tiny: Running) -> None:
    found = client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=2, store=True, metadata={"run": "7"})
    assert found.usage is not None and found.usage.completion_tokens
    fields = tiny.get("/openapi.json")["components"]["schemas"]["ChatBody"]["properties"]
    assert "no chat completion is stored" in fields["store"]["description"]


def test_a_number_without_a_fraction_is_an_integer(tiny: Running) -> None:
    ask = b'{"prompt": [5.0, 6], "max_tokens": 3.0, "seed": 1e1, "ignore_eos": true}'
    assert post(tiny, TEXT, ask).json()["usage"]["completion_tokens"] == 3
    for wrong in (b"2.5", b"1e400", b"1e30"):
        assert post(tiny, TEXT, b'{"prompt": "a", "max_tokens": ' + wrong + b"}").status_code == 400


def test_without_max_tokens_a_chat_can_use_the_whole_context(tiny: Running) -> None:
    answer = post(tiny, TEXT, {"prompt": [5] * (MAX_LEN - 3), "ignore_eos": True}).json()
    assert answer["usage"]["completion_tokens"] == 3 and answer["choices"][0]["finish_reason"] == "length"


def test_curl(tiny: Running) -> None:
    curl = shutil.which("curl")
    if curl is None:
        pytest.skip("curl is not installed")
    body = json.dumps({"model": MODEL, "messages": ASK, "max_tokens": 3, "stream": True})
    asked = [curl, "-sSN", "--max-time", "60", f"{tiny.url}{CHAT}", "-d", body]
    asked += [word for name, value in HEADERS.items() for word in ("-H", f"{name}: {value}")]
    said = subprocess.run(asked, capture_output=True, text=True, check=True).stdout
    assert said.startswith('data: {"id":"chatcmpl-') and said.endswith("data: [DONE]\n\n")
