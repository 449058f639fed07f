"""Compiles grammars with llguidance (https://github.com/guidance-ai/llguidance), and keeps the compiled ones.

A compiled grammar is a matcher: it consumes tokens and gives the mask of the tokens that may follow. Every choice gets
a copy of it, which takes some microseconds. Copies share a lexer behind a lock, so their masks are computed one after
another. Therefore a grammar is compiled once for each thread that computes masks, and its choices take turns. The first
requests add more lexers, one each: a thread then waits less for one that another thread uses.

Compiling takes 0.2 to 5 ms for usual grammars, and up to minutes for hostile ones: the server compiles them in another
process first (check.py).
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from copy import copy
from functools import cached_property, lru_cache
from itertools import count
from typing import TYPE_CHECKING, Any, NamedTuple

from bagu.serve.constrain.finite import has_finite_instance
from bagu.serve.grammar import Grammar
from bagu.serve.request import Unservable

if TYPE_CHECKING:  # check.py runs without torch, which bagu.types imports
    from bagu.types import Tokenizer

KEPT = 256  # compiled grammars, and errors of grammars that do not compile
# 1 to 2 kB per lexer state. Everything else has llguidance's limits: a mask takes at most about 15 ms.
MAX_LEXER_STATES = 50_000
# Sets of tokens that a mask allows as a whole where everything in them may follow; the others are tried one by one.
# llguidance's own sets have at most 10 and 30 characters of a JSON string: near the end of a string with maxLength it
# tries every token. With these, the slowest of 32 masks of `bagu bench constrained --shape qwen3_0_6b` takes 0.67 ms
# instead of 1.05 (one Neoverse-N1 core), and the trie 0.2 s more to build.
IN_STRING = r'[^"\\\x00-\x1F\x7F]'
SLICES = [r"[ \n\r\t]+", *(f"{IN_STRING}{{1,{most}}}" for most in (2, 4, 6, 8, 10, 16, 30)), f"{IN_STRING}+"]
KEPT_TEXTS = 1024  # encoded texts: a grammar forces the same ones again and again, such as the keys of an object
SLOW_S = 0.1  # a grammar that compiles for longer is compiled once
QUICK_S = 0.02  # requests add no lexer to a grammar that compiles for longer: the engine's thread compiles it
# On an H200's host with 8 threads and 32 streams, decoding to a JSON schema is 1.12 times as fast as free text with 32
# lexers, and 0.92 times with 8.
LEXERS_PER_THREAD = 4
TRIED = 8  # first tokens that are tried when a grammar is compiled
FORMATS = ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
OLD_DRAFT = re.compile(r"json-schema\.org/draft-0[4-7]/")
INSTALL = "install it with: pip install 'bagu[grammar]'"


def _unservable(message: str, hint: str) -> Unservable:
    return Unservable(message, hint=hint, param="grammar")


def _package() -> Any:
    try:
        import llguidance
    except ImportError as error:
        raise _unservable("structured output needs the package llguidance, which is missing", INSTALL) from error
    return llguidance


class Vocabulary(NamedTuple):
    """The tokens as bytes. Special tokens are marked with the byte 0xFF, which no text has, so that text cannot contain
    them; ids without a token are empty and never allowed."""

    tokens: list[bytes]
    special: list[int]
    eos_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int]) -> Vocabulary:
        special = {*getattr(tokenizer, "special_ids", {}).values(), *eos_ids}
        size = min(tokenizer.vocab_size, vocab_size)
        words = [tokenizer.bytes_of(id) for id in range(size)]
        tokens = [b"\xff" + word if id in special else word for id, word in enumerate(words)]
        return cls(tokens + [b""] * (vocab_size - size), sorted(t for t in special if t < vocab_size), tuple(eos_ids))


class _Words:
    """A vocabulary and its encoder in the form that llguidance reads."""

    is_tokenizer_wrapper = True

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens, self.special_token_ids, (self.eos_token_id, *_) = vocabulary
        self.bos_token_id = None
        self.encode: Callable[[str], list[int]] | None = None

    def __call__(self, text: str | bytes) -> list[int]:
        """The tokens of a text. llguidance allows only these where the grammar leaves one text."""
        assert self.encode is not None
        return self.encode(text.decode() if isinstance(text, bytes) else text)


def ll_tokenizer(vocabulary: Vocabulary, encode: Callable[[str], list[int]] | None = None) -> Any:
    """The vocabulary as a trie: 0.5 s for 150,000 tokens. `encode` None takes the longest tokens. Raises Unservable
    without llguidance."""
    words = _Words(vocabulary)
    found = _package().LLTokenizer(words, eos_token=list(vocabulary.eos_ids), slices=SLICES)
    words.encode = lru_cache(KEPT_TEXTS)(encode or found.greedy_tokenize)
    return found


def compile_grammar(grammar: Grammar, source: str, tokens: Any) -> Any:
    """A matcher of the grammar at the start of the output, with its first mask computed, from `grammar_source`. Raises
    Unservable."""
    matcher = _new_matcher(source, tokens)
    if not matcher.is_error():
        mask = matcher.compute_bitmask()
        if not matcher.is_error():
            if not any(mask):
                raise _unservable(f"no text matches the {grammar.kind}", "check that it is not contradictory")
            _check_first_tokens(grammar, matcher, mask)
            return matcher
        if "NoExtension" in matcher.get_error():
            raise _unservable(f"no finite text matches the {grammar.kind}", "check that it is not contradictory")
    raise _not_compiled(grammar, matcher)


def _new_matcher(source: str, tokens: Any) -> Any:
    package = _package()
    limits = package.LLParserLimits(max_lexer_states=MAX_LEXER_STATES, verbose_errors=False)
    return package.LLMatcher(tokens, source, log_level=0, limits=limits)


def _check_first_tokens(grammar: Grammar, matcher: Any, mask: bytes) -> None:
    """Raise Unservable if the grammar reaches a limit of llguidance with a first token: a rule with thousands of
    alternatives, or one that repeats itself for ever. Requests with it would fail after they were queued. `TRIED`
    tokens of the mask stand for all."""
    allowed = [i for i, byte in enumerate(mask) if byte]
    for i in allowed[:: -(-len(allowed) // TRIED)]:
        trial, lowest = matcher.deep_copy(), (mask[i] & -mask[i]).bit_length() - 1
        if not trial.consume_token(8 * i + lowest):
            raise _not_compiled(grammar, trial)


def _not_compiled(grammar: Grammar, matcher: Any) -> Unservable:
    reason = re.split("<backtrace>|<state>|<non-verbose/>", matcher.get_error())[0].strip()
    message = f"the {grammar.kind} cannot be compiled: {reason:.500}"
    return _unservable(message, "docs/structured_output.md has the rules")


def grammar_source(grammar: Grammar) -> str:
    """The grammar in llguidance's own notation. Raises Unservable."""
    matcher = _package().LLMatcher
    if grammar.kind == "regex":
        return str(matcher.grammar_from_regex(grammar.text))
    if grammar.kind == "lark":
        return str(matcher.grammar_from_lark(_lark(grammar.text)))
    if grammar.kind == "choice":  # a JSON string is also a string of Lark
        words = " | ".join(json.dumps(word) for word in json.loads(grammar.text))
        # One terminal: the lexer has no limit for alternatives, while a row of the parser has at most 2,000 items.
        return str(matcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {words}"))
    try:
        schema = {"type": "object"} if grammar.kind == "json_object" else json.loads(grammar.text)
        return _schema_source(schema, grammar.json_options)
    except json.JSONDecodeError as error:
        raise _unservable(f"the schema is not JSON: {error}", "send valid JSON") from error
    except RecursionError as error:
        raise _unservable("the schema is nested too deeply", "make it flatter") from error


def _lark(text: str) -> str:
    """A grammar in Lark; one in GBNF (llama.cpp's notation, with `::=`) is translated."""
    if "::=" not in text:
        return text
    from llguidance.gbnf_to_lark import gbnf_to_lark

    try:
        return str(gbnf_to_lark(text))
    except Exception as error:  # a parser in Python, which raises anything for a wrong grammar
        raise _unservable(f"the grammar is not GBNF: {error!s:.300}", "write it in Lark or GBNF") from error


def _schema_source(schema: Any, options: dict[str, Any]) -> str:
    if not isinstance(schema, dict | bool):
        raise _unservable(f"the schema is {schema!r:.80}", "a schema is a JSON object, or true")
    if schema is False:
        raise _unservable("no value satisfies the schema false", "send true, or a JSON object")
    if not has_finite_instance(schema):
        raise _unservable(
            "the schema recurses without end: no finite value satisfies it",
            "leave a recursive property out of `required`, or allow null",
        )
    draft = schema.get("$schema") if isinstance(schema, dict) else None
    lone_refs = OLD_DRAFT.search(draft) is not None if isinstance(draft, str) else None
    known = {} if schema is True else _known(schema, lone_refs)
    try:
        return str(_package().LLMatcher.grammar_from_json_schema(known, defaults=options))
    except ValueError as error:  # an integer below -2^63 or above 2^64
        raise _unservable(
            f"the schema cannot be compiled: {error!s:.200}", "its integers have at most 64 bits"
        ) from error


def _known(schema: Any, lone_refs: bool | None) -> Any:
    """The schema without formats that llguidance does not know: JSON Schema takes any format as a remark. `lone_refs`
    leaves out what stands beside a $ref, which drafts 4 to 7 ignore and llguidance enforces; None: no draft is
    named."""
    if isinstance(schema, list):
        return [_known(part, lone_refs) for part in schema]
    if not isinstance(schema, dict):
        return schema
    refers = isinstance(schema.get("$ref"), str)
    if refers and lone_refs is None and isinstance(schema.get("$id"), str):  # drafts 4 to 7 refer to another schema
        raise _unservable("the schema has $id beside $ref and names no draft", "add $schema, or leave $id out")
    alone = refers and lone_refs
    return {
        key: value if key in ("const", "enum", "default", "examples") else _known(value, lone_refs)
        for key, value in schema.items()
        if not (key == "format" and isinstance(value, str) and value not in FORMATS)
        and (not alone or key in ("$schema", "$ref", "definitions"))
    }


class _Compiled:
    """Matchers of one grammar at the start of the output, each with a lexer of its own."""

    def __init__(self, matchers: list[Any], source: str, most: int) -> None:
        self.matchers, self._source, self._most = matchers, source, most
        self._turns = count()

    def choose(self, choices: int, tokens: Any) -> list[tuple[int, Any]]:
        """A matcher for each choice, with the number of its lexer. Called by one thread."""
        if len(self.matchers) < self._most:
            self.matchers.append(_new_matcher(self._source, tokens))
        lexers = [next(self._turns) % len(self.matchers) for _ in range(choices)]
        return [(lexer, self.matchers[lexer].deep_copy()) for lexer in lexers]


class GrammarCompiler:
    """Compiled grammars of one tokenizer, the last `KEPT` of them. Any thread may call it, but only one `matchers`."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: Sequence[int], lexers: int = 1) -> None:
        self.lexers = lexers
        self._tokenizer, self._vocab_size, self._eos_ids = tokenizer, vocab_size, tuple(eos_ids)
        self._encode = tokenizer.encode
        self.compilations = 0
        self.compile_s = 0.0
        self._tokens: Any = None
        self._tokens_lock, self._lock = threading.Lock(), threading.Lock()  # of `_tokens`; of `_results`
        self._results: OrderedDict[Grammar, _Compiled | Unservable] = OrderedDict()

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary.of(self._tokenizer, self._vocab_size, self._eos_ids)

    def has_result(self, grammar: Grammar) -> bool:
        """Whether `matcher` answers without compiling."""
        with self._lock:
            return grammar in self._results

    def matcher(self, grammar: Grammar, source: str | None = None) -> Any:
        """A matcher at the start of the output. Compiles the grammar unless it is kept; raises Unservable if it cannot
        be compiled. `source` is its `grammar_source`, if that is known."""
        return self._compiled(grammar, source).matchers[0].deep_copy()

    def matchers(self, grammar: Grammar, choices: int) -> list[tuple[int, Any]]:
        """As `matcher`, for some choices, each with the number of its lexer."""
        return self._compiled(grammar, None).choose(choices, self._tokens)

    def _compiled(self, grammar: Grammar, source: str | None) -> _Compiled:
        with self._lock:
            found = self._results.get(grammar)
            if found is not None:
                self._results.move_to_end(grammar)
        if found is None:
            found = self._compile(grammar, source)
            self.keep(grammar, found)
        if isinstance(found, Unservable):
            if found.temporary:
                with self._lock:
                    self._results.pop(grammar, None)
            raise copy(found)  # the kept one would collect the frames of all the requests that it refuses
        return found

    def keep(self, grammar: Grammar, result: _Compiled | Unservable) -> None:
        """Keep the matchers, or the error that `matcher` is to raise for this grammar."""
        with self._lock:
            self._results[grammar] = result
            self._results.move_to_end(grammar)
            while len(self._results) > KEPT:
                self._results.popitem(last=False)

    def _compile(self, grammar: Grammar, source: str | None) -> _Compiled | Unservable:
        began = time.perf_counter()
        try:
            with self._tokens_lock:
                if self._tokens is None:
                    self._tokens = ll_tokenizer(self.vocabulary, self._encode)
            source = grammar_source(grammar) if source is None else source
            started = time.perf_counter()
            first = compile_grammar(grammar, source, self._tokens)
            seconds = time.perf_counter() - started
            lexers = self.lexers if seconds < SLOW_S else 1
            matchers = [first, *(_new_matcher(source, self._tokens) for _ in range(lexers - 1))]
            adds = lexers > 1 and seconds < QUICK_S
            return _Compiled(matchers, source, most=LEXERS_PER_THREAD * lexers if adds else lexers)
        except Unservable as error:
            return error
        finally:
            self.compilations += 1
            self.compile_s += time.perf_counter() - began
