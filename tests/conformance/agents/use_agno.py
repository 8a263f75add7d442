"""`agno`: an agent with a tool, and answers by a schema."""

from agno.agent import Agent
from agno.models.openai import OpenAILike
from asking import PERSON, WEATHER, AnyPerson, Person, asked, clients, get_weather, print_result, told

caller, pair = clients(
    lambda name, url: OpenAILike(id=name, base_url=url, api_key="none", temperature=0, max_tokens=100)
)


def describe(text, schema=AnyPerson):
    return Agent(model=pair, output_schema=schema).run(text).content


said = Agent(model=caller, tools=[get_weather]).run(WEATHER).content
print_result(asked=asked, said=said, people=[describe(PERSON, Person)], told=told(describe))
