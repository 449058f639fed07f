"""`bagu bench`: ops, training steps, the engine, evaluation and servers."""

import sys
from pathlib import Path

import typer

from bagu.bench.options import (
    BenchSetting,
    ConstrainedBench,
    DpoBench,
    EngineBench,
    EvalBench,
    GrpoBench,
    LayersBench,
    OpsBench,
    OpSetting,
    ParallelBench,
    ProcessBench,
    RetrieveBench,
    ServeBench,
    ServerBench,
    SharesBench,
    TrainBench,
)
from bagu.cli.found import check_files, check_model
from bagu.cli.help import Verbs
from bagu.cli.options import takes
from bagu.machine.openmp import wait_briefly

bench = Verbs("Benchmark ops, training steps, the inference engine, evaluation or a server.")


@bench.command("train")
@takes(TrainBench, BenchSetting)
def bench_train(given: TrainBench, setting: BenchSetting) -> None:
    """Measure tokens per second of a full optimizer step, for bagu and its peers.

    Examples:
      bagu bench train
      bagu bench train --shape llama_1b --peer transformers
    """
    from bagu.bench.train import main

    raise typer.Exit(main(given, setting))


@bench.command("parallel")
@takes(ParallelBench)
def bench_parallel(given: ParallelBench) -> None:
    """Measure data parallelism on this machine's cores against independent processes.

    Examples:
      bagu bench parallel
      bagu bench parallel --ranks 4
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench.parallel import main

    raise typer.Exit(main(given))


@bench.command("parameter-server")
@takes(ServerBench)
def bench_parameter_server(given: ServerBench) -> None:
    """Measure a step on parameter servers beside data parallelism, or record what kills of servers do.

    Examples:
      bagu bench parameter-server
      bagu bench parameter-server --kills 100
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench.parameter_server import main

    raise typer.Exit(main(given))


@bench.command("shares")
@takes(SharesBench)
def bench_shares(given: SharesBench) -> None:
    """Measure training on workers of unlike speed: shares by measured speed beside equal ones, and the prediction.

    Examples:
      bagu bench shares
      bagu bench shares --speeds 1,1,0.5,0.25 --micro-batches 32
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench.shares import main

    raise typer.Exit(main(given))


@bench.command("engine")
@takes(
    EngineBench,
    BenchSetting,
    groups={
        "Workload": "inputs outputs shared_prefix passes streams input_tokens output_tokens text adapters adapter_rank",
        "Engine": "speculative speculative_tokens max_num_seqs prefix_caching kv_dtype invariant tp",
    },
)
def bench_engine(given: EngineBench, setting: BenchSetting) -> None:
    """Measure the offline throughput of the engine. The default workload on a GPU is nano-vllm's.

    Examples:
      bagu bench engine --streams 1 --streams 8
      bagu bench engine runs/demo/grpo --requests 64 --peer generate
    """
    check_model(given.model)
    user_environ = wait_briefly()  # must run before torch is imported
    from bagu.bench.engine import main
    from bagu.bench.engine_timing import Case
    from bagu.recipes.serve import Loader
    from bagu.serve.config import EngineConfig

    case = Case(
        requests=given.requests,
        inputs=given.inputs,
        outputs=given.outputs,
        shared_prefix=given.shared_prefix,
        streams=given.streams,
        prompt=given.input_tokens,
        new=given.output_tokens,
        adapters=given.adapters,
        passes=given.passes,
        text=given.text,  # type: ignore[arg-type]
    )
    config = EngineConfig(
        max_num_seqs=given.max_num_seqs,
        max_adapter_rank=given.adapter_rank,
        prefix_cache=given.prefix_caching,
        invariant=given.invariant,
        tp=given.tp,
        speculative="ngram" if given.speculative else None,
        speculative_tokens=given.speculative_tokens,
        quantization=given.quantization,  # type: ignore[arg-type]
        kv_dtype=given.kv_dtype,  # type: ignore[arg-type]
    )
    dtype, device = setting.dtype or "auto", setting.device
    load = None if given.model is None else Loader(model=given.model, dtype=dtype, device=device)
    status = main(
        case,
        config,
        setting,
        shape=given.shape,
        name=given.model,
        peers=given.peer,
        peer_environ=user_environ,
        rounds=given.rounds,
        load=load,
    )
    raise typer.Exit(status)


@bench.command("constrained")
@takes(ConstrainedBench, BenchSetting)
def bench_constrained(given: ConstrainedBench, setting: BenchSetting) -> None:
    """Measure decoding to a JSON schema against free text, and validate every output.

    Examples:
      bagu bench constrained
      bagu bench constrained runs/demo/grpo --schema people.json
    """
    check_model(given.model)
    check_files(given.schema)
    wait_briefly()  # must run before torch is imported
    from bagu.bench.constrained import main
    from bagu.recipes.serve import Loader

    dtype, device = setting.dtype or "auto", setting.device
    load = None if given.model is None else Loader(model=given.model, dtype=dtype, device=device)
    raise typer.Exit(main(given, setting, load=load))


@bench.command("dpo")
@takes(DpoBench, BenchSetting)
def bench_dpo(given: DpoBench, setting: BenchSetting) -> None:
    """Measure a DPO step on random pairs, beside a plain transformers loop.

    Examples:
      bagu bench dpo
      bagu bench dpo --pairs 8 --peer transformers
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench.dpo import main

    raise typer.Exit(main(given, setting))


@bench.command("grpo")
@takes(GrpoBench, BenchSetting)
def bench_grpo(given: GrpoBench, setting: BenchSetting) -> None:
    """Measure a GRPO step: the time of sampling, rewards and the update, and sampling against the engine alone.

    Examples:
      bagu bench grpo
      bagu bench grpo --shape smollm_135m --prompts 16
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench.grpo import main

    raise typer.Exit(main(given, setting))


@bench.command("eval")
@takes(EvalBench, BenchSetting)
def bench_eval(given: EvalBench, setting: BenchSetting) -> None:
    """Measure the speed of multiple-choice scoring, as a share of the engine's prefill speed.

    Examples:
      bagu bench eval
      bagu bench eval --shape smollm_135m --items 1000
    """
    from bagu.bench.evaluation import main

    raise typer.Exit(main(given, setting))


@bench.command("serve")
@takes(
    ServeBench,
    groups={
        "Load": "inputs outputs shared_prefix prefix_groups trace trace_speed warmups seed",
        "Limits": "ttft tpot itl e2el",
    },
)
def bench_serve(given: ServeBench) -> None:
    """Measure latency under load: TTFT, TPOT, ITL and end to end, at p50, p90 and p99, as vLLM defines them.

    Examples:
      bagu bench serve http://127.0.0.1:8000 --sweep 1,2,4,8
      bagu bench serve runs/demo/grpo --ttft 300ms --tpot 30ms
    """
    check_files(given.trace)
    check_model(given.target)
    from contextlib import nullcontext

    from bagu.bench.serve import main
    from bagu.bench.serve_latency import METRICS, parse_goodput
    from bagu.bench.serve_load import Load
    from bagu.bench.trace import read_trace
    from bagu.recipes.demo_server import running_server

    if given.goodput:
        print("bagu: --goodput is now --ttft, --tpot, --itl, --e2el; the old name works until 0.2", file=sys.stderr)
    limits = [f"{name}:{limit}" for name in METRICS if (limit := getattr(given, name))]
    load = Load(
        requests=given.requests,
        inputs=given.inputs,
        outputs=given.outputs,
        shared_prefix=given.shared_prefix,
        prefix_groups=given.prefix_groups,
        max_concurrency=given.max_concurrency,
        request_rate=float("inf") if given.request_rate is None else given.request_rate,
        trace=None if given.trace is None else read_trace(given.trace, given.requests),
        speed=given.trace_speed,
        goodput=parse_goodput([*given.goodput, *limits]),
        warmups=given.warmups,
        seed=given.seed,
    )
    is_url = given.target.startswith(("http://", "https://"))
    status = main(
        nullcontext(given.target) if is_url else running_server(Path(given.target)),
        load,
        model=given.model,
        api_key=given.api_key,
        sweep=given.sweep,
        against=given.against,
        rounds=given.rounds,
        plot=given.plot,
        out=given.out,
        as_json=given.as_json,
    )
    raise typer.Exit(status)


@bench.command("ops")
@takes(OpsBench, OpSetting)
def bench_ops(given: OpsBench, setting: OpSetting) -> None:
    """Time every op and backend, torch eager, torch.compile and Liger; report the fraction of the measured ceiling.

    Examples:
      bagu bench ops rms_norm softmax
      bagu bench ops --quick
    """
    from bagu.bench.ops import main

    raise typer.Exit(main(given, setting))


@bench.command("layers")
@takes(LayersBench, OpSetting)
def bench_layers(given: LayersBench, setting: OpSetting) -> None:
    """Time layers of torch.nn beside bagu's drop-in versions, torch.compile and ONNX Runtime.

    Examples:
      bagu bench layers linear
      bagu bench layers --batch 1 --no-compile
    """
    from bagu.bench.layers import main

    raise typer.Exit(main(given, setting))


@bench.command("process")
@takes(ProcessBench)
def bench_process(given: ProcessBench) -> None:
    """Score recommendations against four plants whose optimum is known. A stopped run goes on where it was.

    Examples:
      bagu bench process --seeds 5
      bagu bench process --plant turbojet --model trees
    """
    from bagu.bench.process import main

    raise typer.Exit(main(given))


@bench.command("retrieve")
@takes(RetrieveBench, BenchSetting)
def bench_retrieve(given: RetrieveBench, setting: BenchSetting) -> None:
    """Measure an index of the standard library: speed, and the rank of functions for their docstrings.

    Examples:
      bagu bench retrieve
      bagu bench retrieve --passages 1000000
    """
    from bagu.bench.retrieve import main

    raise typer.Exit(main(given, setting))
