"""The engine's interface: requests get what they ask for, and release everything at the end."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from small_engine import small_engine, small_model
from test_stream import Bytes

from bagu import ops
from bagu.errors import ArgumentError
from bagu.nn.config import LongRopeScaling, ModelConfig, Rope
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.nn.sample import generate
from bagu.serve.engine import Engine
from bagu.serve.request import PromptLogprobs, Request, Sampling, TokenEvent, Unservable

MODEL = small_model()


def true_logprobs(ids: list[int], model: Transformer = MODEL) -> torch.Tensor:
    """[len(ids) - 1]: the logprob of each token after the first, by the trainer's function."""
    with torch.no_grad():
        T = len(ids)
        hidden = model(torch.tensor(ids), torch.arange(T), torch.tensor([0, T], dtype=torch.int32), T).hidden
        return ops.token_losses(
            *ops.linear_cross_entropy(hidden[:-1], model.head_weight, torch.tensor(ids[1:]))
        ).logprobs


def byte_engine(**settings: int) -> Engine:
    """A model over bytes, so that stop strings can end its text."""
    config = ModelConfig(
        vocab_size=257, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
        max_len=128, init_std=0.2,
    )  # fmt: skip
    return small_engine(init_weights(Transformer(config), 1), Bytes(), **settings)


def test_a_seed_gives_the_same_text_alone_and_in_a_batch() -> None:
    sampling = Sampling(max_tokens=12, temperature=0.8, top_p=0.9, seed=7)
    alone = small_engine(MODEL).generate([[3, 4, 5]], sampling)[0]
    crowd = [[i] * (i + 1) for i in range(6)]
    others = [Sampling(max_tokens=9, temperature=1.0, top_k=5, seed=i) for i in range(6)]
    engine = small_engine(MODEL)
    engine.generate(crowd, others)
    found = engine.generate([*crowd, [3, 4, 5]], [*others, sampling])
    assert found[-1].tokens == alone.tokens
    assert engine.generate([[3, 4, 5]], Sampling(max_tokens=12, seed=8))[0].tokens != alone.tokens


def test_requests_without_a_seed_differ_but_are_reproducible() -> None:
    sampling = Sampling(max_tokens=10)
    first, again = (small_engine(MODEL).generate([[1], [1]], sampling) for _ in range(2))
    assert first[0].tokens != first[1].tokens
    assert [c.tokens for c in first] == [c.tokens for c in again]


def test_n_choices_share_a_prefill_and_have_their_own_seeds() -> None:
    engine = small_engine(MODEL)
    prompt = list(range(1, 11))  # two and a half blocks: the half one is copied on write
    found = engine.generate([prompt], Sampling(max_tokens=8, n=3, seed=5))
    assert [(c.prompt, c.choice) for c in found] == [(0, 0), (0, 1), (0, 2)]
    assert len({c.tokens for c in found}) == 3
    assert engine.stats().prefix_queries == 10, "one prefill"
    alone = small_engine(MODEL).generate([prompt], Sampling(max_tokens=8, n=1, seed=5))
    assert found[0].tokens == alone[0].tokens
    engine.scheduler.queues.check_integrity()
    assert engine.stats().blocks_used == 0


def test_logprobs_are_the_models_own_before_temperature() -> None:
    prompt = [3, 1, 4, 1, 5]
    sampling = Sampling(max_tokens=6, temperature=2.0, top_k=5, seed=1, logprobs=3)
    found = small_engine(MODEL).generate([prompt], sampling)[0]
    want = true_logprobs([*prompt, *found.tokens])[len(prompt) - 1 :]
    assert found.logprobs is not None and found.top is not None
    torch.testing.assert_close(torch.tensor(found.logprobs), want, atol=1e-4, rtol=0)
    for top in found.top:
        assert len(top) == 3 and [p for _, p in top] == sorted((p for _, p in top), reverse=True)


@pytest.mark.parametrize("budget", [64, 8])
def test_prompt_logprobs_are_returned_once_and_complete(budget: int) -> None:
    engine = small_engine(MODEL, max_num_batched_tokens=budget)
    prompt = tuple(range(2, 22))
    engine.submit(Request(id="r", prompt=prompt, sampling=Sampling(max_tokens=2, prompt_logprobs=2)))
    events = []
    while engine.has_work:
        events += engine.step()
    scores = [e for e in events if isinstance(e, PromptLogprobs)]
    assert len(scores) == 1 and events[0] is scores[0] and scores[0].start == 1
    found = torch.tensor([t.logprob for t in scores[0].tokens])
    torch.testing.assert_close(found, true_logprobs(list(prompt)), atol=1e-4, rtol=0)
    assert all(len(t.top) == 2 for t in scores[0].tokens)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("length", [2, 8, 9, 17])
def test_score_equals_the_trainers_and_shares_prefixes(length: int, overlaps: bool) -> None:
    engine = small_engine(MODEL, max_num_batched_tokens=8, async_scheduling=overlaps)
    base = list(range(5, 5 + length))
    texts = [[*base, t] for t in (1, 2, 3)]
    found = engine.score(texts, [length] * 3)
    for ids, scores in zip(texts, found, strict=True):
        torch.testing.assert_close(torch.tensor(scores), true_logprobs(ids)[length - 1 :], atol=1e-4, rtol=0)
    whole = engine.score([texts[0]], [1])[0]
    torch.testing.assert_close(torch.tensor(whole), true_logprobs(texts[0]), atol=1e-4, rtol=0)
    if length > 8:
        assert engine.stats().prefix_hits > 0
    assert engine.stats().blocks_used == 0
    with pytest.raises(ArgumentError, match="start = 0"):
        engine.score([base], [0])


def test_choices_of_a_prompt_compute_it_once_up_to_a_block() -> None:
    """19 of the first choice's 20 tokens (the last is only predicted); of the others those after the 2 shared blocks
    that end before the first scored position."""
    engine, computed = small_engine(MODEL, block_size=8), []
    stage = engine.runner.stage
    engine.runner.stage = lambda plan: computed.append(plan.num_tokens) or stage(plan)  # type: ignore[method-assign, func-returns-value]
    prompt = list(range(5, 22))
    engine.score([[*prompt, t, t + 1, t + 2] for t in range(1, 5)], [17] * 4)
    assert sum(computed) == 19 + 3 * (19 - 16)


def test_scored_tokens_have_the_top_tokens_of_their_positions() -> None:
    """The most probable token at a position is the one that greedy decoding generates there."""
    engine, prompt = small_engine(MODEL), [3, 1, 4, 1, 5]
    greedy = engine.generate([prompt], Sampling(max_tokens=6, temperature=0.0))[0].tokens
    (found,) = engine.score_tokens([[*prompt, *greedy]], [len(prompt)], top=2)
    assert [token.top[0][0] for token in found] == list(greedy)
    assert all(len(token.top) == 2 and token.top[0][1] >= token.top[1][1] for token in found)
    assert engine.score([[*prompt, *greedy]], [len(prompt)]) == [[token.logprob for token in found]]


def test_new_weights_change_the_text_and_empty_the_cache() -> None:
    model, other = small_model(), small_model()
    init_weights(other, 9)
    engine, want = small_engine(model), small_engine(other)
    prompt, sampling = [list(range(20))], Sampling(max_tokens=8, temperature=0.0)
    before = engine.generate(prompt, sampling)[0].tokens
    engine.update_weights(other.state_dict())
    assert engine.stats().blocks_cached == 0
    after = engine.generate(prompt, sampling)[0].tokens
    assert after == want.generate(prompt, sampling)[0].tokens != before
    with pytest.raises(ArgumentError, match="not in the model's state dict"):
        engine.update_weights({"nonsense": torch.zeros(1)})
    with pytest.raises(ArgumentError, match="has shape"):
        engine.update_weights({"embedding.weight": torch.zeros(1)})


@pytest.mark.parametrize("invariant", [False, True])
def test_weights_that_a_trainer_changed_in_place_are_used_after_weights_changed(invariant: bool) -> None:
    """The engine shares the tensors of the model, and what it packed for decoding is packed again."""
    model, other = small_model(), init_weights(small_model(), 9)
    engine = small_engine(model, invariant=invariant)
    prompt, sampling = [list(range(20))], Sampling(max_tokens=8, temperature=0.0)
    before = engine.generate(prompt, sampling)[0].tokens
    with torch.no_grad():
        for mine, new in zip(model.parameters(), other.parameters(), strict=True):
            mine.copy_(new)
    engine.weights_changed()
    assert engine.stats().blocks_cached == 0
    assert engine.model is model and engine.runner.source is model
    after = engine.generate(prompt, sampling)[0].tokens
    assert after == small_engine(other, invariant=invariant).generate(prompt, sampling)[0].tokens != before


@pytest.mark.parametrize("overlap", [False, True])
def test_new_weights_in_the_middle_of_a_text(overlap: bool) -> None:
    engine = small_engine(small_model(), async_scheduling=overlap)
    engine.submit(Request(id="r", prompt=(1, 2, 3), sampling=Sampling(max_tokens=6, temperature=0.0)))
    tokens = [e.token for _ in range(3) for e in engine.step() if isinstance(e, TokenEvent)]
    engine.update_weights(small_model().state_dict())
    while engine.has_work:
        tokens += [e.token for e in engine.step() if isinstance(e, TokenEvent)]
        engine.scheduler.queues.check_integrity()
    assert len(tokens) == 6  # each is returned once, also those of a step that was pending


def test_a_stop_string_ends_only_its_choice() -> None:
    engine = byte_engine()
    sampling = Sampling(max_tokens=40, seed=3, n=2)
    free = engine.generate([[65, 66]], sampling)
    text = free[0].text
    assert text is not None and len(text) > 6
    stop = text[3:5]
    found = engine.generate([[65, 66]], Sampling(max_tokens=40, seed=3, n=2, stop=(stop,)))
    assert (found[0].finish, found[0].stop_reason) == ("stop", stop)
    assert found[0].text == text[: text.index(stop)]
    assert len(found[0].tokens) < 40 and engine.stats().blocks_used == 0
    if stop not in (free[1].text or ""):
        assert found[1].tokens == free[1].tokens
    pieces = list(engine.stream([65, 66], Sampling(max_tokens=40, seed=3, stop=(stop,))))
    assert "".join(p.text or "" for p in pieces) == found[0].text
    assert [p.finish for p in pieces[:-1]] == [""] * (len(pieces) - 1) and pieces[-1].finish == "stop"


def test_stop_tokens_and_min_tokens() -> None:
    engine = small_engine(MODEL)
    greedy = Sampling(max_tokens=12, temperature=0.0)
    text = engine.generate([[1, 2]], greedy)[0].tokens
    end = text[4]
    found = engine.generate([[1, 2]], Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(end,)))[0]
    assert found.tokens == text[: text.index(end) + 1]
    assert (found.finish, found.stop_reason) == ("stop", end)
    late = Sampling(max_tokens=12, temperature=0.0, stop_token_ids=(end,), min_tokens=8)
    assert end not in engine.generate([[1, 2]], late)[0].tokens[:8]


def test_closing_a_stream_aborts_its_request() -> None:
    engine = small_engine(MODEL)
    stream = engine.stream([1, 2, 3], Sampling(max_tokens=50))
    next(stream)
    assert engine.stats().blocks_used > 0 and engine.has_work
    stream.close()
    assert engine.stats().blocks_used == 0 and not engine.has_work


def test_bad_requests_are_refused_and_do_not_affect_others() -> None:
    engine = small_engine(MODEL, num_blocks=8, max_model_len=100)
    with pytest.raises(Unservable, match="pool has 8"):
        engine.submit(Request(id="a", prompt=(1,) * 30, sampling=Sampling(max_tokens=30)))
    with pytest.raises(ArgumentError, match="token 97"):
        engine.submit(Request(id="a", prompt=(97,)))
    with pytest.raises(ArgumentError, match="need a tokenizer"):
        engine.submit(Request(id="a", prompt=(1,), sampling=Sampling(stop=("x",))))
    assert not engine.has_work and engine.step() == []
    assert len(engine.generate([[1]], Sampling(max_tokens=3))[0].tokens) == 3
    assert engine.abort("a") is False


def test_aborts_at_any_moment_release_all_blocks() -> None:
    engine = small_engine(MODEL, num_blocks=20, max_num_batched_tokens=8)
    for moment in range(8):
        for i in range(4):
            prompt = tuple(range(i + 1, i + 10))
            engine.submit(Request(id=str(i), prompt=prompt, sampling=Sampling(max_tokens=9, n=2)))
        for _ in range(moment):
            engine.step()
        for i in range(4):
            engine.abort(str(i))
        engine.scheduler.queues.check_integrity()
        assert engine.stats().blocks_used == 0 and not engine.has_work


def test_stats_count_steps_tokens_and_blocks() -> None:
    engine = small_engine(MODEL)
    engine.generate([[1, 2, 3]] * 3, Sampling(max_tokens=4))
    stats = engine.stats()
    assert (stats.generated_tokens, stats.running, stats.waiting) == (12, 0, 0)
    assert len(stats.block_map) == stats.blocks_total == 64
    assert stats.block_map.count("c") == stats.blocks_cached
    assert stats.tokens_per_s > 0 and stats.last_step_s > 0


def test_logprobs_belong_to_their_request_also_with_overlapping_steps() -> None:
    """Requests with no logprobs, those of the token alone, and of top tokens run in the same steps."""
    prompts = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]
    asks = [Sampling(max_tokens=6, seed=i, logprobs=n) for i, n in enumerate((None, 0, 2))]
    found = {
        overlaps: small_engine(small_model(), async_scheduling=overlaps).generate(prompts, asks)
        for overlaps in (False, True)
    }
    assert found[False] == found[True]
    none, own, top = found[False]
    assert none.logprobs is None and own.logprobs is not None and top.logprobs is not None
    assert own.top == ((),) * len(own.tokens) and top.top is not None and all(len(t) == 2 for t in top.top)
    for completion, ask in ((own, 1), (top, 2)):
        scored = small_engine(small_model()).score([prompts[ask] + list(completion.tokens)], [len(prompts[ask])])[0]
        torch.testing.assert_close(torch.tensor(completion.logprobs), torch.tensor(scored), atol=1e-4, rtol=0)


def test_without_a_prefix_cache_no_token_is_looked_up() -> None:
    asked = Sampling(max_tokens=2, temperature=0.0)
    for cache, looked_up in ((True, 24), (False, 0)):
        engine = small_engine(small_model(), prefix_cache=cache)
        for _ in range(2):
            engine.generate([list(range(1, 13))], asked)
        stats = engine.stats()
        assert stats.prefix_queries == looked_up and (stats.prefix_hits > 0) == cache


@pytest.mark.parametrize("longest", [16, 128])
def test_longrope_has_one_list_of_factors_for_all_requests(longest: int) -> None:
    """The short ones if no sequence can be longer than the original context, else the long ones, with a warning."""
    scaling = LongRopeScaling(
        factor=8.0, original_max_len=16, short_factors=(1.0,) * 4, long_factors=(1.0, 2.0, 5.0, 9)
    )
    model = small_model()
    model = init_weights(Transformer(replace(model.config, positions=Rope(scaling=scaling))), 0).eval()
    prompt, sampling = [3, 4, 5, 6, 7], Sampling(max_tokens=10, temperature=0.0)
    chosen = scaling.factors(longest)
    plain = replace(scaling, short_factors=chosen, long_factors=chosen)
    same = init_weights(Transformer(replace(model.config, positions=Rope(scaling=plain))), 0).eval()
    with pytest.warns(UserWarning, match="max_model_len = 16") if longest == 128 else nullcontext():
        engine = small_engine(model, max_model_len=None if longest == 128 else longest)
    found = engine.generate([prompt], sampling)[0].tokens
    assert list(found) == generate(same, [prompt], 10, temperature=0.0)[0]
    assert model.config.max_len == 128, "the trainer's model is another one"
