"""`langchain-openai`: tools, whole and streamed, and structured output by all of its methods."""

from asking import PERSON, PERSON_REPEATED, WEATHER, AnyFields, Person, clients, get_weather, print_result
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI

caller, pair = clients(
    lambda name, url: ChatOpenAI(model=name, base_url=url, api_key="none", temperature=0, max_tokens=100)
)
agent = caller.bind_tools([get_weather])
messages = [HumanMessage(WEATHER)]
first = agent.invoke(messages)
messages += [first, *(ToolMessage("Sunny", tool_call_id=call["id"]) for call in first.tool_calls)]
streamed = None
for chunk in agent.stream(WEATHER):
    streamed = chunk if streamed is None else streamed + chunk
people = [
    pair.with_structured_output(Person, method=method).invoke(PERSON) for method in ("json_schema", "function_calling")
]
free = pair.with_structured_output(AnyFields, method="json_mode").invoke(PERSON_REPEATED)
print_result(
    asked=[call["args"]["city"] for message in (first, streamed) for call in message.tool_calls],
    said=agent.invoke(messages).content,
    people=people,
    free=free,
)
