"""Codex CLI's requests, and the events of a stream that it reads.

`codex.json` has two turns of `codex exec "Say hello"` of two versions, as they came over HTTP, with their texts cut."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from tests.frontend.tool_model import Thinker, saying
from tests.plugins.responses.test_http_responses import PATH, prompt

RECORDED: dict[str, Any] = json.loads(Path(__file__).with_name("codex.json").read_text())
VERSIONS = [*RECORDED]
SESSION: dict[str, Any] = json.loads(Path(__file__).with_name("codex_session.json").read_text())
FIRST: dict[str, Any] = SESSION["first"]
"""The first request of a session."""
TURNS: list[dict[str, Any]] = SESSION["turns"]
"""What it sends back in later requests, and what came from other providers before."""


@pytest.mark.parametrize("version", VERSIONS)
def test_a_first_request_is_answered_by_the_events_that_codex_reads(thinker: Thinker, version: str) -> None:
    recorded = RECORDED[version]
    tool = recorded["first"]["tools"][0]["name"]
    call = f'<tool_call>\n{{"name": "{tool}", "arguments": {{"cmd": "ls"}}}}\n</tool_call>'
    with saying(thinker, f"<think>Hm.</think>See:\n{call}") as engine:
        status, headers, content = engine.ask("POST", PATH, recorded["first"], recorded["headers"])
    assert status == 200 and headers["content-type"].startswith("text/event-stream"), content
    events = [json.loads(part.split("\ndata: ")[1]) for part in content.decode().split("\n\n")[:-1]]
    kinds = [event["type"] for event in events]
    assert kinds[0] == "response.created" and kinds[-1] == "response.completed"
    assert {"response.output_text.delta", "response.reasoning_text.delta", "response.output_item.added"} <= {*kinds}
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert [item["type"] for item in done] == ["reasoning", "message", "function_call"]
    assert done[0]["summary"] == [] and done[0]["content"] == [{"type": "reasoning_text", "text": "Hm."}]
    assert done[1]["role"] == "assistant" and done[1]["content"][0]["text"] == "See:"
    assert (done[2]["name"], json.loads(done[2]["arguments"])) == (tool, {"cmd": "ls"})
    completed = events[-1]["response"]
    assert completed["id"] == events[0]["response"]["id"]
    assert completed["store"] is recorded["first"]["store"]
    usage = completed["usage"]
    assert usage["input_tokens_details"]["cached_tokens"] == 1
    assert usage["output_tokens_details"]["reasoning_tokens"] == 0
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert [told["name"] for told in completed["tools"]] == [tool]


@pytest.mark.parametrize(
    ("version", "system", "before"),
    [
        ("0.171.0", "...\n\n<skills_instructions>...</skills_instructions><permissions>...</permissions>", ""),
        ("0.20.0", "...", "Let me see."),  # it repeats the text before the thoughts
    ],
)
def test_a_second_turn_is_one_conversation(thinker: Thinker, version: str, system: str, before: str) -> None:
    body = RECORDED[version]["second"]
    call, result = body["input"][-2:]
    said = prompt(thinker, **{**body, "stream": False, "tools": []})
    begin, _, answered = said.partition("<user>Say hello")
    assert begin == f"<system>{system}<user><environment_context>...</environment_context>"
    made = f"<tool_call>{call['call_id']} {call['name']} </tool_call>"
    assert answered.startswith("<assistant><think>I look.</think>")
    assert answered.endswith(f"Let me see.{made}<tool {call['name']}>{result['output']}<assistant>")
    assert answered.count("Let me see.") == 1 + bool(before)


def test_the_model_is_told_of_functions_and_of_texts(thinker: Thinker) -> None:
    said = prompt(thinker, **{**FIRST, "stream": False})
    assert "apply_patch" not in said and "web_search" not in said and "mcp__files" not in said
    assert said.startswith('[{"type": "function", "function": {"name": "shell"')
    system = "<system>You are a coding agent.\n\n<permissions instructions>read-only</permissions instructions>"
    asked = "<user># AGENTS.md instructions<environment_context>bash</environment_context><user>List the files."
    assert said.endswith(f"{system}{asked}<assistant>"), "one system message"


def test_what_it_sends_back_is_the_conversation(thinker: Thinker) -> None:
    said = prompt(thinker, **{**FIRST, "tools": [], "stream": False, "input": TURNS})
    expected = (
        "<assistant><think>Hm.</think>I look.<tool_call>c1 shell ls</tool_call>"
        '<tool shell>{"output":"a.py","metadata":{"exit_code":0}}'
        "<assistant><tool_call>c2 local_shell pwd</tool_call><tool local_shell>/src"
        "<assistant><tool_call>c3 apply_patch </tool_call><tool apply_patch>Done"
        "<assistant>Patched.<user>Go on.<assistant>"
    )
    assert said == f"<system>You are a coding agent.{expected}"


def test_a_choice_among_tools_is_made_of_functions(thinker: Thinker) -> None:
    both = {"tools": FIRST["tools"][:2], "input": "Why?"}
    allowed = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "shell"}]}
    assert "get_weather" not in prompt(thinker, **both, tool_choice=allowed)
    for choice in ({"type": "web_search"}, {"type": "custom", "name": "apply_patch"}):
        status, answer = thinker.engine.post(PATH, **{**FIRST, "stream": False, "tool_choice": choice})
        assert (status, answer["error"]["param"]) == (400, "tool_choice.type")


def test_a_tool_that_is_left_out_is_logged_once(thinker: Thinker, caplog: pytest.LogCaptureFixture) -> None:
    body = {**copy.deepcopy(FIRST), "tools": [{"type": "computer_use"}, {"type": "computer_use"}], "stream": False}
    with saying(thinker, "So.") as engine:
        for _ in range(2):
            status, answer = engine.post(PATH, **body)
            assert (status, answer["tools"]) == (200, [])
    assert [record.getMessage() for record in caplog.records if "computer_use" in record.getMessage()] == [
        "tools of the type 'computer_use' are left out: they are for other servers"
    ]
