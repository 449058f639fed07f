"""Chats in three published formats; errors name the file and the line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bagu.data import DEFAULT_TEMPLATE, BpeTokenizer, ChatEncoder, ChatJsonlSource, Conversation
from bagu.errors import BaguError

ASKED, ANSWERED = {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": "Be short."}
CALL = {"type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 2}}}
TOOL = {"type": "function", "function": {"name": "add", "description": "a plus b"}}


def read(tmp_path: Path, *rows: Any, name: str = "chats.jsonl") -> list[Conversation]:
    path = tmp_path / name
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) if "jsonl" in name else json.dumps(list(rows)))
    return list(ChatJsonlSource(path).conversations())


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": [ASKED, ANSWERED]}, [ASKED, ANSWERED]),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "text", "text": "4"}]}]}, [ASKED, ANSWERED]),
        ({"conversations": [{"from": "human", "value": "2 + 2?"}, {"from": "gpt", "value": "4"}]}, [ASKED, ANSWERED]),
        (
            {"system": "Be short.", "conversations": [{"from": "human", "value": "2 + 2?"}, ANSWERED]},
            [SYSTEM, ASKED, ANSWERED],
        ),
        ({"instruction": "2 + 2?", "output": "4"}, [ASKED, ANSWERED]),
        ({"instruction": "2 + 2?", "input": "", "output": "4", "system": "Be short."}, [SYSTEM, ASKED, ANSWERED]),
        (
            {"instruction": "Add.", "input": "2 and 2", "output": "4", "history": [["2 + 2?", "4"]]},
            [ASKED, ANSWERED, {"role": "user", "content": "Add.\n2 and 2"}, ANSWERED],
        ),
    ],
    ids=[
        "messages",
        "parts",
        "sharegpt",
        "sharegpt with system",
        "alpaca",
        "alpaca with system",
        "alpaca with history",
    ],
)
@pytest.mark.parametrize("name", ["chats.jsonl", "chats.json"])
def test_chat_formats(tmp_path: Path, row: Any, messages: list[dict[str, str]], name: str) -> None:
    (chat,) = read(tmp_path, row, name=name)
    assert list(chat.messages) == messages


TOOL_CHATS = {
    "messages": {
        "messages": [
            ASKED,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "content": "4"},
            ANSWERED,
        ],
        "tools": [TOOL],
    },
    "arguments as text": {
        "messages": [
            ASKED,
            {
                "role": "assistant",
                "tool_calls": [{**CALL, "function": {"name": "add", "arguments": '{"a": 2, "b": 2}'}}],
            },
            {"role": "tool", "content": "4"},
            ANSWERED,
        ],
        "tools": [TOOL],
    },
    "sharegpt": {
        "conversations": [
            {"from": "human", "value": "2 + 2?"},
            {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2, "b": 2}}'},
            {"from": "observation", "value": "4"},
            {"from": "gpt", "value": "4"},
        ],
        "tools": json.dumps([TOOL]),
    },
}


@pytest.mark.parametrize("form", TOOL_CHATS)
def test_tool_calls_are_read_and_trained_on(tmp_path: Path, form: str) -> None:
    (chat,) = read(tmp_path, TOOL_CHATS[form])
    assert [m["role"] for m in chat.messages] == ["user", "assistant", "tool", "assistant"]
    assert chat.messages[1]["tool_calls"][0]["function"] == CALL["function"]
    tokenizer = BpeTokenizer.train(["2 + 2? add"], vocab_size=300, chat_template=DEFAULT_TEMPLATE)
    (document,) = ChatEncoder(tokenizer).documents([chat])
    assert document.mask is not None
    text = tokenizer.decode(list(document.tokens))
    said = tokenizer.decode([t for t, on in zip(document.tokens, document.mask, strict=True) if on])
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 2}}</tool_call><|end|>'
    assert said == f"{call}4<|end|>"
    assert text.startswith("<|system|>You may call") and '"description": "a plus b"' in text
    assert "<|user|><tool_response>4</tool_response><|end|>" in text


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"text": "x"}, "not a chat"),
        ({"messages": [{"content": "x"}]}, "message 0 has no role"),
        ({"messages": [ASKED, {"role": "assistant", "content": 4}]}, "content of message 1 is a int"),
        ({"messages": [ASKED, {"role": "assistant", "content": [{"type": "image_url"}]}]}, "part that is not text"),
        ({"messages": [ASKED, {"role": "assistant", "tool_calls": ["add"]}]}, "a tool call of message 1"),
        ({"messages": [{**ASKED, "tool_calls": [CALL]}]}, "message 0 has tool_calls"),
        ({"conversations": [{"from": "alien", "value": "x"}]}, "message 0 is from 'alien'"),
        (
            {"conversations": [{"from": "function_call", "value": "add(2, 2)"}]},
            "function call of message 0 is not JSON",
        ),
        ({"instruction": "x", "output": 4}, "field 'output' is a int"),
        ({"instruction": "x", "output": "y", "history": [["x"]]}, "a turn of history"),
        ({"messages": [ASKED, ANSWERED], "tools": "add"}, "field 'tools' is not JSON"),
    ],
)
def test_bad_rows_are_named_by_file_and_line(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(BaguError, match=said) as caught:
        read(tmp_path, {"messages": [ASKED, ANSWERED]}, row)
    assert str(caught.value).startswith(f"{tmp_path / 'chats.jsonl'}:2: ")


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        ([ASKED], "this chat has no assistant text"),
        ([ASKED, {"role": "narrator", "content": "x"}, ANSWERED], "the chat template rejects this chat"),
        ([ASKED, {"role": "assistant", "content": "\ufdd0"}], "Unicode noncharacter"),
    ],
)
def test_chats_that_the_template_rejects_are_named_by_line(tmp_path: Path, messages: Any, said: str) -> None:
    chats = read(tmp_path, {"messages": [ASKED, ANSWERED]}, {"messages": messages})
    tokenizer = BpeTokenizer.train(["x"], vocab_size=300, chat_template=DEFAULT_TEMPLATE)
    with pytest.raises(BaguError, match=said) as caught:
        list(ChatEncoder(tokenizer).documents(chats))
    assert str(caught.value).startswith(f"{tmp_path / 'chats.jsonl'}:2: ")


def test_a_folder_prefers_jsonl_over_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps([{"instruction": "x", "output": "y"}]))
    assert [c.id for c in ChatJsonlSource(tmp_path).conversations()] == ["a.json:1"]
    (tmp_path / "b.jsonl").write_text(json.dumps({"instruction": "x", "output": "y"}))
    assert [c.id for c in ChatJsonlSource(tmp_path).conversations()] == ["b.jsonl:1"]


def test_rows_of_prompt_and_completion_train_the_completion(tmp_path: Path) -> None:
    earlier = [SYSTEM, ASKED, ANSWERED, {"role": "user", "content": "Sure?"}]
    texts, lists = read(
        tmp_path, {"prompt": "2 + 2?", "completion": "4"},
        {"prompt": earlier, "completion": [{"role": "assistant", "content": "Yes."}]},
    )  # fmt: skip
    assert list(texts.messages) == [ASKED, ANSWERED] and texts.given == 1
    assert list(lists.messages) == [*earlier, {"role": "assistant", "content": "Yes."}]
    tokenizer = BpeTokenizer.train(["x"], vocab_size=300, chat_template=DEFAULT_TEMPLATE)
    said = [
        tokenizer.decode([t for t, on in zip(d.tokens, d.mask or (), strict=True) if on])
        for d in ChatEncoder(tokenizer).documents([texts, lists])
    ]
    assert said == ["4<|end|>", "Yes.<|end|>"]


def test_chats_in_parquet_are_read(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    called = {"role": "assistant", "content": None, "tool_calls": [CALL]}
    pq.write_table(pa.Table.from_pylist([{"messages": [ASKED, called, ANSWERED]}]), tmp_path / "a.parquet")
    (chat,) = ChatJsonlSource(tmp_path).conversations()
    assert list(chat.messages) == [ASKED, {**called, "content": ""}, ANSWERED]
