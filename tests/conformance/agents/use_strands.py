"""`strands-agents`: an agent with a tool, also on a model whose chat template has no place for tools."""

from asking import HELLO, WEATHER, asked, clients, get_weather, print_result
from strands import Agent, tool
from strands.models.openai import OpenAIModel

caller, pair = clients(
    lambda name, url: OpenAIModel(
        client_args={"base_url": url, "api_key": "none"}, model_id=name, params={"temperature": 0, "max_tokens": 100}
    )
)
weather = tool(get_weather)
said, hello = (
    str(Agent(model, tools=[weather], callback_handler=None)(text)).strip()
    for model, text in ((caller, WEATHER), (pair, HELLO))
)
print_result(asked=asked, said=said, hello=hello)
