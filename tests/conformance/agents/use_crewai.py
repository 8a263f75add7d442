"""`crewai`: a crew of one with a tool, also on a model whose chat template has no place for tools."""

from asking import HELLO, PERSON, WEATHER, AnyPerson, Person, asked, clients, get_weather, print_result, told
from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool

caller, pair = clients(
    lambda name, url: LLM(model=f"openai/{name}", base_url=url, api_key="none", temperature=0, max_tokens=100)
)
weather = tool("get_weather")(get_weather)


def work(model, text):
    agent = Agent(role="Ann", goal="Answer.", backstory="Brief.", llm=model, tools=[weather], max_iter=3)
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
