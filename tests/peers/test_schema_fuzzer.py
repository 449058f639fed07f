"""Schemathesis, a fuzzer of HTTP APIs, over `/openapi.json` of real servers.

It sends what the schemas allow and what they forbid, and checks that the first is never a 5xx, that the second is
refused, and that every answer has a status, a content type and a body that the description names.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from tiny_server import Running, running_server

pytest.importorskip("schemathesis")

KEY = "sk-test"
# What no schema can say: how many tokens a text has, which roles a chat template knows, which fields go together
UNSAID = "positive_data_acceptance"


def fuzz(server: Running, *options: str) -> None:
    """A bounded run with a fixed seed; fails with what was found."""
    program = str(Path(sys.executable).with_name("schemathesis"))
    command = [
        program, "run", f"{server.url}/openapi.json", "--header", f"Authorization: Bearer {KEY}", "--seed", "1",
        "--phases", "coverage,fuzzing", "--max-examples", "30", "--request-timeout", "60", "--suppress-health-check",
        "all", *options,
    ]  # fmt: skip
    run = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False, cwd=server.log.parent)
    assert run.returncode == 0, run.stdout + run.stderr
    assert "Traceback" not in server.log.read_text()
    assert server.get("/health")


@pytest.mark.parametrize(
    "kind",
    [
        (),
        (
            "--kind",
            "encoder",
        ),
    ],
    ids=["generates", "embeds"],
)
def test_the_description_is_true(tmp_path: Path, kind: tuple[str, ...]) -> None:
    flags = ("--api-key", KEY, "--max-model-len", "64", *kind)  # short: a chat without max_tokens goes on to the end
    with running_server(tmp_path / "stderr", *flags) as server:
        fuzz(server, "--exclude-checks", UNSAID)
        said = ("/detokenize", "/engine", "/health", "/metrics", "/version", "/v1/models", "/v1/models/{name}")
        fuzz(server, *(word for path in said for word in ("--include-path", path)))
