"""Padded decode steps and the warm-up without a GPU: a graph is replaced by the forward that it would record."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from small_engine import small_engine, small_model

from bagu.nn.choices import BlockChoice
from bagu.nn.config import ModelConfig
from bagu.nn.init import init_weights
from bagu.nn.model import Transformer
from bagu.serve.build import build_runner
from bagu.serve.engine import Engine
from bagu.serve.graphs import Captured, GraphDecode, GraphInputs
from bagu.serve.kv.pool import Pool
from bagu.serve.request import Sampling
from bagu.serve.warm_up import WarmUp
from bagu.serve.ways import Forward, Replay

PROMPTS = [list(range(1, 30)), [5], [7, 8, 9] * 9, list(range(60, 64))]
GREEDY = Sampling(max_tokens=40, temperature=0.0, ignore_eos=True)


class Repeated:
    """A graph that computes its forward again, from the inputs at the same addresses."""

    def __init__(self, graphs: GraphDecode, inputs: GraphInputs, hidden: torch.Tensor) -> None:
        self.graphs, self.inputs, self.hidden = graphs, inputs, hidden

    def replay(self) -> None:
        self.graphs.kv.load(self.inputs.batch)
        self.hidden.copy_(self.graphs._forward(self.inputs.batch))


def with_graphs(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> Engine:
    def capture(self: GraphDecode, inputs: GraphInputs) -> Captured:
        self.kv.load(inputs.batch)
        hidden = self._forward(inputs.batch)
        return Captured(Repeated(self, inputs, hidden), inputs, hidden)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(GraphDecode, "_capture", capture)
    pool = Pool(engine.blocks.num_blocks + 1, engine.max_model_len, engine.blocks.block_size)  # with one for padding
    runner = engine.runner = engine.sampler.runner = build_runner(engine.model, engine.config, pool, None)
    assert runner.model is not None
    runner.graphs = runner.new_graphs()
    runner.ways = [Replay(runner.graphs, runner.inputs), Forward(runner.model, runner.kv, runner.inputs)]
    return engine


MORE = ("sinks, experts", "windows in all layers", "mla")


@pytest.mark.parametrize("settings", [{}, {"num_blocks": 34, "max_num_batched_tokens": 8}], ids=["room", "preempted"])
@pytest.mark.parametrize("kind", ["gqa", "windows in some", *(pytest.param(k, marks=pytest.mark.slow) for k in MORE)])
def test_padded_steps_have_the_text_of_plain_ones(
    kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = [c.tokens for c in small_engine(small_model(kind), **settings).generate(PROMPTS, GREEDY)]
    engine = with_graphs(small_engine(small_model(kind), **settings), monkeypatch)
    assert [c.tokens for c in engine.generate(PROMPTS, GREEDY)] == want
    engine.scheduler.queues.check_integrity()
    assert engine.runner.graphs is not None and engine.runner.graphs.captured


def test_padded_steps_of_chosen_blocks_have_the_text_of_plain_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    def engine() -> Engine:
        choice = BlockChoice(size=4, top=2, near=1, dense_below=8)
        config = ModelConfig(
            vocab_size=97, hidden_size=32, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=8, intermediate_size=48,
            max_len=128, init_std=0.2, attention="blocks", blocks=choice,
        )  # fmt: skip
        return small_engine(init_weights(Transformer(config), 0).eval())

    want = [c.tokens for c in engine().generate(PROMPTS, GREEDY)]
    assert [c.tokens for c in with_graphs(engine(), monkeypatch).generate(PROMPTS, GREEDY)] == want


@pytest.mark.parametrize("kind", ["gqa", "windows in some"])
def test_traffic_after_the_warm_up_captures_no_graph(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    want = [c.tokens for c in small_engine(small_model(kind), num_blocks=200).generate(PROMPTS, GREEDY)]
    engine = with_graphs(small_engine(small_model(kind), num_blocks=200), monkeypatch)
    warming = WarmUp(engine)
    warming.run(120.0)
    assert not warming.left and engine.stats().steps == 0 and engine.stats().blocks_cached == 0
    captured = set(engine.runner.graphs.captured)  # type: ignore[union-attr]
    assert [c.tokens for c in engine.generate(PROMPTS, GREEDY)] == want
    assert set(engine.runner.graphs.captured) == captured  # type: ignore[union-attr]
