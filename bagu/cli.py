"""The command line: one verb per job. Each verb imports the part it needs when it runs, so `--help` stays fast."""

from __future__ import annotations

import errno
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from bagu import __version__
from bagu.errors import BaguError
from bagu.machine.openmp import wait_briefly

__all__ = ["main"]


def _group(help: str) -> typer.Typer:
    return typer.Typer(help=help, add_completion=False, pretty_exceptions_enable=False, no_args_is_help=True)


app = typer.Typer(
    help="bagu (八股): train, serve and benchmark language models on one machine.",
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = _group("Benchmark ops, training steps, the inference engine, evaluation or a server.")
ops = _group("List the ops; show the formula, cost and predicted time of one.")
lab = _group("Labs: measure a textbook claim on this machine.")
tokenizers = _group("Train a tokenizer, or measure one.")
plans = _group("Plan a training run or a deployment: which layout, how fast, does it fit.")
app.add_typer(bench, name="bench")
app.add_typer(ops, name="ops")
app.add_typer(lab, name="lab")
app.add_typer(tokenizers, name="tokenizer")
app.add_typer(plans, name="plan")


@contextmanager
def _collector_paused() -> Iterator[None]:
    """Pause garbage collection in a verb that imports torch and ends: it takes 0.1 s of the 3.1 s CPU of `ops list`."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # disk full, quota reached, file size limit reached

# Options that several verbs share
AsJson = Annotated[bool, Option("--json", help="Print JSON, and nothing else, on stdout.")]
Model = Annotated[str, Argument(metavar="MODEL", help="A run, a checkpoint, a Hugging Face folder or a model id.")]
TokenizerFolder = Annotated[str | None, Option(help="A folder with tokenizer.json. Default: the model's tokenizer.")]
Device = Annotated[str | None, Option(help="cpu, cuda or cuda:1. Default: the first GPU if there is one.")]
OpDtype = Annotated[str | None, Option(help="bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")]
ModelDtype = Annotated[str, Option(help="bf16, fp32 or auto. auto picks the faster one on this machine.")]
BenchDtype = Annotated[str | None, Option(help="bf16 or fp32. Default: the faster one on this machine.")]
ApiKey = Annotated[str | None, Option(envvar="BAGU_API_KEY", help="The API key that the server requires.")]
KVDtype = Annotated[str, Option(help="Dtype of the KV cache: auto (the model's), int8 or fp8.")]
TensorParallel = Annotated[
    int, Option("--tp", "--tensor-parallel-size", help="Divide the model over this many processes, one per GPU.")
]
PrefixCaching = Annotated[bool, Option(help="Reuse the KV cache of common prompt prefixes.")]
SharedPrefix = Annotated[int, Option(help="Number of leading tokens that all prompts have in common.")]
Rounds = Annotated[int, Option(help="How many times to run all implementations, in turn.")]
Results = Annotated[Path | None, Option(help="The folder of results. Default: benchmarks/results or a subfolder.")]
LabResults = Annotated[Path, Option(help="The folder of lab results.")]


@app.callback(invoke_without_command=True)
def root(
    context: typer.Context,
    version: Annotated[bool, Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        typer.echo(f"bagu {__version__}")
        raise typer.Exit
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
def doctor(
    as_json: AsJson = False,
    measure: Annotated[bool, Option(help="Measure memory bandwidth and matmul rate (about 2 s).")] = True,
) -> None:
    """Describe this machine and list its problems, each with a fix."""
    from bagu.machine import doctor as part

    raise typer.Exit(part.main(as_json=as_json, measure=measure))


@app.command()
def demo(
    out: Annotated[Path | None, Option(help="A new or empty folder. Default: runs/demo, runs/demo-2, …")] = None,
    quick: Annotated[bool, Option("--quick", help="Run every stage at a small size, in under a minute.")] = False,
    minutes: Annotated[float | None, Option(help="Time budget; sets model size and steps. Default: 5 at most.")] = None,
    serve: Annotated[bool, Option(help="Serve the model at the end and send it one question.")] = True,
) -> None:
    """Train a tokenizer and a language model on Python's standard library, fine-tune it, write a report, serve it."""
    from bagu.recipes.demo import demo as part

    part(out, quick=quick, minutes=minutes, serve=serve)


@app.command()
def train(
    data: Annotated[
        list[str] | None,
        Argument(
            metavar="DATA",
            help="Files or folders of text, JSON or Parquet. SFT reads chats (messages, ShareGPT, Alpaca), "
            "reward and dpo read preferences (prompt, chosen, rejected). "
            "Default: 'stdlib', Python's standard library.",
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        Option(
            help="small (default), gpt2_124m, llama_1b, mlm, sft, lora, distill, on_policy_distill, reward, dpo, grpo "
            "or ppo."
        ),
    ] = None,
    config: Annotated[Path | None, Option(help="A run's config.json, instead of a recipe.")] = None,
    start: Annotated[
        str | None, Option("--from", help="Initial weights: a run, a checkpoint, a Hugging Face folder, an adapter.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        Option("--set", metavar="KEY=VALUE", help="Override a setting, e.g. train.optimizer.lr=3e-4; repeatable."),
    ] = None,
    out: Annotated[Path, Option(help="The folder of the run.")] = Path("runs/train"),
    resume: Annotated[bool, Option("--resume", help="Resume the run in the folder --out.")] = False,
    accept_data_change: Annotated[bool, Option("--accept-data-change", help="Resume with changed data.")] = False,
    reward: Annotated[
        str | None,
        Option(help="Of grpo and ppo: FILE.py:FUNCTION (your code, run with your rights), a built-in name, a model."),
    ] = None,
    prompt: Annotated[list[str] | None, Option(help="A prompt to sample from during training; repeatable.")] = None,
    wandb: Annotated[str | None, Option(metavar="PROJECT", help="Also log to this Weights & Biases project.")] = None,
    mesh: Annotated[
        str | None,
        Option(metavar="DIMS", help="Divide the run over ranks: sizes of dp, shard (ZeRO), tp, pp, cp, ep: dp=2,tp=2."),
    ] = None,
    nproc: Annotated[int | None, Option(help="Start this many ranks on this machine. Default mesh: dp=NPROC.")] = None,
    max_restarts: Annotated[int, Option(help="Of --nproc: restarts from the last checkpoint after a crash.")] = 3,
    hang_timeout: Annotated[
        float, Option(help="Of --nproc: seconds without progress after which the rank that hangs is named and killed.")
    ] = 600.0,
    explain: Annotated[
        bool,
        Option("--explain", help="Print what the mesh divides, bytes and waiting time a step, and draw a pipeline."),
    ] = False,
    dry_run: Annotated[bool, Option("--dry-run", help="Check the data; print configuration, sizes and time.")] = False,
) -> None:
    """Pretrain, continue pretraining or fine-tune. Ctrl-C saves a checkpoint; --resume continues with the same bits."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read once by cuBLAS; train.deterministic needs it
    from bagu.recipes import command

    status = command.train_main(
        data or [], recipe=recipe, config=config, start=start, settings=settings or [], out=out, resume=resume,
        accept_data_change=accept_data_change, reward=reward, prompts=prompt or [], wandb=wandb, dry_run=dry_run,
        mesh=mesh, nproc=nproc, max_restarts=max_restarts, hang_timeout=hang_timeout, explain=explain,
    )  # fmt: skip
    raise typer.Exit(status)


@app.command()
def report(run: Annotated[Path, Argument(help="The folder of the run.")]) -> None:
    """Write report.html for a run, finished or still running."""
    from bagu.train.report import write_report

    typer.echo(write_report(run))


@app.command()
def export(
    model: Model,
    out: Annotated[Path, Argument(help="The folder to write, or the GGUF file.")],
    dtype: Annotated[str | None, Option(help="bf16 or fp32. Default: as saved.")] = None,
    format: Annotated[str, Option(help="safetensors (a Hugging Face folder) or gguf.")] = "safetensors",
    quantization: Annotated[str | None, Option(help="For GGUF: f32, f16, bf16, q8_0 or q4_0. Default: f16.")] = None,
) -> None:
    """Export a model for transformers, vLLM and others (safetensors), or for llama.cpp (GGUF)."""
    from bagu.recipes import command

    command.export_main(model, out, dtype=dtype, format=format, quantization=quantization)


@app.command()
def serve(
    model: Model,
    host: Annotated[str, Option(help="The address to listen on; 0.0.0.0 is all interfaces.")] = "127.0.0.1",
    port: Annotated[int, Option(help="The port to listen on; 0 picks a free one.")] = 8000,
    api_key: Annotated[str | None, Option(envvar="BAGU_API_KEY", help="Require this key from clients.")] = None,
    served_model_name: Annotated[list[str] | None, Option(help="Model name in the API; repeatable.")] = None,
    allowed_origins: Annotated[list[str] | None, Option(help="Allowed CORS origin; repeatable, or JSON.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    tp: TensorParallel = 1,
    max_model_len: Annotated[int | None, Option(help="Maximum tokens of a prompt plus its output.")] = None,
    max_num_seqs: Annotated[int, Option(help="Maximum number of sequences that run at once.")] = 256,
    max_num_batched_tokens: Annotated[
        int | None, Option(help="Maximum tokens per step. Default: 2048, on a GPU 16384.")
    ] = None,
    block_size: Annotated[int | None, Option(help="Tokens per KV block. Default: 16.")] = None,
    kv_dtype: KVDtype = "auto",
    gpu_memory_utilization: Annotated[float, Option(help="Fraction of the GPU's memory to use.")] = 0.9,
    kv_memory: Annotated[
        str | None, Option(help="KV cache size, e.g. 2GB. Default: free memory, on a CPU up to 1GiB.")
    ] = None,
    num_blocks: Annotated[int | None, Option(help="Size of the KV cache in blocks, instead of bytes.")] = None,
    enable_prefix_caching: PrefixCaching = True,
    speculative: Annotated[
        str | None, Option(help="Draft tokens by prompt lookup (ngram), or by the model at this path.")
    ] = None,
    speculative_tokens: Annotated[int, Option(help="Maximum drafted tokens per sequence and step.")] = 7,
    invariant: Annotated[bool, Option("--invariant", help="Bitwise equal results at any batch size; slower.")] = False,
    seed: Annotated[int, Option(help="Seed for the requests that do not set one.")] = 0,
    generation_config: Annotated[
        str, Option(help="Sampling defaults: auto (the model's own), none, or a folder.")
    ] = "auto",
    tool_parser: Annotated[
        str, Option(help="Form of tool calls: auto, none, hermes, llama3, mistral, deepseek_v3, ...")
    ] = "auto",
    reasoning_parser: Annotated[str, Option(help="Reasoning in <think> tags: auto, none or think.")] = "auto",
    max_num_queued_reqs: Annotated[int, Option(help="Maximum waiting sequences (encoder: calls); more get 429.")] = 256,
    shutdown_timeout: Annotated[float, Option(help="Seconds to let running requests finish on shutdown.")] = 30.0,
    log_level: Annotated[str, Option(help="debug, info, warning or error.")] = "warning",
    device: Device = None,
) -> None:
    """Start an OpenAI-compatible server, with a chat page at /."""
    from bagu.recipes.serve import Loader, serve_main
    from bagu.serve.config import parse_bytes

    serve_main(
        model,
        loader=Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device, allow_reward=True),
        engine={
            "block_size": block_size, "kv_dtype": kv_dtype, "gpu_memory_utilization": gpu_memory_utilization,
            "kv_memory": None if kv_memory is None else parse_bytes(kv_memory), "num_blocks": num_blocks,
            "max_model_len": max_model_len, "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max_num_batched_tokens, "prefix_cache": enable_prefix_caching,
            "quantization": quantization, "invariant": invariant, "seed": seed, "tp": tp, "speculative": speculative,
            "speculative_tokens": speculative_tokens, "tool_parser": tool_parser,
            "reasoning_parser": reasoning_parser,
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
    model: Annotated[str, Argument(metavar="MODEL", help="A model (as for `bagu serve`), or the URL of a server.")],
    system: Annotated[str, Option(help="The system prompt.")] = "",
    temperature: Annotated[float | None, Option(help="0 is greedy. Default: the server's or model's, or 0.7.")] = None,
    max_tokens: Annotated[int | None, Option(help="Maximum answer length. Default: the rest of the context.")] = None,
    prompt: Annotated[str | None, Option(help="Answer this one prompt and exit.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    api_key: ApiKey = None,
    device: Device = None,
) -> None:
    """Chat with a model in the terminal."""
    from bagu.recipes.serve import Loader, chat_main

    given: dict[str, float | int | None] = {"temperature": temperature, "max_tokens": max_tokens}
    settings = {name: value for name, value in given.items() if value is not None}
    loader = Loader(model=model, tokenizer=tokenizer, dtype=dtype, device=device)
    status = chat_main(model, loader=loader, system=system, settings=settings, prompt=prompt, api_key=api_key)
    raise typer.Exit(status)


@app.command("eval")
def evaluate(
    model: Annotated[str, Argument(metavar="MODEL", help="A run, a Hugging Face folder, or the URL of a server.")],
    tasks: Annotated[
        list[str], Argument(metavar="TASK", help="Built-in tasks, task files (.toml), or BENCHMARK=PATH.")
    ],
    compare: Annotated[bool, Option("--compare", help="Compare two folders of results: MODEL and TASK.")] = False,
    out: Annotated[Path | None, Option(help="The folder of results. Default: evals/NAME.")] = None,
    limit: Annotated[int | None, Option(help="Evaluate only this many items per task.")] = None,
    few_shot: Annotated[int | None, Option(help="Number of examples before each question.")] = None,
    normalization: Annotated[str | None, Option(help="Log-likelihoods: raw, characters, tokens or pmi.")] = None,
    seed: Annotated[int, Option(help="Seed for the choice of examples.")] = 0,
    training: Annotated[Path | None, Option(help="A run or text: report items found in its training text.")] = None,
    tokenizer: TokenizerFolder = None,
    dtype: ModelDtype = "auto",
    device: Device = None,
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    invariant: Annotated[bool, Option("--invariant", help="Bitwise equal results at any batch size; slower.")] = False,
    api_key: ApiKey = None,
    judge: Annotated[str | None, Option(help="Grades answers: a server (URL or URL#MODEL), or a model's path.")] = None,
    judge_api_key: Annotated[str | None, Option(envvar="BAGU_JUDGE_API_KEY", help="The judge's API key.")] = None,
    as_json: AsJson = False,
) -> None:
    """Evaluate a model on tasks, with 95 % confidence intervals, and save the result of every item."""
    from bagu.recipes import evaluate as part

    if compare:
        if len(tasks) != 1:
            raise typer.BadParameter("--compare takes two folders of results")
        raise typer.Exit(part.compare_main(Path(model), Path(tasks[0]), out=out, as_json=as_json))
    status = part.eval_main(
        model, tasks, out=out, limit=limit, few_shot=few_shot, normalization=normalization, seed=seed,
        training=training, tokenizer=tokenizer, dtype=dtype, device=device, invariant=invariant,
        quantization=quantization, api_key=api_key, judge=judge, judge_api_key=judge_api_key, as_json=as_json,
    )  # fmt: skip
    raise typer.Exit(status)


@tokenizers.command("train")
def tokenizer_train(
    out: Annotated[Path, Argument(help="The folder to write.")],
    data: Annotated[Path | None, Argument(help="Text, JSONL or Parquet. Default: Python's standard library.")] = None,
    vocab_size: Annotated[int, Option(help="Vocabulary size, special tokens included.")] = 4096,
    max_mb: Annotated[float, Option(help="Train on at most this many MB of text.")] = 64,
) -> None:
    """Train a byte-level BPE tokenizer."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.train_main(out, path=data, vocab_size=vocab_size, max_mb=max_mb)


@tokenizers.command("stats")
def tokenizer_stats(
    path: Annotated[Path, Argument(help="A folder with tokenizer.json.")],
    data: Annotated[Path | None, Argument(help="Text to measure on. Default: Python's standard library.")] = None,
    max_mb: Annotated[float, Option(help="Measure on at most this many MB of text.")] = 8,
) -> None:
    """Measure bytes per token and speed, and check that decoding restores the text."""
    from bagu.data import tokenizer_cli

    tokenizer_cli.stats_main(path, path=data, max_mb=max_mb)


@bench.command("train")
def bench_train(
    shape: Annotated[str, Option(help="cpu_6m, llama_1b or gpt_d20. Default: chosen for this machine.")] = "",
    peer: Annotated[
        list[str] | None,
        Option(help="transformers, transformers-compile, or a script that prints JSON with tokens_per_s."),
    ] = None,
    steps: Annotated[int, Option(help="Number of timed steps per implementation.")] = 20,
    micro_batches: Annotated[list[int] | None, Option(help="Micro-batches per step; repeatable.")] = None,
    compile: Annotated[bool, Option("--compile", help="Also time bagu under torch.compile.")] = False,
    recompute: Annotated[str, Option(help="Activation recomputation: none, selective or block.")] = "none",
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
        compiled=(False, True) if compile else (False,), recompute=recompute, rounds=rounds, dtype=dtype,
        device=device, out=out, as_json=as_json,
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
    batch: Annotated[int, Option(help="Maximum number of sequences that run at once.")] = 256,
    prefix_caching: PrefixCaching = True,
    quantization: Annotated[str | None, Option(help="int8, int4 or fp8 weights in linear layers.")] = None,
    kv_dtype: KVDtype = "auto",
    invariant: Annotated[bool, Option("--invariant", help="Use the batch-invariant mode.")] = False,
    tp: TensorParallel = 1,
    dtype: BenchDtype = None,
    peer: Annotated[
        list[str] | None, Option(help="generate, generate_batch, llama.cpp or a script; repeatable.")
    ] = None,
    rounds: Rounds = 1,
    device: Device = None,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure the offline throughput of the engine. The default workload on a GPU is nano-vllm's."""
    user_environ = wait_briefly()  # must run before torch is imported
    from bagu.bench import engine as part
    from bagu.recipes.serve import Loader

    load = None if model is None else Loader(model=model, dtype=dtype or "auto", device=device)
    status = part.main(
        shape, load=load, name=model, requests=requests, inputs=inputs, outputs=outputs,
        shared_prefix=shared_prefix, streams=streams or (), prompt=prompt, new=new, speculative=speculative,
        speculative_tokens=speculative_tokens, text=text, batch=batch, prefix_cache=prefix_caching,  # type: ignore[arg-type]
        quantization=quantization, kv_dtype=kv_dtype, invariant=invariant, tp=tp, dtype=dtype, peers=peer or (),
        peer_environ=user_environ, rounds=rounds, device=device, out=out, as_json=as_json,
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
    quantization: Annotated[str | None, Option(help="int8; CPU only.")] = None,
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
    requests: Annotated[int, Option(help="Number of requests.")] = 64,
    inputs: Annotated[str | None, Option(help="Range of prompt lengths. Default: 32-128, or what fits.")] = None,
    outputs: Annotated[str | None, Option(help="Range of output lengths. Default: 32-128, or what fits.")] = None,
    shared_prefix: SharedPrefix = 0,
    max_concurrency: Annotated[int | None, Option(help="Maximum requests in flight. Default: 8.")] = None,
    request_rate: Annotated[float | None, Option(help="Requests per second, Poisson arrivals.")] = None,
    api_key: ApiKey = None,
    plot: Annotated[Path | None, Option(help="The folder to write a plot of the latencies to.")] = None,
    seed: Annotated[int, Option(help="Seed of the prompts and the arrival times.")] = 0,
    out: Results = None,
    as_json: AsJson = False,
) -> None:
    """Measure latency under load: TTFT, TPOT, ITL and end to end, at p50, p90 and p99, as vLLM defines them."""
    from bagu.bench import serve as part
    from bagu.recipes.demo_server import running_server

    is_url = target.startswith(("http://", "https://"))
    status = part.main(
        target if is_url else None, server=None if is_url else running_server(Path(target)), api_key=api_key,
        requests=requests, inputs=inputs, outputs=outputs, shared_prefix=shared_prefix,
        max_concurrency=max_concurrency, request_rate=float("inf") if request_rate is None else request_rate,
        plot=plot, seed=seed, out=out, as_json=as_json,
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


@ops.command("list")
def ops_list() -> None:
    """List every op with its backends, gradients and bound (memory or compute)."""
    with _collector_paused():
        from rich.console import Console

        from bagu.bench import show

        show.list_ops(Console())


@ops.command("show")
def ops_show(
    name: Annotated[str, Argument(help="The op.")],
    size: Annotated[str, Option(help="Sizes, e.g. M=4096,N=4096. Default: the first benchmark case.")] = "",
    dtype: OpDtype = None,
    as_json: AsJson = False,
    measure: Annotated[bool, Option("--measure", help="Measure the ceilings again, even if recorded.")] = False,
    kernel: Annotated[
        bool, Option("--kernel", help="Compile its Triton kernels, without a GPU, and show registers, occupancy …")
    ] = False,
    arch: Annotated[str, Option(help="Architecture to compile for. [with --kernel]")] = "sm_90",
    config: Annotated[str, Option(help="A tuning, e.g. num_warps=8 or backward.block=1024. [with --kernel]")] = "",
    diff: Annotated[
        tuple[str, str] | None, Option(metavar="A B", help="Two tunings to compare; '' is the default. [with --kernel]")
    ] = None,
    out: Annotated[Path | None, Option(help="Folder for the stages. Default: kernels/NAME. [with --kernel]")] = None,
) -> None:
    """Show one op: formula, arguments, backends, cases, cost and predicted time on this machine; or its kernels."""
    from rich.console import Console

    from bagu.bench import show

    if kernel or diff:
        show.show_op_kernels(
            name, Console(), out or Path("kernels") / name, size=size, dtype=dtype, arch=arch, config=config,
            diff=diff, as_json=as_json,
        )  # fmt: skip
    else:
        show.show_op(name, Console(), size=size, dtype=dtype, as_json=as_json, measure=measure)


@lab.command("list")
def lab_list() -> None:
    """List every lab with its claim."""
    from rich.console import Console

    from bagu.lab.listing import list_labs

    list_labs(Console())


@lab.command("run")
def lab_run(
    names: Annotated[list[str] | None, Argument(metavar="NAME", help="The labs to run. Default: all.")] = None,
    out: LabResults = Path("labs"),
    quick: Annotated[bool, Option("--quick", help="Use smaller sizes: a few seconds per lab.")] = False,
) -> None:
    """Measure claims, plot the results and print whether each claim holds."""
    from bagu.lab.run import run_labs

    raise typer.Exit(run_labs(names or (), out=out, quick=quick))


@lab.command("report")
def lab_report(out: LabResults = Path("labs")) -> None:
    """Write one HTML page with all lab results of this machine."""
    from bagu.lab.report import write_report

    typer.echo(write_report(out))


@plans.callback(invoke_without_command=True)
def plan(
    context: typer.Context,
    model: Annotated[str, Option(help="A model such as llama3-70b, or a config.json of Hugging Face or bagu.")] = "",
    gpus: Annotated[int, Option(help="Number of GPUs.")] = 8,
    gpu: Annotated[str, Option(help="a100, h100, h200, b200, or a cluster file (docs/planner.md).")] = "h100",
    seq: Annotated[int, Option(help="Tokens per sequence.")] = 4096,
    batch: Annotated[int, Option(help="Sequences per step, over all GPUs.")] = 256,
    tokens: Annotated[float | None, Option(help="Tokens to train on, e.g. 2e12: adds days and cost.")] = None,
    precision: Annotated[str, Option(help="bf16 or fp8.")] = "bf16",
    top: Annotated[int, Option(help="Number of layouts to print.")] = 10,
    out: Annotated[Path | None, Option(help="A folder for plan.html and the plot.")] = None,
    as_json: AsJson = False,
    serve: Annotated[bool, Option("--serve", help="Plan a deployment instead; the options below describe it.")] = False,
    rate: Annotated[float, Option(help="Requests per second.")] = 10.0,
    input_tokens: Annotated[int, Option(help="Tokens of a prompt.")] = 1024,
    output_tokens: Annotated[int, Option(help="Tokens of an answer.")] = 256,
    token_ms: Annotated[float, Option(help="Target: milliseconds per output token.")] = 50.0,
    first_token_ms: Annotated[float, Option(help="Target: milliseconds to the first token.")] = 1000.0,
) -> None:
    """Rank the layouts of a training run over a cluster, or plan a deployment (--serve)."""
    if context.invoked_subcommand is not None:
        return
    if not model:
        raise typer.BadParameter("name a model, such as --model llama3-70b", param_hint="--model")
    from bagu.parallel.planner import command

    if serve:
        command.serve(
            model=model, gpu=gpu, rate=rate, input_tokens=input_tokens, output_tokens=output_tokens,
            token_ms=token_ms, first_token_ms=first_token_ms, as_json=as_json,
        )  # fmt: skip
        return
    command.plan(
        model=model, gpus=gpus, gpu=gpu, seq=seq, batch=batch, tokens=tokens, precision=precision, top=top,
        as_json=as_json, out=out,
    )  # fmt: skip


@plans.command("validate")
def plan_validate(
    out: Annotated[Path | None, Option(help="A folder for validation.html and the plot.")] = None,
    as_json: AsJson = False,
) -> None:
    """Compare predictions with published measurements: errors per source, and the ranking of layouts."""
    from bagu.parallel.planner import command

    command.validation(out=out, as_json=as_json)


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the program `bagu`.

    A BaguError, and an OSError about a file or a full disk, print a message without a traceback and exit with status
    2. Set BAGU_TRACEBACK=1 to see the traceback.
    """
    try:
        app(args=argv, prog_name="bagu")
    except (BaguError, OSError) as error:
        message = _message(error)
        if message is None or os.environ.get("BAGU_TRACEBACK", "0") not in ("", "0"):
            raise
        print(f"bagu: {message}", file=sys.stderr)
        raise SystemExit(2) from None


def _message(error: BaguError | OSError) -> str | None:
    """The message to print instead of a traceback; None for an OSError that is not about a file or a full disk."""
    if isinstance(error, BaguError):
        return f"{error}" + (f"\n  -> {error.hint}" if error.hint else "")
    if error.errno in DISK_FULL:
        file = f"{error.filename}: " if error.filename else ""
        return f"{file}{error.strerror}\n  -> free some disk space, or write to another disk"
    return error.filename and f"{error.filename}: {error.strerror}\n  -> check the path and its permissions"
