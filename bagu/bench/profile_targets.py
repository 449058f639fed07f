"""The three things that `bagu profile` profiles: an op, a training step, and steps of the engine."""

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import torch

from bagu.bench.profile import profiled, report
from bagu.bench.roofline import costs
from bagu.bench.sizing import bench_inputs, dtype_named, first_tensor, shape_label, shrink
from bagu.bench.train import bagu_step
from bagu.bench.train_shapes import SHAPES
from bagu.bench.units import duration
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.ceilings import measure_ceilings
from bagu.machine.device import named_device, named_dtype
from bagu.machine.fast_dtype import compute_dtype
from bagu.machine.terminal import Terminal
from bagu.nn.model import Transformer
from bagu.ops.call.dispatch import call
from bagu.ops.catalogue import SPECS
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.request import Request, Sampling


def profile_op(name: str, out: Path, *, dtype: str | None, device: str | None, steps: int) -> None:
    """Profile the forward and backward of an op at its first benchmark case; `out` is the folder to write."""
    UnknownName.check("op", name, SPECS)
    where, spec = named_device(device), SPECS[name]
    chosen = dtype_named(dtype or ("bf16" if where.type == "cuda" else "fp32"))
    case = shrink(spec, next(c for c in spec.cases if c.bench), chosen, 1 << (34 if where.type == "cuda" else 26))
    args = bench_inputs(spec, case, chosen, where)
    leaves = [args[g].requires_grad_() for g in spec.grads if args[g] is not None]

    def step() -> None:
        result = call(spec, None, **args)
        outputs = result if isinstance(result, tuple) else (result,)
        if leaves:
            torch.autograd.grad([y.float().sum() for y in outputs if y.requires_grad], leaves)

    cost = costs(spec, spec.bind(args), first_tensor(spec, args).dtype)
    ceilings = measure_ceilings(where, dtype=chosen, quick=True)
    least = sum(max(c.bytes / ceilings.copy, c.flops / ceilings.matmul) for n, c in cost.items() if n != "fwd+bwd")
    found = profiled(step, where, steps=steps, trace=out / "trace.json")
    share = least * found.steps / found.seconds
    notes = [f"By the measured ceilings a step takes at least {duration(least)}, {share:.0%} of the measured time."]
    report(found, Terminal(), out, f"{name} {shape_label(spec, args)}", notes)


def profile_train(shape: str, out: Path, *, dtype: str | None, device: str | None, steps: int) -> None:
    """Profile optimizer steps of a shape of `bagu bench train`."""
    UnknownName.check("shape", shape, SHAPES)
    where = named_device(device)
    chosen = named_dtype(dtype) if dtype else compute_dtype(where)
    with bagu_step(SHAPES[shape], where, chosen, micro_batches=1, compiled=False, recompute="none") as step:
        found = profiled(step, where, steps=steps, trace=out / "trace.json")
    report(found, Terminal(), out, f"a training step of {shape}")


def profile_serve(
    load: Callable[[], tuple[Transformer, object, object]],
    name: str,
    out: Path,
    *,
    streams: int,
    prompt: int,
    steps: int,
) -> None:
    """Profile decode steps of the engine with `streams` sequences, after their prompts."""
    if streams < 1 or prompt < 1:
        raise ArgumentError(f"{streams} streams with prompts of {prompt} tokens", hint="both are 1 or more")
    model = load()[0]
    length = prompt + 4 * steps + 64
    with closing(Engine(model, None, EngineConfig(max_model_len=length, max_num_seqs=streams))) as engine:
        draw = torch.Generator().manual_seed(0)
        for i in range(streams):
            ids = torch.randint(model.config.vocab_size, (prompt,), generator=draw).tolist()
            sampling = Sampling(max_tokens=length - prompt - 1, temperature=0.0, ignore_eos=True)
            engine.submit(Request(id=str(i), prompt=tuple(ids), sampling=sampling))
        for _ in range(4):  # the prompts
            engine.step()
        found = profiled(engine.step, engine.runner.device, steps=steps, trace=out / "trace.json")
    report(found, Terminal(), out, f"decode steps of {name}, {streams} streams")
