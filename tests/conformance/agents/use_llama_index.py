"""`llama-index` with a server that is like OpenAI's: tools in an agent."""

import asyncio

from asking import WEATHER, asked, get_weather, print_result, urls
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.llms.openai_like import OpenAILike

caller, _ = urls()
model = OpenAILike(
    model="caller",
    api_base=f"{caller}/v1",
    api_key="none",
    is_chat_model=True,
    is_function_calling_model=True,
    context_window=512,
    max_tokens=100,
    temperature=0,
)


async def main() -> str:
    return str(await FunctionAgent(tools=[get_weather], llm=model).run(WEATHER))


print_result(asked=asked, said=asyncio.run(main()))
