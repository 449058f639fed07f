"""The loader: a step is a function of (seed, step); every target once per epoch; the cursor names the next token."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bagu import config as config_tree
from bagu.data.loader import DataConfig, Loader, check_vocab, evaluation_batches
from bagu.data.mix import MixConfig, MixPoint
from bagu.data.prefetch import Prefetch
from bagu.data.store import TokenDocument, TokenStore
from bagu.data.store_writer import in_memory
from bagu.errors import BaguError
from bagu.types import IGNORE, Batch

WIDTH = 1000  # token id = document * WIDTH + position: a token identifies its origin


def store_of(lengths: list[int], masks: list[list[int]] | None = None, first: int = 0) -> TokenStore:
    documents = [
        TokenDocument(
            id=f"doc {first + d}",
            tokens=(first + d) * WIDTH + np.arange(n),
            mask=None if masks is None else masks[d],
        )
        for d, n in enumerate(lengths)
    ]
    return in_memory(documents, token_bytes=np.arange(100 * WIDTH) % 7)


def some_store(seed: int = 0, n: int = 30, first: int = 0) -> TokenStore:
    return store_of([2 + (seed * 13 + i * 37) % 58 for i in range(n)], first=first)


def check_integrity(batch: Batch, context: int, rows: int) -> None:
    """Invariants of every batch."""
    total = rows * context
    cu = batch.cu_seqlens.tolist()
    assert batch.ids.shape == batch.targets.shape == batch.positions.shape == (total,)
    assert (batch.ids.dtype, batch.cu_seqlens.dtype) == (torch.int64, torch.int32)
    assert cu[0] == 0
    assert cu[-1] == total
    assert cu == sorted(cu)
    assert set(range(0, total, context)) <= set(cu), "a segment crosses a row boundary"
    lengths = np.diff(cu)
    assert lengths.max() <= batch.max_len == context
    assert batch.positions.tolist() == [p for n in lengths.tolist() for p in range(n)]
    counted = batch.targets[batch.targets != IGNORE]
    assert batch.num_targets == len(counted)
    assert batch.target_bytes == int((counted % 7).sum())


def learned(batches: list[Batch]) -> Counter[tuple[int, int]]:
    """(input, target) of every target that counts."""
    pairs: Counter[tuple[int, int]] = Counter()
    for b in batches:
        keep = b.targets != IGNORE
        pairs.update(zip(b.ids[keep].tolist(), b.targets[keep].tolist(), strict=True))
    return pairs


def all_pairs(store: TokenStore) -> dict[tuple[int, int], int]:
    """Each token with its successor in the document, where the successor's mask is 1."""
    pairs = {}
    for d in range(store.num_documents):
        tokens, mask = store.tokens(d).tolist(), store.mask(d)
        for t in range(len(tokens) - 1):
            if mask is None or mask[t + 1]:
                pairs[tokens[t], tokens[t + 1]] = 1
    return pairs


def same(a: tuple[Batch, ...], b: tuple[Batch, ...]) -> bool:
    names = ("ids", "targets", "positions", "cu_seqlens")
    return len(a) == len(b) and all(
        torch.equal(getattr(x, n), getattr(y, n)) for x, y in zip(a, b, strict=True) for n in names
    )


@pytest.mark.parametrize("packing", ["stream", "whole", "joined"])
def test_a_step_is_a_function_of_seed_and_step(packing: str) -> None:
    stores = {"a": some_store(0), "b": some_store(1, first=40)}
    config = DataConfig(context=32, rows=3, micro_batches=2, packing=packing)  # type: ignore[arg-type]
    forward, backward = Loader(stores, config), Loader(stores, config)
    steps = range(40)  # several epochs
    batches = {s: forward.batch(s) for s in steps}
    assert all(same(batches[s], backward.batch(s)) for s in reversed(steps))
    assert len({tuple(b.ids.tolist()) for bs in batches.values() for b in bs}) == 80
    other = Loader(stores, DataConfig(context=32, rows=3, micro_batches=2, packing=packing, seed=1))  # type: ignore[arg-type]
    assert not same(other.batch(0), batches[0])


def test_the_rows_of_a_step_are_not_neighbours() -> None:
    """Eight documents of 64 rows: a step of eight neighbouring rows would contain one or two of them."""
    config = DataConfig(context=16, rows=8)
    documents = [TokenDocument(id=str(d), tokens=[d + 1] * (16 * 64)) for d in range(8)]
    loader = Loader({"a": in_memory(documents, token_bytes=np.ones(9, np.int32))}, config)
    met = [len(loader.batch(s)[0].ids.unique()) for s in range(64)]
    assert min(met) >= 3 and sum(met) / len(met) > 4.5, "eight random draws from eight give 5.25 on average"


def test_the_data_of_a_seed_are_the_same_bits_on_every_machine() -> None:
    """A change of these digests changes the data of every resumed run: do it only on purpose."""
    digests = {}
    for packing in ("stream", "whole"):
        config = DataConfig(context=32, rows=4, packing=packing, seed=7)  # type: ignore[arg-type]
        loader = Loader({"a": some_store(0), "b": some_store(1, first=40)}, config)
        data = b"".join(loader.batch(s)[0].ids.numpy().astype("<i8").tobytes() for s in (0, 1, 50))
        digests[packing] = hashlib.sha256(data).hexdigest()[:16]
    assert digests == {"stream": "a9af8113ec10c885", "whole": "facb36742b6697bf"}


@settings(max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 50), min_size=2, max_size=12).filter(lambda n: max(n) > 1),
    context=st.integers(2, 24),
    rows=st.integers(1, 4),
    packing=st.sampled_from(["stream", "whole", "joined"]),
)
def test_an_evaluation_epoch_has_every_target_once(lengths: list[int], context: int, rows: int, packing: str) -> None:
    store = store_of(lengths)
    config = DataConfig(context=context, rows=rows, packing=packing)  # type: ignore[arg-type]
    batches = list(evaluation_batches(store, config))
    assert learned(batches) == all_pairs(store)
    assert len({b.cu_seqlens.shape for b in batches}) == 1  # static shapes
    for b in batches:
        if packing != "joined":
            check_integrity(b, context, rows)
        assert b.uniform or packing != "joined"


def test_training_epochs_have_every_target_once_too() -> None:
    store = store_of([16, 24, 40, 8, 8])  # 96 tokens: 3 steps of 32 are an epoch
    loader = Loader({"x": store}, DataConfig(context=16, rows=2, max_segments_per_row=16))
    for epoch in range(3):
        assert learned([loader.batch(3 * epoch + s)[0] for s in range(3)]) == all_pairs(store)
    assert sum(b.num_padding for s in range(9) for b in loader.batch(s)) == 0


def test_splitting_loses_no_target_and_the_last_token_has_none() -> None:
    (batch,) = evaluation_batches(store_of([10]), DataConfig(context=4, rows=3))
    assert batch.ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 0]
    assert batch.targets.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9, IGNORE, IGNORE, IGNORE]
    assert batch.positions.tolist() == [0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 0, 1]
    assert batch.cu_seqlens.tolist() == [0, 4, 8, 10, 12, 12, 12, 12, 12, 12]
    assert (batch.num_targets, batch.num_padding) == (9, 2)


def test_a_loss_mask_decides_which_targets_count() -> None:
    (batch,) = evaluation_batches(store_of([8], [[1, 0, 0, 1, 1, 0, 0, 1]]), DataConfig(context=4, rows=2))
    assert batch.targets.tolist() == [IGNORE, IGNORE, 3, 4, IGNORE, IGNORE, 7, IGNORE]


def test_the_first_batches_of_whole_documents_are_a_fair_sample() -> None:
    """Rows are packed longest first: a limited evaluation of chats was one of the longest chats."""
    lengths = np.random.default_rng(0).integers(4, 64, size=400)
    documents = [TokenDocument(id=str(i), tokens=np.ones(n, np.int64)) for i, n in enumerate(lengths)]
    store = in_memory(documents, token_bytes=np.ones(2, np.int32))
    config = DataConfig(context=64, rows=4, packing="whole")
    first = [batch.cu_seqlens.diff() for batch in evaluation_batches(store, config, limit=8)]
    found = torch.cat(first)
    seen = found[found > 3]  # shorter ones are padding
    assert abs(seen.float().mean() - lengths.mean()) < 4 * lengths.std() / len(seen) ** 0.5


def test_chats_longer_than_the_row_never_leave_a_step_without_a_target() -> None:
    """nanochat: chats longer than the row block the packer, rows become padding and the loss 0/0 (its pull 834). Here
    40 % of chats are longer and their first rows hold only user text."""
    rng = np.random.default_rng(0)
    lengths = np.where(rng.random(60) < 0.4, rng.integers(65, 300, 60), rng.integers(5, 64, 60)).tolist()
    masks = [[0] * (n - n // 4) + [1] * (n // 4) for n in lengths]
    store = store_of(lengths, masks)
    loader = Loader({"chats": store}, DataConfig(context=64, rows=1, packing="whole"))
    report = loader.report()["sources"]["chats"]
    assert report["tokens_lost"] == 0
    assert report["rows_without_targets"] > 0
    epoch = [loader.batch(s)[0] for s in range(report["rows"] - report["rows_without_targets"])]
    assert min(b.num_targets for b in epoch) > 0
    assert learned(epoch) == all_pairs(store)


def test_the_cursor_is_json_and_names_the_next_token() -> None:
    stores = {"a": some_store(0), "b": some_store(1, first=40)}
    config = DataConfig(context=32, rows=4, seed=3, mix=MixConfig(weights={"a": 3, "b": 1}))
    loader = Loader(stores, config)
    for step in (0, 1, 7, 30):
        cursor = json.loads(json.dumps(loader.cursor(step)))
        assert cursor["step"] == step
        (batch,) = loader.batch(step)
        starts = batch.ids[::32].tolist()  # the first token of each row
        for name, source in cursor["sources"].items():
            first = int(source["document"].removeprefix("doc ")) * WIDTH + source["offset"]
            mine = [t for t in starts if (t >= 40 * WIDTH) == (name == "b")]
            assert mine[0] == first
        assert cursor["sources"]["a"]["rows_before"] == 3 * step
    assert loader.cursor(30)["sources"]["a"]["epoch"] == 90 * 32 // loader.layouts["a"].epoch_tokens  # type: ignore[attr-defined]


def test_the_report_has_mix_epochs_and_padding() -> None:
    stores = {"a": some_store(0), "b": some_store(1, first=40)}
    loader = Loader(stores, DataConfig(context=32, rows=5, packing="whole", mix=MixConfig(weights={"a": 1, "b": 2})))
    report = loader.report(steps=10)
    a, b = report["sources"]["a"], report["sources"]["b"]
    assert (a["rows_used"], b["rows_used"]) in {(16, 34), (17, 33)}
    assert a["mix_ideal_percent"] == pytest.approx(100 / 3)
    assert a["epochs"] == a["rows_used"] / a["rows"]
    assert report["tokens"] == 1600
    counted = sum(batch.num_padding for s in range(10) for batch in loader.batch(s))
    assert report["padding_percent"] == pytest.approx(100 * counted / 1600, abs=3)  # an epoch's mean, not this run's
    json.dumps(report)


def test_evaluation_stops_at_its_limit_and_starts_with_the_first_document() -> None:
    batches = list(evaluation_batches(some_store(), DataConfig(context=16, rows=2), limit=3))
    assert len(batches) == 3
    assert batches[0].ids[0] == 0


def test_a_config_survives_json() -> None:
    points = (MixPoint(step=0, weights={"a": 1.0}), MixPoint(step=9, weights={"a": 2.0}))
    config = DataConfig(context=32, rows=2, packing="whole", mix=MixConfig(schedule=points))
    data = json.loads(json.dumps(config_tree.to_dict(config)))
    assert config_tree.from_dict(DataConfig, data) == config


def test_a_tokenizer_that_does_not_match_the_model_is_refused() -> None:
    store = store_of([5, 9])
    check_vocab(store, 100 * WIDTH)
    check_vocab(store, WIDTH + 9)  # a smaller vocabulary whose ids all occur
    with pytest.raises(BaguError, match=f"token id {WIDTH + 8}, the model's largest id is {WIDTH + 7}"):
        check_vocab(store, WIDTH + 8)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"context": 1}, "has no targets"),
        ({"rows": 0}, "rows is 0"),
        ({"packing": "streem"}, "no packing 'streem'"),
        ({"max_segments_per_row": 1}, "max_segments_per_row is 1"),
        ({"max_segments_per_row": 4, "packing": "joined"}, "has no effect"),
    ],
)
def test_impossible_configs_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(BaguError, match=message):
        DataConfig(**{"context": 8, "rows": 2, **change})  # type: ignore[arg-type]


def test_data_without_targets_are_refused() -> None:
    config = DataConfig(context=8, rows=1)
    with pytest.raises(BaguError, match="no token store"):
        Loader({}, config)
    with pytest.raises(BaguError, match="no targets"):
        Loader({"x": store_of([1, 1])}, config)
    with pytest.raises(BaguError, match="no targets"):
        Loader({"x": store_of([6], [[1, 0, 0, 0, 0, 0]])}, config)  # the first token is never a target
    with pytest.raises(BaguError, match="step 0 has no target"):
        Loader({"x": store_of([16], [[0] * 15 + [1]])}, config).batch(0)
    other = in_memory([TokenDocument(id="d", tokens=[1, 2])], token_bytes=np.ones(5))
    with pytest.raises(BaguError, match="different tokenizers"):
        Loader({"x": store_of([5]), "y": other}, config)


def test_prefetch_gives_the_same_batches_in_order_and_ends() -> None:
    loader = Loader({"x": some_store()}, DataConfig(context=16, rows=2))
    with loader.prefetch(5, stop=12, depth=3) as batches:
        made = list(batches)
        assert batches.total_wait_s >= batches.wait_s >= 0
    assert len(made) == 7
    assert all(same(batch, loader.batch(5 + i)) for i, batch in enumerate(made))


def test_prefetch_stays_within_its_depth() -> None:
    made: list[int] = []
    paused = threading.Event()

    def make(step: int) -> int:
        made.append(step)
        if len(made) == 4:
            paused.set()  # item 1 was taken, 2 and 3 wait in the queue, the thread holds 4
        return step

    with Prefetch(make, 0, depth=2) as items:
        assert next(items) == 0
        assert paused.wait(10)
        assert made == [0, 1, 2, 3]
        assert next(items) == 1
    assert not items._thread.is_alive()
    with pytest.raises(StopIteration):
        next(items)
    items.close()  # a second close does nothing


def test_prefetch_raises_an_error_at_its_step_and_keeps_raising_it() -> None:
    def make(step: int) -> int:
        if step == 2:
            raise BaguError("step 2 is broken")
        return step

    with Prefetch(make, 0, depth=4) as items:
        assert [next(items), next(items)] == [0, 1]
        for _ in range(2):
            with pytest.raises(BaguError, match="step 2 is broken"):
                next(items)


def test_calls_from_several_threads_do_not_disturb_each_other() -> None:
    stores = {"a": some_store(0), "b": some_store(1, first=40)}
    config = DataConfig(context=32, rows=4)
    expected = [Loader(stores, config).batch(s) for s in range(0, 600, 20)]
    shared = Loader(stores, config)
    wrong: list[int] = []

    def read(order: Iterator[int]) -> None:
        wrong.extend(i for i in order if not same(shared.batch(20 * i), expected[i]))

    n = len(expected)
    threads = [threading.Thread(target=read, args=(iter(o),)) for o in (range(n), reversed(range(n)))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
