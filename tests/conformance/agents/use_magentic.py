"""`magentic`: functions whose body is a prompt, by a schema and with a tool; all answers are streamed."""

from asking import PERSON, WEATHER, Person, asked, clients, get_weather, print_result
from magentic import FunctionCall, OpenaiChatModel, StreamedResponse, prompt

caller, pair = clients(
    lambda name, url: OpenaiChatModel(name, base_url=url, api_key="none", temperature=0, max_tokens=100)
)


@prompt(WEATHER, functions=[get_weather], model=caller)
def ask() -> StreamedResponse: ...


@prompt(PERSON, model=pair)
def tell() -> Person: ...


said = ""
for item in ask():
    if isinstance(item, FunctionCall):
        item()
    else:
        said += str(item)
print_result(asked=asked, said=said, people=[tell()])
