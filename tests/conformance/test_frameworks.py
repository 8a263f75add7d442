"""The programs of `agents/`. They have venvs of their own: their clients need other versions than `.venv` has."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.conftest import PEOPLE, TEXTS, saying
from tests.conformance.repeating import STRICT_ANSWERS

_AGENTS = Path(__file__).parent / "agents"
_ROOT = Path(__file__).parents[2]
_CREWAI = _ROOT / ".venv-crewai/bin/python"
_PYTHONS = {"crewai": _CREWAI, "semantic_kernel": _CREWAI, "dspy": Path(sys.executable)}
_OTHERS = _ROOT / ".venv-agents/bin/python"
OFFLINE = {
    "AGNO_TELEMETRY": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_DISABLE_VERSION_CHECK": "true",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "HF_HUB_OFFLINE": "1",
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OTEL_SDK_DISABLED": "true",
}
BOTH, ROME = ["Oslo", "Rome"], ["Rome"]


def run(client: str, caller: str, pair: str, home: Path) -> dict[str, Any]:
    """What a program finds out; it must end well."""
    command = [_PYTHONS.get(client, _OTHERS), _AGENTS / f"use_{client}.py", caller, pair, *TEXTS]
    environment = {**os.environ, **OFFLINE, "HOME": str(home)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize(
    ("client", "expected"),
    [
        ("agno", {"asked": BOTH, "said": "Let me see.It is sunny.", "people": 1, "told": PEOPLE}),
        ("chatlas", {"asked": ROME * 4, "said": ["It is sunny."] * 4, "people": 2}),
        ("crewai", {"asked": ROME, "said": "It is sunny.", "hello": True, "people": 1, "told": PEOPLE}),
        ("dspy", {"asked": ROME, "people": 1, "told": PEOPLE}),
        ("griptape", {"asked": BOTH, "said": "It is sunny.", "people": 1, "told": PEOPLE}),
        ("guidance", {"hello": True, "people": 2, "forced": 2}),
        ("haystack", {"asked": BOTH * 2, "said": ["It is sunny."] * 2, "hello": True, "people": 1}),
        ("instructor", {"people": 2}),
        ("langchain", {"asked": BOTH * 2, "said": "It is sunny.", "people": 2, "free": True}),
        ("langgraph", {"asked": BOTH, "said": "It is sunny.", "hello": True, "people": 3}),
        ("llama_index", {"asked": BOTH, "said": "It is sunny."}),
        ("magentic", {"asked": BOTH, "said": "Let me see.", "people": 1}),
        ("mirascope", {"asked": ROME * 2, "said": ["It is sunny."] * 2, "people": 4, "told": PEOPLE}),
        ("openai_agents", {"asked": ROME * 2, "said": ["It is sunny."] * 2, "people": 2}),
        ("outlines", {"people": 2, "free": True, "forced": 4}),
        ("pydantic_ai", {"asked": ROME, "said": "It is sunny.", "people": 2, "free": True}),
        ("semantic_kernel", {"asked": BOTH, "said": "It is sunny.", "people": 1, "told": PEOPLE}),
        ("smolagents", {"asked": BOTH, "forced": 1}),
        ("strands", {"asked": BOTH, "said": "It is sunny.", "hello": True}),
    ],
)
def test_a_client_uses_its_tools_and_gets_what_its_schema_says(
    caller: str, strict_caller: str, server: str, client: str, expected: dict[str, Any], tmp_path: Path
) -> None:
    """`expected`: which cities it is told to ask about (one, where its tools are strict by default), what it says
    then, how many answers it gets by a schema and as free JSON, how many cities a model that knows no tools is forced
    to name, by a call or a grammar, whether such a model answers beside its tools, and what it tells about `TEXTS` by a
    schema that does not limit its fields."""
    strict = ROME[0] in expected.get("asked", []) and BOTH[0] not in expected["asked"]
    found = run(client, strict_caller if strict else caller, server, tmp_path)
    assert sorted(found.get("asked", [])) == sorted(expected.get("asked", []))
    assert found.get("said") == expected.get("said")
    people = found.get("people", [])
    assert len(people) == expected.get("people", 0)
    for person in people:
        assert sorted(person) == ["age", "name"]
        assert isinstance(person["name"], str) and len(person["name"]) <= 12 and 1 <= person["age"] <= 120
    assert found.get("told") == expected.get("told")
    assert isinstance(found.get("free"), dict) == ("free" in expected)
    assert bool(found.get("hello")) == ("hello" in expected)
    forced = found.get("forced", [])
    assert len(forced) == expected.get("forced", 0) and set(forced) <= {"Rome", "Oslo"}


def test_an_agent_of_langchain_calls_its_tools_before_it_answers_by_a_schema(server: str, tmp_path: Path) -> None:
    answers = {"<assistant>": STRICT_ANSWERS["<assistant>"], "<answer>": ['{"name": "Bob", ', '"age": 7}']}
    with saying(tmp_path / "caller", answers) as url:
        found = run("langchain_agent", url, server, tmp_path)
    assert found == {"asked": ROME, "people": [{"name": "Bob", "age": 7}]}
