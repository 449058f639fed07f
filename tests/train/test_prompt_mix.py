"""The source of each prompt of reinforcement: by weights where data.mix has some."""

from __future__ import annotations

from collections import Counter

from bagu.data.mix import MixConfig, Mixture
from bagu.data.prompts import Prompt
from bagu.train.rl.loader import PromptLoader, RolloutConfig
from bagu.train.rl.rollout import PackShape

SOURCES = {
    name: [Prompt(id=f"{name}{i}", ids=(1,), text="", facts={}) for i in range(n)]
    for name, n in (("few", 7), ("many", 300))
}


def loader(mix: MixConfig | None) -> PromptLoader:
    return PromptLoader(
        sources=SOURCES, held_out_prompts=[], shape=PackShape(tokens=64, segments=4, context=64),
        config=RolloutConfig(
            prompts=4, samples=2, max_tokens=8, epochs=1, minibatches=1, max_draws=1, fill=False, seed=3
        ),
        mixture=None if mix is None else Mixture(mix, {name: len(p) for name, p in SOURCES.items()}, rows_per_step=1),
    )  # fmt: skip


def names(prompts: list[Prompt]) -> Counter[str]:
    return Counter(p.id.rstrip("0123456789") for p in prompts)


def test_prompts_come_by_their_weights_and_each_once_in_a_pass() -> None:
    source = loader(MixConfig(weights={"few": 3.0, "many": 1.0}))
    drawn = source.drawn(0, 280)
    assert names(drawn) == {"few": 210, "many": 70}
    few = [p.id for p in drawn if p.id.startswith("few")]
    passes = [tuple(few[i : i + 7]) for i in range(0, 210, 7)]
    assert all(len(set(one)) == 7 for one in passes) and len(set(passes)) > 20  # an order of its own for each
    report = source.report(70)
    assert {name: round(of["epochs"], 2) for name, of in report["sources"].items()} == {"few": 30.0, "many": 0.23}


def test_a_resumed_run_draws_the_same() -> None:
    source = loader(MixConfig(weights={"few": 1.0, "many": 2.0}))
    assert source.drawn(0, 40) == source.drawn(0, 13) + source.drawn(13, 14) + source.drawn(14, 40)


def test_without_weights_all_prompts_are_one_list() -> None:
    drawn = loader(None).drawn(0, 307)
    assert len({p.id for p in drawn}) == 307 and names(drawn) == {"few": 7, "many": 300}
