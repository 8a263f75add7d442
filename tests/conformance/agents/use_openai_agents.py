"""`openai-agents`, by responses (its default) and by chats."""

from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from asking import PERSON, WEATHER, Person, asked, get_weather, print_result, urls
from openai import AsyncOpenAI

set_tracing_disabled(True)
caller, pair = (AsyncOpenAI(base_url=f"{url}/v1", api_key="none") for url in urls())
settings = ModelSettings(temperature=0, max_tokens=100)
weather = function_tool(get_weather)
said = [
    Runner.run_sync(
        Agent("Ann", tools=[weather], model=kind("caller", caller), model_settings=settings), WEATHER
    ).final_output
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)
]
people = [
    Runner.run_sync(
        Agent("Bob", output_type=Person, model=kind("smollm2", pair), model_settings=settings), PERSON
    ).final_output
    for kind in (OpenAIResponsesModel, OpenAIChatCompletionsModel)
]
print_result(asked=asked, said=said, people=people)
