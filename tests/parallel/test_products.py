"""Products of two modes on four ranks give the loss, gradients and gradient norm of one process."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from ranks import Ranks
from shared_models import (
    EXACT,
    batch_of,
    config_of,
    gradients,
    loss_of,
    model_of,
    number_of_targets,
    one_process,
    open_cpu,
    worst,
)
from test_pipeline import as_batch

from bagu import ops
from bagu.nn.choices import Alibi, Learned, MoEConfig, NormConfig
from bagu.parallel.context import split_batch
from bagu.parallel.model_parallel import ModelParallel, apply
from bagu.parallel.pipeline import Pipeline
from bagu.parallel.vocab_loss import vocab_cross_entropy
from bagu.types import Batch

GPT = {
    "norm": NormConfig(kind="layer", bias=True), "positions": Learned(), "ffn": "gelu", "ffn_bias": True,
    "qkv_bias": True, "out_bias": True, "tie_embeddings": True,
}  # fmt: skip
MOE = {"moe": MoEConfig(num_experts=4, top_k=2, expert_size=8, num_shared=1, aux_weight=0.1)}
PRODUCTS: dict[str, tuple[dict[str, int], dict[str, Any], dict[str, Any]]] = {
    "tp x dp": ({"tp": 2, "dp": 2}, GPT, {}),
    "tp x cp, ring": ({"tp": 2, "cp": 2}, {"num_heads": 8}, {"method": "ring"}),
    "tp x cp, ulysses": ({"tp": 2, "cp": 2}, {"positions": Alibi(), "windows": (None, 5)}, {"method": "ulysses"}),
    "tp x pp, 1f1b": ({"tp": 2, "pp": 2}, GPT, {"schedule": "1f1b"}),
    "tp x pp, zero bubble": ({"tp": 2, "pp": 2}, {**GPT, "num_layers": 4}, {"schedule": "zero_bubble"}),
    "tp x ep": ({"tp": 2, "ep": 2}, MOE, {}),
    "cp x pp": ({"cp": 2, "pp": 2}, {"num_layers": 4}, {"schedule": "interleaved", "method": "ulysses"}),
    "ep x pp": ({"ep": 2, "pp": 2}, MOE, {"schedule": "1f1b"}),
    "dp x pp": ({"dp": 2, "pp": 2}, GPT, {"schedule": "gpipe"}),
    "dp x ep": ({"dp": 2, "ep": 2}, MOE, {}),
    "dp x cp": ({"dp": 2, "cp": 2}, {}, {"method": "ring"}),
}
LENGTHS = ((9, 1, 6), (16,), (8, 8), (3, 5, 8))  # of four micro-batches; ranks of dp and ep divide them


def run_step(parallel: ModelParallel, batches: list[Batch], total: int, options: dict[str, Any]) -> torch.Tensor:
    """Forward and backward of this rank's micro-batches; returns its part of the loss."""
    mesh = parallel.mesh
    config = next(iter(parallel.modules.values())).config
    values: Any = ops.linear_cross_entropy
    if mesh.size("tp") > 1:
        values = functools.partial(vocab_cross_entropy, vocab_size=config.vocab_size, mesh=mesh)
    loss = functools.partial(loss_of, total=total, values=values)
    aux = 1 / len(LENGTHS)
    if mesh.size("cp") > 1:
        batches = [split_batch(b, mesh, options["method"]) for b in batches]
    if parallel.stages:
        pipeline = Pipeline(
            parallel.stages,
            mesh,
            schedule=options["schedule"],
            micro_batches=len(batches),
            tokens=batches[0].num_tokens,
        )
        return pipeline.step(batches, loss, aux_scale=aux)
    parts = []
    for batch in batches:
        out = parallel.model(batch.ids, batch.positions, batch.cu_seqlens, batch.max_len)
        part = loss(out.hidden, parallel.model.head_weight, batch.targets)
        part = part if out.aux_loss is None else part + out.aux_loss * aux
        part.backward()
        parts.append(part.detach())
    return torch.stack(parts).sum()


def compare(name: str) -> dict[str, float]:
    sizes, changes, options = PRODUCTS[name]
    mesh, config = open_cpu(**sizes), config_of(**changes)
    batches = [batch_of(n, i) for i, n in enumerate(LENGTHS)]
    wanted_loss, wanted = one_process(model_of(config), batches)
    state = {n: x.detach() for n, x in model_of(config).named_parameters()}

    parallel = apply(model_of(config), mesh, context=16, **options)
    mine = [as_batch(*b) for i, b in enumerate(batches) if i % mesh.size("data") == mesh.coordinate("data")]
    part = run_step(parallel, mine, number_of_targets(t for _, t in batches), options)
    grads = {n: g for m in parallel.modules.values() for n, g in gradients(m).items()}
    parallel.sum_gradients(grads)
    for parameter, g in grads.items():  # what data parallelism does
        for group in ("dp", "cp") if parallel.is_expert(parameter) else ("loss",):
            if (ranks := mesh.group(group)) is not None:
                dist.all_reduce(g, group=ranks)
    for group in ("loss", "pp"):
        if (ranks := mesh.group(group)) is not None:
            dist.all_reduce(part, group=ranks)
    local = parallel.local(state)
    assert all(torch.equal(local[n], p) for n, p in parallel.parameters.items())
    return {
        "loss": abs(float(part) - wanted_loss),
        "gradient": worst(parallel.full(grads, state.keys()), wanted),
        "norm": abs(float(parallel.squared_norm(grads)) / sum(float(g.square().sum()) for g in wanted.values()) - 1),
        "state": worst(parallel.full(local, state.keys()), state),
    }


@pytest.mark.parametrize("name", PRODUCTS)
def test_a_product_of_two_modes_is_one_process(four: Ranks, name: str) -> None:
    for rank, found in enumerate(four.run(compare, name)):
        assert max(found.values()) < EXACT, (rank, found)
        assert found["state"] == 0
