"""Operating the server: logs, request ids, traces, metrics of the dashboard, container and Kubernetes files."""

from __future__ import annotations

import json
import re
import signal
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from tiny_server import KEY, Running, running_server

from bagu.cli import app
from bagu.errors import ArgumentError, BaguError, UnknownName
from bagu.serve.http import server
from bagu.serve.http.observe import tracing
from bagu.serve.http.options import ServerOptions

DEPLOY = Path(__file__).parents[2] / "deploy"
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ASK = {"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 5, "ignore_eos": True}


class Receiver(ThreadingHTTPServer):
    """An OTLP/HTTP receiver; `spans` are the received ones."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        super().__init__(("127.0.0.1", 0), ReceiverHandler)


class ReceiverHandler(BaseHTTPRequestHandler):
    server: Receiver

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        import gzip

        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        assert self.path == "/v1/traces"
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        message = ExportTraceServiceRequest.FromString(body)
        self.server.spans += [s for r in message.resource_spans for scope in r.scope_spans for s in scope.spans]
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()


class Instance:
    """What a server with JSON logs and traces left after some requests and a SIGTERM."""

    def __init__(self, running: Running, receiver: Receiver) -> None:
        http, key = running.http, {"Authorization": f"Bearer {KEY}"}
        traced = {**key, "X-Request-Id": "mine-1", "traceparent": f"00-{TRACE}-{PARENT}-01"}
        self.answer = http.post("/v1/chat/completions", json=ASK, headers=traced)
        with http.stream("POST", "/v1/chat/completions", json={**ASK, "stream": True}, headers=key) as stream:
            self.stream_id = stream.headers["x-request-id"]
            stream.read()
        self.refused = http.post("/v1/chat/completions", json={**ASK, "max_tokens": -1}, headers=key)
        self.denied = http.post("/v1/chat/completions", json=ASK, headers={"X-Request-Id": "no\u00a0ascii".encode()})
        self.metrics = http.get("/metrics", headers=key).text
        http.close()
        running.process.send_signal(signal.SIGTERM)
        self.exit_status = running.process.wait(60)
        self.log = running.log.read_text()
        assert "Traceback" not in self.log, self.log
        self.lines = [json.loads(line) for line in self.log.splitlines()]
        self.requests = [line for line in self.lines if line.get("path", "").startswith("/v1")]
        self.spans = receiver.spans


@pytest.fixture(scope="module")
def instance(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Instance]:
    receiver = Receiver()
    thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    flags = ("--api-key", KEY, "--log-format", "json", "--otlp-endpoint", f"http://127.0.0.1:{receiver.server_port}")
    try:
        with running_server(tmp_path_factory.mktemp("operations") / "stderr", *flags) as running:
            yield Instance(running, receiver)
    finally:
        receiver.shutdown()
        thread.join()
        receiver.server_close()


def test_a_request_is_one_line_of_json_without_the_key(instance: Instance) -> None:
    assert instance.exit_status == 0
    assert KEY not in instance.log
    assert "hello" not in instance.log  # no prompts
    line = instance.requests[0]
    assert (line["request_id"], line["path"], line["status"]) == ("mine-1", "/v1/chat/completions", 200)
    assert (line["model"], line["key"], line["finish_reasons"]) == ("tiny", "api-key", ["length"])
    usage = instance.answer.json()["usage"]
    assert (line["prompt_tokens"], line["completion_tokens"]) == (usage["prompt_tokens"], 5)
    assert 0 <= line["queue_ms"] <= line["ttft_ms"] <= line["total_ms"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["time"])
    assert [r["status"] for r in instance.requests] == [200, 200, 400, 401]
    probes = {line["status"] for line in instance.lines if line.get("path") == "/health"}
    assert probes <= {503}  # while the model loads; successful probes are not logged


def test_a_request_id_is_returned_or_made(instance: Instance) -> None:
    assert instance.answer.headers["x-request-id"] == "mine-1"
    ids = [instance.stream_id, instance.refused.headers["x-request-id"], instance.denied.headers["x-request-id"]]
    assert all(re.fullmatch(r"[0-9a-f]{32}", id) for id in ids)
    assert [line["request_id"] for line in instance.requests] == ["mine-1", *ids]
    assert instance.requests[3]["key"] is None


def test_a_trace_has_the_phases_and_continues_the_clients(instance: Instance) -> None:
    ours = [span for span in instance.spans if span.trace_id.hex() == TRACE]
    assert sorted(span.name for span in ours) == ["chat tiny", "decode", "prefill", "queue"]
    root = next(span for span in ours if span.name == "chat tiny")
    assert root.parent_span_id.hex() == PARENT
    values = {a.key: a.value for a in root.attributes}
    assert values["gen_ai.operation.name"].string_value == "chat"
    assert values["gen_ai.request.model"].string_value == "tiny"
    assert values["gen_ai.usage.output_tokens"].int_value == 5
    assert values["gen_ai.response.finish_reasons"].array_value.values[0].string_value == "length"
    assert values["http.response.status_code"].int_value == 200
    phases = sorted((s for s in ours if s is not root), key=lambda s: (s.start_time_unix_nano, s.end_time_unix_nano))
    assert [s.name for s in phases] == ["queue", "prefill", "decode"]
    assert all(s.parent_span_id == root.span_id for s in phases)
    assert phases[0].start_time_unix_nano == root.start_time_unix_nano
    assert [s.end_time_unix_nano for s in phases] == [
        *(s.start_time_unix_nano for s in phases[1:]),
        root.end_time_unix_nano,
    ]
    errors = [a.value.string_value for s in instance.spans for a in s.attributes if a.key == "error.type"]
    assert errors == ["400"]  # a request without the key is logged, not traced


def test_every_metric_of_the_dashboard_exists(instance: Instance) -> None:
    dashboard = json.loads((DEPLOY / "grafana" / "bagu.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    expressions += [v["query"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    used = {name for text in expressions for name in re.findall(r"\b(?:(?:vllm|bagu):\w+|http_\w+_total)", text)}
    existing = set(re.findall(r"^([\w:]+)[{ ]", instance.metrics, re.MULTILINE))
    assert len(used) > 15
    assert used <= existing
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])


def serve_flags() -> set[str]:
    command = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    return {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}


def test_the_containers_flags_exist() -> None:
    dockerfile = (DEPLOY / "Dockerfile").read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (\[.*\])$", dockerfile, re.MULTILINE)[1])  # type: ignore[index]
    assert entry[:2] == ["bagu", "serve"]
    command = json.loads(re.search(r"^HEALTHCHECK .*?CMD (\[.*?\])$", dockerfile, re.M | re.S)[1])  # type: ignore[index]
    compile(command[2], "healthcheck", "exec")
    assert re.search(r"^USER 1000$", dockerfile, re.MULTILINE)
    container = deployment()["spec"]["template"]["spec"]["containers"][0]
    flags = {arg for arg in [*entry, *container["args"]] if arg.startswith("--")}
    assert flags <= serve_flags()


def deployment() -> Any:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    assert [d["kind"] for d in documents] == ["PersistentVolumeClaim", "Deployment", "Service"]
    return documents[1]


def test_kubernetes_waits_for_the_shutdown_and_probes_paths_that_exist(instance: Instance) -> None:
    pod = deployment()["spec"]["template"]["spec"]
    [container] = pod["containers"]
    args = container["args"]
    timeout = float(args[args.index("--shutdown-timeout") + 1])
    pause = float(container["lifecycle"]["preStop"]["exec"]["command"][1])
    stop = 5  # seconds, of EngineProcess.stop
    assert pod["terminationGracePeriodSeconds"] >= pause + timeout + server.GRACE_S + stop
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    assert 'http_requests_total{handler="/health",method="GET",status="200"}' in instance.metrics
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert ports == {"http": 8000}


def test_the_other_deploy_files_are_valid_and_name_files_that_exist() -> None:
    for path in (*DEPLOY.glob("*.y*ml"), *DEPLOY.glob("grafana/*.yaml")):
        assert list(yaml.safe_load_all(path.read_text())), path
    compose = yaml.safe_load((DEPLOY / "compose.yaml").read_text())
    mounted = [v.split(":")[0] for s in compose["services"].values() for v in s["volumes"] if v.startswith("./")]
    assert len(mounted) == 4
    assert all((DEPLOY / name).is_file() for name in mounted)


def test_wrong_settings_are_refused_and_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="xml"):
        ServerOptions(log_format="xml")
    with pytest.raises(ArgumentError, match="localhost:4318"):
        tracing.Tracing("localhost:4318")
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk", None)
    with pytest.raises(BaguError, match=r"needs opentelemetry\.sdk.*\n?.*bagu\[otel\]"):
        tracing.Tracing("http://localhost:4318")
