"""The options of `bagu bench` (bagu/config/options.py), as its commands take them. `--help` imports this file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from bagu.bench.units import parse_ms
from bagu.bench.workload import Lengths
from bagu.config import options
from bagu.config.options import Argument, Option

RESULTS_HELP = "The folder of results. Default: benchmarks/results or a subfolder."
ROUNDS = Option("How many times to run all implementations, in turn.")
SHAPE = Option("cpu_8m, smollm_135m, qwen3_0_6b or llama_8b, with random weights.")
SHARED_PREFIX = Option("Number of leading tokens that all prompts have in common.")
INPUTS = Option("Range of prompt lengths. Default: 32-128, or what fits.", parse=Lengths.parse)
OUTPUTS = Option("Range of output lengths. Default: 32-128, or what fits.", parse=Lengths.parse)
RATE = Option("Requests per second, Poisson arrivals.")


@dataclass(frozen=True, kw_only=True)
class BenchSetting:
    """Where a benchmark runs and what it leaves: every command has these."""

    dtype: Annotated[str | None, Option("bf16 or fp32. Default: the faster one on this machine.")] = None
    device: Annotated[str | None, options.DEVICE] = None
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class OpSetting(BenchSetting):
    dtype: Annotated[str | None, Option("bf16, fp16, fp32 or fp64. Default: bf16 on a GPU, fp32 on a CPU.")] = None


@dataclass(frozen=True, kw_only=True)
class TrainBench:
    shape: Annotated[
        str | None, Option("cpu_6m, llama_1b, llama_1b_long, llama_8b_4 or gpt_d20. Default: chosen for this machine.")
    ] = None
    peer: Annotated[
        tuple[str, ...],
        Option(
            "transformers, transformers-compile, flash-attention (bagu with FlashAttention-2), "
            "or a script that prints JSON with tokens_per_s."
        ),
    ] = ()
    steps: Annotated[int, Option("Number of timed steps per implementation.")] = 20
    micro_batches: Annotated[tuple[int, ...], Option("Micro-batches per step; repeatable.")] = ()
    compile: Annotated[bool, Option("Also time bagu under torch.compile.", flags=("--compile",))] = False
    recompute: Annotated[str, Option("Activation recomputation: none, selective or block.")] = "none"
    fp8: Annotated[bool, Option("Also time bagu with train.precision=fp8.", flags=("--fp8",))] = False
    rounds: Annotated[int, ROUNDS] = 1


@dataclass(frozen=True, kw_only=True)
class ConstrainedBench:
    model: Annotated[str | None, Argument("A model. Default: random weights of --shape.", metavar="MODEL")] = None
    shape: Annotated[str | None, Option("cpu_8m, smollm_135m, qwen3_0_6b or llama_8b.")] = None
    schema: Annotated[Path | None, Option("A file with a JSON schema. Default: a list of three people.")] = None
    streams: Annotated[int, Option("Number of streams that decode at once.")] = 32
    prompt: int = 64  # tokens
    max_tokens: Annotated[int, Option("Maximum tokens of an output.")] = 1024
    temperature: Annotated[float, Option("0 is greedy.")] = 1.0
    threads: Annotated[int | None, Option("CPU threads of the model.")] = None
    quantization: Annotated[str | None, options.QUANTIZATION] = None
    invariant: Annotated[bool, Option("Use the batch-invariant mode.", flags=("--invariant",))] = False
    rounds: Annotated[int, ROUNDS] = 5


@dataclass(frozen=True, kw_only=True)
class DpoBench:
    shape: Annotated[str | None, Option("A preset, with random weights. Default: llama_1b, cpu_6m on a CPU.")] = None
    peer: Annotated[tuple[str, ...], Option("transformers or transformers-compile, on the same pairs.")] = ()
    pairs: Annotated[int | None, Option("Pairs of a step. Default: 32 on a GPU, 4 on a CPU.")] = None
    prompt: Annotated[
        int | None, Option("Tokens of a prompt. Default: 256 on a GPU, 32 on a CPU.", flags=("--input-tokens",))
    ] = None
    answer: Annotated[
        int | None,
        Option("Tokens of the longest answer. Default: 768 on a GPU, 96 on a CPU.", flags=("--output-tokens",)),
    ] = None
    steps: Annotated[int, Option("Steps to time, after three to warm up.")] = 10


@dataclass(frozen=True, kw_only=True)
class GrpoBench:
    shape: Annotated[str | None, SHAPE] = None
    prompts: Annotated[int | None, Option("Prompts of a step. Default: 64 on a GPU, 4 on a CPU.")] = None
    samples: Annotated[int, Option("Answers to each prompt.")] = 8
    prompt: Annotated[int, Option("Tokens of a prompt.", flags=("--input-tokens",))] = 64
    new: Annotated[
        int | None, Option("Tokens of an answer. Default: 256 on a GPU, 32 on a CPU.", flags=("--output-tokens",))
    ] = None
    steps: Annotated[int, Option("Steps to time, after one to warm up.")] = 3


@dataclass(frozen=True, kw_only=True)
class EvalBench:
    shape: Annotated[str | None, Option("cpu_8m, smollm_135m, qwen3_0_6b or llama_8b; random weights.")] = None
    items: Annotated[int, Option("Number of four-way items, in all rounds together.")] = 10_000
    rounds: Annotated[int, ROUNDS] = 4


@dataclass(frozen=True, kw_only=True)
class RetrieveBench:
    passages: Annotated[int, Option("Also time queries over this many passages, such as 1000000.")] = 0
    queries: Annotated[int, Option("Number of held-out docstrings.")] = 1000
    hybrid: Annotated[
        bool, Option("Also train a token table on docstrings, and join its ranking.", flags=("--hybrid",))
    ] = False


@dataclass(frozen=True, kw_only=True)
class LayersBench:
    names: Annotated[tuple[str, ...], Argument("The layers to time. Default: all.", metavar="NAME")] = ()
    batch: Annotated[tuple[int, ...], Option("Batch size; repeatable. Default: 1, 8 and on a GPU 32.")] = ()
    compile: Annotated[bool, Option("Also time torch.compile (slow).")] = True
    seconds: Annotated[float, Option("Seconds to measure each implementation and pass.")] = 0.3
    plot: Annotated[bool, Option("Write one plot per layer next to the results.")] = True
    write_sas: Annotated[Path | None, Option("Write a SAS program that times these layers, and end.")] = None
    read_sas: Annotated[Path | None, Option("Show the times of that program beside bagu's.")] = None


@dataclass(frozen=True, kw_only=True)
class OpsBench:
    names: Annotated[tuple[str, ...], Argument("The ops to time. Default: all.", metavar="NAME")] = ()
    case: Annotated[tuple[str, ...], Option("Time only this benchmark case; repeatable.")] = ()
    backend: Annotated[tuple[str, ...], Option("Time only this backend of bagu; repeatable.")] = ()
    quick: Annotated[bool, Option("One small case per op. Saved only with --out.", flags=("--quick",))] = False
    compile: Annotated[bool | None, Option("Also time torch.compile (slow). Default: unless --quick.")] = None
    plot: Annotated[bool, Option("Write one plot per op next to the results.")] = True


@dataclass(frozen=True, kw_only=True)
class ParallelBench:
    shape: Annotated[str, Option("A shape of `bagu bench train`.")] = "cpu_6m"
    ranks: Annotated[int, Option("Processes of one thread; as many as there are free cores.")] = 2
    rounds: Annotated[int, Option("Steps to time of each kind, in turn.")] = 6
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class ServerBench:
    shape: Annotated[str, Option("A shape of `bagu bench train`.")] = "cpu_6m"
    servers: Annotated[int, Option("Processes that keep the parameters.")] = 4
    workers: Annotated[int, Option("Processes of one thread that compute gradients.")] = 2
    rounds: Annotated[int, Option("Steps to time of each kind, in turn.")] = 6
    kills: Annotated[int, Option("Instead, kill servers so many times at random moments, and check every update.")] = 0
    fault: Annotated[
        str, Option("Of --kills: kill, pair (adjacent servers), stop (SIGSTOP, 5 s), manager, or slow (a worker).")
    ] = "kill"
    delays: Annotated[str, Option("Instead, workers with jitter at these delays, such as 0,4,8.")] = ""
    delay_steps: Annotated[int, Option("Of --delays: updates to time.")] = 60
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class SharesBench:
    speeds: Annotated[str, Option("The speed of each worker.", metavar="S,S,…")] = "1,1,1,0.5"
    micro_batches: Annotated[int, Option("Of a step; a multiple of the workers.")] = 16
    wait_ms: Annotated[float, Option("The time of a micro-batch on a worker of speed 1.")] = 100.0
    rounds: Annotated[int, Option("Steps to time of each kind, in turn.")] = 8
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class EngineBench:
    model: Annotated[str | None, Argument("A model. Default: random weights of --shape.", metavar="MODEL")] = None
    shape: Annotated[str | None, Option("cpu_8m, smollm_135m, qwen3_0_6b or llama_8b.")] = None
    requests: Annotated[int | None, Option("Number of requests. Default: 256 on a GPU, 32 on a CPU.")] = None
    inputs: Annotated[Lengths | None, Option("Range of prompt lengths, e.g. 100-1024.", parse=Lengths.parse)] = None
    outputs: Annotated[Lengths | None, Option("Range of output lengths, e.g. 100-1024.", parse=Lengths.parse)] = None
    shared_prefix: Annotated[int, SHARED_PREFIX] = 0
    passes: Annotated[
        int, Option("Time so many passes, from the first after the warm-up; 0: one, after a whole one.")
    ] = 0
    streams: Annotated[tuple[int, ...], Option("Time decoding with this many streams; repeatable.")] = ()
    input_tokens: Annotated[int, Option("With --streams: tokens of a prompt.")] = 64
    output_tokens: Annotated[int, Option("With --streams: generated tokens of a stream.")] = 128
    speculative: Annotated[
        bool, Option("Draft by prompt lookup, and time the same without drafts.", flags=("--speculative",))
    ] = False
    speculative_tokens: Annotated[int, Option("Maximum drafted tokens per sequence and step.")] = 7
    text: Annotated[str | None, Option("What streams generate: edit (repeats the prompt with edits), or new.")] = None
    adapters: Annotated[int, Option("With --streams: random LoRA adapters in one batch, and the same without.")] = 0
    adapter_rank: Annotated[int, Option("The rank of --adapters.")] = 16
    max_num_seqs: Annotated[int, Option("Maximum number of sequences that run at once.")] = 256
    prefix_caching: Annotated[bool, options.PREFIX_CACHING] = True
    quantization: Annotated[str | None, options.QUANTIZATION] = None
    kv_dtype: Annotated[str, options.KV_DTYPE] = "auto"
    invariant: Annotated[bool, Option("Use the batch-invariant mode.", flags=("--invariant",))] = False
    tp: Annotated[int, options.TENSOR_PARALLEL] = 1
    peer: Annotated[tuple[str, ...], Option("generate, generate_batch, llama.cpp, eager or a script; repeatable.")] = ()
    rounds: Annotated[int, ROUNDS] = 1


@dataclass(frozen=True, kw_only=True)
class ServeBench:
    target: Annotated[str, Argument("The URL of a server, or a model to start one for.", metavar="URL|MODEL")]
    requests: Annotated[int | None, Option("Number of requests. Default: 64, or all of the trace.")] = None
    inputs: Annotated[Lengths | None, INPUTS] = None
    outputs: Annotated[Lengths | None, OUTPUTS] = None
    shared_prefix: Annotated[int, SHARED_PREFIX] = 0
    prefix_groups: Annotated[int, Option("Number of different shared prefixes; a prompt has one of them.")] = 1
    max_concurrency: Annotated[int | None, Option("Maximum requests in flight. Default: 8.")] = None
    request_rate: Annotated[float | None, RATE] = None
    trace: Annotated[
        Path | None, Option("Arrivals and lengths from a file: Mooncake, Azure or BurstGPT, CSV or JSON lines.")
    ] = None
    trace_speed: Annotated[float, Option("With --trace: replay this many times as fast.")] = 1.0
    sweep: Annotated[
        str | None, Option("Measure several loads: 1,2,4,8 clients, or rate:0.5,1,2 requests per second.")
    ] = None
    against: Annotated[str | None, Option("Compare with this server, in turn, on the same prompts.", metavar="URL")] = (
        None
    )
    rounds: Annotated[int, Option("With --against: how many times to measure both servers.")] = 5
    ttft: Annotated[str | None, Option("Count requests whose time to first token is less.", metavar="TIME")] = None
    tpot: Annotated[str | None, Option("The same for the time per output token, e.g. 30ms.", metavar="TIME")] = None
    itl: Annotated[str | None, Option("The same for the time between tokens.", metavar="TIME")] = None
    e2el: Annotated[str | None, Option("The same for the whole request, e.g. 2s.", metavar="TIME")] = None
    goodput: Annotated[tuple[str, ...], Option("", hidden=True)] = ()
    warmups: Annotated[int, Option("Requests to send before the load, one by one; they are not counted.")] = 1
    model: Annotated[str | None, Option("Model name in the API. Default: the server's first.")] = None
    api_key: Annotated[str | None, options.API_KEY] = None
    plot: Annotated[Path | None, Option("The folder to write a plot of the latencies to.")] = None
    seed: Annotated[int, Option("Seed of the prompts and the arrival times.")] = 0
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class ProcessBench:
    plants: Annotated[tuple[str, ...], Option("Plants; repeatable. Default: all four.", flags=("--plant",))] = ()
    seeds: Annotated[int, Option("Histories per plant.")] = 30
    first_seed: Annotated[int, Option("Seed of the first history.")] = 0
    rows: Annotated[int, Option("Rows of a history.")] = 200
    noise: Annotated[float, Option("Noise of the target, as a share of its spread.")] = 0.2
    models: Annotated[
        tuple[str, ...], Option("Models besides mean, ridge and gp: trees, mlp; repeatable.", flags=("--model",))
    ] = ()
    jobs: Annotated[int, Option("Processes.")] = 2
    out: Annotated[Path | None, Option(RESULTS_HELP)] = None
    as_json: Annotated[bool, options.AS_JSON] = False


@dataclass(frozen=True, kw_only=True)
class TuneServe:
    """`ttft` and `tpot` are in milliseconds."""

    model: Annotated[str, options.MODEL]
    ttft: Annotated[float | None, Option("Limit of the time to first token, e.g. 300ms.", parse=parse_ms)] = None
    tpot: Annotated[float | None, Option("Limit of the time per output token, e.g. 30ms.", parse=parse_ms)] = None
    values: Annotated[
        tuple[str, ...],
        Option("Values of a setting, e.g. max_num_seqs=4,16; repeatable.", flags=("--try",), metavar="NAME=VALUES"),
    ] = ()
    requests: Annotated[int | None, Option("Requests of a full measurement. Default: 6 per client, 64 or more.")] = None
    inputs: Annotated[Lengths | None, INPUTS] = None
    outputs: Annotated[Lengths | None, OUTPUTS] = None
    shared_prefix: Annotated[int, SHARED_PREFIX] = 0
    max_concurrency: Annotated[int | None, Option("Clients of the closed loop. Default: 8.")] = None
    request_rate: Annotated[float | None, RATE] = None
    share: Annotated[float, Option("Time to use, as a share of measuring every combination.")] = 0.2
    seed: Annotated[int, Option("Seed of the prompts and of the search.")] = 0
    out: Annotated[Path, Option("Folder of serve.toml and trials.jsonl; the same command resumes.")] = Path("tune")
