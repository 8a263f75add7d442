"""The programs of `agents/`. They have a venv of their own: their clients need other versions than `.venv` has."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

_AGENTS = Path(__file__).parent / "agents"
_PYTHON = Path(__file__).parent.parent.parent / ".venv-agents" / "bin" / "python"
_OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("instructor", {"people": 2}),
        ("langchain", {"asked": 2, "said": "It is sunny.", "people": 2, "free": True}),
        ("langgraph", {"asked": 1, "said": "It is sunny.", "hello": True}),
        ("llama_index", {"asked": 1, "said": "It is sunny."}),
        ("openai_agents", {"asked": 2, "said": ["It is sunny."] * 2, "people": 2}),
        ("pydantic_ai", {"asked": 1, "said": "It is sunny.", "people": 2, "free": True}),
        ("smolagents", {"asked": 1, "forced": 1}),
        ("strands", {"asked": 1, "said": "It is sunny.", "hello": True}),
    ],
)
def test_a_client_uses_its_tools_and_gets_what_its_schema_says(
    caller: str, server: str, client: str, expected: dict[str, Any]
) -> None:
    """`expected`: how often it is told to ask about both cities, what it says then, how many answers it gets by a
    schema and as free JSON, how many calls a model that knows no tools is forced to make, and whether such a model
    answers beside its tools."""
    command = [str(_PYTHON), str(_AGENTS / f"use_{client}.py"), caller, server]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **_OFFLINE})
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout)
    assert sorted(found.get("asked", [])) == sorted(["Rome", "Oslo"] * expected.get("asked", 0))
    assert found.get("said") == expected.get("said")
    people = found.get("people", [])
    assert len(people) == expected.get("people", 0)
    for person in people:
        assert sorted(person) == ["age", "name"]
        assert isinstance(person["name"], str) and len(person["name"]) <= 12 and 1 <= person["age"] <= 120
    assert isinstance(found.get("free"), dict) == ("free" in expected)
    assert bool(found.get("hello")) == ("hello" in expected)
    forced = found.get("forced", [])
    assert len(forced) == expected.get("forced", 0) and set(forced) <= {"Rome", "Oslo"}
