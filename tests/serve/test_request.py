"""Validation of requests: allowed values, and errors that name the field."""

from __future__ import annotations

import pickle
import re
from typing import Any

import pytest

from bagu.errors import ArgumentError
from bagu.serve.grammar import Grammar
from bagu.serve.request import Request, Sampling, TokenEvent


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_tokens", 0), ("max_tokens", -1), ("max_tokens", 1.5), ("max_tokens", True),
        ("temperature", -0.1), ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
        ("top_k", 0), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1), ("min_p", -0.1), ("min_p", 1.5),
        ("repetition_penalty", 0.0), ("presence_penalty", 2.1), ("frequency_penalty", -2.1),
        ("logit_bias", {-1: 0.0}), ("logit_bias", {5: 101.0}), ("logit_bias", {"5": 1.0}),
        ("seed", 1.0), ("stop", ("",)), ("stop", "word"), ("stop_token_ids", (-1,)),
        ("min_tokens", 17), ("min_tokens", -1), ("n", 0), ("logprobs", -1), ("prompt_logprobs", -1),
        ("grammar", "a+"),
    ],
)  # fmt: skip
def test_a_bad_value_is_refused_with_its_name(name: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"sampling: {name} = "):
        Sampling(**{name: value})


def test_extreme_values_that_are_allowed() -> None:
    Sampling(temperature=0.0, top_k=1, top_p=1e-9, min_p=1.0, seed=-(2**63), logit_bias={0: -100.0, 7: 100}, logprobs=0)
    Sampling(max_tokens=0, prompt_logprobs=0)
    with pytest.raises(ArgumentError, match="max_tokens"):
        Sampling(max_tokens=0, prompt_logprobs=0, n=2)


def test_a_logit_bias_is_copied() -> None:
    mine = {3: 1.0}
    sampling = Sampling(logit_bias=mine)
    mine[3] = 2.0
    assert sampling.logit_bias == {3: 1.0}


def test_an_empty_prompt_and_an_outside_score_start_are_refused() -> None:
    with pytest.raises(ArgumentError, match="empty prompt"):
        Request(id="r", prompt=())
    with pytest.raises(ArgumentError, match="score_start = 2 in a prompt of 2"):
        Request(id="r", prompt=(1, 2), score_start=2)


def test_requests_and_events_can_be_pickled() -> None:
    request = Request(
        id="r", prompt=(1, 2), sampling=Sampling(stop=("x",), logit_bias={1: 2.0}), priority=1, arrival=2.0
    )
    event = TokenEvent("r", 0, 5, -0.5, ((5, -0.5),), "stop", "x")
    assert pickle.loads(pickle.dumps((request, event))) == (request, event)
    assert (event.index, event.token, event.finish) == (0, 5, "stop")


@pytest.mark.parametrize(
    ("kind", "text", "message"),
    [
        ("yaml", "a", "kind = 'yaml'"),
        ("regex", "", "the text of kind regex is ''"),
        ("json_object", "{}", "the text of kind json_object is '{}'"),
        ("choice", "[]", "the choices are"),
        ("choice", '["a", 1]', "the choices are"),
        ("choice", "a", "the choices are"),
    ],
)
def test_a_bad_grammar_is_refused(kind: Any, text: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        Grammar(kind, text)


def test_a_grammar_from_python_values_is_json_text() -> None:
    assert Grammar.json_schema({"type": "integer"}) == Grammar("json_schema", '{"type": "integer"}')
    assert Grammar.choice(["yes", "no"]) == Grammar("choice", '["yes", "no"]')
    assert pickle.loads(pickle.dumps(Grammar.regex("a+"))) == Grammar("regex", "a+")
