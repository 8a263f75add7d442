"""`strands-agents`: an agent with a tool, also on a model whose chat template has no place for tools."""

from asking import HELLO, WEATHER, print_result, urls
from strands import Agent, tool
from strands.models.openai import OpenAIModel

caller, pair = (
    OpenAIModel(
        client_args={"base_url": f"{url}/v1", "api_key": "none"},
        model_id=name,
        params={"temperature": 0, "max_tokens": 100},
    )
    for name, url in zip(("caller", "smollm2"), urls(), strict=True)
)
asked = []


@tool
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


said, hello = (
    str(Agent(model, tools=[get_weather], callback_handler=None)(text)).strip()
    for model, text in ((caller, WEATHER), (pair, HELLO))
)
print_result(asked=asked, said=said, hello=hello)
