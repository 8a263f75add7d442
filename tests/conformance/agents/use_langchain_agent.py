"""`langchain`'s agent with a tool and an answer that obeys a schema, in requests that have both."""

from asking import WEATHER, Person, asked, get_weather, print_result, urls
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_openai import ChatOpenAI

caller, _ = urls()
model = ChatOpenAI(model="caller", base_url=f"{caller}/v1", api_key="none", temperature=0, max_tokens=100)
agent = create_agent(model, [get_weather], response_format=ProviderStrategy(Person))
print_result(asked=asked, people=[agent.invoke({"messages": [("user", WEATHER)]})["structured_response"]])
