"""`bagu bench`: ops, training steps, the engine, evaluation and servers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu.cli.options import (
    ApiKey,
    AsJson,
    BenchDtype,
    Device,
    KVDtype,
    OpDtype,
    PrefixCaching,
    Results,
    Rounds,
    SharedPrefix,
    TensorParallel,
    group,
)
from bagu.machine.openmp import wait_briefly

bench = group("Benchmark ops, training steps, the inference engine, evaluation or a server.")


@bench.command("train")
def bench_train(
    shape: Annotated[
        str, Option(help="cpu_6m, llama_1b, llama_1b_long, llama_8b_4 or gpt_d20. Default: chosen for this machine.")
    ] = "",
    peer: Annotated[
        list[str] | None,
        Option(
            help="transformers, transformers-compile, flash-attention (bagu with FlashAttention-2), "
            "or a script that prints JSON with tokens_per_s."
        ),
    ] = None,
    steps: Annotated[int, Option(help="Number of timed steps per implementation.")] = 20,
    micro_batches: Annotated[list[int] | None, Option(help="Micro-batches per step; repeatable.")] = None,
    compile: Annotated[bool, Option("--compile", help="Also time bagu under torch.compile.")] = False,
    recompute: Annotated[str, Option(help="Activation recomputation: none, selective or block.")] = "none",
    fp8: Annotated[bool, Option("--fp8", help="Also time bagu with train.precision=fp8.")] = False,
    rounds: Rounds = 1,
    dtype: BenchDtype = None,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure tokens per second of a full optimizer step, for bagu and its peers."""
    from bagu.bench import train as part

    status = part.main(
        shape or None, peers=peer or (), steps=steps, micro_batches=micro_batches or (1,),
        compiled=(False, True) if compile else (False,), recompute=recompute, fp8=fp8, rounds=rounds,
        dtype=dtype, device=device, out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("parallel")
def bench_parallel(
    shape: Annotated[str, Option(help="A shape of `bagu bench train`.")] = "cpu_6m",
    ranks: Annotated[int, Option(help="Processes of one thread; as many as there are free cores.")] = 2,
    rounds: Annotated[int, Option(help="Steps to time of each kind, in turn.")] = 6,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure data parallelism on this machine's cores against independent processes."""
    wait_briefly()  # must run before torch is imported
    from bagu.bench import parallel as part

    raise typer.Exit(part.main(shape, ranks=ranks, rounds=rounds, out=out, as_json=as_json))


@bench.command("engine")
def bench_engine(
    model: Annotated[str | None, Argument(metavar="MODEL", help="A model. Default: random weights of --shape.")] = None,
    shape: Annotated[str | None, Option(help="cpu_8m, smollm_135m or qwen3_0_6b.")] = None,
    requests: Annotated[int | None, Option(help="Number of requests. Default: 256 on a GPU, 32 on a CPU.")] = None,
    inputs: Annotated[str | None, Option(help="Range of prompt lengths, e.g. 100-1024.")] = None,
    outputs: Annotated[str | None, Option(help="Range of output lengths, e.g. 100-1024.")] = None,
    shared_prefix: SharedPrefix = 0,
    streams: Annotated[list[int] | None, Option(help="Time decoding with this many streams; repeatable.")] = None,
    prompt: Annotated[int, Option(help="With --streams: tokens of a prompt.")] = 64,
    new: Annotated[int, Option(help="With --streams: generated tokens of a stream.")] = 128,
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
    batch: Annotated[int, Option(help="Maximum number of sequences that run at once.")] = 256,
    prefix_caching: PrefixCaching = True,
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
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
    """Measure the offline throughput of the engine. The default workload on a GPU is nano-vllm's."""
    user_environ = wait_briefly()  # must run before torch is imported
    from bagu.bench import engine as part
    from bagu.bench.engine_timing import Case
    from bagu.bench.workload import Lengths
    from bagu.recipes.serve import Loader
    from bagu.serve.config import EngineConfig

    case = Case(
        requests=requests, inputs=Lengths.parse(inputs) if inputs else None, adapters=adapters,
        outputs=Lengths.parse(outputs) if outputs else None, shared_prefix=shared_prefix,
        streams=tuple(streams or ()), prompt=prompt, new=new, text=text,  # type: ignore[arg-type]
    )  # fmt: skip
    config = EngineConfig(
        max_num_seqs=batch, max_adapter_rank=adapter_rank, prefix_cache=prefix_caching, invariant=invariant, tp=tp,
        quantization=quantization, kv_dtype=kv_dtype,  # type: ignore[arg-type]
        speculative="ngram" if speculative else None, speculative_tokens=speculative_tokens,
    )  # fmt: skip
    status = part.main(
        case, config, shape=shape, name=model, dtype=dtype, peers=peer or (), peer_environ=user_environ, rounds=rounds,
        load=None if model is None else Loader(model=model, dtype=dtype or "auto", device=device), device=device,
        out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("constrained")
def bench_constrained(
    model: Annotated[str | None, Argument(metavar="MODEL", help="A model. Default: random weights of --shape.")] = None,
    shape: Annotated[str | None, Option(help="cpu_8m, smollm_135m or qwen3_0_6b.")] = None,
    schema: Annotated[Path | None, Option(help="A file with a JSON schema. Default: a list of three people.")] = None,
    streams: Annotated[int, Option(help="Number of streams that decode at once.")] = 32,
    max_tokens: Annotated[int, Option(help="Maximum tokens of an output.")] = 1024,
    temperature: Annotated[float, Option(help="0 is greedy.")] = 1.0,
    threads: Annotated[int | None, Option(help="CPU threads of the model.")] = None,
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    invariant: Annotated[bool, Option("--invariant", help="Use the batch-invariant mode.")] = False,
    dtype: BenchDtype = None,
    rounds: Rounds = 5,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure decoding to a JSON schema against free text, and validate every output."""
    wait_briefly()  # must run before torch is imported
    from bagu.bench import constrained as part
    from bagu.recipes.serve import Loader

    load = None if model is None else Loader(model=model, dtype=dtype or "auto", device=device)
    status = part.main(
        shape, load=load, name=model, schema=schema, streams=streams, max_tokens=max_tokens, temperature=temperature,
        rounds=rounds, threads=threads, quantization=quantization, invariant=invariant, dtype=dtype, device=device,
        out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("dpo")
def bench_dpo(
    shape: Annotated[
        str | None, Option(help="A preset, with random weights. Default: llama_1b, cpu_6m on a CPU.")
    ] = None,
    peer: Annotated[list[str] | None, Option(help="transformers or transformers-compile, on the same pairs.")] = None,
    pairs: Annotated[int | None, Option(help="Pairs of a step. Default: 32 on a GPU, 4 on a CPU.")] = None,
    prompt: Annotated[int | None, Option(help="Tokens of a prompt. Default: 256 on a GPU, 32 on a CPU.")] = None,
    answer: Annotated[
        int | None, Option(help="Tokens of the longest answer. Default: 768 on a GPU, 96 on a CPU.")
    ] = None,
    steps: Annotated[int, Option(help="Steps to time, after three to warm up.")] = 10,
    dtype: BenchDtype = None,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure a DPO step on random pairs, beside a plain transformers loop."""
    wait_briefly()  # must run before torch is imported
    from bagu.bench import dpo as part

    status = part.main(
        shape, peers=peer or (), pairs=pairs, prompt=prompt, answer=answer, steps=steps, dtype=dtype, device=device,
        out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("grpo")
def bench_grpo(
    shape: Annotated[str | None, Option(help="cpu_8m, smollm_135m or qwen3_0_6b, with random weights.")] = None,
    prompts: Annotated[int | None, Option(help="Prompts of a step. Default: 64 on a GPU, 4 on a CPU.")] = None,
    samples: Annotated[int, Option(help="Answers to each prompt.")] = 8,
    prompt: Annotated[int, Option(help="Tokens of a prompt.")] = 64,
    new: Annotated[int | None, Option(help="Tokens of an answer. Default: 256 on a GPU, 32 on a CPU.")] = None,
    steps: Annotated[int, Option(help="Steps to time, after one to warm up.")] = 3,
    dtype: BenchDtype = None,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure a GRPO step: the time of sampling, rewards and the update, and sampling against the engine alone."""
    wait_briefly()  # must run before torch is imported
    from bagu.bench import grpo as part

    status = part.main(
        shape, prompts=prompts, samples=samples, prompt=prompt, new=new, steps=steps, dtype=dtype, device=device,
        out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("eval")
def bench_eval(
    shape: Annotated[str | None, Option(help="cpu_8m, smollm_135m or qwen3_0_6b; random weights.")] = None,
    items: Annotated[int, Option(help="Number of four-way items, in all rounds together.")] = 10_000,
    rounds: Rounds = 4,
    dtype: BenchDtype = None,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure the speed of multiple-choice scoring, as a share of the engine's prefill speed."""
    from bagu.bench import evaluation as part

    status = part.main(shape, items=items, rounds=rounds, dtype=dtype, device=device, out=out, as_json=as_json)
    raise typer.Exit(status)


@bench.command("serve")
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
    goodput: Annotated[
        list[str] | None, Option(help="Count requests within these limits: ttft:300ms,tpot:30ms (also itl, e2el).")
    ] = None,
    warmups: Annotated[int, Option(help="Requests to send before the load, one by one; they are not counted.")] = 1,
    model: Annotated[str | None, Option(help="Model name in the API. Default: the server's first.")] = None,
    api_key: ApiKey = None,
    plot: Annotated[Path | None, Option(help="The folder to write a plot of the latencies to.")] = None,
    seed: Annotated[int, Option(help="Seed of the prompts and the arrival times.")] = 0,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency under load: TTFT, TPOT, ITL and end to end, at p50, p90 and p99, as vLLM defines them."""
    from contextlib import nullcontext

    from bagu.bench import serve as part
    from bagu.bench.serve_latency import parse_goodput
    from bagu.bench.serve_load import Load
    from bagu.bench.trace import read_trace
    from bagu.bench.workload import Lengths
    from bagu.recipes.demo_server import running_server

    load = Load(
        requests=requests, inputs=None if inputs is None else Lengths.parse(inputs),
        outputs=None if outputs is None else Lengths.parse(outputs), shared_prefix=shared_prefix,
        max_concurrency=max_concurrency, request_rate=float("inf") if request_rate is None else request_rate,
        trace=None if trace is None else read_trace(trace, requests), speed=trace_speed,
        goodput=parse_goodput(goodput or ()), warmups=warmups, seed=seed,
    )  # fmt: skip
    is_url = target.startswith(("http://", "https://"))
    status = part.main(
        nullcontext(target) if is_url else running_server(Path(target)), load, model=model, api_key=api_key,
        sweep=sweep, against=against, rounds=rounds, plot=plot, out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("ops")
def bench_ops(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The ops to time. Default: all.")] = None,
    case: Annotated[list[str] | None, Option(help="Time only this benchmark case; repeatable.")] = None,
    backend: Annotated[list[str] | None, Option(help="Time only this backend of bagu; repeatable.")] = None,
    dtype: OpDtype = None,
    quick: Annotated[bool, Option("--quick", help="One small case per op. Saved only with --out.")] = False,
    compile: Annotated[bool | None, Option(help="Also time torch.compile (slow). Default: unless --quick.")] = None,
    as_json: AsJson = False,
    plot: Annotated[bool, Option(help="Write one plot per op next to the results.")] = True,
    out: Results = None,
    device: Device = None,
) -> None:
    """Time every op and backend, torch eager, torch.compile and Liger; report the fraction of the measured ceiling."""
    from bagu.bench import ops as part

    status = part.main(
        names or (), cases=case or (), backends=backend or (), dtype=dtype, quick=quick, compiled=compile,
        as_json=as_json, draw=plot, out=out, device=device,
    )  # fmt: skip
    raise typer.Exit(status)


@bench.command("layers")
def bench_layers(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The layers to time. Default: all.")] = None,
    batch: Annotated[list[int] | None, Option(help="Batch size; repeatable. Default: 1, 8 and on a GPU 32.")] = None,
    dtype: OpDtype = None,
    compile: Annotated[bool, Option(help="Also time torch.compile (slow).")] = True,
    seconds: Annotated[float, Option(help="Seconds to measure each implementation and pass.")] = 0.3,
    plot: Annotated[bool, Option(help="Write one plot per layer next to the results.")] = True,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Time layers of torch.nn beside bagu's drop-in versions, torch.compile and ONNX Runtime."""
    from bagu.bench import layers as part

    status = part.main(
        names or (), batches=batch or (), dtype=dtype, device=device, compiled=compile, seconds=seconds, plot=plot,
        out=out, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)
