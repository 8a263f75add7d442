"""A JSON schema at `/v1/responses`, by the built-in pair."""

from __future__ import annotations

import json

import pytest

from tests.test_doors import AGES, PERSON, Doors, doors, posted

__all__ = ["doors"]


@pytest.mark.parametrize(("name", "age"), AGES.items())
def test_the_models_penalties_do_not_act_in_a_grammar(doors: Doors, name: str, age: int) -> None:
    prompt = f"{name} is {age} years old. Answer in JSON."
    format = {"type": "json_schema", "name": "person", "schema": PERSON}
    found = posted(doors, "/v1/responses", input=prompt, max_output_tokens=64, text={"format": format})
    assert json.loads(found["output"][0]["content"][0]["text"]) == {"name": name, "age": age}
