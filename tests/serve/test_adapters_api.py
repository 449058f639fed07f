"""Adapters over HTTP: chosen by the name of the model, listed, loaded, unloaded and refused. A server of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from api_client import HEADERS, TEXT, idle, post
from small_adapters import saved_adapter
from tiny_server import KEY, MODEL, Running, eventually, load, running_server

from bagu.errors import BaguError
from bagu.recipes.serve import with_adapters
from bagu.serve.config import EngineConfig, name_and_path

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    made = {name: saved_adapter(load()[0], root / name, seed) for seed, name in enumerate(("one", "two"))}
    return {**made, "large": saved_adapter(load()[0], root / "large", 3, rank=5)}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory, folders: dict[str, Path]) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("server") / "stderr"
    flags = ("--api-key", KEY, "--open-metrics", "--adapter", "one", str(folders["one"]), "--max-adapters", "2")
    with running_server(log, *flags, "--adapter-root", str(folders["one"].parent)) as running:
        yield running


def text(server: Running, model: str, **more: Any) -> str:
    body = {"model": model, "prompt": "hello world", "max_tokens": 24, "temperature": 0, "ignore_eos": True, **more}
    answer = post(server, TEXT, body).raise_for_status().json()
    assert answer["model"] == model
    return str(answer["choices"][0]["text"])


def names(server: Running) -> dict[str, str | None]:
    data = server.http.get("/v1/models", headers=HEADERS).raise_for_status().json()["data"]
    return {model["id"]: model["parent"] for model in data}


def test_adapters_are_loaded_listed_used_and_unloaded(server: Running, folders: dict[str, Path]) -> None:
    assert names(server) == {MODEL: None, "one": MODEL}
    assert "room for 2 LoRA adapters of rank 4, 44,032 bytes at most" in server.log.read_text()
    base, one = text(server, MODEL), text(server, "one")
    assert base != one
    loaded = post(server, LOAD, {"lora_name": "two", "lora_path": str(folders["two"])})
    assert loaded.status_code == 200 and "two" in loaded.text
    assert names(server) == {MODEL: None, "one": MODEL, "two": MODEL}
    assert server.http.get("/v1/models/two", headers=HEADERS).json()["parent"] == MODEL
    two = text(server, "two")
    assert two not in (base, one)
    document = server.http.get("/openapi.json", headers=HEADERS).json()
    assert document["components"]["schemas"]["ChatBody"]["properties"]["model"]["anyOf"][0]["enum"] == list(
        names(server)
    )
    assert LOAD in document["paths"]
    assert post(server, UNLOAD, {"lora_name": "two"}).status_code == 200
    refused = post(server, TEXT, {"model": "two", "prompt": "x"})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"
    assert post(server, LOAD, {"lora_name": "two", "lora_path": str(folders["one"])}).status_code == 200
    assert text(server, "two") == one, "the name has other weights now, and none of its old blocks"
    assert post(server, UNLOAD, {"lora_name": "two"}).status_code == 200
    eventually(lambda: idle(server), "no block is used")


def test_refusals_leave_the_engine_alive(server: Running, folders: dict[str, Path]) -> None:
    one = {"lora_name": "one", "lora_path": str(folders["one"])}
    refusals: list[tuple[str, dict[str, Any], int, str]] = [
        (LOAD, one, 400, "already an adapter 'one'"),
        (LOAD, {**one, "lora_name": MODEL}, 400, "base model's name"),
        (LOAD, {**one, "lora_name": ""}, 400, "lora_name"),
        (LOAD, {**one, "lora_name": "x", "lora_path": "."}, 400, "adapter_config.json"),
        (LOAD, {**one, "lora_name": "x", "lora_path": str(folders["large"])}, 400, "rank 5"),
        (LOAD, {**one, "lora_name": "x", "load_inplace": True}, 400, "load_inplace"),
        (UNLOAD, {"lora_name": "x"}, 404, "no adapter 'x'"),
    ]
    before = server.engine_pid()
    for path, body, status, message in refusals:
        answer = post(server, path, body)
        assert answer.status_code == status and message in answer.json()["error"]["message"], answer.text
    assert post(server, LOAD, one, headers={"Content-Type": "application/json"}).status_code == 401
    assert server.engine_pid() == before and names(server) == {MODEL: None, "one": MODEL}
    eventually(lambda: idle(server), "no block is used")


def test_a_server_loads_adapters_only_if_that_is_allowed(tiny: Running) -> None:
    answer = post(tiny, LOAD, {"lora_name": "x", "lora_path": "/"})
    assert answer.status_code == 403 and "--adapter-root" in answer.json()["error"]["message"]
    assert LOAD not in tiny.get("/openapi.json")["paths"]


def test_the_flags_of_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def settings(*given: str, root: Path | None = None, most: int | None = None, allow: bool = False) -> EngineConfig:
        config = EngineConfig(adapters=tuple(map(name_and_path, given)), adapter_root=root, max_adapters=most)
        return with_adapters(config, allow_loading=allow)

    assert settings().adapter_slots == 0
    assert settings("a=b", "c=d=e").adapters == (("a", "b"), ("c", "d=e"))
    assert settings("a=b").adapter_slots == 1 and settings(root=tmp_path).adapter_slots == 8
    for wrong in ("a", "=b", "a="):
        with pytest.raises(BaguError, match="--adapter"):
            settings(wrong)
    with pytest.raises(BaguError, match="--max-adapters 0"):
        settings(root=tmp_path, most=0)
    with pytest.raises(BaguError, match="not a folder"):
        settings(root=tmp_path / "none")
    with pytest.raises(BaguError, match="without --adapter-root"):
        settings(allow=True)
    assert not capsys.readouterr().err
    assert settings(root=tmp_path, allow=True).adapter_root == tmp_path
    assert "deprecated" in capsys.readouterr().err
