"""`bagu bench engine`: tokens per second of the engine without a server, with peers in the same run."""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from bagu.bench.engine_peers import EAGER, PEERS, check_eager, eager_row, scripted
from bagu.bench.engine_timing import Case, Measured, measure_in_turn, measure_throughput
from bagu.bench.harness import Place, Rows, check_peers, shown, table
from bagu.bench.known_text import counts_upwards
from bagu.bench.llama_cpp_peer import LLAMA_CPP, check_llama_cpp, llama_cpp_row
from bagu.bench.options import BenchSetting
from bagu.bench.workload import Workload
from bagu.errors import ArgumentError, UnknownName
from bagu.machine.openmp import settings
from bagu.machine.timing import reset_device
from bagu.nn import Transformer, preset
from bagu.nn.init import draw, init_weights
from bagu.nn.peft import Adapter
from bagu.serve.adapters.registry import adaptable
from bagu.serve.config import EngineConfig
from bagu.serve.engine import Engine
from bagu.serve.kv.pool import size_pool
from bagu.serve.warm_up import WarmUp

Load = Callable[[], tuple[Transformer, Any, Any]]  # the model, and what this benchmark does not use
Timed = tuple[str, int | None, Measured]  # implementation, streams
PLAIN, BASE = "bagu without drafts", "bagu without adapters"
LEAST_LEN = 4096  # minimum max_model_len of the engine, as in nano-vllm's benchmark
SHAPES = (
    "cpu_8m",
    "smollm_135m",
    "qwen3_0_6b",
    "llama_8b",
)  # presets with random weights: speed does not depend on the values


def main(
    case: Case,
    config: EngineConfig,
    setting: BenchSetting,
    *,
    shape: str | None = None,
    load: Load | None = None,
    name: str | None = None,
    peers: Sequence[str] = (),
    peer_environ: Mapping[str, str] | None = None,
    rounds: int = 1,
) -> int:
    """Time bagu's engine and the peers, `rounds` times in turn; print a table and append the rows to the record.

    The model is `shape` with random weights, or the result of `load`, with `name` in the rows. `config.max_num_seqs` is
    also the padded batch size of the peer. A peer that is a script runs in `peer_environ`, by default in the
    environment of this process.

    With `config.speculative`, the same engine without drafts is timed in turn, as a peer. `case.text` is what the
    streams generate: "edit" repeats the prompt with edits, "new" repeats nothing (known_text.py); it replaces some
    weights of the shape, so it has no model of `load`.

    `case.adapters` random LoRA adapters of `config.max_adapter_rank` of all linear layers are loaded; the streams use
    them in turn. The same engine without adapters is timed in turn, as a peer.
    """
    place = Place.of(setting)
    where = place.device
    if rounds < 1:
        raise ArgumentError(f"{rounds} rounds", hint="1 or more")
    case, config = case.on(where), replace(config, max_adapters=case.adapters, seed=case.seed)
    _check(case, peers, where, loaded=load is not None, speculative=config.speculative is not None)
    make, name = _maker(shape, load, name, place, case)
    rows = Rows.of(setting, "serve")
    common = {
        "system": "engine",
        "model": name,
        **place.facts,
        "case": asdict(case),
        "engine": asdict(config),
        "openmp": settings(os.environ),
    }
    for turn in range(rounds):
        reset_device(where)
        model = make()
        common["config"] = asdict(model.config)
        rows.add(common | _row(who, m, where, s) for who, s, m in _bagu(model, config, case, turn))
        for peer in peers:
            if peer == LLAMA_CPP:
                rows.add([common | llama_cpp_row(model, case, config.quantization, peer_environ)])
                continue
            if peer == EAGER:
                rows.add([common | eager_row(model, case)])
                continue
            if peer not in PEERS:
                rows.add(common | row for row in scripted(Path(peer), peer_environ))
                continue
            reset_device(where)
            measured = _peer(peer, model, case, turn, config.max_num_seqs, where, place.dtype)
            rows.add(common | _row(peer, m, where, s) for s, m in measured)
    rows.finish(_table(f"{name}, {setting.dtype or common['dtype']}, {where}: {case.words()}", rows.all))
    return 0


def _check(case: Case, peers: Sequence[str], device: torch.device, *, loaded: bool, speculative: bool) -> None:
    if speculative and (case.adapters or not case.streams):
        raise ArgumentError(
            "--speculative with --adapters, or without --streams", hint="add --streams 1, and leave out --adapters"
        )
    if case.text is not None and loaded:
        raise ArgumentError("--text with a model", hint="known text needs weights of its own: use --shape")
    check_peers(peers, [*PEERS, LLAMA_CPP, EAGER])
    if EAGER in peers:
        check_eager(case, device)
    if LLAMA_CPP in peers:
        check_llama_cpp(case, device)
    if case.streams and any(p in PEERS for p in peers):
        raise ArgumentError("a transformers peer with --streams", hint="it has no separate decode rate: leave one out")


def shape_on(shape: str | None, place: Place) -> str:
    """The name of a shape, or the default on this device."""
    name = shape or ("qwen3_0_6b" if place.on_gpu else "cpu_8m")
    UnknownName.check("shape", name, SHAPES)
    return name


def random_model(shape: str | None, place: Place, **changes: Any) -> tuple[Transformer, str]:
    """A shape with random weights, and its name; `changes` are fields of its configuration."""
    name = shape_on(shape, place)
    config = replace(preset(name), **changes)
    return init_weights(Transformer(config, device=place.device, dtype=place.dtype), 0), name


def _maker(
    shape: str | None, load: Load | None, name: str | None, place: Place, case: Case
) -> tuple[Callable[[], Transformer], str]:
    """A function that creates the model, and its name in the rows."""
    if load is not None:
        loaded = load()[0].to(device=place.device, dtype=place.dtype)
        return lambda: loaded, name or "loaded"
    if case.text is not None:  # a head of its own
        return lambda: counts_upwards(random_model(shape, place, tie_embeddings=False)[0]), shape_on(shape, place)
    return lambda: random_model(shape, place)[0], shape_on(shape, place)


def _bagu(model: Transformer, config: EngineConfig, case: Case, turn: int) -> Iterator[Timed]:
    if case.streams:
        longest = max(case.prompt + case.new + 1, min(LEAST_LEN, model.config.max_len))
        names, configs = ["bagu"], [replace(config, max_model_len=longest)]
        if config.speculative is not None or config.adapter_slots:  # two pools in the memory of one
            share = size_pool(model, configs[0]).num_blocks // 2
            plain = replace(configs[0], speculative=None, max_adapters=0)
            configs = [replace(c, num_blocks=share) for c in (configs[0], plain)]
            names.append(BASE if config.adapter_slots else PLAIN)
        with ExitStack() as stack:
            engines = [stack.enter_context(closing(Engine(model, None, c))) for c in configs]
            for number in range(config.adapter_slots):
                adapter = random_adapter(model, config.max_adapter_rank, number)
                engines[0].load_adapter(f"adapter-{number}", "random weights", adapter)
            for streams, measured in measure_in_turn(engines, case):
                yield from ((name, streams, m) for name, m in zip(names, measured, strict=True))
        return
    workload, warmup = _workloads(case, model.config.vocab_size, turn, full_warmup=model.embedding.weight.is_cuda)
    longest = max(workload.longest, warmup.longest, min(LEAST_LEN, model.config.max_len))
    with closing(Engine(model, None, replace(config, max_model_len=longest))) as engine:
        if not case.passes:
            yield "bagu", None, measure_throughput(engine, [warmup, workload])[-1]
            return
        began = time.perf_counter()
        WarmUp(engine).run(config.warm_up)
        facts = {"warm_up_s": time.perf_counter() - began}
        works = [case.workload(model.config.vocab_size, turn * case.passes + number) for number in range(case.passes)]
        for number, one in enumerate(measure_throughput(engine, works), 1):
            yield f"bagu, pass {number}", None, replace(one, facts=one.facts | facts)


def random_adapter(model: Transformer, rank: int, seed: int) -> Adapter:
    """An adapter of every linear layer. Its values are small: the speed does not depend on them."""
    pairs = {}
    for name, m in adaptable(model).items():
        a, b = (draw(s, f"{name}.{seed}", seed) for s in ((rank, m.in_features), (m.out_features, rank)))
        pairs[name] = 0.01 * a, 0.01 * b
    return Adapter(rank=rank, scale=1.0, pairs=pairs)


def _peer(
    peer: str, model: Transformer, case: Case, turn: int, batch: int, device: torch.device, dtype: torch.dtype
) -> Iterator[tuple[int | None, Measured]]:
    workload, warmup = _workloads(case, model.config.vocab_size, turn, full_warmup=False)
    with PEERS[peer](model.config, device, dtype, batch) as run:
        run(warmup)
        yield None, run(workload)


def _workloads(case: Case, vocab_size: int, turn: int, *, full_warmup: bool) -> tuple[Workload, Workload]:
    """The timed workload, and a warmup with other tokens: a few requests, or with `full_warmup` an equally large one,
    if the first use of each shape is slow (CUDA graphs)."""
    warmup = case.workload(vocab_size, 1000 + turn)
    return case.workload(vocab_size, turn), warmup if full_warmup else warmup.head(4)


def _row(implementation: str, measured: Measured, device: torch.device, streams: int | None) -> dict[str, Any]:
    seconds, made = measured.seconds, measured.output_tokens
    return {
        "implementation": implementation,
        "streams": streams,
        "seconds": seconds,
        "output_tokens": made,
        "input_tokens": measured.input_tokens,
        "tokens_per_s": made / seconds,
        "total_tokens_per_s": (made + measured.input_tokens) / seconds,
        "peak_bytes": torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None,
        **measured.facts,
    }


def _table(title: str, rows: Sequence[dict[str, Any]]) -> Table:
    heads = (
        "implementation", "streams", "output tokens/s", "all tokens/s", "prompt tokens/s", "steps", "step ms",
        "overhead ms", "prefix hits", "drafts accepted", "against best peer", "prompt against best peer",
    )  # fmt: skip
    lines = []
    for row in rows:
        others = [r for r in rows if r["implementation"] != "bagu" and r["streams"] == row["streams"]]
        peers = [r["tokens_per_s"] for r in others]
        prompts = [r["prompt_tokens_per_s"] for r in others if r.get("prompt_tokens_per_s") is not None]
        hits, asked = row.get("prefix_hits"), row.get("prefix_queries")
        total = None if row["streams"] else row.get("total_tokens_per_s")
        lines.append((
            row["implementation"], shown(row["streams"], "{}"), f"{row['tokens_per_s']:,.0f}",
            shown(total, "{:,.0f}"), shown(row.get("prompt_tokens_per_s"), "{:,.0f}"),
            shown(row.get("steps"), "{:,}"), _ms(row.get("step_s")),
            _ms(row.get("overhead_s")), f"{100 * hits / asked:.0f} %" if hits is not None and asked else "–",
            f"{100 * row['accepted_tokens'] / row['draft_tokens']:.0f} %" if row.get("draft_tokens") else "–",
            f"{row['tokens_per_s'] / max(peers):.2f}×" if peers else "–",
            f"{row['prompt_tokens_per_s'] / max(prompts):.2f}×" if prompts and row.get("prompt_tokens_per_s") else "–",
        ))  # fmt: skip
    return table(title, heads, lines)


def _ms(seconds: float | None) -> str:
    return shown(seconds and 1e3 * seconds, "{:.2f}")
