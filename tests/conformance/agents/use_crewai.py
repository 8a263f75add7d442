"""`crewai`: a crew of one with a tool, also on a model whose chat template has no place for tools."""

from asking import HELLO, PERSON, WEATHER, AnyPerson, Person, print_result, told, urls
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

caller, pair = (
    LLM(model=f"openai/{name}", base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=100)
    for name, url in zip(("caller", "smollm2"), urls(), strict=True)
)
asked = []


@tool("get_weather")
def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


def work(model, text):
    agent = Agent(role="Ann", goal="Answer.", backstory="Brief.", llm=model, tools=[get_weather], max_iter=3)
    task = Task(description=text, expected_output="A sentence.", agent=agent)
    return Crew(agents=[agent], tasks=[task]).kickoff().raw


said = work(caller, WEATHER)
hello = work(pair, HELLO)
person = pair.call(PERSON, response_model=Person)


def describe(text):
    agent = Agent(role="Ann", goal="Answer.", backstory="Brief.", llm=pair)
    task = Task(description=text, expected_output="A person.", agent=agent, output_pydantic=AnyPerson)
    return Crew(agents=[agent], tasks=[task]).kickoff().pydantic


print_result(asked=asked, said=said, hello=hello, people=[person], told=told(describe))
