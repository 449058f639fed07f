"""`bagu serve RUN` in a process of its own, over real sockets."""

import base64
import json
import urllib.error
import urllib.request
from typing import Any

import pytest

pytest.importorskip("uvicorn")


def call(url: str, body: Any = None, kind: str = "application/json") -> tuple[int, Any, Any]:
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": kind})
    try:
        with urllib.request.urlopen(request, timeout=300) as found:
            text = found.read()
            return found.status, json.loads(text) if text[:1] in b"{[" else text.decode(), found.headers
    except urllib.error.HTTPError as error:
        return error.code, json.loads(error.read()), error.headers


def test_the_page_loads_nothing_from_elsewhere(url: str) -> None:
    status, text, headers = call(url + "/")
    assert status == 200 and "default-src 'none'" in headers["Content-Security-Policy"]
    assert "require-trusted-types-for 'script'" in headers["Content-Security-Policy"]
    for name in ("/app.js", "/words.js", "/style.css", "/dom.js"):
        source = call(url + name)[1]
        assert "innerHTML" not in source and "https://" not in source
    assert "http" not in text
    report = call(url + "/v1/process/report")
    assert report[0] == 200 and "script" not in report[2]["Content-Security-Policy"]


def test_a_row_a_recommendation_and_a_refusal(url: str) -> None:
    state = call(url + "/v1/process")[1]
    assert state["goal"] == "yield" and len(state["inputs"]) == 5 and state["answers"] == []
    found = call(url + "/v1/process/whatif", {"row": {"temperature": 365}})[1]
    assert found["low"] < found["mean"] < found["high"] and found["row"]["temperature"] == 365
    answer = call(url + "/v1/process/recommend", {"given": {"activity": 1.0, "impurity": 0.15}})[1]
    assert answer["refused"] is None and len(answer["choices"][0]["nearest"]) == 3
    refused = call(url + "/v1/process/recommend", {"given": {"activity": 50}})[1]
    assert refused["refused"] == "context_outside" and "activity" in refused["words"]["zh"]
    rows = "activity,impurity\n" + "\n".join(f"{1.3 + i / 100},0.15" for i in range(10))
    body = {"recent": base64.b64encode(rows.encode()).decode(), "given": {"activity": 1.0}}
    assert call(url + "/v1/process/recommend", body)[1]["refused"] == "drifted"
    assert len(call(url + "/v1/process")[1]["answers"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "kind", "status"),
    [
        ("whatif", {"row": {"nonsense": 1}}, "application/json", 400),
        ("whatif", {"row": {"temperature": "hot"}}, "application/json", 400),
        ("whatif", {"row": []}, "text/plain", 415),
        ("whatif", [1], "application/json", 400),
        ("recommend", {"given": {}, "probability": 7}, "application/json", 400),
        ("recommend", {"given": {"activity": None}}, "application/json", 400),
        ("recommend", {"recent": "no base64 !"}, "application/json", 400),
        ("recommend", {"recent": "YSxiCjEsMgo="}, "application/json", 400),
        ("look", {"data": "no base64 !"}, "application/json", 400),
        ("look", {"data": ""}, "application/json", 400),
    ],
)
def test_hostile_bodies_get_one_sentence(url: str, path: str, body: Any, kind: str, status: int) -> None:
    found = call(f"{url}/v1/process/{path}", body, kind)
    assert found[0] == status and "\n" not in found[1]["error"]["message"]


def test_an_uploaded_table_gets_roles_and_findings(url: str) -> None:
    rows = "\n".join(f"{180 + i % 7},{i % 5},{90 + i % 3}" for i in range(40))
    data = base64.b64encode(f"<script>alert(1)</script>,flow,yield\n{rows}\n".encode()).decode()
    status, found, _ = call(url + "/v1/process/look", {"data": data})
    assert status == 200 and found["rows"] == 40
    assert [c["role"] for c in found["schema"]["columns"]][-1] == "target"
    assert found["schema"]["columns"][0]["name"] == "<script>alert(1)</script>"


@pytest.mark.slow
def test_the_rows_of_the_run_are_fitted_with_other_roles(url: str) -> None:
    schema = call(url + "/v1/process")[1]["schema"]
    for column in schema["columns"]:
        if column["name"] == "feed":
            column["role"] = "ignore"
    status, found, _ = call(url + "/v1/process/fit", {"schema": schema})
    assert status == 200 and found["rows"] == 80 and "feed" not in [i["name"] for i in found["inputs"]]


def test_a_large_upload_is_refused(url: str) -> None:
    assert call(url + "/v1/process/look", {"data": "A" * (9 * 2**20)})[0] == 413
