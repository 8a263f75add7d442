"""Programs that build agents: AutoGen."""

from __future__ import annotations

import asyncio

import pytest
from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination
from autogen_agentchat.messages import TextMessage
from autogen_agentchat.teams import RoundRobinGroupChat
from autogen_ext.models.openai import OpenAIChatCompletionClient


def test_agents_of_autogen_talk_to_each_other(server: str) -> None:
    """Their messages have the sender's name."""

    async def main() -> list[TextMessage]:
        client = OpenAIChatCompletionClient(
            model="smollm2",
            base_url=f"{server}/v1",
            api_key="none",
            max_tokens=24,
            temperature=0,
            model_info={
                "vision": False,
                "function_calling": False,
                "json_output": False,
                "family": "unknown",
                "structured_output": False,
            },
        )
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
        client = OpenAIChatCompletionClient(
            model="caller",
            base_url=f"{caller}/v1",
            api_key="none",
            temperature=0,
            model_info={
                "vision": False,
                "function_calling": True,
                "json_output": False,
                "family": "unknown",
                "structured_output": False,
            },
        )
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
