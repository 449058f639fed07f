"""Run `bagu serve` in a child process, for the demo, the benchmark and the tuner, and ask it one question over HTTP."""

import importlib.util
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console

from bagu.errors import BaguError
from bagu.serve.api_client import ApiClient

START_S = 600.0  # a large model on a slow disk; a server that fails to start ends, which is reported at once
STOP_S = 20.0  # its shutdown timeout of 5 s, and the end of its connections and of the engine process


def can_serve() -> bool:
    """Whether the dependencies of `bagu[serve]` are installed."""
    return all(importlib.util.find_spec(name) is not None for name in ("fastapi", "uvicorn"))


@contextmanager
def running_server(model: Path | str, *options: str) -> Iterator[str]:
    """Start `bagu serve` for `model` with these options on a free local port, yield its URL, and stop it when the block
    ends, also by SIGTERM."""
    command = [sys.executable, "-m", "bagu", "serve", str(model), "--port", "0", "--shutdown-timeout", "5", *options]
    with tempfile.TemporaryDirectory() as folder, _exit_on_sigterm() as may_exit:
        log = Path(folder) / "output"  # a file: a pipe that nobody reads would fill, and block the server
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
        try:
            may_exit()
            yield _wait_until_ready(process, log)
        finally:
            process.terminate()
            try:
                process.wait(timeout=STOP_S)
            except subprocess.TimeoutExpired:
                pass  # killed below
            finally:  # also if a second signal ends the wait
                process.kill()
                process.wait()


@contextmanager
def _exit_on_sigterm() -> Iterator[Callable[[], None]]:
    """Raise SystemExit in the main thread on SIGTERM, but not before the function that this yields was called: an
    exception inside Popen would lose the process that it started. The default action of SIGTERM ends the process
    without `finally` blocks."""
    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield lambda: None
        return
    ready, came = False, 0

    def leave(number: int, _frame: object) -> None:
        nonlocal came
        came = number
        if ready:
            raise SystemExit(128 + number)  # the status that shells report for the signal

    def may_exit() -> None:
        nonlocal ready
        ready = True
        if came:
            raise SystemExit(128 + came)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield may_exit
    finally:
        signal.signal(signal.SIGTERM, before)


def _wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    """Wait until the server has printed its URL and `/health` returns 200; return the URL."""
    end = time.monotonic() + START_S
    while time.monotonic() < end:
        status = process.poll()  # before its output is read: what an ended process wrote is complete
        said = log.read_text(errors="replace")
        if status is not None:
            raise BaguError(f"the server ended with status {status}: {said.strip()[-400:]}")
        found = re.search(r"http://\S+?:\d+(?=\s)", said)
        try:
            if found:
                with urllib.request.urlopen(f"{found[0]}/health", timeout=5):
                    return found[0]
        except (urllib.error.URLError, OSError):
            pass  # 503: the model is still loading
        time.sleep(0.1)
    raise BaguError(f"the server was not ready after {START_S:.0f} s: {said.strip()[-400:]}")


def ask(address: str, question: str, max_tokens: int) -> str:
    """Ask one question with the `openai` client if it is installed, otherwise with ours; the request is the same."""
    messages = [{"role": "user", "content": question}]
    if importlib.util.find_spec("openai") is not None:
        import openai

        client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")
        name = client.models.list().data[0].id
        answer = client.chat.completions.create(
            model=name,
            messages=messages,  # type: ignore[arg-type]
            max_tokens=max_tokens,
            temperature=0.6,
            seed=0,
        )
        return answer.choices[0].message.content or ""
    body = {"messages": messages, "max_tokens": max_tokens, "temperature": 0.6, "seed": 0}
    answer = ApiClient(address, timeout_s=120).call("/v1/chat/completions", body)
    return str(answer["choices"][0]["message"]["content"])


def wait_for_interrupt(address: str, console: Console) -> None:
    """Print the address of the chat page and block until Ctrl-C."""
    console.print(f"Chat with the model at {address}   (Ctrl-C to stop)", highlight=False, soft_wrap=True)
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        console.print("server stopped", highlight=False)
