"""`bagu bench`: ops, training steps, the engine, evaluation and servers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.bench.options import (
    BenchSetting,
    ConstrainedBench,
    DpoBench,
    EvalBench,
    GrpoBench,
    LayersBench,
    OpsBench,
    OpSetting,
    TrainBench,
)
from bagu.cli.found import check_files, check_model
from bagu.cli.help import Verbs, grouped
from bagu.cli.options import (
    ApiKey,
    AsJson,
    BenchDtype,
    Device,
    KVDtype,
    PrefixCaching,
    Quantization,
    Results,
    Rounds,
    SharedPrefix,
    TensorParallel,
    takes,
)
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
def bench_parallel(
    shape: Annotated[str, Option(help="A shape of `bagu bench train`.")] = "cpu_6m",
    ranks: Annotated[int, Option(help="Processes of one thread; as many as there are free cores.")] = 2,
    rounds: Annotated[int, Option(help="Steps to time of each kind, in turn.")] = 6,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure data parallelism on this machine's cores against independent processes.

    Examples:
      bagu bench parallel
      bagu bench parallel --ranks 4
    """
    wait_briefly()  # must run before torch is imported
    from bagu.bench import parallel as part

    raise typer.Exit(part.main(shape, ranks=ranks, rounds=rounds, out=out, as_json=as_json))


@bench.command("engine")
@grouped(
    Workload="inputs outputs shared_prefix streams input_tokens output_tokens text adapters adapter_rank",
    Engine="speculative speculative_tokens max_num_seqs prefix_caching kv_dtype invariant tp",
)
def bench_engine(
    model: Annotated[str | None, Argument(metavar="MODEL", help="A model. Default: random weights of --shape.")] = None,
    shape: Annotated[str | None, Option(help="cpu_8m, smollm_135m or qwen3_0_6b.")] = None,
    requests: Annotated[int | None, Option(help="Number of requests. Default: 256 on a GPU, 32 on a CPU.")] = None,
    inputs: Annotated[str | None, Option(help="Range of prompt lengths, e.g. 100-1024.")] = None,
    outputs: Annotated[str | None, Option(help="Range of output lengths, e.g. 100-1024.")] = None,
    shared_prefix: SharedPrefix = 0,
    streams: Annotated[list[int] | None, Option(help="Time decoding with this many streams; repeatable.")] = None,
    input_tokens: Annotated[int, Option(help="With --streams: tokens of a prompt.")] = 64,
    output_tokens: Annotated[int, Option(help="With --streams: generated tokens of a stream.")] = 128,
    speculative: Annotated[
        bool, Option("--speculative", help="Draft by prompt lookup, and time the same without drafts.")
    ] = False,
    speculative_tokens: Annotated[int, Option(help="Maximum drafted tokens per sequence and step.")] = 7,
    text: Annotated[
        str | None, Option(help="What streams generate: edit (repeats the prompt with edits), or new.")
    ] = None,
    adapters: Annotated[
        int, Option(help="With --streams: random LoRA adapters in one batch, and the same without.")
    ] = 0,
    adapter_rank: Annotated[int, Option(help="The rank of --adapters.")] = 16,
    max_num_seqs: Annotated[int, Option(help="Maximum number of sequences that run at once.")] = 256,
    prefix_caching: PrefixCaching = True,
    quantization: Quantization = None,
    kv_dtype: KVDtype = "auto",
    invariant: Annotated[bool, Option("--invariant", help="Use the batch-invariant mode.")] = False,
    tp: TensorParallel = 1,
    dtype: BenchDtype = None,
    peer: Annotated[
        list[str] | None, Option(help="generate, generate_batch, llama.cpp, eager or a script; repeatable.")
    ] = None,
    rounds: Rounds = 1,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure the offline throughput of the engine. The default workload on a GPU is nano-vllm's.

    Examples:
      bagu bench engine --streams 1 --streams 8
      bagu bench engine runs/demo/grpo --requests 64 --peer generate
    """
    check_model(model)
    user_environ = wait_briefly()  # must run before torch is imported
    from bagu.bench import engine as part
    from bagu.bench.engine_timing import Case
    from bagu.bench.workload import Lengths
    from bagu.recipes.serve import Loader
    from bagu.serve.config import EngineConfig

    case = Case(
        requests=requests, inputs=Lengths.parse(inputs) if inputs else None, adapters=adapters,
        outputs=Lengths.parse(outputs) if outputs else None, shared_prefix=shared_prefix,
        streams=tuple(streams or ()), prompt=input_tokens, new=output_tokens, text=text,  # type: ignore[arg-type]
    )  # fmt: skip
    config = EngineConfig(
        max_num_seqs=max_num_seqs, max_adapter_rank=adapter_rank, prefix_cache=prefix_caching, invariant=invariant,
        tp=tp, quantization=quantization, kv_dtype=kv_dtype,  # type: ignore[arg-type]
        speculative="ngram" if speculative else None, speculative_tokens=speculative_tokens,
    )  # fmt: skip
    status = part.main(
        case, config, BenchSetting(dtype=dtype, device=device, out=out, as_json=as_json), shape=shape, name=model,
        peers=peer or (), peer_environ=user_environ, rounds=rounds,
        load=None if model is None else Loader(model=model, dtype=dtype or "auto", device=device),
    )  # fmt: skip
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
@grouped(Load="inputs outputs shared_prefix trace trace_speed warmups seed", Limits="ttft tpot itl e2el")
def bench_serve(
    target: Annotated[str, Argument(metavar="URL|MODEL", help="The URL of a server, or a model to start one for.")],
    requests: Annotated[int | None, Option(help="Number of requests. Default: 64, or all of the trace.")] = None,
    inputs: Annotated[str | None, Option(help="Range of prompt lengths. Default: 32-128, or what fits.")] = None,
    outputs: Annotated[str | None, Option(help="Range of output lengths. Default: 32-128, or what fits.")] = None,
    shared_prefix: SharedPrefix = 0,
    max_concurrency: Annotated[int | None, Option(help="Maximum requests in flight. Default: 8.")] = None,
    request_rate: Annotated[float | None, Option(help="Requests per second, Poisson arrivals.")] = None,
    trace: Annotated[
        Path | None, Option(help="Arrivals and lengths from a file: Mooncake, Azure or BurstGPT, CSV or JSON lines.")
    ] = None,
    trace_speed: Annotated[float, Option(help="With --trace: replay this many times as fast.")] = 1.0,
    sweep: Annotated[
        str | None, Option(help="Measure several loads: 1,2,4,8 clients, or rate:0.5,1,2 requests per second.")
    ] = None,
    against: Annotated[
        str | None, Option(metavar="URL", help="Compare with this server, in turn, on the same prompts.")
    ] = None,
    rounds: Annotated[int, Option(help="With --against: how many times to measure both servers.")] = 5,
    ttft: Annotated[
        str | None, Option(metavar="TIME", help="Count requests whose time to first token is less.")
    ] = None,
    tpot: Annotated[
        str | None, Option(metavar="TIME", help="The same for the time per output token, e.g. 30ms.")
    ] = None,
    itl: Annotated[str | None, Option(metavar="TIME", help="The same for the time between tokens.")] = None,
    e2el: Annotated[str | None, Option(metavar="TIME", help="The same for the whole request, e.g. 2s.")] = None,
    goodput: Annotated[list[str] | None, Option(hidden=True)] = None,
    warmups: Annotated[int, Option(help="Requests to send before the load, one by one; they are not counted.")] = 1,
    model: Annotated[str | None, Option(help="Model name in the API. Default: the server's first.")] = None,
    api_key: ApiKey = None,
    plot: Annotated[Path | None, Option(help="The folder to write a plot of the latencies to.")] = None,
    seed: Annotated[int, Option(help="Seed of the prompts and the arrival times.")] = 0,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency under load: TTFT, TPOT, ITL and end to end, at p50, p90 and p99, as vLLM defines them.

    Examples:
      bagu bench serve http://127.0.0.1:8000 --sweep 1,2,4,8
      bagu bench serve runs/demo/grpo --ttft 300ms --tpot 30ms
    """
    check_files(trace)
    check_model(target)
    from contextlib import nullcontext

    from bagu.bench import serve as part
    from bagu.bench.serve_latency import parse_goodput
    from bagu.bench.serve_load import Load
    from bagu.bench.trace import read_trace
    from bagu.bench.workload import Lengths
    from bagu.recipes.demo_server import running_server

    if goodput:
        print("bagu: --goodput is now --ttft, --tpot, --itl, --e2el; the old name works until 0.2", file=sys.stderr)
    limits = (f"{name}:{v}" for name, v in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2el", e2el)) if v)
    load = Load(
        requests=requests, inputs=None if inputs is None else Lengths.parse(inputs),
        outputs=None if outputs is None else Lengths.parse(outputs), shared_prefix=shared_prefix,
        max_concurrency=max_concurrency, request_rate=float("inf") if request_rate is None else request_rate,
        trace=None if trace is None else read_trace(trace, requests), speed=trace_speed,
        goodput=parse_goodput([*(goodput or ()), *limits]), warmups=warmups, seed=seed,
    )  # fmt: skip
    is_url = target.startswith(("http://", "https://"))
    status = part.main(
        nullcontext(target) if is_url else running_server(Path(target)), load, model=model, api_key=api_key,
        sweep=sweep, against=against, rounds=rounds, plot=plot, out=out, as_json=as_json,
    )  # fmt: skip
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
