"""What all programs of this folder ask, and how they tell what they got."""

import json
import sys
from collections.abc import Callable
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

WEATHER = "How is the weather in Rome and Oslo?"
HELLO = "Say hello."
PERSON = "Bob is 7 years old. Who is he?"
PERSON_REPEATED = 'Answer in JSON and repeat only this: {"name": "Bob", "age": 7}'


class Person(BaseModel):
    """A person. What obeys this ends soon, whatever a model says."""

    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=12)
    age: int = Field(ge=1, le=120)


# A person as most programs write one: its schema limits neither field, so only the prompt says what is right. It has no
# docstring, which some clients would show to the model.
class AnyPerson(BaseModel):
    name: str
    age: int


class AnyFields(BaseModel):
    """For modes that send no schema: the server makes an answer JSON, the model chooses its fields."""

    model_config = ConfigDict(extra="allow")


def urls() -> list[str]:
    """The addresses of `caller` and of the built-in pair."""
    return sys.argv[1:3]


def clients(make: Callable[[str, str], Any]) -> list[Any]:
    """Make a client for `caller` and one for the built-in pair, of a model's name and an address of OpenAI's kind."""
    return [make(name, f"{url}/v1") for name, url in zip(("caller", "smollm2"), urls(), strict=True)]


asked: list[str] = []


def get_weather(city: str) -> str:
    """The weather of a city."""
    asked.append(city)
    return "Sunny"


def told(ask: Callable[[str], Any]) -> list[Any]:
    """Return an `AnyPerson`, or the error that its client raises, for each text of the command line."""
    answers: list[Any] = []
    for text in sys.argv[3:]:
        try:
            answers.append(ask(text))
        except Exception as error:
            answers.append(repr(error)[-500:])
    return answers


def print_result(**found: Any) -> None:
    print(json.dumps(found, default=lambda model: model.model_dump()))
