"""`bagu bench constrained`: decoding to a JSON schema against free text, in the same engine and in turn.

Every round decodes the schema on all streams to its end, then free text with as many tokens on each stream. Timing
starts when every stream has its first token. The ratio is the median of the rounds' ratios, so that a slow minute of
the machine hits both sides. Every constrained output is validated.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from bagu.bench.engine import random_model
from bagu.bench.harness import Place, Rows, table
from bagu.bench.options import BenchSetting, ConstrainedBench
from bagu.bench.words import WordTokenizer
from bagu.bench.workload import Lengths, random_workload
from bagu.data.stdlib import StdlibSource
from bagu.errors import ArgumentError, BaguError
from bagu.nn.model import Transformer
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.request import Request, Sampling, TokenEvent
from bagu.types import Tokenizer

CORPUS = 300  # files of the standard library
WARM_UP = 3  # rounds: on a GPU a step of a new size captures a CUDA graph, which takes longer than many steps
PEOPLE: dict[str, Any] = {  # strings, numbers, enums, nesting: about 40 tokens per person
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "additionalProperties": False,
        "required": ["name", "age", "email", "tags", "address"],
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 24},
            "age": {"type": "integer", "minimum": 0, "maximum": 120},
            "email": {"type": "string", "pattern": "^[a-z]{3,12}@[a-z]{3,12}\\.(com|org|net)$"},
            "tags": {"type": "array", "items": {"enum": ["new", "paid", "blocked", "admin"]}, "maxItems": 3},
            "address": {
                "type": "object",
                "additionalProperties": False,
                "required": ["street", "zip", "primary"],
                "properties": {
                    "street": {"type": "string", "minLength": 3, "maxLength": 32},
                    "zip": {"type": "string", "pattern": "^[0-9]{5}$"},
                    "primary": {"type": "boolean"},
                },
            },
        },
    },
}


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One round: the same numbers of tokens, constrained and free."""

    tokens: int  # after the first of each stream
    forced: int  # of the constrained ones: the schema left no choice
    constrained_s: float
    free_s: float
    mask_s: float  # computing masks
    mask_wait_s: float  # of it, what the engine waited for
    steps: int  # of the constrained run
    texts: tuple[str, ...]

    @property
    def ratio(self) -> float:
        """Speed of constrained decoding, as a fraction of that of free text."""
        return self.free_s / self.constrained_s


def main(
    given: ConstrainedBench, setting: BenchSetting, *, load: Callable[[], tuple[Transformer, Tokenizer, Any]] | None
) -> int:
    """Time `rounds` pairs after some that warm up; print a table and append a row to the record. Returns 1 if an
    output is not valid. The model is that of `load`, or the shape with random weights."""
    streams, rounds, prompt, max_tokens = given.streams, given.rounds, given.prompt, given.max_tokens
    if streams < 1 or rounds < 1 or prompt < 1 or max_tokens < 2:
        raise ArgumentError(
            f"{streams} streams, {rounds} rounds, prompt {prompt}, max_tokens {max_tokens}", hint="use 1 or more"
        )
    rows, place = Rows.of(setting, "serve"), Place.of(setting)
    model, tokenizer, name = _model(given, load, place)
    asked = PEOPLE if given.schema is None else _read(given.schema)
    config = EngineConfig(
        max_num_seqs=streams,
        prefix_cache=False,
        invariant=given.invariant,
        threads=given.threads,
        max_model_len=prompt + max_tokens,
        quantization=given.quantization,  # type: ignore[arg-type]
    )
    engine = Engine(model, tokenizer, config)
    pairs = [
        measure_pair(engine, asked, streams, prompt, max_tokens, given.temperature, s) for s in range(WARM_UP + rounds)
    ]
    del pairs[:WARM_UP]
    check, validator = _validator(asked)
    outputs = [text for pair in pairs for text in pair.texts]
    row = {
        "system": "constrained", "model": name, **place.facts, "streams": streams, "prompt": prompt,
        "temperature": given.temperature, "rounds": rounds,
        "ratios": [pair.ratio for pair in pairs], "ratio": statistics.median(pair.ratio for pair in pairs),
        "constrained_tokens_per_s": statistics.median(p.tokens / p.constrained_s for p in pairs),
        "free_tokens_per_s": statistics.median(p.tokens / p.free_s for p in pairs),
        "mask_ms_per_step": 1e3 * statistics.median(p.mask_s / p.steps for p in pairs),
        "mask_wait_ms_per_step": 1e3 * statistics.median(p.mask_wait_s / p.steps for p in pairs),
        "forced": statistics.median(p.forced / p.tokens for p in pairs),
        "compile_s": engine.stats().grammar_compile_s, "validator": validator,
        "outputs": len(outputs), "valid": sum(map(check, outputs)), "engine": asdict(config),
    }  # fmt: skip
    rows.add([row])
    heads = ("decoding", "tokens/s", "of free text", "forced", "mask ms/step", "waited ms/step", "valid")
    rows.finish(table(f"{name}, {row['dtype']}, {place.device}: {streams} streams, medians of {rounds} rounds", heads, [
        ("free text", f"{row['free_tokens_per_s']:,.0f}", "1.000", "–", "–", "–", "–"),
        (
            "JSON schema", f"{row['constrained_tokens_per_s']:,.0f}", f"{row['ratio']:.3f}",
            f"{row['forced']:.0%}", f"{row['mask_ms_per_step']:.2f}", f"{row['mask_wait_ms_per_step']:.2f}",
            f"{row['valid']} of {row['outputs']} ({validator})",
        ),
    ]))  # fmt: skip
    if row["valid"] != row["outputs"]:
        rows.console.print("an output is not valid if max_tokens cut it off: raise --max-tokens", style="dim")
        return 1
    return 0


def measure_pair(
    engine: Engine, schema: Any, streams: int, prompt: int, max_tokens: int, temperature: float, seed: int
) -> Pair:
    """Decode to the schema on all streams, then as many tokens of free text on each."""
    lengths = Lengths(prompt, prompt)
    work = random_workload(streams, lengths, Lengths(1, 1), tokens=engine.model.config.vocab_size, seed=seed)
    grammar = Grammar.json_schema(schema)

    def asked(count: int, grammar: Grammar | None, i: int) -> Sampling:
        ends = grammar is not None
        return Sampling(max_tokens=count, temperature=temperature, seed=seed + i, grammar=grammar, ignore_eos=not ends)

    before = engine.stats()
    outputs, constrained_s, steps = _decode(
        engine, work.prompts, [asked(max_tokens, grammar, i) for i in range(streams)]
    )
    after = engine.stats()
    counts = [len(tokens) for tokens in outputs]
    free, free_s, _ = _decode(engine, work.prompts, [asked(n, None, i) for i, n in enumerate(counts)])
    if [len(tokens) for tokens in free] != counts:
        raise BaguError(f"free text has {sum(map(len, free))} tokens, and constrained text {sum(counts)}")
    assert engine.tokenizer is not None
    texts = [engine.tokenizer.decode([t for t in ids if t not in engine.scheduler.config.eos_ids]) for ids in outputs]
    return Pair(
        tokens=sum(counts) - streams,
        forced=after.forced_tokens - before.forced_tokens,
        constrained_s=constrained_s,
        free_s=free_s,
        mask_s=after.mask_s - before.mask_s,
        mask_wait_s=after.mask_wait_s - before.mask_wait_s,
        steps=steps,
        texts=tuple(texts),
    )


def _decode(
    engine: Engine, prompts: Sequence[tuple[int, ...]], samplings: Sequence[Sampling]
) -> tuple[list[list[int]], float, int]:
    """The tokens of each request, the seconds from when all have their first token to the end, and the steps."""
    outputs: list[list[int]] = [[] for _ in prompts]
    for i, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        engine.submit(Request(id=str(i), prompt=prompt, sampling=sampling, arrival=float(i)))
    began, steps = 0.0, 0
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.token is not None:
                outputs[int(event.request_id)].append(event.token)
        steps += 1
        if not began and all(outputs):
            began = time.perf_counter()
    return outputs, time.perf_counter() - began, steps


def _model(
    given: ConstrainedBench, load: Callable[[], tuple[Transformer, Tokenizer, Any]] | None, place: Place
) -> tuple[Transformer, Tokenizer, str]:
    if load is not None:
        model, tokenizer, _ = load()
        return model.to(device=place.device, dtype=place.dtype), tokenizer, given.model or "loaded"
    model, shape = random_model(given.shape, place)
    texts = (document.text.encode() for document in islice(StdlibSource().documents(), CORPUS))
    return model, WordTokenizer(texts, model.config.vocab_size), shape


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BaguError(f"cannot read {path}: {error.strerror}", hint="give a file with a JSON schema") from error
    except ValueError as error:
        raise BaguError(f"{path} is not JSON: {error}", hint="give a file with a JSON schema") from error


def _validator(schema: Any) -> tuple[Callable[[str], bool], str]:
    """Whether a text satisfies the schema, and the name of the judge: jsonschema, or only a JSON parser."""
    try:
        import jsonschema
    except ImportError:
        return _is_json, "json"
    judge = jsonschema.validators.validator_for(schema)(schema)
    return lambda text: _is_json(text) and judge.is_valid(json.loads(text)), "jsonschema"


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
