"""`griptape`: an agent with a tool, and answers by a schema."""

from asking import PERSON, WEATHER, AnyPerson, Person, asked, clients, get_weather, print_result, told
from griptape.artifacts import TextArtifact
from griptape.drivers.prompt.openai import OpenAiChatPromptDriver
from griptape.structures import Agent
from griptape.tools import BaseTool
from griptape.utils.decorators import activity
from schema import Literal, Schema

caller, pair = clients(
    lambda name, url: OpenAiChatPromptDriver(model=name, base_url=url, api_key="none", temperature=0, max_tokens=100)
)


class Get(BaseTool):
    """Its name and that of its activity are those of the model's calls: `get_weather`."""

    @activity(config={"description": "The weather of a city.", "schema": Schema({Literal("city"): str})})
    def weather(self, values: dict) -> TextArtifact:
        return TextArtifact(get_weather(values["city"]))


def describe(text, schema=AnyPerson):
    return Agent(prompt_driver=pair, output_schema=schema).run(text).output.value


said = Agent(prompt_driver=caller, tools=[Get(name="get")]).run(WEATHER).output.value
print_result(asked=asked, said=said, people=[describe(PERSON, Person)], told=told(describe))
