"""The command line: one verb per job. It parses, looks up and calls; a part is imported when its verb runs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from bagu import __version__
from bagu.errors import BaguError
from bagu.machine.openmp import wait_briefly

__all__ = ["main"]


def _group(help: str) -> typer.Typer:
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


app = typer.Typer(
    help="bagu (八股): the canon of LLM infrastructure as one package, every number measured.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = _group("Measure: every op against its peers and the machine's ceilings.")
ops = _group("The catalogue of ops: what each means, costs and should take here.")
lab = _group("Labs: a textbook claim, measured with the real parts.")
tokenizers = _group("Tokenizers: train one, and see how good and how fast one is.")
app.add_typer(bench, name="bench")
app.add_typer(ops, name="ops")
app.add_typer(lab, name="lab")
app.add_typer(tokenizers, name="tokenizer")

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # no room on the disk, in the quota, under the limit of a file's size
AsJson = Annotated[bool, typer.Option("--json", help="JSON on stdout and nothing else there.")]
Dtype = Annotated[str | None, typer.Option(help="bf16, fp16, fp32 or fp64; by default bf16 on a GPU, fp32 on a CPU.")]
LabOut = Annotated[Path, typer.Option(help="The folder of results.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"bagu {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    as_json: AsJson = False,
    measure: Annotated[bool, typer.Option(help="Measure bandwidth and matmul rate, 2 s.")] = True,
) -> None:
    """What this machine is, and what is wrong with it."""
    from bagu.machine import doctor as part

    raise typer.Exit(part.main(as_json=as_json, measure=measure))


@app.command()
def demo(
    out: Annotated[
        Path | None, typer.Option(help="A new or empty folder; by default runs/demo, or runs/demo-2 and so on.")
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Every stage in small, under a minute.")] = False,
    minutes: Annotated[
        float | None, typer.Option(help="Choose size and steps to fill so many; by default 5 at most.")
    ] = None,
    serve: Annotated[bool, typer.Option(help="Serve the model at the end and ask it a question.")] = True,
) -> None:
    """Train a tokenizer and a language model on this Python's own library, fine-tune it, write a report, serve it."""
    from bagu.recipes.demo import demo as part

    part(out, quick=quick, minutes=minutes, serve=serve)


@app.command()
def train(
    data: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="DATA",
            help="Files or folders of text, JSON or Parquet, for SFT of chats (messages, ShareGPT, Alpaca); "
            "'stdlib' by default.",
        ),
    ] = None,
    recipe: Annotated[
        str | None, typer.Option(help="Where to begin: small (the default), gpt2_124m, llama_1b, mlm, sft, lora.")
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A run's config.json instead of a recipe.")] = None,
    start: Annotated[
        str | None,
        typer.Option("--from", help="Go on from this model: a run, a checkpoint, a Hugging Face folder, an adapter."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="e.g. train.optimizer.lr=3e-4; repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The folder of the run.")] = Path("runs/train"),
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    accept_data_change: Annotated[
        bool, typer.Option("--accept-data-change", help="Resume although the data is not what it was.")
    ] = False,
    prompt: Annotated[list[str] | None, typer.Option(help="Continued while training; repeatable.")] = None,
    wandb: Annotated[
        str | None, typer.Option(metavar="PROJECT", help="Log to Weights & Biases too, under this project.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check the data; print the configuration, sizes and time; write no run.")
    ] = False,
) -> None:
    """Pretrain, continue pretraining or fine-tune. Ctrl-C saves; --resume goes on to the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; train.deterministic needs it
    from bagu.recipes import command

    raise typer.Exit(
        command.train_main(
            data or [], recipe=recipe, config=config, start=start, settings=settings or [], out=out, resume=resume,
            accept_data_change=accept_data_change, prompts=prompt or [], wandb=wandb, dry_run=dry_run,
        )
    )  # fmt: skip


@app.command()
def report(run: Annotated[Path, typer.Argument(help="The folder of a run.")]) -> None:
    """Write report.html of a run, which may still be going on."""
    from bagu.train.report import write_report

    typer.echo(write_report(run))


@app.command()
def export(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder or id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write: safetensors, config.json, tokenizer.")],
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32; by default as saved.")] = None,
) -> None:
    """Write a model as transformers, vLLM and others read it."""
    from bagu.recipes import command

    command.export_main(model, out, dtype=dtype)


@app.command()
def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder or id.")],
    host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 is everywhere.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="0 takes a free one.")] = 8000,
    api_key: Annotated[
        str | None, typer.Option(envvar="BAGU_API_KEY", help="Ask for this key under /v1 and by /tokenize.")
    ] = None,
    served_model_name: Annotated[list[str] | None, typer.Option(help="Names clients may use; repeatable.")] = None,
    allowed_origins: Annotated[
        list[str] | None, typer.Option(help="Origins whose pages may call (CORS); repeatable, or a JSON list.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder with tokenizer.json; by default the model's.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp32, or auto: the one that is fast here.")] = "auto",
    quantization: Annotated[str | None, typer.Option(help="int8: linears and head, on a CPU.")] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and answer together.")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Choices that run at once.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one step, prefill and decode; by default 2048, on a GPU 16384.")
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(help="Positions of a KV block; by default 16, on a GPU 256.")
    ] = None,
    gpu_memory_utilization: Annotated[float, typer.Option(help="Share of the GPU's memory.")] = 0.9,
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Size of the KV pool, e.g. 512MiB or 2GB; by default what is free, on a CPU up to 1GiB."),
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="The same as a number of KV blocks.")] = None,
    enable_prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of prompts that begin alike.")] = True,
    invariant: Annotated[
        bool, typer.Option("--invariant", help="The same bits alone or in any batch, at a published cost.")
    ] = False,
    seed: Annotated[int, typer.Option(help="From which requests without a seed get theirs.")] = 0,
    generation_config: Annotated[
        str, typer.Option(help="auto: default sampling and ends as the model's folder has them; none; or a folder.")
    ] = "auto",
    max_num_queued_reqs: Annotated[
        int, typer.Option(help="Choices (of an encoder: calls) that may wait; further calls get 429.")
    ] = 256,
    shutdown_timeout: Annotated[float, typer.Option(help="Seconds that running requests get at the end.")] = 30.0,
    log_level: Annotated[str, typer.Option(help="debug, info, warning or error.")] = "warning",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the first GPU.")] = None,
) -> None:
    """An OpenAI-compatible server with a chat page at /."""
    from bagu.recipes import serving
    from bagu.serve.config import parse_bytes

    serving.serve_main(
        model,
        loader=serving.Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device),
        engine={
            "block_size": block_size, "gpu_memory_utilization": gpu_memory_utilization,
            "kv_memory": None if kv_memory is None else parse_bytes(kv_memory), "num_blocks": num_blocks,
            "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": enable_prefix_caching,
            "quantization": quantization, "invariant": invariant, "seed": seed,
        },
        server={
            "host": host, "port": port, "api_key": api_key, "served_model_name": served_model_name or (),
            "allowed_origins": allowed_origins or (), "max_queue": max_num_queued_reqs,
            "shutdown_timeout": shutdown_timeout, "log_level": log_level,
        },
        generation_config=generation_config,
    )  # fmt: skip


@app.command()
def chat(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, or the address of a server.")],
    system: Annotated[str, typer.Option(help="How the assistant should behave.")] = "",
    temperature: Annotated[
        float | None, typer.Option(help="0 is greedy; by default the server's, generation_config.json's, or 0.7.")
    ] = None,
    max_tokens: Annotated[int | None, typer.Option(help="Of an answer; by default what fits.")] = None,
    prompt: Annotated[str | None, typer.Option(help="Answer this and end.")] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder with tokenizer.json; by default the model's.")] = None,
    dtype: Annotated[str, typer.Option(help="bf16, fp32, or auto: the one that is fast here.")] = "auto",
    api_key: Annotated[str | None, typer.Option(envvar="BAGU_API_KEY", help="Of the server.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the first GPU.")] = None,
) -> None:
    """Talk to a model in the terminal."""
    from bagu.recipes import serving

    given: dict[str, float | int | None] = {"temperature": temperature, "max_tokens": max_tokens}
    settings = {name: value for name, value in given.items() if value is not None}
    loader = serving.Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device)
    raise typer.Exit(
        serving.chat_main(
            model, loader=loader, system=system, settings=settings, prompt=prompt, api_key=api_key
        )
    )  # fmt: skip


@app.command("eval")
def evaluate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A run folder, a Hugging Face folder, or a server's URL.")
    ],
    tasks: Annotated[
        list[str], typer.Argument(metavar="TASK", help="Built-in names, task files (.toml), or BENCHMARK=PATH.")
    ],
    compare: Annotated[
        bool, typer.Option("--compare", help="MODEL and TASK are two folders of results to compare instead.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of the results; by default evals/NAME.")] = None,
    limit: Annotated[int | None, typer.Option(help="Evaluate only the first so many items of each task.")] = None,
    few_shot: Annotated[int | None, typer.Option(help="Examples before each question.")] = None,
    normalization: Annotated[
        str | None, typer.Option(help="Of log-likelihoods: raw, characters, tokens or pmi.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the choice of examples.")] = 0,
    training: Annotated[
        Path | None, typer.Option(help="A run folder or text: report items that are in its training text.")
    ] = None,
    tokenizer: Annotated[str | None, typer.Option(help="A folder with tokenizer.json.")] = None,
    dtype: Annotated[str, typer.Option(help="auto, bf16 or fp32.")] = "auto",
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the first GPU.")] = None,
    invariant: Annotated[bool, typer.Option("--invariant", help="The same numbers at any batch size (CPU).")] = False,
    api_key: Annotated[str | None, typer.Option(envvar="BAGU_API_KEY", help="Of the server.")] = None,
    as_json: AsJson = False,
) -> None:
    """Score a model on tasks, with 95 % intervals; every item is kept."""
    from bagu.recipes import evaluate as part

    if compare:
        if len(tasks) != 1:
            raise typer.BadParameter("--compare takes two folders of results")
        raise typer.Exit(part.compare_main(Path(model), Path(tasks[0]), out=out, as_json=as_json))
    raise typer.Exit(
        part.eval_main(
            model, tasks, out=out, limit=limit, few_shot=few_shot, normalization=normalization, seed=seed,
            training=training, tokenizer=tokenizer, dtype=dtype, device=device, invariant=invariant, api_key=api_key,
            as_json=as_json,
        )
    )  # fmt: skip


@tokenizers.command("train")
def tokenizer_train(
    out: Annotated[Path, typer.Argument(help="The folder to write.")],
    data: Annotated[Path | None, typer.Argument(help="Text, JSON lines or Parquet; by default the library.")] = None,
    vocab_size: Annotated[int, typer.Option(help="Tokens in all.")] = 4096,
    max_mb: Annotated[float, typer.Option(help="Learn from at most so many MB of text.")] = 64,
) -> None:
    """Learn a byte-level BPE."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.train_main(out, path=data, vocab_size=vocab_size, max_mb=max_mb)


@tokenizers.command("stats")
def tokenizer_stats(
    path: Annotated[Path, typer.Argument(help="A folder with tokenizer.json.")],
    data: Annotated[Path | None, typer.Argument(help="Text to measure on; by default the library.")] = None,
    max_mb: Annotated[float, typer.Option(help="Measure on at most so many MB.")] = 8,
) -> None:
    """Bytes per token, speed, and whether text comes back byte for byte."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.stats_main(path, path=data, max_mb=max_mb)


@bench.command("train")
def bench_train(
    shape: Annotated[str, typer.Option(help="cpu_6m, llama_1b or gpt_d20; by default what suits this machine.")] = "",
    peer: Annotated[
        list[str] | None,
        typer.Option(help="transformers, transformers-compile, or a script that prints JSON with tokens_per_s."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of each implementation.")] = 20,
    micro_batches: Annotated[list[int] | None, typer.Option(help="How many a step is made of; repeatable.")] = None,
    compile: Annotated[bool, typer.Option("--compile", help="Time bagu under torch.compile too.")] = False,
    recompute: Annotated[str, typer.Option(help="none, selective or block.")] = "none",
    rounds: Annotated[int, typer.Option(help="Run everything so often, in turn.")] = 1,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32; by default the one that is fast here.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the first GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="By default benchmarks/results/train.")] = None,
    as_json: AsJson = False,
) -> None:
    """Tokens per second of a whole optimizer step, beside peers in the same run."""
    from bagu.bench import train as part

    raise typer.Exit(
        part.main(
            shape or None, peers=peer or (), steps=steps, micro_batches=micro_batches or (1,),
            compiled=(False, True) if compile else (False,), recompute=recompute, rounds=rounds, dtype=dtype,
            device=device, out=out, as_json=as_json,
        )
    )  # fmt: skip


@bench.command("engine")
def bench_engine(
    model: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="By default a shape with random weights.")
    ] = None,
    shape: Annotated[str | None, typer.Option(help="cpu_8m, smollm_135m or qwen3_0_6b.")] = None,
    requests: Annotated[int | None, typer.Option(help="256 on a GPU, 32 on a CPU.")] = None,
    inputs: Annotated[str | None, typer.Option(help="Prompt lengths, e.g. 100-1024.")] = None,
    outputs: Annotated[str | None, typer.Option(help="Answer lengths.")] = None,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    streams: Annotated[list[int] | None, typer.Option(help="Time decoding of so many streams; repeatable.")] = None,
    batch: Annotated[int, typer.Option(help="Sequences that run at once.")] = 256,
    prefix_caching: Annotated[bool, typer.Option(help="Reuse the KV of prompts that begin alike.")] = True,
    quantization: Annotated[str | None, typer.Option(help="int8, on a CPU.")] = None,
    invariant: Annotated[bool, typer.Option("--invariant", help="What the same bits in any batch cost.")] = False,
    dtype: Annotated[str | None, typer.Option(help="bf16 or fp32; by default the one that is fast here.")] = None,
    peer: Annotated[list[str] | None, typer.Option(help="generate, generate_batch, or a script; repeatable.")] = None,
    rounds: Annotated[int, typer.Option(help="Run everything so often, in turn.")] = 1,
    device: Annotated[str | None, typer.Option(help="cpu or cuda; by default the first GPU.")] = None,
    out: Annotated[Path | None, typer.Option(help="By default benchmarks/results/serve.")] = None,
    as_json: AsJson = False,
) -> None:
    """Offline throughput of the engine; nano-vllm's workload by default on a GPU."""
    users = wait_briefly()  # before torch is imported
    from bagu.bench import engine as part
    from bagu.recipes.serving import Loader

    load = None if model is None else Loader(model=model, dtype=dtype or "auto", device=device)
    raise typer.Exit(
        part.main(
            shape, load=load, name=model, requests=requests, inputs=inputs, outputs=outputs,
            shared_prefix=shared_prefix, streams=streams or (), batch=batch, prefix_cache=prefix_caching,
            quantization=quantization, invariant=invariant, dtype=dtype, peers=peer or (), peer_environ=users,
            rounds=rounds, device=device, out=out, as_json=as_json,
        )
    )  # fmt: skip


@bench.command("serve")
def bench_serve(
    target: Annotated[str, typer.Argument(metavar="URL|MODEL", help="A server, or a model to start one for.")],
    requests: Annotated[int, typer.Option(help="In all.")] = 64,
    inputs: Annotated[
        str | None, typer.Option(help="Prompt lengths; by default 32-128, or what fits the model.")
    ] = None,
    outputs: Annotated[str | None, typer.Option(help="Answer lengths; by default likewise.")] = None,
    shared_prefix: Annotated[int, typer.Option(help="Tokens that all prompts begin with.")] = 0,
    max_concurrency: Annotated[int | None, typer.Option(help="Clients of a closed loop, 8 by default.")] = None,
    request_rate: Annotated[float | None, typer.Option(help="Poisson arrivals a second instead.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="BAGU_API_KEY", help="Of the server.")] = None,
    plot: Annotated[Path | None, typer.Option(help="A folder for a picture of the latencies.")] = None,
    seed: Annotated[int, typer.Option(help="Of prompts and arrivals.")] = 0,
    out: Annotated[Path | None, typer.Option(help="By default benchmarks/results/serve.")] = None,
    as_json: AsJson = False,
) -> None:
    """Latency under load: TTFT, TPOT, ITL and end to end, p50, p90 and p99, by vLLM's names."""
    from bagu.bench import serve as part
    from bagu.recipes.served import served

    is_url = target.startswith(("http://", "https://"))
    raise typer.Exit(
        part.main(
            target if is_url else None, server=None if is_url else served(Path(target)), api_key=api_key,
            requests=requests, inputs=inputs, outputs=outputs, shared_prefix=shared_prefix,
            max_concurrency=max_concurrency, request_rate=float("inf") if request_rate is None else request_rate,
            plot=plot, seed=seed, out=out, as_json=as_json,
        )
    )  # fmt: skip


@bench.command("ops")
def bench_ops(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Ops to time; all by default.")] = None,
    case: Annotated[list[str] | None, typer.Option(help="Only this bench case; may be repeated.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only this backend of bagu; may be repeated.")] = None,
    dtype: Dtype = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="One case an op, small sizes; recorded only with --out.")
    ] = False,
    compile: Annotated[
        bool | None, typer.Option(help="torch.compile as a peer, seconds a case; by default unless --quick.")
    ] = None,
    as_json: AsJson = False,
    plot: Annotated[bool, typer.Option(help="Draw a picture per op beside the record.")] = True,
    out: Annotated[Path | None, typer.Option(help="The folder of the record; by default benchmarks/results.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda or cuda:1; by default the first GPU.")] = None,
) -> None:
    """Every op and backend against torch eager, torch.compile and Liger, as a share of the measured ceiling."""
    from bagu.bench import ops as part

    raise typer.Exit(
        part.main(
            names or (),
            cases=case or (),
            backends=backend or (),
            dtype=dtype,
            quick=quick,
            compiled=compile,
            as_json=as_json,
            draw=plot,
            out=out,
            device=device,
        )
    )


@ops.command("list")
def ops_list() -> None:
    """Every op in one line: kernels, gradients, what bounds it."""
    from rich.console import Console

    from bagu.bench import show

    show.list_ops(Console())


@ops.command("show")
def ops_show(
    name: str,
    size: Annotated[
        str, typer.Option(help="Sizes of the cost, e.g. M=4096,N=4096; by default the first timed case.")
    ] = "",
    dtype: Dtype = None,
    as_json: AsJson = False,
    measure: Annotated[
        bool, typer.Option("--measure", help="Measure the ceilings now, even if some are recorded.")
    ] = False,
) -> None:
    """One op: formula, arguments, backends, cases, cost, predicted time on this machine."""
    from rich.console import Console

    from bagu.bench import show

    show.show_op(name, Console(), size=size, dtype=dtype, as_json=as_json, measure=measure)


@lab.command("list")
def lab_list() -> None:
    """Every lab with its claim."""
    from rich.console import Console

    from bagu.lab.listing import list_labs

    list_labs(Console())


@lab.command("run")
def lab_run(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME", help="Labs to run; all by default.")] = None,
    out: LabOut = Path("labs"),
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes, a few seconds a lab.")] = False,
) -> None:
    """Measure a claim, draw it, and say whether it held."""
    from bagu.lab.run import run_labs

    raise typer.Exit(run_labs(names or (), out=out, quick=quick))


@lab.command("report")
def lab_report(out: LabOut = Path("labs")) -> None:
    """One HTML page with all results of this machine."""
    from bagu.lab.report import write_report

    typer.echo(write_report(out))


def main(argv: Sequence[str] | None = None) -> None:
    """The program `bagu`. A BaguError, and a file that cannot be read or written, is told without a traceback, with
    exit status 2; BAGU_TRACEBACK=1 shows it."""
    try:
        app(args=argv, prog_name="bagu")
    except (BaguError, OSError) as error:
        told = _told(error)
        if told is None or os.environ.get("BAGU_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"bagu: {told}", file=sys.stderr)
        raise SystemExit(2) from None


def _told(error: BaguError | OSError) -> str | None:
    """What to say in place of a traceback; None of an OSError that is not about a file or a full disk."""
    if isinstance(error, BaguError):
        return f"{error}" + (f"\n  -> {error.hint}" if error.hint else "")
    if error.errno in FULL:
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror}\n  -> free some disk space, or write to another disk"
    return error.filename and f"{error.filename}: {error.strerror}\n  -> give a place that can be read or written"
