"""`smolagents`, which reads tool calls of an answer."""

import json

from asking import WEATHER, print_result, urls
from smolagents import OpenAIServerModel, tool

caller, _ = urls()
model = OpenAIServerModel("caller", api_base=f"{caller}/v1", api_key="none", temperature=0, max_tokens=100)


@tool
def get_weather(city: str) -> str:
    """The weather of a city.

    Args:
        city: its name
    """
    return "Sunny"


answer = model.generate([{"role": "user", "content": WEATHER}], tools_to_call_from=[get_weather], tool_choice="auto")
print_result(asked=[json.loads(call.function.arguments)["city"] for call in answer.tool_calls or []])
