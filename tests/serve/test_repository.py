"""A model repository with real processes and the openai client: swap, A/B, automatic return, faults."""

from __future__ import annotations

import json
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import openai
import pytest
import tiny_repository
from tiny_server import KEY, Running, eventually, openai_client, running_server

from bagu.cli import main
from tests.forked import is_spawned

HEADERS = {"Authorization": f"Bearer {KEY}"}
PATIENCE = 300.0  # seconds; loading takes 5 s of CPU time, and the machine may be busy
ASK: dict[str, Any] = {"model": "chat", "prompt": "hello world", "max_tokens": 24, "extra_body": {"ignore_eos": True}}
PAUSE_S = 0.05  # between two requests of a client
FAST = "load_niceness = 0\nwarmup_prompts = ['hello', '你好']\n"  # tests do not wait for a low priority


def settings(folder: Path, text: str) -> None:
    """Write the model's file; the server reads it at the next operation."""
    (folder / "chat" / "model.toml").write_text(FAST + text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("repository")
    for version in "1234":
        (folder / "chat" / version).mkdir(parents=True)
    (folder / "chat" / "3" / "broken_weights").touch()
    (folder / "chat" / "4" / "disk_full").touch()
    settings(folder, "weights = {1 = 1}")
    return folder


@pytest.fixture(scope="module")
def server(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    keys = folder / "keys.toml"
    keys.write_text(
        f"[[key]]\nname = 'operator'\nkey = '{KEY}'\nadmin = true\n"
        "[[key]]\nname = 'guest'\nkey = 'sk-guest'\nrequests_per_minute = 2\n"
        "[[key]]\nname = 'other'\nkey = 'sk-other'\nmodels = ['other']\n"
        "[[key]]\nname = 'poor'\nkey = 'sk-poor'\ntokens_per_day = 5\n"
    )
    log = tmp_path_factory.mktemp("log") / "stderr"
    script = tiny_repository.__file__
    with running_server(log, str(folder), "--api-keys", str(keys), script=script) as running:
        yield running


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai_client(server.url, KEY, PATIENCE) as client:
        yield client


def change(server: Running, verb: str, body: Any, status: int = 200) -> Any:
    path = f"/v1/repository/models/chat/{verb}"
    answer = server.http.post(path, json=body, headers=HEADERS, timeout=PATIENCE)
    assert answer.status_code == status, answer.text
    return answer.json()


def described(server: Running) -> Any:
    (model,) = server.http.get("/v1/repository", headers=HEADERS).raise_for_status().json()["data"]
    return model


def states(server: Running) -> dict[int, str]:
    return {version["version"]: version["state"] for version in described(server)["versions"]}


def restore(server: Running, folder: Path) -> None:
    """Version 1 serves alone, with the settings of the start."""
    settings(folder, "weights = {1 = 1}")
    change(server, "promote", {"version": 1})
    alone = {1: "ready"}
    eventually(lambda: {n: s for n, s in states(server).items() if s not in ("unloaded", "failed")} == alone, "alone")


def idle(server: Running, model: str) -> bool:
    stats = server.http.get(f"/engine?model={model}", headers=HEADERS).raise_for_status().json()
    return bool(stats["blocks"]["used"] == stats["running"] == stats["waiting"] == 0)


@contextmanager
def load(client: openai.OpenAI, clients: int = 3, *, streams: bool = True) -> Iterator[list[str]]:
    """Clients that send one request after the other, with a pause that leaves half of the machine to a version that
    loads; with `streams` every second one streams. Yields the names of the models that answered; raises the first
    failure at the end."""
    stop, answered = threading.Event(), list[str]()

    def run(number: int) -> None:
        while not stop.wait(PAUSE_S):
            if streams and number % 2:
                chunks = list(client.completions.create(stream=True, **ASK))
                assert chunks[-1].choices[0].finish_reason == "length"
                answered.append(chunks[-1].model)
            else:
                answer = client.completions.create(**ASK)
                assert answer.usage is not None and answer.usage.completion_tokens == 24
                answered.append(answer.model)

    with ThreadPoolExecutor(clients) as threads:
        futures = [threads.submit(run, number) for number in range(clients)]
        try:
            eventually(lambda: answered or any(f.done() for f in futures), "the first answer")
            yield answered
        finally:
            stop.set()
        for future in futures:
            future.result()


def test_a_swap_and_the_return_under_load_lose_no_request(client: openai.OpenAI, server: Running, folder: Path) -> None:
    """1,000 more clients disconnect during the swap."""
    body = json.dumps({"model": "chat", "prompt": "hello", "max_tokens": 3000, "stream": True, "ignore_eos": True})
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
    sent = f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()
    with load(client) as answered, ThreadPoolExecutor(1) as thread:
        promoted = thread.submit(change, server, "promote", {"version": 2})
        eventually(lambda: states(server)[2] != "unloaded", "the new version loads")
        for _ in range(1000):
            server.raw(sent).close()
        result = promoted.result()
        assert {v["version"]: v["weight"] for v in result["versions"]} == {1: 0, 2: 1, 3: 0, 4: 0}
        before = len(answered)
        eventually(lambda: "chat@2" in answered[before:], "the new version answers")
        eventually(lambda: states(server) == {1: "unloaded", 2: "ready", 3: "unloaded", 4: "unloaded"}, "1 has ended")
        assert set(answered) == {"chat@1", "chat@2"}
        change(server, "promote", {"version": 1})
        before = len(answered)
        eventually(lambda: "chat@1" in answered[before:], "the old version answers again")
    eventually(lambda: states(server)[2] == "unloaded", "2 has ended")
    eventually(lambda: idle(server, "chat@1"), "no block is used")
    assert described(server)["swaps"] >= 2


@pytest.mark.parametrize("version, why", [(3, "not finite"), (4, "No space left on device"), (9, "no version 9")])
def test_a_version_that_does_not_start_leaves_the_old_one(
    client: openai.OpenAI, server: Running, version: int, why: str
) -> None:
    """Its warm-up fails, the disk fills while it loads, or it does not exist."""
    before = states(server)
    error = change(server, "promote", {"version": version}, 404 if version == 9 else 409)["error"]
    assert why in error["message"]
    if version != 9:
        found = next(v for v in described(server)["versions"] if v["version"] == version)
        assert found["state"] == "failed" and why in found["reason"]
    assert states(server) == {**before, **({version: "failed"} if version != 9 else {})}
    assert client.completions.create(**ASK).model == "chat@1"


def test_a_wrong_change_is_refused(client: openai.OpenAI, server: Running, folder: Path) -> None:
    before = described(server)
    assert "sum to zero" in change(server, "weights", {"weights": {"1": 0, "2": 0}}, 400)["error"]["message"]
    assert change(server, "weights", {"weights": {"1": -1}}, 400)
    assert change(server, "promote", {"version": "two"}, 400)["error"]["param"] == "version"
    assert change(server, "promote", {"version": 2, "weight": 0.1}, 400)["error"]["param"] == "weight"
    settings(folder, "memory_share = 0.8\nweights = {1 = 1}")
    missing = change(server, "load", {"version": 2}, 409)["error"]
    assert missing["code"] == "insufficient_memory"
    assert "chat@2 needs 80 % of the memory (8.00 GB), and 55 %" in missing["message"]  # 1 has 0.9 / 2
    assert "25 % of the memory (2.50 GB) is missing" in missing["message"]
    settings(folder, "warmup_promts = []")
    said = change(server, "load", {"version": 2}, 400)["error"]["message"]
    assert "model.toml" in said and "warmup_prompts" in said
    settings(folder, "weights = {1 = 1}")
    with pytest.raises(openai.NotFoundError, match="this server has: chat"):
        client.completions.create(**{**ASK, "model": "chta"})
    assert described(server) == before


@pytest.mark.slow  # 13 s: two versions and a restart
def test_traffic_is_split_kept_by_user_and_returns_when_an_engine_dies(
    client: openai.OpenAI, server: Running, folder: Path
) -> None:
    before = set(children(server))
    settings(folder, "return_when = {error_percent = 5}\nshadow = {version = 2, share = 1}")
    change(server, "weights", {"weights": {"1": 1, "2": 1}})
    assert Counter(client.completions.create(**ASK).model for _ in range(8)) == {"chat@1": 4, "chat@2": 4}
    of_user = [{client.completions.create(user=f"u{i}", **ASK).model for _ in range(3)} for i in range(8)]
    assert all(len(names) == 1 for names in of_user) and set.union(*of_user) == {"chat@1", "chat@2"}
    for name in ("chat@2", "chat:2"):
        assert client.completions.create(**{**ASK, "model": name}).model == "chat@2"
    assert [model.id for model in client.models.list()] == ["chat", "chat@1", "chat@2"]
    copies = r'bagu:shadow_requests_total\{model_name="chat",result="ok"\} [1-9]'
    eventually(lambda: re.search(copies, server.http.get("/metrics", headers=HEADERS).text), "copies were answered")
    assert states(server)[2] == "ready" and described(server)["versions"][1]["in_trial"]

    (engine,) = set(children(server)) - before
    with load(client, 2, streams=False) as answered:
        eventually(lambda: {"chat@1", "chat@2"} <= set(answered), "both answer")
        os.kill(engine, signal.SIGKILL)
        eventually(lambda: described(server)["returns"] == 1, "the traffic returns")
        count = len(answered)
        eventually(lambda: len(answered) > count + 4, "more answers")
        assert set(answered[count + 2 :]) == {"chat@1"}  # the two that ran may be of the other version
    assert "version 2: it is restarting" in described(server)["last_return"]
    text = server.http.get("/metrics", headers=HEADERS).text
    assert 'bagu:repository_returns_total{model_name="chat"} 1' in text
    assert 'bagu:repository_weight{model_name="chat",version="2"} 0.0' in text
    assert re.search(
        r'vllm:request_success_total\{model_name="chat",version="1",finished_reason="length"\} [1-9]', text
    )
    assert text.count("# TYPE vllm:request_success_total") == 1
    answers = (
        r'http_requests_total\{handler="/v1/completions",method="POST",status="200",model_name="chat",version="%d"\} '
    )
    assert all(re.search(answers % version, text) for version in (1, 2))
    assert "the traffic returns to version 1" in server.log.read_text()
    eventually(lambda: idle(server, "chat@1"), "no block is used")
    restore(server, folder)


@pytest.mark.slow
def test_the_version_before_can_be_promoted_again_during_the_trial(
    client: openai.OpenAI, server: Running, folder: Path
) -> None:
    settings(folder, "return_when = {error_percent = 5}")
    change(server, "promote", {"version": 2})
    assert states(server)[1] == "ready"  # kept, in case the traffic returns
    change(server, "promote", {"version": 1})
    for _ in range(20):
        assert client.completions.create(**ASK).model == "chat@1"
    assert states(server)[1] == states(server)[2] == "ready"
    restore(server, folder)


def children(server: Running) -> list[int]:
    """The engine processes of the server."""
    tasks = Path(f"/proc/{server.process.pid}/task").iterdir()
    pids = {int(pid) for task in tasks for pid in (task / "children").read_text().split()}
    return [pid for pid in pids if is_spawned(pid)]


@pytest.mark.slow
def test_a_version_is_replaced_where_memory_is_for_one_only(
    client: openai.OpenAI, server: Running, folder: Path
) -> None:
    """Requests wait while the process of the old version ends and that of the new one starts. If the new one does not
    start, the old one is loaded again."""
    settings(folder, 'memory_share = 0.8\nswap = "replace"')
    with load(client, 2) as answered:
        assert "No space left" in change(server, "promote", {"version": 4}, 409)["error"]["message"]
        assert states(server)[1] == "ready"
        change(server, "promote", {"version": 2})
        before = len(answered)
        eventually(lambda: "chat@2" in answered[before:], "the new version answers")
    assert states(server)[1] == "unloaded"
    assert len(children(server)) == 1
    change(server, "promote", {"version": 1})
    restore(server, folder)


def test_keys_limit_requests_tokens_models_and_changes(server: Running) -> None:
    def status(key: str, path: str = "/v1/completions", body: Any = None) -> tuple[int, str]:
        ask = {"model": "chat", "prompt": "hello", "max_tokens": 8, "ignore_eos": True}
        answer = server.http.post(path, json=body or ask, headers={"Authorization": f"Bearer {key}"})
        return answer.status_code, answer.headers.get("retry-after", "")

    assert [status("sk-guest")[0] for _ in range(3)] == [200, 200, 429]
    assert 1 <= int(status("sk-guest")[1]) <= 30
    assert status("sk-poor")[0] == 200  # 9 tokens of 5
    code, wait = status("sk-poor")
    assert code == 429 and 1 <= int(wait) <= 86400
    assert status("sk-other")[0] == 403 and status("sk-nobody")[0] == 401
    assert status("sk-guest", "/v1/repository/models/chat/unload", {"version": 1})[0] == 403
    other = {"Authorization": "Bearer sk-other"}
    assert server.http.get("/v1/models", headers=other).json()["data"] == []
    names = ("chat", "chat@1", "chat:1", "nothing")
    assert [server.http.get(f"/v1/models/{n}", headers=other).status_code for n in names] == [
        403
    ] * 4  # also for a model that does not exist
    assert all(server.http.get(f"/v1/models/{n}", headers=HEADERS).status_code == 200 for n in names[:3])
    text = server.http.get("/metrics", headers=HEADERS).text
    assert 'bagu:key_refusals_total{key="poor",limit="tokens_per_day"} 1' in text and "sk-poor" not in text


def test_the_routes_are_documented(server: Running) -> None:
    paths = server.get("/openapi.json")["paths"]
    assert {"/v1/repository", "/v1/repository/models/{name}/promote", "/v1/chat/completions"} <= paths.keys()
    for path, item in paths.items():
        for method, operation in item.items():
            answer = server.http.request(method, path.replace("{name}", "chat"), headers=HEADERS)
            assert str(answer.status_code) in operation["responses"], (path, answer.text)


@pytest.mark.slow
def test_sigterm_during_a_swap_ends_everything(tmp_path: Path) -> None:
    """With `bagu serve` and saved models. A running stream ends, the promotion gets 503, and no process is left."""
    from tiny_server import load as tiny_model

    from bagu.recipes.models import save_model

    model, tokenizer, _ = tiny_model()
    for version in "12":
        save_model(model, tokenizer, tmp_path / "repo" / "chat" / version)
    (tmp_path / "repo" / "chat" / "model.toml").write_text("weights = {1 = 1}\nload_niceness = 19\n")
    script = tmp_path / "serve.py"
    script.write_text(f"import sys\nfrom bagu.cli import main\nsys.argv = ['bagu', 'serve', {str(tmp_path / 'repo')!r}")
    with script.open("a") as file:
        file.write(", '--port', '0']\nif __name__ == '__main__':\n    sys.exit(main())\n")
    with running_server(tmp_path / "stderr", script=str(script)) as running, ThreadPoolExecutor(1) as thread:
        with openai_client(running.url, timeout=PATIENCE) as client:
            stream = iter(client.completions.create(stream=True, **{**ASK, "max_tokens": 400}))
            next(stream)
            promoted = thread.submit(change, running, "promote", {"version": 2}, 503)
            eventually(lambda: states(running)[2] == "loading" and len(children(running)) == 2, "the new one loads")
            pids = children(running)
            running.process.send_signal(signal.SIGTERM)
            assert "shutting down" in promoted.result()["error"]["message"]
            assert list(stream)[-1].choices[0].finish_reason == "length"
        assert running.process.wait(PATIENCE) == 0, running.log.read_text()
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert "Traceback" not in running.log.read_text()


def test_the_command_refuses_a_wrong_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "chat" / "1").mkdir(parents=True)
    (tmp_path / "chat" / "model.toml").write_text("polycy = 'all'")
    with pytest.raises(SystemExit) as end:
        main(["serve", str(tmp_path)])
    said = re.sub(r"\s+", " ", capsys.readouterr().err)
    assert end.value.code == 2 and "policy" in said and "Traceback" not in said
