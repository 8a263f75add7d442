"""`langgraph`: its prebuilt agent with a tool, also on a model whose chat template has no place for tools, and
`langchain`'s agent on it, whose answer obeys a schema beside its tools."""

from asking import HELLO, PERSON, WEATHER, Person, asked, clients, get_weather, print_result
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy, ToolStrategy
from langchain_openai import ChatOpenAI
from langgraph.prebuilt import create_react_agent

caller, pair = clients(
    lambda name, url: ChatOpenAI(model=name, base_url=url, api_key="none", temperature=0, max_tokens=100)
)
said, hello = (
    create_react_agent(model, [get_weather]).invoke({"messages": [("user", text)]})["messages"][-1].content
    for model, text in ((caller, WEATHER), (pair, HELLO))
)
people = [
    create_agent(pair, tools, response_format=strategy(Person)).invoke({"messages": [("user", PERSON)]})[
        "structured_response"
    ]
    for strategy, tools in ((ProviderStrategy, []), (ProviderStrategy, [get_weather]), (ToolStrategy, []))
]
print_result(asked=asked, said=said, hello=hello, people=people)
