"""`dspy`, told that the models know tools and schemas: calls, and a typed answer."""

import dspy
import litellm
from asking import PERSON, WEATHER, AnyPerson, Person, clients, get_weather, print_result, told

KNOWN = {
    "litellm_provider": "openai",
    "mode": "chat",
    "supports_function_calling": True,
    "supports_response_schema": True,
}
litellm.register_model({f"openai/{name}": KNOWN for name in ("caller", "smollm2")})
caller, pair = clients(
    lambda name, url: dspy.LM(
        f"openai/{name}", api_base=url, api_key="none", engine="litellm", temperature=0, max_tokens=100, cache=False
    )
)


class Ask(dspy.Signature):
    question: str = dspy.InputField()
    tools: list[dspy.Tool] = dspy.InputField()
    calls: dspy.ToolCalls = dspy.OutputField()


class Tell(dspy.Signature):
    question: str = dspy.InputField()
    person: Person = dspy.OutputField()


class Describe(dspy.Signature):
    question: str = dspy.InputField()
    person: AnyPerson = dspy.OutputField()


dspy.configure(adapter=dspy.JSONAdapter())
with dspy.context(lm=caller):
    calls = dspy.Predict(Ask)(question=WEATHER, tools=[dspy.Tool(get_weather)]).calls.tool_calls
with dspy.context(lm=pair):
    person = dspy.Predict(Tell)(question=PERSON).person
    people = told(lambda text: dspy.Predict(Describe)(question=text).person)
print_result(asked=[call.args["city"] for call in calls], people=[person], told=people)
