"""What all programs of this folder ask, and how they tell what they got."""

import json
import sys
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

WEATHER = "How is the weather in Rome and Oslo?"
PERSON = 'Answer in JSON and repeat only this: {"name": "Bob", "age": 7}'


class Person(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: Literal["Ann", "Bob"]
    age: int = Field(ge=1, le=9)


def urls() -> list[str]:
    """The addresses of `caller` and of the built-in pair."""
    return sys.argv[1:3]


def print_result(**found: Any) -> None:
    print(json.dumps(found, default=lambda model: model.model_dump()))
