"""`magentic`: functions whose body is a prompt, by a schema and with a tool; all answers are streamed."""

from asking import PERSON, WEATHER, Person, print_result, urls
from magentic import FunctionCall, OpenaiChatModel, StreamedResponse, prompt

caller, pair = (
    OpenaiChatModel(name, base_url=f"{url}/v1", api_key="none", temperature=0, max_tokens=100)
    for name, url in zip(("caller", "smollm2"), urls(), strict=True)
)
asked = []


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


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
