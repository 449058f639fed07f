"""Images in the engine: the model's own answers, blocks of the prefix cache, chunks, preemption, encoder budget."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from small_adapters import merge_into, random_adapter
from small_vlm import SIDE, TOKENS, file_of, picture, small_vlm

from bagu.errors import ArgumentError
from bagu.machine.image_file import read_image
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.images.encoder import ImageEncoder
from bagu.serve.images.prompt import EncoderBudget, ImageSpec, PromptImage, keyed, pieces, place_images
from bagu.serve.request import Request, Sampling, TokenEvent

IMAGE = 5
SPEC = ImageSpec(IMAGE, TOKENS, SIDE)
STOP = 299  # as good as no end


def pixels(seed: int) -> bytes:
    return read_image(file_of(picture(seed)), SIDE).tobytes()


def request(id: str, prompt: list[int], seeds: list[int], max_tokens: int = 6, **fields) -> Request:
    """`IMAGE` in the prompt stands for each image."""
    tokens, images = place_images(prompt, [pixels(s) for s in seeds], SPEC)
    sampling = Sampling(max_tokens=max_tokens, temperature=0.0, ignore_eos=True, **fields)
    return Request(id=id, prompt=tuple(tokens), images=tuple(images), sampling=sampling)


def answers(engine: Engine, *requests: Request) -> dict[str, list[int]]:
    for given in requests:
        engine.submit(given)
    found: dict[str, list[int]] = {given.id: [] for given in requests}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.token is not None:
                found[event.request_id].append(event.token)
    engine.scheduler.queues.check_integrity()
    return found


def expected(model, given: Request) -> list[int]:
    """The answer of the model alone."""
    images = torch.stack(
        [
            torch.frombuffer(bytearray(i.pixels), dtype=torch.uint8).view(SIDE, SIDE, 3).permute(2, 0, 1)
            for i in given.images
        ]
    )
    return model.answer([given.prompt], images, given.sampling.max_tokens, STOP)[0]


def engine_of(model, **config) -> Engine:
    return Engine(model, None, EngineConfig(**{"block_size": 4, "num_blocks": 200, "max_num_seqs": 8, **config}))


REQUESTS = (
    ("one", [2, IMAGE, 40, 41, 42], [0]),
    ("two", [2, IMAGE, 50, IMAGE, 40, 41], [1, 2]),
    ("same twice", [2, IMAGE, IMAGE, 60], [3, 3]),
    ("late", [2, 40, 41, 42, 43, 44, 45, IMAGE, 9], [1]),
)


@pytest.mark.parametrize(
    "config",
    [{}, {"max_num_batched_tokens": 8}, {"prefix_cache": False}, {"speculative": "ngram", "speculative_always": True},
     {"num_blocks": 9, "max_num_batched_tokens": 8}, {"async_scheduling": True}, {"invariant": True}],
    ids=["plain", "cut by chunks", "no cache", "speculation", "preempted", "overlapping", "invariant"],
)  # fmt: skip
def test_greedy_answers_are_those_of_the_model(config):
    model = small_vlm()
    engine = engine_of(model, **config)
    given = [request(*r) for r in REQUESTS]
    found = answers(engine, *given)
    assert found == {r.id: expected(model, r) for r in given}
    assert len(set(map(tuple, found.values()))) > 1, "the answers depend on the images"
    if config.get("num_blocks") == 9:
        assert engine.stats().preemptions > 0


def test_text_between_images_is_answered_as_without_an_encoder():
    model, sampling = small_vlm(), Sampling(max_tokens=5, temperature=0.0, ignore_eos=True)
    text = Request(id="text", prompt=(2, 40, 41), sampling=sampling)
    together = answers(engine_of(model), text, request("one", *REQUESTS[0][1:]))
    assert together["text"] == answers(engine_of(model.decoder), text)["text"]


def test_an_adapter_answers_about_an_image_as_the_merged_model_does():
    model, merged = small_vlm(), small_vlm()
    adapter = random_adapter(model.decoder, 1)
    merge_into(merged.decoder, adapter)
    engine = engine_of(model, max_adapters=1)
    engine.load_adapter("own", "in memory", adapter)
    given = [request(*r) for r in REQUESTS]
    named = [replace(r, id=f"{r.id} adapted", adapter="own") for r in given]
    found = answers(engine, *given, *named)
    assert found == {r.id: expected(m, r) for m, part in ((model, given), (merged, named)) for r in part}
    assert [found[r.id] for r in given] != [found[r.id] for r in named], "the adapter changes the answers"


def logprobs(engine: Engine, id: str, seeds: list[int]) -> list[float]:
    """Of the answer to a prompt of one block of text, two images of a block each, and text."""
    engine.submit(request(id, [2, 40, 41, 42, IMAGE, IMAGE, 50, 51, 52, 53, 7], seeds, logprobs=0))
    found = []
    while engine.has_work:
        found += [e.logprob for e in engine.step() if isinstance(e, TokenEvent) and e.logprob is not None]
    return found


def test_two_images_share_no_block_and_equal_ones_all():
    model = small_vlm()
    cached, fresh = (engine_of(model, invariant=True, prefix_cache=on) for on in (True, False))
    first = logprobs(cached, "first", [0, 1])
    before = cached.stats()
    assert (before.images_encoded, before.prefix_hits) == (2, 0)
    assert logprobs(cached, "again", [0, 1]) == first == logprobs(fresh, "fresh", [0, 1]), "the same bits"
    after = cached.stats()
    assert after.images_encoded == 2, "the encoder ran once"
    assert (after.prefix_hits, after.prefix_queries - before.prefix_queries) == (16, 17)
    other = logprobs(cached, "other", [0, 2])
    assert other == logprobs(fresh, "other", [0, 2]) and all(a != b for a, b in zip(first, other, strict=True))
    assert cached.stats().prefix_hits - after.prefix_hits == 8, "the text and the first image, not the second"


def test_an_image_and_a_short_question_are_found_again():
    """26 tokens: of blocks of 16 one would be found, 62 %."""
    engine = Engine(small_vlm(), None, EngineConfig(num_blocks=200))
    prompt = [2, IMAGE, *range(40, 59), 9, 3]
    for id in ("first", "again"):
        before = engine.stats()
        answers(engine, request(id, prompt, [0]))
    after = engine.stats()
    assert (after.prefix_queries - before.prefix_queries, after.prefix_hits) == (26, 25)
    assert (after.images_encoded, after.images_reused) == (1, 0), "nothing of the image is computed again"


def test_keys_tell_images_places_and_sizes_apart():
    def numbers(seed: int, spec: ImageSpec = SPEC) -> list[int]:
        return keyed([IMAGE] * spec.tokens, [PromptImage.of(0, pixels(seed), spec)])

    assert numbers(0) == numbers(0) and len(set(numbers(0))) == TOKENS
    assert not set(numbers(0)) & set(numbers(1))
    assert not set(numbers(0)) & set(numbers(0, ImageSpec(IMAGE, 2 * TOKENS, SIDE)))
    assert all(2**62 <= n < 2**63 for n in numbers(0))


def test_a_step_encodes_no_more_than_its_budget_and_at_least_one_image():
    images = [PromptImage.of(at, pixels(at), SPEC) for at in (1, 5, 9)]
    budget = EncoderBudget(2 * TOKENS, lambda digest: False)
    assert budget.cut(images, 0, 14) == 9 and budget.cut(images, 9, 5) == 0
    budget.begin()
    assert budget.cut(images, 9, 5) == 5
    tight = EncoderBudget(1, {images[1].digest}.__contains__)
    assert tight.cut(images, 0, 14) == 9, "the first always, the second is known, not the third"
    assert [p[1:] for p in pieces(images, 3, 10, 100)] == [(2, 4, 100), (0, 4, 102), (0, 1, 106)]


def test_a_prompt_of_many_images_runs_with_a_small_budget_and_no_room_to_keep_any():
    model = small_vlm()
    engine = engine_of(model, prefix_cache=False)
    assert engine.images is not None
    engine.images.budget.tokens, engine.images.kept_bytes = TOKENS, 0
    given = request("many", [2, *[IMAGE] * 6, 40], list(range(6)))
    assert answers(engine, given)["many"] == expected(model, given)
    assert engine.stats().steps == 6 + given.sampling.max_tokens - 1
    assert engine.images.encoded == 6


def test_vectors_are_kept_within_a_bound_and_dropped_with_new_weights():
    encoder = ImageEncoder(small_vlm(), kept_bytes=2 * TOKENS * 32 * 4)
    images = [PromptImage.of(0, pixels(seed), SPEC) for seed in range(3)]
    with torch.inference_mode():
        for image in (*images, images[1], images[0]):
            encoder.place(list(pieces([image], 0, TOKENS, 0)))
    assert (encoder.encoded, encoder.reused) == (4, 1)
    model = small_vlm()
    engine = engine_of(model)
    before = logprobs(engine, "before", [0, 1])
    with torch.no_grad():
        model.down.weight.mul_(-1)
    engine.weights_changed()
    after = logprobs(engine, "after", [0, 1])
    assert after == logprobs(engine_of(model), "fresh", [0, 1]) and all(
        a != b for a, b in zip(before, after, strict=True)
    )


def test_images_that_do_not_fit_are_refused():
    engine, good = engine_of(small_vlm()), request(*REQUESTS[0])
    image = good.images[0]
    wrong = {
        "place": image._replace(start=0),
        "pixels": image._replace(pixels=b"\0"),
        "tokens": image._replace(tokens=3),
    }
    for name, bad in wrong.items():
        with pytest.raises(ArgumentError, match="the image at"):
            engine.submit(Request(id=name, prompt=good.prompt, images=(bad,), sampling=good.sampling))
    with pytest.raises(ArgumentError, match="takes text only"):
        engine_of(small_vlm().decoder).submit(good)
    with pytest.raises(ArgumentError, match="tp = 2"):
        engine_of(small_vlm(), tp=2)
    with pytest.raises(ArgumentError, match="writes 1 images, and the messages have 2"):
        place_images([IMAGE], [b"", b""], SPEC)
    assert not engine.has_work


def test_all_choices_of_a_prompt_see_its_image():
    model = small_vlm()
    engine = engine_of(model)
    given = request("n", REQUESTS[1][1], REQUESTS[1][2], n=2)
    engine.submit(given)
    found: dict[int, list[int]] = {0: [], 1: []}
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, TokenEvent) and event.token is not None:
                found[event.index].append(event.token)
    assert found[0] == found[1] == expected(model, given)
