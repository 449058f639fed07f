"""The openai-agents SDK runs an agent with a tool against a real server, by both APIs, streamed and not.

The model is random, so the first call is required; the SDK then sends the tool's output and lets the model choose.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from tiny_server import MODEL, Running, running_server

agents = pytest.importorskip("agents")
openai = pytest.importorskip("openai")

KEY = "sk-test"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    log = tmp_path_factory.mktemp("agents") / "stderr"
    with running_server(log, "--api-key", KEY) as running:
        yield running


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("api", ["OpenAIChatCompletionsModel", "OpenAIResponsesModel"])
def test_an_agent_calls_its_tool_and_answers(server: Running, api: str, stream: bool) -> None:
    asked: list[tuple[str, int]] = []

    @agents.function_tool
    def weather(city: Literal["Köln", "Rome"], days: int) -> str:
        """The weather of a city."""
        asked.append((city, days))
        return f"sunny in {city}"

    async def run() -> Any:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as client:
            agent = agents.Agent(
                name="Forecaster", instructions="Answer briefly.", tools=[weather],
                model=getattr(agents, api)(model=MODEL, openai_client=client),
                model_settings=agents.ModelSettings(
                    tool_choice="required", parallel_tool_calls=False, max_tokens=400, include_usage=True
                ),
                tool_use_behavior="run_llm_again",
            )  # fmt: skip
            if not stream:
                return await agents.Runner.run(agent, "Will it rain?", max_turns=10)
            result = agents.Runner.run_streamed(agent, "Will it rain?", max_turns=10)
            async for _ in result.stream_events():
                pass
            return result

    agents.set_tracing_disabled(True)
    result = asyncio.run(run())
    assert asked and all(city in ("Köln", "Rome") for city, _ in asked)
    kinds = [item.type for item in result.new_items]
    assert kinds[:2] == ["tool_call_item", "tool_call_output_item"] and kinds[-1] == "message_output_item"
    assert isinstance(result.final_output, str)
    usage = result.context_wrapper.usage
    assert usage.requests == len(asked) + 1 and usage.output_tokens > 0
