"""`agno`: an agent with a tool, and answers by a schema."""

from agno.agent import Agent
from agno.models.openai import OpenAILike
from asking import PERSON, WEATHER, AnyPerson, Person, print_result, told, urls

caller, pair = (
    OpenAILike(id=name, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=100)
    for name, url in zip(("caller", "smollm2"), urls(), strict=True)
)
asked = []


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


def describe(text, schema=AnyPerson):
    return Agent(model=pair, output_schema=schema).run(text).content


said = Agent(model=caller, tools=[get_weather]).run(WEATHER).content
print_result(asked=asked, said=said, people=[describe(PERSON, Person)], told=told(describe))
