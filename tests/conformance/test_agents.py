"""Programs that build agents: AutoGen."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


def model(name: str, url: str, calls: bool = False, **options: Any) -> OpenAIChatCompletionClient:
    """A client that is told what the model can do."""
    cannot = dict.fromkeys(("vision", "json_output", "structured_output"), False)
    info: Any = {**cannot, "function_calling": calls, "family": "unknown"}
    url = f"{url}/v1"
    return OpenAIChatCompletionClient(
        model=name, base_url=url, api_key="none", temperature=0, model_info=info, **options
    )


def test_agents_of_autogen_talk_to_each_other(server: str) -> None:
    async def main() -> list[TextMessage]:
        client = model("smollm2", server, max_tokens=24)
        agents = [
            AssistantAgent(name, client, system_message=f"You are {name}. Be brief.", model_client_stream=streams)
            for name, streams in (("Ann", False), ("Bob", True))
        ]
        team = RoundRobinGroupChat(agents, termination_condition=MaxMessageTermination(5))  # type: ignore[arg-type]
        result = await team.run(task="Name a colour, then another one.")
        await client.close()
        return [message for message in result.messages if isinstance(message, TextMessage)]

    said = asyncio.run(main())
    assert [message.source for message in said] == ["user", "Ann", "Bob", "Ann", "Bob"]
    assert all(message.content for message in said)
    assert all(message.models_usage and message.models_usage.completion_tokens <= 24 for message in said[1:])


@pytest.mark.parametrize("streams", [False, True])
def test_an_agent_of_autogen_uses_its_tools(caller: str, streams: bool) -> None:
    asked = []

    async def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        return "Sunny"

    async def main() -> str:
        client = model("caller", caller, calls=True)
        agent = AssistantAgent(
            "Ann", client, tools=[get_weather], reflect_on_tool_use=True, model_client_stream=streams
        )
        result = await agent.run(task="How is the weather in Rome and Oslo?")
        await client.close()
        last = result.messages[-1]
        assert isinstance(last, TextMessage)
        return last.content

    assert asyncio.run(main()) == "It is sunny."
    assert sorted(asked) == ["Oslo", "Rome"]
