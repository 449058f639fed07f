"""Constrained decoding in the engine: valid outputs in every mode, masks that never empty, and failures of grammars."""

from __future__ import annotations

import json
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from constrained import POINT, constrained_engine, constrained_model, json_tokenizer

from bagu.bench.constrained import measure_pair
from bagu.bench.words import WordTokenizer
from bagu.data.tokenizer import BpeTokenizer
from bagu.errors import ArgumentError
from bagu.nn.model import Transformer
from bagu.serve.constrain.check import CheckedCompiler
from bagu.serve.constrain.compiler import (
    GrammarCompiler,
    Vocabulary,
    compile_grammar,
    grammar_source,
    ll_tokenizer,
)  # fmt: skip
from bagu.serve.constrain.mask_thread import MaskThread
from bagu.serve.constrain.masks import FEWEST_ROWS
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.request import Request, Sampling, TokenEvent, Unservable
from bagu.types import Completion

SCHEMA = Grammar.json_schema(POINT)


@pytest.fixture(scope="module")
def tokenizer() -> BpeTokenizer:
    return json_tokenizer()


@pytest.fixture(scope="module")
def model(tokenizer: BpeTokenizer) -> Transformer:
    return constrained_model(tokenizer)


@pytest.fixture
def engine(model: Transformer, tokenizer: BpeTokenizer) -> Engine:
    return constrained_engine(model, tokenizer)


def test_masks_do_not_depend_on_the_sets_of_tokens(tokenizer: BpeTokenizer) -> None:
    """Tokens that are allowed as a set are those that would be allowed one by one."""
    items = [{"type": "string", "minLength": 1, "maxLength": most} for most in (1, 2, 3, 5, 9, 17, 40)]
    grammar = Grammar.json_schema({"type": "array", "prefixItems": [*items, {"type": "string"}], "minItems": 8})
    sets = ll_tokenizer(Vocabulary.of(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,)))
    matchers = [compile_grammar(grammar, grammar_source(grammar), t) for t in (sets, sets.with_slices([]))]
    random = np.random.default_rng(0)
    for step in range(200):
        masks = [matcher.compute_bitmask() for matcher in matchers]
        assert masks[0] == masks[1], step
        allowed = np.flatnonzero(np.unpackbits(np.frombuffer(masks[0], np.uint8), bitorder="little"))
        token = int(random.choice(allowed))
        if token == tokenizer.eos_id:
            assert step > 20  # every string was begun
            return
        assert all(matcher.consume_token(token) for matcher in matchers)


def check(completion: Completion) -> None:
    assert completion.finish == "stop", completion
    jsonschema.validate(json.loads(completion.text or ""), POINT)


EVERY: list[dict[str, Any]] = [
    {"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 2.0, "top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2},
    {"repetition_penalty": 1.4, "presence_penalty": 1.0}, {"frequency_penalty": -1.0},
    {"logit_bias": {11: 100.0, 0: 100.0}}, {"min_tokens": 30}, {"ignore_eos": True}, {"logprobs": 3},
    {"n": 3}, {"temperature": 0.0, "logit_bias": {40: 3.0}, "n": 2},
]  # fmt: skip


def samplings() -> list[Sampling]:
    return [Sampling(**{"max_tokens": 120, "seed": i, "grammar": SCHEMA, **ask}) for i, ask in enumerate(EVERY)]


@pytest.mark.parametrize(
    "settings",
    [
        {}, {"async_scheduling": True}, {"invariant": True}, {"quantization": "int8"}, {"prefix_cache": False},
        {"num_blocks": 36, "async_scheduling": True}, {"threads": 2}, {"threads": 2, "async_scheduling": True},
    ],
    ids=["plain", "overlap", "invariant", "int8", "no cache", "few blocks", "threads", "threads, overlap"],
)  # fmt: skip
def test_every_output_is_valid(model: Transformer, tokenizer: BpeTokenizer, settings: dict[str, Any]) -> None:
    threads = settings.get("threads", 1)
    engine = constrained_engine(model, tokenizer, **{k: v for k, v in settings.items() if k != "threads"})
    engine.sampler.masks.threads = threads
    prompt = tokenizer.encode("hello world")
    for completion in engine.generate([prompt] * len(EVERY), samplings()):
        check(completion)
    assert engine.stats().constrained_requests == len(EVERY)
    assert ("num_blocks" in settings) == (engine.stats().preemptions > 0)
    while engine.has_work:  # with overlap, a step is in flight after the last event
        engine.step()
    engine.scheduler.queues.check_integrity()
    assert not engine.sampler.masks and engine.blocks.used_count == 0


def test_batch_overlap_and_preemption_do_not_change_the_tokens(model: Transformer, tokenizer: BpeTokenizer) -> None:
    """In invariant mode, alone and without overlap, against all requests at once with free ones among them."""
    prompts = [tokenizer.encode(f"hello {i}") for i in range(len(EVERY))]
    alone = constrained_engine(model, tokenizer, invariant=True)
    expected = [c.tokens for p, s in zip(prompts, samplings(), strict=True) for c in alone.generate([p], s)]
    busy = constrained_engine(model, tokenizer, invariant=True, async_scheduling=True, num_blocks=36)
    busy.sampler.masks.threads = 2
    free = [Sampling(max_tokens=40, seed=i, ignore_eos=True) for i in range(4)]
    found = busy.generate([*prompts, *prompts[:4]], [*samplings(), *free])
    assert [c.tokens for c in found[: len(expected)]] == expected
    assert busy.stats().preemptions > 0
    lonely = [alone.generate([p], s)[0].tokens for p, s in zip(prompts, free, strict=False)]
    assert [c.tokens for c in found[len(expected) :]] == lonely


LONG = {  # its keys have more tokens than are forced at once
    "type": "object", "required": ["a_key_of_many_tokens", "rest"], "additionalProperties": False,
    "properties": {"a_key_of_many_tokens": {"type": "boolean"}, "rest": {"const": "the only text that may be here"}},
}  # fmt: skip


@pytest.mark.parametrize("overlap", [pytest.param(False, marks=pytest.mark.slow), True])
def test_forced_tokens_are_those_that_would_be_sampled(
    model: Transformer, tokenizer: BpeTokenizer, overlap: bool
) -> None:
    """Requests with logprobs take a step for every token."""
    prompt, grammars = tokenizer.encode("hello"), (SCHEMA, Grammar.json_schema(LONG), Grammar.regex("(cat|dogma){9}"))
    engine = constrained_engine(model, tokenizer, invariant=True, async_scheduling=overlap)
    for grammar in grammars:
        for cut in ({}, {"n": 3}, {"stop": ("a",)}, *({"max_tokens": most} for most in range(2, 16))):
            asked = {"max_tokens": 200, "seed": 3, "grammar": grammar, **cut}
            before = engine.stats()
            fast = engine.generate([prompt], Sampling(**asked))
            after = engine.stats()
            slow = engine.generate([prompt], Sampling(**asked, logprobs=0))
            found = [(c.tokens, c.text, c.finish) for c in fast]
            assert found == [(c.tokens, c.text, c.finish) for c in slow], (grammar, cut)
            if not cut:
                assert after.forced_tokens > before.forced_tokens
                assert after.steps - before.steps < engine.stats().steps - after.steps
    forced = engine.stats().forced_tokens
    engine.generate([prompt], Sampling(max_tokens=200, grammar=SCHEMA, logprobs=0))
    assert engine.stats().forced_tokens == forced
    while engine.has_work:
        engine.step()
    engine.scheduler.queues.check_integrity()
    assert engine.blocks.used_count == 0


@pytest.mark.parametrize("cut", [{"max_tokens": 4}, {"max_tokens": 99, "stop": ("d",)}])
def test_forced_tokens_after_the_end_of_a_choice_are_not_counted(
    engine: Engine, tokenizer: BpeTokenizer, cut: dict[str, Any]
) -> None:
    sampling = Sampling(grammar=Grammar.choice(["zbcdfgzbcdfg"]), **cut)
    (found,) = engine.generate([tokenizer.encode("hello")], sampling)
    assert len(found.tokens) == 4 and engine.stats().forced_tokens == 3


@pytest.mark.parametrize("overlap", [False, True])
def test_more_choices_than_tokens_of_a_step_have_forced_tokens(
    model: Transformer, tokenizer: BpeTokenizer, overlap: bool
) -> None:
    """As after steps that ran out of memory: each choice still gets a token in every step."""
    asked = Sampling(max_tokens=60, grammar=SCHEMA, n=4, seed=1)
    engines = [constrained_engine(model, tokenizer, invariant=True, async_scheduling=overlap) for _ in range(2)]
    engines[1].scheduler.limit_step(2)
    want, found = (engine.generate([tokenizer.encode("hello")], asked) for engine in engines)
    assert [c.tokens for c in found] == [c.tokens for c in want]


def test_without_threads_the_engine_waits_for_all_work_on_masks(engine: Engine, tokenizer: BpeTokenizer) -> None:
    engine.generate([tokenizer.encode("hello")], Sampling(max_tokens=60, grammar=SCHEMA, n=3))
    stats = engine.stats()
    assert stats.mask_s == stats.mask_wait_s > 0.0


def test_a_request_may_end_and_another_begin_while_masks_are_computed(
    model: Transformer, tokenizer: BpeTokenizer
) -> None:
    """Between two calls of `step`, where steps overlap: one request is aborted, one is added, all others are valid."""
    engine = constrained_engine(model, tokenizer, async_scheduling=True)
    engine.sampler.masks.threads = 2  # as with a GPU
    tokens: dict[str, list[int]] = {}

    def submit(name: str) -> None:
        asked = Sampling(max_tokens=100, seed=len(name), grammar=SCHEMA, n=2)
        engine.submit(Request(id=name, prompt=tuple(tokenizer.encode(name)), sampling=asked))

    for name in ("a", "bb", "ccc"):
        submit(name)
    for turn in range(1000):
        if turn == 4:
            assert engine.abort("bb")
            submit("dddd")
        if turn == 6:
            assert engine.abort("dddd")
            engine.weights_changed()  # drops the step whose masks are computed
        for event in engine.step():
            assert isinstance(event, TokenEvent) and event.finish in (None, "stop")
            if event.token is not None:
                tokens.setdefault(f"{event.request_id}{event.index}", []).append(event.token)
        if not engine.has_work:
            break
    for name in ("a0", "a1", "ccc0", "ccc1"):
        text = tokenizer.decode([t for t in tokens[name] if t != tokenizer.eos_id])
        jsonschema.validate(json.loads(text), POINT)
    assert not engine.sampler.masks and engine.blocks.used_count == 0
    engine.scheduler.queues.check_integrity()
    for _ in range(2):  # the masks of a step that was not sampled are left from the first
        check(engine.generate([tokenizer.encode("hello")], Sampling(max_tokens=100, grammar=SCHEMA))[0])


def test_choices_that_end_leave_the_memory_of_their_masks_to_others(
    model: Transformer, tokenizer: BpeTokenizer
) -> None:
    """Most of them end by max_tokens, while a thread computes a mask that nobody needs."""
    engine = constrained_engine(model, tokenizer, async_scheduling=True)
    masks = engine.sampler.masks
    masks.threads = 2
    asked = [Sampling(max_tokens=3 + i % 5, seed=i, n=1 + i % 2, grammar=SCHEMA) for i in range(16)]
    for _ in range(5):
        engine.generate([tokenizer.encode("hello")] * len(asked), asked)
    assert masks.requests == 80 and len(masks._memory) == len(masks._free_rows) + len(masks._removed) == FEWEST_ROWS


def test_an_error_in_the_thread_of_masks_is_raised_in_the_engines() -> None:
    def fails() -> float:
        raise ValueError("no")

    thread = MaskThread()
    wait = thread.start(fails)
    with pytest.raises(ValueError, match="no"):
        wait()
    waits = [thread.start(lambda: 2.0) for _ in range(3)]
    assert [waits[i]() for i in (1, 0, 2)] == [4.0, 0.0, 2.0]


def test_choices_of_a_grammar_take_turns_with_its_lexers(tokenizer: BpeTokenizer) -> None:
    """Two to begin with, and one more with every request, up to four times as many."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,), lexers=2)
    other = Grammar.regex("[0-9]+")
    found = compiler.matchers(SCHEMA, 4) + compiler.matchers(SCHEMA, 2)
    assert [lexer for lexer, _ in found] == [0, 1, 2, 0, 0, 1] and compiler.compilations == 1
    for _ in range(8):
        found += compiler.matchers(SCHEMA, 1)
        compiler.matchers(other, 1)  # its turns are its own
    assert [lexer for lexer, _ in compiler.matchers(SCHEMA, 8)] == [6, 7, 0, 1, 2, 3, 4, 5]
    ids = tokenizer.encode('{"x": 7, "na')
    assert all(matcher.consume_tokens(ids) for _, matcher in found)
    assert len({matcher.compute_bitmask() for _, matcher in found}) == 1


def test_without_threads_a_grammar_has_one_lexer(tokenizer: BpeTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    assert {lexer for _ in range(3) for lexer, _ in compiler.matchers(SCHEMA, 2)} == {0}


def test_logprobs_are_those_of_the_unconstrained_model(engine: Engine, tokenizer: BpeTokenizer) -> None:
    prompt = tokenizer.encode("hello")
    (found,) = engine.generate([prompt], Sampling(max_tokens=50, logprobs=0, grammar=SCHEMA, seed=1))
    (scores,) = engine.score([[*prompt, *found.tokens]], [len(prompt)])
    torch.testing.assert_close(torch.tensor(found.logprobs), torch.tensor(scores))


def test_a_stop_string_and_max_tokens_end_it_earlier(engine: Engine, tokenizer: BpeTokenizer) -> None:
    prompt = tokenizer.encode("hello")
    (stopped,) = engine.generate([prompt], Sampling(max_tokens=50, stop=('"name"',), grammar=SCHEMA))
    assert (stopped.finish, stopped.stop_reason) == ("stop", '"name"') and '"x"' in (stopped.text or "")
    (short,) = engine.generate([prompt], Sampling(max_tokens=2, grammar=SCHEMA))
    assert short.finish == "length" and len(short.tokens) == 2
    assert not engine.sampler.masks._removed, "no thread writes their masks, so their matchers are free"


@pytest.mark.parametrize("ask", [{"min_tokens": 20}, {"ignore_eos": True}, {"min_tokens": 20, "stop_token_ids": (4,)}])
def test_a_complete_output_ends_where_nothing_can_follow(
    engine: Engine, tokenizer: BpeTokenizer, ask: dict[str, Any]
) -> None:
    """Without end-of-text in the mask it would be empty; min_tokens and ignore_eos do not take it away."""
    (found,) = engine.generate(
        [tokenizer.encode("hello")], Sampling(max_tokens=40, grammar=Grammar.choice(["yes"]), **ask)
    )
    assert (found.text, found.finish) == ("yes", "stop") and len(found.tokens) < 20


def test_min_tokens_and_ignore_eos_go_on_while_the_grammar_can(engine: Engine, tokenizer: BpeTokenizer) -> None:
    ask: dict[str, Any] = {"max_tokens": 30, "grammar": Grammar.regex("[ab]+"), "logit_bias": {tokenizer.eos_id: 100.0}}
    prompt = tokenizer.encode("hello")
    (free,) = engine.generate([prompt], Sampling(**ask))
    (least,) = engine.generate([prompt], Sampling(**ask, min_tokens=12))
    (most,) = engine.generate([prompt], Sampling(**ask, ignore_eos=True))
    assert (len(free.tokens), len(least.tokens), len(most.tokens)) == (2, 13, 30)  # the 13th ends it
    assert (free.finish, least.finish, most.finish) == ("stop", "stop", "length")


def test_a_special_stop_token_ends_only_a_complete_output(engine: Engine, tokenizer: BpeTokenizer) -> None:
    """A chat ends its turn with <|end|>, which no text contains."""
    end = tokenizer.special_ids["<|end|>"]
    sampling = Sampling(
        max_tokens=40, grammar=SCHEMA, stop_token_ids=(end,), logit_bias={end: 100.0, tokenizer.eos_id: -100.0}
    )
    (found,) = engine.generate([tokenizer.encode("hello")], sampling)
    check(found)
    assert found.tokens[-1] == end == found.stop_reason


def test_ids_without_a_token_are_never_sampled(engine: Engine, tokenizer: BpeTokenizer) -> None:
    outside = range(tokenizer.vocab_size, engine.model.config.vocab_size)
    sampling = Sampling(max_tokens=60, grammar=SCHEMA, logit_bias=dict.fromkeys(outside, 100.0), n=4, seed=0)
    for found in engine.generate([tokenizer.encode("hello")], sampling):
        check(found)
        assert max(found.tokens) < tokenizer.vocab_size


def test_a_grammar_that_reaches_a_limit_ends_its_choice_with_an_error(engine: Engine, tokenizer: BpeTokenizer) -> None:
    """The other request of the batch goes on, and no block is lost."""
    hard = "(.*a.{25}b.*c.{25}){2}"  # many states of the lexer
    assert engine.grammars is not None
    matcher = engine.grammars.matcher(Grammar.regex(hard))
    requests = [
        Request(id="hard", prompt=(5, 6), sampling=Sampling(max_tokens=50, grammar=Grammar.regex(hard))),
        Request(id="easy", prompt=(5, 6), sampling=Sampling(max_tokens=50, grammar=SCHEMA, seed=1)),
    ]
    for request in requests:
        engine.submit(request)
    assert matcher.consume_token(tokenizer.eos_id) is False  # a matcher in an error state stands for one at its limit
    engine.sampler.masks._choices["hard"][0].matcher = matcher
    events = []
    while engine.has_work:
        events += [e for e in engine.step() if isinstance(e, TokenEvent)]
    (last,) = (e for e in events if e.request_id == "hard")
    assert (last.finish, last.token) == ("error", None) and "the grammar cannot go on" in str(last.stop_reason)
    assert [e.finish for e in events if e.request_id == "easy"][-1] == "stop"
    assert engine.blocks.used_count == 0
    engine.scheduler.queues.check_integrity()


def test_a_refused_grammar_leaves_nothing_in_the_engine(engine: Engine) -> None:
    for _ in range(2):  # the second time from the kept error
        with pytest.raises(Unservable, match="cannot be compiled") as caught:
            engine.submit(Request(id="bad", prompt=(1,), sampling=Sampling(grammar=Grammar.regex("(["))))
        assert caught.value.param == "grammar"
    assert not engine.has_work and engine.stats().grammar_compilations == 1


def test_a_kept_error_does_not_keep_the_requests_that_it_refused(engine: Engine) -> None:
    """An exception that is raised again keeps the frames of every time that it was raised."""

    def refusal() -> Unservable:
        with pytest.raises(Unservable) as caught:
            engine.submit(Request(id="bad", prompt=(1,), sampling=Sampling(grammar=Grammar.regex("(["))))
        return caught.value

    first, second = refusal(), refusal()
    assert first is not second and str(first) == str(second) and first.hint == second.hint
    frames = [len(list(traceback.walk_tb(error.__traceback__))) for error in (first, second)]
    assert frames[0] == frames[1]


def test_an_engine_without_a_tokenizer_refuses_a_grammar(model: Transformer) -> None:
    with pytest.raises(ArgumentError, match="needs a tokenizer"):
        Engine(model).submit(Request(id="r", prompt=(1,), sampling=Sampling(grammar=SCHEMA)))


def test_without_the_package_the_error_names_it(monkeypatch: pytest.MonkeyPatch, tokenizer: BpeTokenizer) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)  # an import of it fails
    with pytest.raises(Unservable, match="llguidance") as caught:
        GrammarCompiler(tokenizer, tokenizer.vocab_size, (0,)).matcher(SCHEMA)
    assert "pip install 'bagu[grammar]'" in caught.value.hint


def test_an_unknown_format_is_a_remark_and_a_known_one_holds(engine: Engine, tokenizer: BpeTokenizer) -> None:
    def accepts(schema: Any, text: str) -> bool:
        assert engine.grammars is not None
        matcher, ids = engine.grammars.matcher(Grammar.json_schema(schema)), tokenizer.encode(text)
        return matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting()

    assert accepts({"type": "string", "format": "file-path"}, '"a/b"')
    assert accepts({"type": "string", "format": "date"}, '"2024-02-29"')
    assert not accepts({"type": "string", "format": "date"}, '"soon"')
    named = {"type": "object", "properties": {"format": {"const": {"format": "x"}}}, "required": ["format"]}
    assert accepts(named, '{"format": {"format": "x"}}') and not accepts(named, '{"format": {}}')


def test_a_boolean_is_a_schema(engine: Engine, tokenizer: BpeTokenizer) -> None:
    assert engine.grammars is not None
    matcher = engine.grammars.matcher(Grammar.json_schema(True))
    assert matcher.consume_tokens(tokenizer.encode('{"a": [1, null]}')) and matcher.is_accepting()
    with pytest.raises(Unservable, match="schema false"):
        engine.grammars.matcher(Grammar.json_schema(False))


@pytest.mark.parametrize("text", ['a"b\\c', "line\nbreak\ttab", "你好 🙂 é", "\x01/x/", "{}", "<|end|>"])
def test_any_choice_is_generated_exactly(engine: Engine, tokenizer: BpeTokenizer, text: str) -> None:
    (found,) = engine.generate([tokenizer.encode("hello")], Sampling(max_tokens=60, grammar=Grammar.choice([text])))
    assert (found.text, found.finish) == (text, "stop")


def test_a_hostile_grammar_ends_another_process_than_the_engine(tokenizer: BpeTokenizer) -> None:
    """A chain of rules overflows the stack of llguidance, and thousands of optional properties compile for 20 s."""
    from threading import Event

    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    checked = CheckedCompiler(compiler)

    def prepared(grammar: Grammar) -> GrammarCompiler:
        done = Event()
        checked.prepare(grammar, done.set)
        assert done.wait(120) and compiler.has_result(grammar)
        return compiler

    try:
        chain = "start: r0\n" + "".join(f"r{i}: r{i + 1}\n" for i in range(4000)) + 'r4000: "a"\n'
        with pytest.raises(Unservable, match="nested too deeply, or too large"):
            prepared(Grammar.lark(chain)).matcher(Grammar.lark(chain))
        wide = Grammar.json_schema({"type": "object", "properties": {f"p{i}": {} for i in range(6000)}})
        checked.limit_s = 0.5
        with pytest.raises(Unservable, match=r"more than 0\.5 s"):
            prepared(wide).matcher(wide)
        checked.limit_s = 5.0
        assert prepared(SCHEMA).matcher(SCHEMA).consume_token(tokenizer.encode("{")[0])
    finally:
        checked.close()


def test_what_stands_beside_a_ref_counts_in_newer_drafts_only(tokenizer: BpeTokenizer) -> None:
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    schema = {
        "definitions": {"list": {"type": "array", "items": {"const": 1}}},
        "$ref": "#/definitions/list",
        "maxItems": 1,
    }

    def accepts(given: dict[str, Any], text: str) -> bool:
        ids = tokenizer.encode(text)
        return bool(compiler.matcher(Grammar.json_schema(given)).try_consume_tokens(ids) == len(ids))

    old = {"$schema": "http://json-schema.org/draft-07/schema#", **schema}
    assert accepts(old, "[1, 1]") and not accepts(schema, "[1, 1]") and accepts(schema, "[1]")
    with pytest.raises(Unservable, match=r"\$id beside \$ref"):
        accepts({"properties": {"a": {"$id": "x", "$ref": "#/definitions/list"}}, **schema}, "{")


def test_a_compiler_that_cannot_start_refuses_only_for_now(
    tokenizer: BpeTokenizer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The refusal was kept, as a fault of the grammar."""
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, (tokenizer.eos_id,))
    checked = CheckedCompiler(compiler)

    def refusal(executable: str) -> Unservable:
        done = threading.Event()
        monkeypatch.setattr("sys.executable", executable)
        checked.prepare(SCHEMA, done.set)
        assert done.wait(120)
        with pytest.raises(Unservable, match="did not start") as found:
            compiler.matcher(SCHEMA)
        assert not compiler.has_result(SCHEMA)
        return found.value

    usual = sys.executable
    try:
        assert refusal(str(tmp_path / "nothing")).temporary
        assert refusal("/bin/false").temporary  # it starts, and ends at once
        monkeypatch.setattr("sys.executable", usual)
        done = threading.Event()
        checked.prepare(SCHEMA, done.set)
        assert done.wait(120) and compiler.matcher(SCHEMA).consume_token(tokenizer.encode("{")[0])
        large = Grammar.json_schema({"type": "integer", "minimum": -(2**63) - 1})
        done.clear()
        checked.prepare(large, done.set)
        assert done.wait(120)
        with pytest.raises(Unservable, match="not JSON serializable: -9223372036854775809"):
            compiler.matcher(large)
    finally:
        checked.close()


def test_the_benchmark_compares_equal_numbers_of_tokens(engine: Engine) -> None:
    pair = measure_pair(engine, POINT, streams=4, prompt=8, max_tokens=200, temperature=1.0, seed=0)
    assert pair.tokens > 4 and pair.constrained_s > 0 and pair.free_s > 0 and pair.steps > 4
    for text in pair.texts:
        jsonschema.validate(json.loads(text), POINT)


def test_the_words_of_a_benchmark_are_a_tokenizer() -> None:
    tokenizer = WordTokenizer([b"def f(x):\n    return x + 1\n" * 3, "héllo".encode()], 700)
    assert tokenizer.vocab_size == 700 and len({tokenizer.bytes_of(i) for i in range(700)}) == 700
    text = 'def g(y): return "héllo" 🙂'
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("def f(x)")) < len("def f(x)")
