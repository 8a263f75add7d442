"""`pydantic-ai`: tools, and output of its three modes."""

from asking import PERSON, PERSON_REPEATED, WEATHER, AnyFields, Person, print_result, urls
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

caller, pair = (
    OpenAIChatModel(name, provider=OpenAIProvider(base_url=f"{url}/v1", api_key="none"))
    for name, url in zip(("caller", "smollm2"), urls(), strict=True)
)
settings = {"temperature": 0.0, "max_tokens": 100}
asked = []
agent = Agent(caller, model_settings=settings)


@agent.tool_plain
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


people = [
    Agent(pair, output_type=output(Person), model_settings=settings).run_sync(PERSON).output
    for output in (NativeOutput, ToolOutput)
]
free = Agent(pair, output_type=PromptedOutput(AnyFields), model_settings=settings).run_sync(PERSON_REPEATED).output
print_result(asked=asked, said=agent.run_sync(WEATHER).output, people=people, free=free)
