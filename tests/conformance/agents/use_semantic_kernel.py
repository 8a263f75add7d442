"""`semantic-kernel`: an agent with a tool, and answers by a schema."""

# ruff: noqa: E402
import asyncio
import sys
from unittest.mock import MagicMock

# The client imports these for voices over WebRTC. They take 150 MB, so they are not installed.
VOICES = ("aiortc", "aiortc.mediastreams", "av", "av.audio", "av.audio.frame")
sys.modules |= dict.fromkeys(VOICES, MagicMock())

from asking import PERSON, WEATHER, AnyPerson, Person, asked, get_weather, print_result, told, urls
from openai import AsyncOpenAI
from semantic_kernel.agents import ChatCompletionAgent
from semantic_kernel.connectors.ai.open_ai import OpenAIChatCompletion, OpenAIChatPromptExecutionSettings
from semantic_kernel.functions import KernelArguments, kernel_function

caller, pair = urls()


class Weather:
    @kernel_function
    def get_weather(self, city: str) -> str:
        """The weather of a city."""
        return get_weather(city)


def ask(name, url, text, schema=None, **options):
    async def main():
        client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
        settings = OpenAIChatPromptExecutionSettings(temperature=0, max_tokens=100, response_format=schema)
        agent = ChatCompletionAgent(
            service=OpenAIChatCompletion(name, async_client=client), arguments=KernelArguments(settings), **options
        )
        return (await agent.get_response(text)).message.content

    return asyncio.run(main())


def describe(text, schema=AnyPerson):
    return schema.model_validate_json(ask("smollm2", pair, text, schema))


said = ask("caller", caller, WEATHER, plugins=[Weather()])
print_result(asked=asked, said=said, people=[describe(PERSON, Person)], told=told(describe))
