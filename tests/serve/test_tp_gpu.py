"""The collectives of a divided engine on a GPU: NCCL with one rank, inside CUDA graphs, changes no token.

Two ranks need two GPUs. One rank runs the same code: all-reduces after each sublayer and an all-gather of the logits.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from small_engine import small_model

from bagu.parallel.inference import divide
from bagu.parallel.mesh import Mesh, MeshConfig, open_mesh
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Sampling
from bagu.serve.runner import Runner

pytestmark = pytest.mark.gpu


@pytest.fixture
def mesh() -> Iterator[Mesh]:
    """A mesh of one rank that does not leave its collectives out."""
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        opened = open_mesh(MeshConfig(), torch.device("cuda", 0))
        world = dist.group.WORLD
        assert world is not None
        yield Mesh(
            config=opened.config, device=opened.device, device_mesh=opened.device_mesh, groups={"tp": world}, rank=0
        )
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("graphs", [True, False])
@pytest.mark.parametrize("kind", ["gqa", "alibi", "mla"])
def test_collectives_inside_cuda_graphs_leave_the_tokens_as_they_are(mesh: Mesh, kind: str, graphs: bool) -> None:
    model = small_model(kind, torch.bfloat16).cuda()
    config = EngineConfig(num_blocks=64, max_num_seqs=8, max_num_batched_tokens=64, cuda_graphs=graphs)
    prompts = [list(range(1, 30)), [5], [7, 8, 9] * 9]
    sampling = Sampling(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True, logprobs=1)
    wanted = [c.tokens for c in Engine(model, None, config).generate(prompts, sampling)]

    engine = Engine(model, None, config)
    part = small_model(kind, torch.bfloat16).cuda()
    divide(part, mesh)
    engine.runner = engine.sampler.runner = Runner(part, engine.runner.kv, config, engine.max_model_len, mesh)
    before = mesh.traffic.calls
    assert [c.tokens for c in engine.generate(prompts, sampling)] == wanted
    assert mesh.traffic.calls > before
    assert bool(engine.runner.graphs and engine.runner.graphs.captured) == graphs
