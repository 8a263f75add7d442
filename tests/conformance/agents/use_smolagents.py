"""`smolagents`, which reads tool calls of an answer, and by default requires one."""

import json
from typing import Literal

from asking import WEATHER, clients, print_result
from smolagents import OpenAIServerModel, tool

caller, pair = clients(
    lambda name, url: OpenAIServerModel(name, api_base=url, api_key="none", temperature=0, max_tokens=100)
)


@tool
def get_weather(city: Literal["Rome", "Oslo"]) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "Sunny"


messages = [{"role": "user", "content": WEATHER}]
asked, forced = (
    [json.loads(call.function.arguments)["city"] for call in answer.tool_calls or []]
    for answer in (
        caller.generate(messages, tools_to_call_from=[get_weather], tool_choice="auto"),
        pair.generate(messages, tools_to_call_from=[get_weather], parallel_tool_calls=False),
    )
)
print_result(asked=asked, forced=forced)
