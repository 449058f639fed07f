"""The last stage of the demo: the model it trained, served, and asked one question as any client would."""

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

__all__ = ["ask", "can_serve", "served", "stay"]

START_S = 120.0  # a loaded machine takes its time to import torch twice


def can_serve() -> bool:
    """Whether the libraries of `bagu[serve]` are here."""
    return all(importlib.util.find_spec(name) is not None for name in ("fastapi", "uvicorn"))


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The address of a server of `model`, on a free port of this machine, that ends with the block."""
    command = [sys.executable, "-m", "bagu", "serve", str(model), "--port", "0", "--shutdown-timeout", "5"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        yield _ready(process)
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _ready(process: subprocess.Popen[str]) -> str:
    """Wait until the server says where it is, and is warm."""
    out: IO[str] | None = process.stdout
    assert out is not None
    said: list[str] = []
    address = None
    for line in out:
        said.append(line)
        if found := re.search(r"http://\S+?:\d+", line):
            address = found[0]
            break
    if address is None:
        raise BaguError(f"the server did not start: {''.join(said).strip()[-400:]}")
    began = time.monotonic()
    while time.monotonic() - began < START_S:
        if process.poll() is not None:
            raise BaguError(f"the server ended with status {process.returncode}: {out.read().strip()[-400:]}")
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return address
        except (urllib.error.URLError, OSError):
            time.sleep(0.1)  # not warm yet: it says 503
    raise BaguError(f"the server at {address} was not ready after {START_S:.0f} s")


def ask(address: str, question: str, max_tokens: int) -> str:
    """One question through the official client where it is installed, else as plain HTTP: the same bytes."""
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


def stay(address: str, console: Console) -> None:
    """Leave the page up until Ctrl-C, where somebody is there to press it."""
    console.print(f"Talk to it: {address}   (Ctrl-C ends)", highlight=False, soft_wrap=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("served no more", highlight=False)
