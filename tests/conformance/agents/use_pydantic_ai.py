"""`pydantic-ai`: tools, and output of its three modes."""

from asking import PERSON, PERSON_REPEATED, WEATHER, AnyFields, Person, asked, clients, get_weather, print_result
from pydantic_ai import Agent, NativeOutput, PromptedOutput, ToolOutput
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider

caller, pair = clients(lambda name, url: OpenAIChatModel(name, provider=OpenAIProvider(base_url=url, api_key="none")))
settings = {"temperature": 0.0, "max_tokens": 100}
agent = Agent(caller, model_settings=settings)
agent.tool_plain(get_weather)
people = [
    Agent(pair, output_type=output(Person), model_settings=settings).run_sync(PERSON).output
    for output in (NativeOutput, ToolOutput)
]
free = Agent(pair, output_type=PromptedOutput(AnyFields), model_settings=settings).run_sync(PERSON_REPEATED).output
print_result(asked=asked, said=agent.run_sync(WEATHER).output, people=people, free=free)
