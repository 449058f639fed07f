"""Required tool calls with a random model: the grammar of every form makes them parse and fit their schemas."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest
from constrained import constrained_engine, constrained_model

from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.message.format import MessageFormat
from bagu.serve.message.forms import FORMS
from bagu.serve.message.parser import CallDelta, Content
from bagu.serve.message.schema_check import schema_error
from bagu.serve.message.tool_grammar import Tool, tool_grammar
from bagu.serve.request import Sampling

TOOLS = [
    Tool(
        name="look",
        parameters={
            "type": "object",
            "properties": {"at": {"$ref": "#/$defs/Place"}, "deep": {"type": "boolean"}},
            "required": ["at"],
            "$defs": {"Place": {"enum": ["sky", "sea\n", "a ::= b"]}},
        },
    ),
    Tool(name="wait", parameters={}),
]
MARKERS = sorted({marker for form in FORMS.values() for marker in form.markers})


@pytest.fixture(scope="module", params=["control tokens", "text"])
def engine(request: pytest.FixtureRequest) -> Engine:
    """The markers of all forms are control tokens of the tokenizer, or plain text."""
    special = (*SPECIAL_TOKENS, *(MARKERS if request.param == "control tokens" else ()))
    rows = [json.dumps({"name": "look", "arguments": {"at": "sea", "deep": True}})] * 8
    tokenizer = BpeTokenizer.train(rows, vocab_size=400, special_tokens=special)
    return constrained_engine(constrained_model(tokenizer), tokenizer)


def ids(engine: Engine, text: str) -> list[int]:
    """The tokens of a text, in which the names of control tokens are these tokens."""
    special = tokenizer_of(engine).special_ids
    parts = re.split(f"({'|'.join(map(re.escape, special))})", text)
    return [i for p in parts for i in ([special[p]] if p in special else tokenizer_of(engine).encode(p))]


def tokenizer_of(engine: Engine) -> BpeTokenizer:
    assert isinstance(engine.tokenizer, BpeTokenizer)
    return engine.tokenizer


def accepts(engine: Engine, grammar: Grammar, text: str) -> bool:
    assert engine.grammars is not None
    matcher = engine.grammars.matcher(grammar)
    tokens = ids(engine, text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and bool(matcher.is_accepting())


def call(form: str, name: str, arguments: str) -> str:
    return FORMS[form].before.replace("NAME", name) + arguments + FORMS[form].after


def calls(form: str, *texts: str) -> str:
    return FORMS[form].opening + FORMS[form].separator.join(texts) + FORMS[form].closing


@pytest.mark.parametrize("form", FORMS)
def test_required_calls_of_a_random_model_parse_and_validate(engine: Engine, form: str) -> None:
    grammar = tool_grammar(FORMS[form], TOOLS, max_calls=1, special_ids=tokenizer_of(engine).special_ids)
    samplings = [Sampling(max_tokens=200, seed=seed, grammar=grammar) for seed in range(4)]
    for completion in engine.generate([[5, 6, 7]] * 4, samplings):
        assert completion.finish == "stop" and completion.text is not None
        parser = MessageFormat(form=FORMS[form], names=("look", "wait"), live=True).parser()
        deltas = parser.push(completion.text) + parser.finish()
        assert not any(isinstance(delta, Content) for delta in deltas) and parser.calls == 1
        found = [delta for delta in deltas if isinstance(delta, CallDelta)]
        (tool,) = (tool for tool in TOOLS if tool.name == found[0].name)
        jsonschema.validate(json.loads("".join(delta.arguments for delta in found)), dict(tool.parameters))


@pytest.mark.parametrize("form", FORMS)
def test_a_grammar_admits_calls_that_fit_and_no_others(engine: Engine, form: str) -> None:
    special = tokenizer_of(engine).special_ids
    good = [call(form, "look", '{"at": "sky"}'), call(form, "wait", "{}")]
    bad = [call(form, "look", "{}"), call(form, "look", '{"at": "x"}'), call(form, "hide", "{}")]
    many = tool_grammar(FORMS[form], TOOLS, max_calls=None, special_ids=special)
    one = tool_grammar(FORMS[form], TOOLS, max_calls=1, special_ids=special)
    free = tool_grammar(FORMS[form], TOOLS, max_calls=None, special_ids=special, required=False)
    for grammar in (many, one, free):
        assert all(accepts(engine, grammar, calls(form, text)) for text in good)
        assert not any(accepts(engine, grammar, calls(form, text)) for text in bad)
        assert accepts(engine, grammar, "It is {late} < now.") is (grammar is free)
    assert [accepts(engine, grammar, calls(form, *good)) for grammar in (many, one)] == [True, False]
    if FORMS[form].trigger is not None:
        assert accepts(engine, free, "I look.\n" + calls(form, *good))
        assert not accepts(engine, free, "I look.\n" + calls(form, bad[0]))


@pytest.mark.parametrize("form", FORMS)
def test_reasoning_and_json_content_may_stand_before_or_instead_of_calls(engine: Engine, form: str) -> None:
    special = tokenizer_of(engine).special_ids
    text = calls(form, call(form, "wait", "{}"))
    thinks = tool_grammar(FORMS[form], TOOLS, max_calls=1, special_ids=special, thinks=True)
    assert all(accepts(engine, thinks, before + text) for before in ("", "<think>well {</think>\n\n"))
    assert not accepts(engine, thinks, "<think>well") and not accepts(engine, thinks, "well</think>" + text)
    thinking = tool_grammar(FORMS[form], TOOLS, max_calls=1, special_ids=special, thinks=True, thinking=True)
    assert accepts(engine, thinking, "well</think>" + text) and not accepts(engine, thinking, text)
    if FORMS[form].trigger is None:
        return
    schema = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}
    content = tool_grammar(
        FORMS[form], TOOLS, max_calls=1, special_ids=special, required=False, content=Grammar.json_schema(schema)
    )
    assert accepts(engine, content, '{"x": 1}') and accepts(engine, content, text)
    assert not accepts(engine, content, "{}") and not accepts(engine, content, "text")


@pytest.mark.parametrize(
    ("schema", "error"),
    [
        ({"type": "objekt"}, "type 'objekt' is not one of"),
        ({"properties": {"a": {"items": {"type": 5}}}}, "properties.a.items: type 5 is not"),
        ({"properties": []}, "properties is not an object"),
        ({"properties": {"a": 1}}, "properties.a: a schema is an object or a boolean"),
        ({"anyOf": {}}, "anyOf is not a list"),
        ({"required": "a"}, "required is not a list"),
        ({"enum": []}, "enum is not a list"),
        ({"$ref": "#/$defs/Missing"}, "$ref '#/$defs/Missing' is not in this schema"),
        ({"$ref": "https://example.com/schema"}, "is not in this schema"),
    ],
)
def test_wrong_schemas_are_found(schema: dict[str, object], error: str) -> None:
    found = schema_error(schema)
    assert found is not None and error in found


def test_right_schemas_and_deep_ones() -> None:
    tree = {"type": ["object", "null"], "properties": {"left": {"$ref": "#"}, "n": {"enum": [1]}, "any": True}}
    assert schema_error(tree) is None and schema_error({}) is None
    deep: dict[str, object] = {}
    for _ in range(2000):
        deep = {"items": deep}
    assert "levels" in str(schema_error(deep))
