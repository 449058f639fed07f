"""Speculation changes how many steps a text takes, never the text."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model
from test_stream import Bytes

from bagu.errors import ArgumentError
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.recipes.loader import Loader
from bagu.recipes.serve import ServeOptions, serve_main
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.grammar import Grammar
from bagu.serve.http.options import ServerOptions
from bagu.serve.kv.pool import Pool
from bagu.serve.plan import Sequence
from bagu.serve.request import Request, Sampling, TokenEvent
from bagu.serve.speculation.draft_model import DraftModel, DraftSource
from bagu.serve.speculation.speculator import speculates

MODEL = small_model()
PROMPTS = [[1, 2, 3, 1, 2, 3, 1, 2], [5] * 11, [7, 8], [9, 10, 11, 12, 13, 14]]
Texts = dict[tuple[str, int], list[TokenEvent]]


class Script:
    """A proposer that knows the text, and is wrong at every `wrong`-th position."""

    free = True

    def __init__(self, texts: Texts, wrong: int) -> None:
        self.texts = {key: [e.token for e in events] for key, events in texts.items()}
        self.wrong = wrong

    def propose(self, sequences: Seq[Sequence], count: int) -> list[list[int]]:
        return [self._guess(s, count) for s in sequences]

    def _guess(self, s: Sequence, count: int) -> list[int]:
        at = s.num_output
        rest = self.texts[s.request.id, s.index][at : at + count] + [0] * count  # 0s: after the end
        return [
            (t or 0) if (at + i + 1) % self.wrong else ((t or 0) + 1) % 97 for i, t in enumerate(rest[:count])
        ]  # fmt: skip

    def forget(self, sequence: Sequence) -> None:
        pass


def run(engine: Engine, requests: Seq[Request]) -> Texts:
    """The events of all requests; the scheduler's integrity is checked after each step."""
    for request in requests:
        engine.submit(request)
    found: Texts = {(r.id, i): [] for r in requests for i in range(r.sampling.n)}
    while engine.has_work:
        for event in engine.step():
            assert isinstance(event, TokenEvent)
            found[event.request_id, event.index].append(event)
        engine.scheduler.queues.check_integrity()
    assert engine.blocks.used_count == 0
    return found


def requests(sampling: Sampling, prompts: Seq[Seq[int]] = PROMPTS) -> list[Request]:
    return [Request(id=str(i), prompt=tuple(p), sampling=sampling) for i, p in enumerate(prompts)]


def scripted(texts: Texts, wrong: int, tokenizer: Any = None, model: Transformer = MODEL, **settings: Any) -> Engine:
    engine = small_engine(model, tokenizer, speculative="ngram", speculative_always=True, **settings)
    assert engine.speculator is not None
    engine.speculator.proposer = Script(texts, wrong)
    return engine


def details(texts: Texts) -> dict[tuple[str, int], list[TokenEvent]]:
    """The events without the time at which a request was started, and what it found in the cache."""
    return {key: [e._replace(started=None, cached=0) for e in events] for key, events in texts.items()}


def words(texts: Texts) -> dict[tuple[str, int], list[tuple[int | None, str | None, str | int | None]]]:
    return {key: [(e.token, e.finish, e.stop_reason) for e in events] for key, events in texts.items()}


SAMPLINGS = {
    "greedy": Sampling(max_tokens=30, temperature=0.0),
    "ends in a draft": Sampling(max_tokens=9, temperature=0.0),
    "one token": Sampling(max_tokens=1, temperature=0.0),
    "sampled": Sampling(max_tokens=30, temperature=0.9, top_p=0.95, seed=5),
    "without a seed": Sampling(max_tokens=30),
    "penalties": Sampling(
        max_tokens=30, temperature=0.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.3
    ),
    "sampled with penalties": Sampling(max_tokens=30, seed=1, frequency_penalty=1.0, logit_bias={3: 5.0, 4: -100.0}),
    "choices": Sampling(max_tokens=20, seed=2, n=3),
    "logprobs": Sampling(max_tokens=20, temperature=0.0, logprobs=3),
}
WAYS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "overlapping steps": {"async_scheduling": True},
    "preempted": {"num_blocks": 24, "async_scheduling": True},
    "small steps": {"max_num_batched_tokens": 8},
    "no prefix cache": {"prefix_cache": False},
}


@pytest.mark.parametrize("wrong", [3, 1000])
@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *((kind, "overlapping steps") for kind in SAMPLINGS),
        *((kind, way) for kind in ("greedy", "sampled") for way in WAYS if way != "overlapping steps"),
        ("choices", "preempted"),
        ("penalties", "as it comes"),
    ],
)
def test_the_text_is_the_same_however_good_the_drafts(kind: str, way: str, wrong: int) -> None:
    asked = requests(SAMPLINGS[kind])
    plain = run(small_engine(MODEL, **WAYS[way]), asked)
    engine = scripted(plain, wrong, **WAYS[way])
    assert words(run(engine, asked)) == words(plain)
    stats = engine.stats()
    assert stats.generated_tokens == sum(map(len, plain.values()))
    if kind != "one token":
        assert 0 < stats.accepted_tokens <= stats.draft_tokens
        assert wrong == 1000 or stats.accepted_tokens < stats.draft_tokens
    if kind == "greedy" and wrong == 1000 and way != "small steps":
        steps = small_engine(MODEL, **WAYS[way])
        run(steps, asked)
        assert stats.steps < steps.stats().steps / 2


@pytest.mark.parametrize("kind", ["gqa", "windows in all layers", "mqa, QK norm", "mla", "learned, layer norm"])
def test_every_attention_verifies_drafts(kind: str) -> None:
    model, asked = small_model(kind), requests(SAMPLINGS["greedy"])
    plain = run(small_engine(model), asked)
    engine = scripted(plain, 4, model=model)
    assert words(run(engine, asked)) == words(plain)
    assert engine.stats().accepted_tokens > 20


@pytest.mark.parametrize("way", ["as it comes", "overlapping steps"])
@pytest.mark.parametrize("kind", ["gqa", "windows in some", "mqa, QK norm", "biases, gelu"])
def test_in_invariant_mode_logprobs_have_the_same_bits(kind: str, way: str) -> None:
    """And the prefix cache has no rejected draft: a second request that reads it has the bits of a new engine."""
    model, asked = small_model(kind), requests(Sampling(max_tokens=30, seed=4, logprobs=2))
    plain = run(small_engine(model, invariant=True), asked)
    engine = scripted(plain, 3, model=model, invariant=True, **WAYS[way])
    assert details(run(engine, asked)) == details(plain)
    assert engine.stats().accepted_tokens > 0
    longer = [[*p, *(e.token or 0 for e in plain[str(i), 0])] for i, p in enumerate(PROMPTS)]
    after = requests(Sampling(max_tokens=4, temperature=0.0, logprobs=0), longer)
    want, hits = run(small_engine(model, invariant=True), after), engine.stats().prefix_hits
    assert engine.speculator is not None
    engine.speculator.proposer = Script(want, 2)
    assert details(run(engine, after)) == details(want)
    assert engine.stats().prefix_hits > hits


def byte_model() -> Transformer:
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_len=128, init_std=0.2,
    )  # fmt: skip
    return init_weights(Transformer(config), 1).eval()


@pytest.mark.parametrize("way", ["as it comes", "overlapping steps"])
@pytest.mark.parametrize("stops", ["a string", "a string and max_tokens", "a token", "a token after min_tokens"])
def test_a_stop_in_the_middle_of_accepted_drafts_drops_the_rest(stops: str, way: str) -> None:
    model = byte_model()
    asked = requests(Sampling(max_tokens=40, seed=3, n=2), [[65, 66]])
    free = run(small_engine(model, Bytes()), asked)
    tokens = [e.token or 0 for e in free["0", 0]]
    text, third = Bytes().decode(tokens), tokens[3]
    more: dict[str, Any] = {
        "a string": {"stop": (text[3:5],)},
        "a string and max_tokens": {"stop": (text[3:5],), "max_tokens": 7},
        "a token": {"stop_token_ids": (third,)},
        "a token after min_tokens": {"stop_token_ids": (third,), "min_tokens": 9},
    }[stops]
    asked = requests(dataclasses.replace(asked[0].sampling, **more), [[65, 66]])
    plain = run(small_engine(model, Bytes()), asked)
    engine = scripted(free, 1000, Bytes(), model, **WAYS[way])
    assert words(run(engine, asked)) == words(plain)
    assert engine.stats().accepted_tokens > 0
    assert stops == "a token after min_tokens" or len(plain["0", 0]) < 7


@pytest.mark.parametrize("overlap", [False, True])
def test_aborts_at_any_moment_release_all_blocks(overlap: bool) -> None:
    asked = requests(SAMPLINGS["greedy"])
    plain = run(small_engine(MODEL), asked)
    for moment in range(8):
        engine = scripted(plain, 5, async_scheduling=overlap)
        for request in asked:
            engine.submit(request)
        for _ in range(moment):
            engine.step()
        for request in asked:
            engine.abort(request.id)
            engine.scheduler.queues.check_integrity()
        while engine.has_work:
            engine.step()
        assert engine.blocks.used_count == 0
        engine.scheduler.queues.check_integrity()


def test_new_weights_in_the_middle_of_a_speculated_text() -> None:
    asked = requests(SAMPLINGS["greedy"], PROMPTS[:1])
    engine = scripted(run(small_engine(MODEL), asked), 5, async_scheduling=True)
    engine.submit(asked[0])
    events = [e for _ in range(4) for e in engine.step()]
    engine.weights_changed()
    while engine.has_work:
        events += engine.step()
        engine.scheduler.queues.check_integrity()
    assert [e.token for e in events if isinstance(e, TokenEvent)] == list(
        small_engine(MODEL).generate(PROMPTS[:1], SAMPLINGS["greedy"])[0].tokens
    )


def test_drafts_preempt_nobody() -> None:
    """A pool that is just large enough for the texts is large enough with speculation."""
    asked = requests(SAMPLINGS["greedy"])
    plain = small_engine(MODEL, num_blocks=42)
    texts = run(plain, asked)
    engine = scripted(texts, 3, num_blocks=42)
    run(engine, asked)
    assert plain.stats().preemptions == engine.stats().preemptions == 0 < engine.stats().accepted_tokens


@pytest.mark.parametrize("way", ["as it comes", "overlapping steps", "preempted"])
@pytest.mark.parametrize("kind", ["greedy", "choices"])
def test_a_draft_model_changes_no_text(kind: str, way: str) -> None:
    """The model itself as its draft is right whenever the text is greedy; another one is right by chance."""
    asked, other = requests(SAMPLINGS[kind]), init_weights(Transformer(MODEL.config), 5).eval()
    plain = run(small_engine(MODEL, **WAYS[way]), asked)
    settings = {"num_blocks": 64, "block_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 64} | WAYS[way]
    for draft in (MODEL, other):
        config = EngineConfig(**settings, speculative="draft", speculative_tokens=4, speculative_always=True)
        engine = Engine(MODEL, None, config, draft=DraftSource(draft))
        assert words(run(engine, asked)) == words(plain)
        stats = engine.stats()
        if kind == "greedy" and draft is MODEL and way == "as it comes":
            assert stats.accepted_tokens == stats.draft_tokens > 0
        assert stats.draft_tokens > 0


def test_a_draft_model_with_a_full_pool_evicts_no_sequence_of_the_same_call() -> None:
    """Two sequences of 8 + 3 positions and 5 blocks of 4: there is room for one, whose drafts are the model's own."""
    draft = DraftModel(MODEL, EngineConfig(max_num_seqs=4, max_num_batched_tokens=64), Pool(5, 64, 4))
    asked = requests(Sampling(max_tokens=4, temperature=0.0), [[1, 2, 3, 1, 2, 3, 1, 2], [5, 6] * 4])
    first, second = (Sequence(request, 0, (0.0, i, 0), frozenset()) for i, request in enumerate(asked))
    alone = draft.propose([first], 4)
    draft.forget(first)
    assert draft.propose([first, second], 4) == [*alone, []]
    assert draft.propose([second], 4)[0]  # in a call of its own it may take the room


def test_a_sampled_token_has_the_distribution_of_the_model() -> None:
    """Chi-squared over a vocabulary of 11 tokens: the second and third token, drafted, given those before them."""
    config = ModelConfig(
        vocab_size=11, hidden_size=16, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=8, intermediate_size=16,
        max_len=32, init_std=0.5,
    )  # fmt: skip
    model, prompt, count = init_weights(Transformer(config), 3).eval(), [1, 2, 3, 4], 1500
    settings = EngineConfig(
        num_blocks=512, block_size=4, max_num_seqs=64, speculative="itself", speculative_tokens=2,
        speculative_always=True,
    )  # fmt: skip
    engine = Engine(model, None, settings, draft=DraftSource(model))
    found = engine.generate([prompt] * count, Sampling(max_tokens=3))
    counts = torch.zeros(11, 11, 11)
    for completion in found:
        counts[completion.tokens] += 1
    exact = torch.zeros(11, 11, 11, dtype=torch.float64)
    wide = copy.deepcopy(model).double()
    with torch.no_grad():
        for a in range(11):
            for b in range(11):
                ids = torch.tensor([*prompt, a, b])
                T = len(ids)
                hidden = wide(ids, torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T).hidden
                p = wide.logits(hidden).softmax(-1)[-3:]
                exact[a, b] = p[0, a] * p[1, b] * p[2]
    expected, seen = (count * exact).flatten(), counts.double().flatten()
    often = expected >= 5
    expected = torch.cat((expected[often], expected[~often].sum().unsqueeze(0)))
    seen = torch.cat((seen[often], seen[~often].sum().unsqueeze(0)))
    freedom = len(expected) - 1
    statistic = float(((seen - expected) ** 2 / expected).sum())
    assert engine.stats().accepted_tokens > count / 4 and freedom > 20
    assert statistic < freedom + 4 * (2 * freedom) ** 0.5  # mean and 4 standard deviations of chi-squared


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"speculative": "somewhere"}, "no draft model was passed"),
        ({"speculative": "ngram", "speculative_tokens": 0}, "speculative_tokens = 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        small_engine(MODEL, **settings)


def test_a_draft_model_with_another_tokenizer_is_refused() -> None:
    class Other(Bytes):
        def bytes_of(self, id: int) -> bytes:
            return b"x" if id == 200 else super().bytes_of(id)

    model, config = byte_model(), EngineConfig(num_blocks=8, speculative="draft")
    with pytest.raises(ArgumentError, match="another tokenizer: its token 200 is b'x'"):
        Engine(model, Bytes(), config, draft=DraftSource(byte_model(), Other()))
    with pytest.raises(ArgumentError, match="the draft model has 97 tokens, and the model has 257"):
        Engine(model, Bytes(), config, draft=DraftSource(MODEL))
    Engine(model, Bytes(), config, draft=DraftSource(byte_model(), Bytes()))


def test_the_server_gets_the_draft_model_and_a_wrong_path_is_refused_before_it_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[dict[str, Any]] = []
    monkeypatch.setattr("bagu.serve.http.server.main", lambda name, **settings: calls.append(settings))
    monkeypatch.setattr("bagu.recipes.find.find_model", lambda name: {"large": 1, "small": 2}[name])
    for speculative in (None, "ngram", "small"):
        loader = Loader(model="large", tokenizer="words", dtype="fp32")
        config = EngineConfig(speculative=speculative, speculative_tokens=5)
        serve_main(loader, config, ServerOptions(), ServeOptions(generation_config="none"))
    assert [c["load_draft"] for c in calls] == [None, None, Loader(model="small", dtype="fp32")]
    assert calls[1]["config"].speculative == "ngram" and calls[1]["config"].speculative_tokens == 5
    with pytest.raises(KeyError):
        serve_main(
            Loader(model="large"),
            EngineConfig(speculative="x"),
            ServerOptions(),
            ServeOptions(generation_config="none"),
        )


def test_grammars_are_not_speculated() -> None:
    free, constrained = Sampling(), Sampling(grammar=Grammar.regex("[0-9]+"))
    assert speculates(Sequence(Request(id="0", prompt=(1,), sampling=free), 0, (0.0, 0, 0), frozenset()))
    assert not speculates(Sequence(Request(id="0", prompt=(1,), sampling=constrained), 0, (0.0, 0, 0), frozenset()))
