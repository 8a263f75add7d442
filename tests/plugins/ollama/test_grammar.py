"""A format at `/api/chat`, by the built-in pair."""

from __future__ import annotations

import json

import pytest

from tests.test_doors import AGES, PERSON, Doors, doors, posted

__all__ = ["doors"]


@pytest.mark.parametrize(("name", "age"), AGES.items())
def test_the_models_penalties_do_not_act_in_a_grammar(doors: Doors, name: str, age: int) -> None:
    prompt = f"{name} is {age} years old. Answer in JSON."
    body = {"model": "smollm2", "messages": [{"role": "user", "content": prompt}], "stream": False}
    found = posted(doors, "/api/chat", **body, format=PERSON, options={"num_predict": 64})
    assert json.loads(found["message"]["content"]) == {"name": name, "age": age}
