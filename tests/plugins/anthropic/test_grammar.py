"""A forced tool at `/v1/messages`, by the built-in pair."""

from __future__ import annotations

import pytest

from tests.test_doors import AGES, PERSON, Doors, doors, posted

__all__ = ["doors"]


@pytest.mark.parametrize(("name", "age"), AGES.items())
def test_the_models_penalties_do_not_act_in_a_grammar(doors: Doors, name: str, age: int) -> None:
    prompt = f"{name} is {age} years old. Answer in JSON."
    body = {"messages": [{"role": "user", "content": prompt}], "max_tokens": 64}
    tools, choice = [{"name": "person", "input_schema": PERSON}], {"type": "tool", "name": "person"}
    found = posted(doors, "/v1/messages", model="smollm2", **body, tools=tools, tool_choice=choice)
    assert found["content"][0]["input"] == {"name": name, "age": age}
