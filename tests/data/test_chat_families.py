"""Chats of several turns with templates in the style of known families: which text is trained, in which example."""

from __future__ import annotations

import re
from typing import Any

import pytest

from bagu.data.chat import ChatEncoder, ChatTemplate
from bagu.data.source import Conversation
from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer
from bagu.errors import BaguError

# only the answers after the last question keep their thoughts, and have empty ones if they have none
QWEN3 = """\
{%- set last = namespace(at=0) -%}
{%- for m in messages -%}{%- if m.role == "user" -%}{%- set last.at = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set words = m.content.split("</think>") -%}
{{- "<|im_start|>" + m.role + "\\n" -}}
{%- if m.role == "assistant" and loop.index0 > last.at -%}
{{- "<think>\\n" + words[0].replace("<think>", "") * (words | length - 1) + "\\n</think>\\n" -}}
{%- endif -%}
{{- words[-1] + "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|im_start|>assistant\\n" -}}{%- endif -%}
"""
# one more token after the last message, whatever its role
PHI3 = """\
{%- for m in messages -%}{{- "<|" + m.role + "|>\\n" + m.content + "<|end|>\\n" -}}{%- endfor -%}
{{- "<|assistant|>\\n" if add_generation_prompt else eos_token -}}
"""
# the last answer ends with a token of its own
GPT_OSS = """\
{%- for m in messages -%}
{{- "<|start|>" + m.role + ("<|channel|>final" if m.role == "assistant" else "") + "<|message|>" + m.content -}}
{{- "<|return|>" if loop.last and m.role == "assistant" else "<|end|>" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant" -}}{%- endif -%}
"""
# the generation prompt opens a thought, which the answers of a chat do not have
DEEPSEEK = """\
{%- for m in messages -%}
{%- if m.role == "user" -%}{{- "<|user|>" + m.content -}}
{%- elif m.role == "system" -%}{{- m.content -}}
{%- else -%}{{- "<|assistant|>" + m.content.split("</think>")[-1] + "<|endoftext|>" -}}{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant|><think>\\n" -}}{%- endif -%}
"""
# writes the content of a message and nothing else
LLAMA3 = """\
{%- for m in messages -%}{{- "<|start|>" + m.role + "<|message|>\\n\\n" + m.content | trim + "<|end|>" -}}{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|start|>assistant<|message|>\\n\\n" -}}{%- endif -%}
"""
CHAT = [
    {"role": "user", "content": "one?"},
    {"role": "assistant", "content": "<think>hm</think>1"},
    {"role": "user", "content": "two?"},
    {"role": "assistant", "content": "<think>ah</think>2"},
]
# the text of each example, with its targets in square brackets
EXPECTED = {
    QWEN3: [
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n[<think>\nhm\n</think>\n1<|im_end|>]\n",
        "<|im_start|>user\none?<|im_end|>\n<|im_start|>assistant\n1<|im_end|>\n"
        "<|im_start|>user\ntwo?<|im_end|>\n<|im_start|>assistant\n[<think>\nah\n</think>\n2<|im_end|>]\n",
    ],
    PHI3: [
        "<|user|>\none?<|end|>\n<|assistant|>\n[<think>hm</think>1<|end|>]\n"
        "<|user|>\ntwo?<|end|>\n<|assistant|>\n[<think>ah</think>2<|end|>]\n<|endoftext|>",
    ],
    GPT_OSS: [
        "<|start|>user<|message|>one?<|end|><|start|>assistant[<|channel|>final<|message|><think>hm</think>1<|return|>]",
        "<|start|>user<|message|>one?<|end|><|start|>assistant<|channel|>final<|message|><think>hm</think>1<|end|>"
        "<|start|>user<|message|>two?<|end|><|start|>assistant[<|channel|>final<|message|><think>ah</think>2<|return|>]",
    ],
    DEEPSEEK: ["<|user|>one?<|assistant|>[1<|endoftext|>]<|user|>two?<|assistant|>[2<|endoftext|>]"],
    LLAMA3: [
        "<|start|>user<|message|>\n\none?<|end|><|start|>assistant<|message|>\n\n[<think>hm</think>1<|end|>]"
        "<|start|>user<|message|>\n\ntwo?<|end|><|start|>assistant<|message|>\n\n[<think>ah</think>2<|end|>]",
    ],
}  # fmt: skip
FAMILIES = pytest.mark.parametrize("source", EXPECTED, ids=["qwen3", "phi3", "gpt_oss", "deepseek", "llama3"])


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    names = ("im_start", "im_end", "start", "message", "channel", "return")
    specials = (*SPECIAL_TOKENS, *(f"<|{name}|>" for name in names))
    return BpeTokenizer.train(["one two hm ah"], vocab_size=300, special_tokens=specials)


def encoder(tokenizer: BpeTokenizer, source: str) -> ChatEncoder:
    return ChatEncoder(tokenizer, ChatTemplate(source=source, variables={"eos_token": "<|endoftext|>"}))


def marked(tokenizer: BpeTokenizer, ids: Any, mask: Any) -> str:
    """The text, with square brackets around the targets."""
    text, before = "", 0
    for id, on in zip([*ids], [*mask], strict=True):
        text += "[" * (on > before) + "]" * (on < before) + tokenizer.decode([id])
        before = on
    return text + "]" * before


@FAMILIES
def test_each_answer_is_trained_as_it_is_generated(tokenizer: BpeTokenizer, source: str) -> None:
    enc = encoder(tokenizer, source)
    assert [marked(tokenizer, e.ids, e.mask) for e in enc.examples(CHAT)] == EXPECTED[source]
    given = [marked(tokenizer, e.ids, e.mask) for e in enc.examples(CHAT, given=3)]
    assert len(given) == 1 and given[0].count("[") == 1  # an answer of the prompt is not trained
    assert given[0].partition("[")[2] == EXPECTED[source][-1].rpartition("[")[2]


@FAMILIES
def test_generation_stops_at_the_token_that_training_ends_with(tokenizer: BpeTokenizer, source: str) -> None:
    end = EXPECTED[source][-1].rpartition("]")[0]
    (id,) = encoder(tokenizer, source).turn_ends
    assert end.endswith(tokenizer.decode([id]))


def test_tool_calls_that_the_template_leaves_out_are_refused(tokenizer: BpeTokenizer) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    chat = [CHAT[0], {"role": "assistant", "content": "", "tool_calls": [call]}]
    with pytest.raises(BaguError, match="leaves out tool call 0 of message 1"):
        encoder(tokenizer, LLAMA3).encode(chat)
    writes = LLAMA3.replace("m.content | trim", "m.content + (m.tool_calls | tojson if m.tool_calls else '')")
    ids = encoder(tokenizer, writes).encode(chat).ids
    assert '"name": "add"' in tokenizer.decode(ids)


SYSTEM = {"role": "system", "content": "Count."}
LONG = [
    SYSTEM,
    *(m for n in range(9) for m in ({"role": "user", "content": f"q{n}"}, {"role": "assistant", "content": f"a{n}"})),
]


@FAMILIES
def test_a_long_chat_is_cut_at_turns_with_its_question(tokenizer: BpeTokenizer, source: str) -> None:
    enc, whole = encoder(tokenizer, source), Conversation(id="a:1", messages=tuple(LONG))
    context = max(len(d.tokens) for d in enc.documents([whole])) // 2
    documents = list(enc.documents([whole], context))
    assert [d.id for d in documents] == ["a:1", *(f"a:1#{n}" for n in range(2, len(documents) + 1))]
    trained = ""
    for document in documents:
        assert len(document.tokens) <= context
        text = marked(tokenizer, document.tokens, document.mask)
        numbers = re.findall(r"\[[^]]*\ba(\d)", text)
        assert "Count." in text and all(f"q{n}" in text for n in numbers)
        trained += "".join(numbers)
    assert trained == "012345678"


def test_a_turn_that_does_not_fit_is_left_out(tokenizer: BpeTokenizer) -> None:
    chat = [*LONG[:3], {"role": "user", "content": "x" * 200}, LONG[4], *LONG[5:7]]
    documents = list(encoder(tokenizer, PHI3).documents([Conversation(id="a:1", messages=tuple(chat))], 60))
    texts = [tokenizer.decode(list(d.tokens)) for d in documents]
    assert ["a0" in texts[0], "a2" in texts[1], len(texts)] == [True, True, 2]
    alone = Conversation(id="a:2", messages=tuple(chat[3:5]))
    assert list(encoder(tokenizer, PHI3).documents([alone], 60)) == []
