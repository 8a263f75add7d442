"""`haystack`: its agent with a tool, whole and streamed, and answers by a schema."""

import json
from typing import Annotated

from asking import HELLO, PERSON, WEATHER, Person, clients, print_result
from haystack.components.agents import Agent
from haystack.components.generators.chat import OpenAIChatGenerator
from haystack.dataclasses import ChatMessage
from haystack.tools import tool
from haystack.utils import Secret

caller, pair = clients(
    lambda name, url: OpenAIChatGenerator(
        model=name,
        api_base_url=url,
        api_key=Secret.from_token("none"),
        generation_kwargs={"temperature": 0, "max_tokens": 100},
    )
)
asked = []


@tool
def get_weather(city: Annotated[str, "its name"]) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


def ask(model, text, **options):
    agent = Agent(chat_generator=model, tools=[get_weather], **options)
    return agent.run(messages=[ChatMessage.from_user(text)])["last_message"].text


said = [ask(caller, WEATHER), ask(caller, WEATHER, streaming_callback=lambda chunk: None)]
answer = pair.run([ChatMessage.from_user(PERSON)], generation_kwargs={"response_format": Person})
print_result(asked=asked, said=said, hello=ask(pair, HELLO), people=[json.loads(answer["replies"][0].text)])
