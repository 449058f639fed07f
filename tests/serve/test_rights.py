"""Who may do what: keys of several owners, with and without `admin` and a list of models, against real servers. The
table in docs/running.md says what each route answers."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import tiny_repository
from small_adapters import saved_adapter
from tiny_server import MODEL, Running, load, running_server

from bagu.serve.http.api import Api, make_app
from bagu.serve.http.observe.metrics import Metrics
from bagu.serve.http.routes import ApiConfig
from bagu.serve.page import assets
from bagu.serve.repository.routes import RepositoryApi

KEYS = """
[[key]]
name = "alice"
key = "sk-alice"
[[key]]
name = "bob"
key = "sk-bob"
[[key]]
name = "root"
key = "sk-root"
admin = true
[[key]]
name = "base"
key = "sk-base"
models = ["tiny", "chat"]
[[key]]
name = "adapter"
key = "sk-adapter"
models = ["one", "gone"]
"""
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
TABLE = Path(__file__).parents[2] / "docs" / "running.md"
# a body for every route that takes a model
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}], "max_tokens": 2},
    "/v1/completions": {"prompt": "hello", "max_tokens": 2},
    "/v1/responses": {"input": "hello", "max_output_tokens": 2},
    "/v1/embeddings": {"input": "hello"},
    "/v1/score": {"text_1": "hello", "text_2": "world"},
    "/v1/rerank": {"query": "hello", "documents": ["world"]},
    "/tokenize": {"prompt": "hello"},
    "/detokenize": {"tokens": [5]},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "keys.toml").write_text(KEYS)
    return folder


@pytest.fixture(scope="module")
def root(folder: Path) -> Path:
    """The adapter root: two adapters, one that overflows, and links that lead out of it and stay in it."""
    root = folder / "root"
    for seed, name in enumerate(("one", "two")):
        saved_adapter(load()[0], root / name, seed)
    saved_adapter(load()[0], root / "huge", 2, size=1e25)
    saved_adapter(load()[0], folder / "outside", 3)
    (root / "link_out").symlink_to(folder / "outside")
    (root / "link_nowhere").symlink_to(folder / "nothing")
    (root / "link_in").symlink_to(root / "two")
    (root / "loop").symlink_to(root / "loop")
    (root / "linked_file").mkdir()
    for file in (folder / "outside").iterdir():
        (root / "linked_file" / file.name).symlink_to(file)
    return root


@pytest.fixture(scope="module")
def server(folder: Path, root: Path) -> Iterator[Running]:
    flags = ("--api-keys", str(folder / "keys.toml"), "--adapter", "one", str(root / "one"), "--max-adapters", "4")
    with running_server(folder / "stderr", *flags, "--adapter-root", str(root)) as running:
        yield running


@pytest.fixture(scope="module")
def repository(folder: Path) -> Iterator[Running]:
    """Two models, of which the second does not start."""
    for name in ("chat", "secret"):
        (folder / "models" / name / "1").mkdir(parents=True)
        (folder / "models" / name / "model.toml").touch()
    (folder / "models" / "secret" / "1" / "disk_full").touch()
    flags = (str(folder / "models"), "--api-keys", str(folder / "keys.toml"))
    with running_server(folder / "repository", *flags, script=tiny_repository.__file__) as running:
        yield running


def call(server: Running, key: str | None, method: str, path: str, body: Any = None) -> httpx.Response:
    headers = {} if key is None else {"Authorization": f"Bearer sk-{key}"}
    return server.http.request(method, path, headers=headers, json=body)


def ask(server: Running, key: str | None, method: str, path: str, body: Any = None) -> tuple[int, str]:
    answer = call(server, key, method, path, body)
    return answer.status_code, answer.text


def rows() -> dict[tuple[str, str], tuple[str, ...]]:
    """(method, path) -> the cells: without a key, with a key, with admin."""
    section = TABLE.read_text(encoding="utf-8").partition("### Who may use a route")[2]
    found = re.findall(r"^\| `([A-Z]+) (\S+)` \| (.+) \| (.+) \| (.+) \|$", section, re.M)
    return {(method, path): tuple(cells) for method, path, *cells in found}


def test_the_table_has_every_route() -> None:
    routed = set()
    for kind in (Api, RepositoryApi):
        app: Any = make_app(kind(None, Metrics("x"), ApiConfig())).app  # type: ignore[arg-type]
        for route in app.router.routes:
            path = "/" if route.path in assets() else route.path.replace(":path}", "}")
            routed |= {(method, path) for method in route.methods - {"HEAD"}}
    assert routed == rows().keys()


@pytest.mark.parametrize("name", ["server", "repository"])
def test_every_route_of_the_schema_answers_as_in_the_table(name: str, request: pytest.FixtureRequest) -> None:
    server, model = request.getfixturevalue(name), MODEL if name == "server" else "chat"
    schema = server.get("/openapi.json")["paths"]
    routes = [(method.upper(), path) for path, item in schema.items() for method in item]
    table, body = rows(), {"model": model}
    for method, path in [*routes, ("GET", "/openapi.json"), ("GET", "/docs"), *(("GET", path) for path in assets())]:
        cells = table[method, "/" if path in assets() else path]
        place = path.replace("{name}", model).replace("{id}", "resp_0")
        for key, cell in zip((None, "alice", "root"), cells, strict=True):
            status, text = ask(server, key, method, place, body | BODIES.get(path, {}) if method == "POST" else None)
            refused = int(cell) if cell.isdigit() else None
            assert (status if status in (401, 403) else None) == refused, (method, path, key, text)
            assert refused or method == "POST" or status == (404 if "{id}" in path else 200), (method, path, key, text)


def test_an_unknown_key_is_no_key(server: Running) -> None:
    for header in ("Bearer wrong", "Basic sk-root", "sk-root", "Bearer"):
        for path in ("/v1/models", "/engine", "/metrics"):
            assert server.http.get(path, headers={"Authorization": header}).status_code == 401


def test_a_stored_response_exists_only_for_its_key(server: Running) -> None:
    body = BODIES["/v1/responses"]
    id, unknown = call(server, "alice", "POST", "/v1/responses", body).json()["id"], "resp_" + "0" * 32

    def answers(key: str, id: str) -> list[tuple[int, str]]:
        found = [ask(server, key, verb, f"/v1/responses/{id}") for verb in ("GET", "DELETE")]
        continued = [{**body, "previous_response_id": id, "stream": stream} for stream in (False, True)]
        return [*found, *(ask(server, key, "POST", "/v1/responses", c) for c in continued)]

    for key in ("bob", "root"):
        theirs = [(status, text.replace(id, unknown)) for status, text in answers(key, id)]
        assert theirs == answers(key, unknown) and {status for status, _ in theirs} == {404}
    assert ask(server, "alice", "POST", "/v1/responses", {**body, "previous_response_id": id})[0] == 200
    assert [ask(server, "alice", verb, f"/v1/responses/{id}")[0] for verb in ("GET", "DELETE", "GET")] == [
        200,
        200,
        404,
    ]


def test_an_adapter_is_a_model_in_a_keys_list(server: Running) -> None:
    """On every route that takes a model. A name that is not in the list is refused whether or not it exists."""
    schema = call(server, "root", "GET", "/openapi.json").json()
    takes_model = {
        path
        for path, item in schema["paths"].items()
        if (content := item.get("post", {}).get("requestBody", {}).get("content", {}).get("application/json"))
        and "model" in _resolved(schema, content["schema"])["properties"]
    }
    assert takes_model <= BODIES.keys()
    for path, body in BODIES.items():
        for key, named, other in (
            ("base", (None, MODEL), ("one", "none")),
            ("adapter", ("one",), (None, MODEL, "none")),
        ):
            for model in named:
                status, text = ask(server, key, "POST", path, {**body, "model": model})
                assert status == 200 or (status == 400 and path not in takes_model), (path, model, text)
            refused = {ask(server, key, "POST", path, {**body, "model": model}) for model in other}
            assert [status for status, _ in refused] == [403], (path, refused)


def test_names_of_other_models_are_shown_nowhere(server: Running) -> None:
    def listed(key: str) -> dict[str, Any]:
        return {m["id"]: m["parent"] for m in call(server, key, "GET", "/v1/models").json()["data"]}

    assert (listed("base"), listed("adapter")) == ({MODEL: None}, {"one": None})
    assert listed("alice") == {MODEL: None, "one": MODEL}
    assert call(server, "adapter", "GET", "/v1/models/one").json()["parent"] is None
    assert {ask(server, "base", "GET", f"/v1/models/{name}")[0] for name in ("one", "none")} == {403}
    gone = call(server, "adapter", "POST", "/v1/completions", {"model": "gone", "prompt": "x"})
    assert gone.status_code == 404 and gone.json()["error"]["message"].endswith("(this server has: one)")
    for key, names in ((None, None), ("base", [MODEL]), ("adapter", ["one"]), ("alice", [MODEL, "one"])):
        schema = call(server, key, "GET", "/openapi.json").json()["components"]["schemas"]
        assert schema["ChatBody"]["properties"]["model"]["anyOf"][0].get("enum") == names
    assert ask(server, "adapter", "GET", "/engine")[0] == 200  # of the model that it may use
    assert {ask(server, "adapter", "GET", f"/engine?model={name}")[0] for name in (MODEL, "none")} == {403}
    assert ask(server, "adapter", "GET", "/metrics")[0] == 403


def test_a_repository_shows_a_key_its_models_only(repository: Running) -> None:
    def models(key: str) -> list[str]:
        return [m["name"] for m in call(repository, key, "GET", "/v1/repository").json()["data"]]

    assert (models("base"), models("adapter"), models("root")) == (["chat"], [], ["chat", "secret"])
    unnamed = call(repository, "base", "POST", "/v1/completions", {"prompt": "x"})
    assert unnamed.status_code == 400 and "this server has: chat, chat@1" in unnamed.json()["error"]["message"]
    for name in ("secret", "secret@1", "secret:1", "none"):
        assert ask(repository, "base", "POST", "/v1/completions", {"model": name, "prompt": "x"})[0] == 403
        assert ask(repository, "base", "GET", f"/engine?model={name}")[0] == 403
    for name in ("chat", "chat@1", "chat:1"):
        assert ask(repository, "base", "GET", f"/engine?model={name}")[0] == 200
    missing = call(repository, "base", "GET", "/v1/models/chat@2")
    assert missing.status_code == 404 and "secret" not in missing.text
    assert "secret" not in call(repository, None, "GET", "/openapi.json").text


def test_adapters_come_from_below_the_root_only(server: Running, folder: Path, root: Path) -> None:
    """What is outside is answered as what does not exist, so that nobody learns which paths do."""
    paths = [
        "none", str(root / "none"), str(folder / "outside"), str(folder / "nothing"), "../outside", "../nothing",
        "/etc", "/etc/passwd", "link_out", "link_nowhere", "link_out/../../outside", "loop", "linked_file", "~",
        "~nouser", "~root/x", "x" * 300, "x/" * 3000, "a\0b", f"{root}_sibling",
    ]  # fmt: skip
    for path in paths:
        status, text = ask(server, "root", "POST", LOAD, {"lora_name": "x", "lora_path": path})
        said = json.loads(text)["error"]["message"]
        assert (
            status == 400
            and said == f"there is no folder {path!r:.200} below the adapter root (give one that is there)"
        )
    for path in ("link_in", str(root / "two"), "./one/../two"):
        assert ask(server, "root", "POST", LOAD, {"lora_name": "x", "lora_path": path})[0] == 200
        for verb, body in ((LOAD, {"lora_name": "y", "lora_path": path}), (UNLOAD, {"lora_name": "x"})):
            answer = call(server, "alice", "POST", verb, body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (403, "admin_required")
        assert ask(server, "root", "POST", UNLOAD, {"lora_name": "x"})[0] == 200


def test_an_adapter_that_overflows_is_named_and_counted(server: Running) -> None:
    def counted() -> int:
        found = re.search(r"^bagu:not_finite_total\{.*\} (\d+)$", call(server, "root", "GET", "/metrics").text, re.M)
        assert found
        return int(found[1])

    plain = {"model": MODEL, "prompt": "hello world", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    before = call(server, "alice", "POST", "/v1/completions", plain).json()["choices"]
    assert ask(server, "root", "POST", LOAD, {"lora_name": "huge", "lora_path": "huge"})[0] == 200
    asked: list[dict[str, Any]] = [
        {}, {"logprobs": 2}, {"temperature": 1.0, "top_p": 0.9}, {"echo": True, "logprobs": 1, "max_tokens": 0},
        {"prompt_logprobs": 1}, {"stream": True}, {"stream": True, "logprobs": 1},
    ]  # fmt: skip
    for count, more in enumerate(asked, 1):
        answer = call(server, "alice", "POST", "/v1/completions", {**plain, "model": "huge", **more})
        if answer.status_code == 200:
            assert more.get("stream") and answer.text.endswith("data: [DONE]\n\n")
            error = json.loads(answer.text.split("data: ")[-2])["error"]
        else:
            error = answer.json()["error"]
        assert answer.status_code in (200, 400) and error["code"] == "not_finite", (more, answer.text)
        assert "the probabilities are not finite" in error["message"] and counted() == count
    response = call(server, "alice", "POST", "/v1/responses", {"model": "huge", "input": "x", "stream": True})
    assert "the probabilities are not finite" in response.text
    assert call(server, "alice", "POST", "/v1/completions", plain).json()["choices"] == before


def _resolved(schema: dict[str, Any], node: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = schema["components"]["schemas"][node["$ref"].rsplit("/", 1)[1]]
    return found
