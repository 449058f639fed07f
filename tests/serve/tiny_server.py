"""A real server with a tiny random model, for tests: a real socket, and a real engine process.

>>> python tests/serve/tiny_server.py --max-num-seqs 4
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bagu.errors import BaguError
from bagu.serve.config import EngineConfig
from bagu.serve.http import server
from bagu.serve.http.options import ServerOptions
from bagu.serve.replicas.make import Replicas
from bagu.serve.replicas.options import ReplicaOptions

if TYPE_CHECKING:
    import openai

MODEL = "tiny"
KEY = "sk-test"  # of the fixture `tiny`
ORIGIN = "http://localhost:3000"  # allowed by it
PATIENCE_S = 180.0  # to wait for what must come: starting an engine takes 5 s, on a busy machine a minute
MAX_LEN = 4096  # long, so that tests can act while a stream runs


def load(*, kind: str = "generator", broken: bool = False, template: str | None = None) -> tuple[Any, Any, Any]:
    """Called in the engine process; the server's process does not need these imports (1.4 s)."""
    if broken:
        raise BaguError("the weights are torn", hint="download them again")
    import torch

    from bagu.data.chat import ChatEncoder
    from bagu.data.chat_template import DEFAULT_TEMPLATE
    from bagu.data.tokenizer import SPECIAL_TOKENS, BpeTokenizer
    from bagu.nn import ModelConfig, Transformer, init_weights

    torch.set_num_threads(1)
    if kind == "vlm":
        from small_vlm import loaded

        return loaded()
    corpus = ["def f(x):\n    return x\n", "hello world, 你好，世界 🙂 "] * 4
    special = (*SPECIAL_TOKENS, *(("[TOOL_CALLS]",) if template and "[TOOL_CALLS]" in template else ()))
    tokenizer = BpeTokenizer.train(
        corpus, vocab_size=320, special_tokens=special, chat_template=template or DEFAULT_TEMPLATE
    )
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        intermediate_size=48, max_len=MAX_LEN, causal=kind != "encoder", score_head=kind == "reward",
    )  # fmt: skip
    model = init_weights(Transformer(config, dtype=torch.float32), 0)
    if model.score is not None:  # it starts at 0
        torch.nn.init.normal_(model.score.weight, generator=torch.Generator().manual_seed(0))
    return model, tokenizer, ChatEncoder(tokenizer)


class Running:
    """A running server: its URL, its process, and its output."""

    def __init__(self, process: subprocess.Popen[str], url: str, log: Path) -> None:
        import httpx  # here, since the server's and the engine's process import this file too (0.25 s of CPU time each)

        self.process, self.url, self.log = process, url, log
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, trust_env=False, verify=no_certificates())

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    def get(self, path: str) -> Any:
        """The JSON at `path`; raises httpx.HTTPError on an error status."""
        return self.http.get(path).raise_for_status().json()

    def engine_pid(self) -> int:
        """The engine process."""
        return self.engine_pids()[0]

    def engine_pids(self) -> list[int]:
        """The engine processes, in the order of their start: the children that are not the resource tracker."""
        from tests import forked  # here, since scripts import this file too, without the tests' folder in their path

        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        threads = [
            c for t in Path(f"/proc/{self.process.pid}/task").iterdir() for c in (t / "children").read_text().split()
        ]
        pids = sorted(map(int, {*children, *threads}))
        engines = [pid for pid in pids if forked.is_spawned(pid)]
        assert engines, "the server has no engine process"
        return engines

    def raw(self, data: bytes) -> socket.socket:
        """Open a connection and send these bytes."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)
        connection.sendall(data)
        return connection


@contextmanager
def running_server(
    log: Path, *flags: str, ready: bool = True, script: str = __file__, fork: bool = True
) -> Iterator[Running]:
    """Start a server process, and kill it at the end. With `ready`, wait until it is warmed up. Without `fork` it has
    the memory and the imports of a server (tests/forked.py)."""
    from tests import forked

    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    with log.open("w") as errors, forked.starts() if fork else nullcontext():
        process = subprocess.Popen(
            [sys.executable, script, *flags], stdout=subprocess.PIPE, stderr=errors, text=True, env=environment
        )
    try:
        assert process.stdout is not None
        port = re.search(r"loading .* \(port (\d+)\)", process.stdout.readline())
        assert port, log.read_text()
        running = Running(process, f"http://127.0.0.1:{port[1]}", log)
        if ready:
            line = process.stdout.readline()
            assert f"{running.url} is ready" in line, f"{line}\n{log.read_text()}"
            assert healthy(running), "the URL is printed when requests are answered"
        yield running
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
        process.wait()


def openai_client(url: str, key: str = "none", timeout: float = PATIENCE_S) -> openai.OpenAI:
    """The official client of the server at `url`."""
    import openai

    http = openai.DefaultHttpxClient(verify=no_certificates())
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=timeout, http_client=http)


def no_certificates() -> ssl.SSLContext:
    """For clients of http:// only: reading the certificates takes 40 ms of CPU time for each client."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def healthy(running: Running) -> bool:
    import httpx

    assert running.process.poll() is None, running.log.read_text()
    try:
        return bool(running.get("/health"))
    except httpx.HTTPError:
        return False


def gone(pid: int) -> bool:
    """Whether the process has ended, or is a zombie."""
    try:
        return "State:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True


def eventually(condition: Callable[[], Any], what: str, timeout: float = PATIENCE_S) -> Any:
    """Wait until `condition` is true; fails with its name after `timeout` seconds."""
    began = time.monotonic()
    while (waited := time.monotonic() - began) < timeout:
        if result := condition():
            return result
        time.sleep(
            min(0.01 + 0.02 * waited, 0.1)
        )  # a question costs both processes 2 ms: ask less often as time goes by
    raise AssertionError(f"not within {timeout} s: {what}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--max-queue", type=int, default=64)
    parser.add_argument("--api-key")
    parser.add_argument("--api-keys", type=Path)
    parser.add_argument("--open-metrics", action="store_true")
    parser.add_argument("--allowed-origins", nargs="*", default=())
    parser.add_argument("--kind", choices=("generator", "encoder", "reward", "vlm"), default="generator")
    parser.add_argument("--embeddings", action="store_true")
    parser.add_argument("--template", type=Path)
    parser.add_argument("--broken", action="store_true")
    parser.add_argument("--stall-timeout", type=float, default=60.0)
    parser.add_argument("--shutdown-timeout", type=float, default=20.0)
    parser.add_argument("--request-timeout", type=float, default=20.0)
    parser.add_argument("--adapter", nargs=2, action="append", default=[], metavar=("NAME", "PATH"))
    parser.add_argument("--max-adapters", type=int, default=0)
    parser.add_argument("--adapter-root", type=Path)
    parser.add_argument("--speculative")
    parser.add_argument("--log-format", default="text")
    parser.add_argument("--otlp-endpoint")
    parser.add_argument("--index", action="append", default=[])
    parser.add_argument("--files", type=Path)
    parser.add_argument("--replicas")
    parser.add_argument("--router", default="finish")
    parser.add_argument("--min-replicas", type=int)
    parser.add_argument("--num-blocks", type=int, default=1024)
    given = parser.parse_args()
    config = EngineConfig(
        max_num_seqs=given.max_num_seqs, num_blocks=given.num_blocks, max_num_batched_tokens=512,
        max_model_len=given.max_model_len, tp=given.tp, adapters=tuple(map(tuple, given.adapter)),
        max_adapters=given.max_adapters, max_adapter_rank=4, adapter_root=given.adapter_root,
        embeddings=given.embeddings, speculative=given.speculative, speculative_always=True,
    )  # fmt: skip
    template = given.template.read_text() if given.template else None
    loading = partial(load, kind=given.kind, broken=given.broken, template=template)
    asked = ReplicaOptions(replicas=given.replicas, router=given.router, min_replicas=given.min_replicas)
    plan = asked.replication(cores=2, gpus=0)
    server.main(
        MODEL,
        load=loading,
        config=config,
        replicas=None if plan is None else Replicas(
            plan.specs(config, sorted(os.sched_getaffinity(0)), lambda device: loading), plan.least, plan.router
        ),
        options=ServerOptions(
            port=0, api_key=given.api_key, api_keys=given.api_keys, open_metrics=given.open_metrics,
            max_queue=given.max_queue, allowed_origins=tuple(given.allowed_origins),
            stall_timeout=given.stall_timeout, shutdown_timeout=given.shutdown_timeout,
            request_timeout=given.request_timeout, log_format=given.log_format, otlp_endpoint=given.otlp_endpoint,
            index=tuple(given.index), files=given.files,
        ),
    )  # fmt: skip
