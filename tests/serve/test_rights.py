"""Who may do what: keys of several owners, with and without `admin` and a list of models, against real servers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from tiny_server import Running, running_server

KEYS = """
[[key]]
name = "alice"
key = "sk-alice"
[[key]]
name = "bob"
key = "sk-bob"
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("rights")
    (folder / "keys.toml").write_text(KEYS)
    with running_server(folder / "stderr", "--api-keys", str(folder / "keys.toml")) as running:
        yield running


def ask(server: Running, key: str | None, method: str, path: str, body: Any = None) -> tuple[int, str]:
    headers = {} if key is None else {"Authorization": f"Bearer sk-{key}"}
    answer = server.http.request(method, path, headers=headers, json=body)
    return answer.status_code, answer.text


def test_a_stored_response_exists_only_for_its_key(server: Running) -> None:
    body = {"input": "hello", "max_output_tokens": 2}
    created = server.http.post("/v1/responses", json=body, headers={"Authorization": "Bearer sk-alice"})
    id, unknown = created.raise_for_status().json()["id"], "resp_" + "0" * 32

    def answers(key: str, id: str) -> list[tuple[int, str]]:
        continued = {**body, "previous_response_id": id}
        found = [ask(server, key, verb, f"/v1/responses/{id}") for verb in ("GET", "DELETE")]
        return [*found, ask(server, key, "POST", "/v1/responses", continued)]

    theirs = [(status, text.replace(id, unknown)) for status, text in answers("bob", id)]
    assert theirs == answers("bob", unknown) and {status for status, _ in theirs} == {404}
    assert ask(server, "alice", "POST", "/v1/responses", {**body, "previous_response_id": id})[0] == 200
    assert [ask(server, "alice", verb, f"/v1/responses/{id}")[0] for verb in ("GET", "DELETE", "GET")] == [
        200,
        200,
        404,
    ]
