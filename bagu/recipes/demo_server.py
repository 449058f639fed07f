"""Run `bagu serve` in a child process, as the demo and the benchmark need it, and ask it one question over HTTP."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rich.console import Console

from bagu.errors import BaguError

__all__ = ["ask", "can_serve", "running_server", "wait_for_interrupt"]

START_S = 120.0  # the server and the engine process both import torch, which is slow on a loaded machine


def can_serve() -> bool:
    """Whether the dependencies of `bagu[serve]` are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("fastapi", "uvicorn"))


@contextmanager
def running_server(model: Path | str, *options: str) -> Iterator[str]:
    """Start `bagu serve` for `model` with these options on a free local port, yield its URL, and stop it when the block
    ends."""
    command = [sys.executable, "-m", "bagu", "serve", str(model), "--port", "0", "--shutdown-timeout", "5", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _wait_until_ready(process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    """Wait until the server has printed its URL and `/health` returns 200; return the URL."""
    out: IO[str] | None = process.stdout
    assert out is not None
    lines: list[str] = []
    address = None
    for line in out:
        lines.append(line)
        if found := re.search(r"http://\S+?:\d+", line):
            address = found[0]
            break
    if address is None:
        raise BaguError(f"the server did not start: {''.join(lines).strip()[-400:]}")
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise BaguError(f"the server ended with status {process.returncode}: {out.read().strip()[-400:]}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)  # 503: the model is still loading
    raise BaguError(f"the server at {address} was not ready after {START_S:.0f} s")


def ask(address: str, question: str, max_tokens: int) -> str:
    """Ask one question with the `openai` client if it is installed, otherwise with urllib; the request is the same."""
    messages = [{"role": "user", "content": question}]
    if importlib.util.find_spec("openai") is not None:
        import openai

        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=name, messages=messages, max_tokens=max_tokens, temperature=0.6, seed=0  # type: ignore[arg-type]
        )  # fmt: skip
        return answer.choices[0].message.content or ""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0.6, "seed": 0}
    request = urllib.request.Request(
        f"{address}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as response:
        return str(json.load(response)["choices"][0]["message"]["content"])


def wait_for_interrupt(address: str, console: Console) -> None:
    """Print the address of the chat page and block until Ctrl-C."""
    console.print(f"Chat with the model at {address}   (Ctrl-C to stop)", highlight=False, soft_wrap=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("server stopped", highlight=False)
