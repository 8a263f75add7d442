"""Ten everyday prompts at every door of one engine, without a word on sampling: the same texts, and none that loops."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from ssd.client import Client, Completion
from ssd.config.params import SamplingParams, Speculation, Structured
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine

PROMPTS = [
    "Why is the sky blue?",
    "Tell me a story about a fox.",
    "Explain how a bicycle works.",
    "Write a poem about the sea.",
    "What is the capital of France?",
    "Give me a recipe for pancakes.",
    "How do I learn to play the guitar?",
    "Write a Python function that reverses a string.",
    "What should I do on a rainy day?",
    "Summarize the history of Rome.",
]
SHORT = 40  # tokens, for doors that answer one prompt after the other
AGES = {"Ann": 11, "Dmitri": 7, "Maria": 57}
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


class Doors(NamedTuple):
    url: str
    client: Client


@pytest.fixture(scope="module")
def doors() -> Iterator[Doors]:
    """Of the built-in pair. No answer depends on what runs beside it."""
    options = EngineOptions(max_num_seqs=len(PROMPTS), deterministic=True)
    with Engine(resolve(options, ServerOptions(port=0))) as engine, Client(engine.address) as client:
        assert engine.url is not None
        yield Doors(engine.url, client)


@pytest.fixture(scope="module")
def told(doors: Doors) -> list[Completion]:
    """What a ZeroMQ client gets that gives no parameters."""
    return doors.client.generate(PROMPTS, chat=True)


@pytest.fixture(scope="module")
def shown(doors: Doors) -> list[dict[str, Any]]:
    """What chats over HTTP get that have room to end: the choices, with their token ids."""
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        return list(pool.map(lambda prompt: chat_completion(doors, prompt, max_tokens=1024), PROMPTS))


def chat_completion(doors: Doors, prompt: str, **body: Any) -> dict[str, Any]:
    asked = {"messages": [{"role": "user", "content": prompt}], "return_token_ids": True, **body}
    found: dict[str, Any] = posted(doors, "/v1/chat/completions", **asked)["choices"][0]
    return found


def posted(doors: Doors, path: str, **body: Any) -> Any:
    request = urllib.request.Request(
        f"{doors.url}{path}", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def ssd(*arguments: str, given: str = "") -> str:
    done = subprocess.run(
        [sys.executable, "-m", "ssd.cli.main", *arguments], input=given, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loops(ids: Sequence[int]) -> bool:
    """Tell whether 40 tokens or more, at the end or before, are one passage three times or more."""
    return any(
        ids[begin : begin + span - period] == ids[begin + period : begin + span]
        for period in range(1, len(ids) // 3 + 1)
        for span in [max(40, 3 * period)]
        for begin in range(len(ids) - span + 1)
    )


def test_a_loop_is_told_from_a_text() -> None:
    text = list(range(50))
    assert loops(text + [1, 2, 3] * 14) and loops([*text, *[1, 2, 3] * 14, 9]) and loops(text * 3) and loops([7] * 40)
    assert not loops(text) and not loops(text * 2) and not loops(text + [1, 2, 3] * 13) and not loops([7] * 39)


def test_no_first_answer_loops(shown: list[dict[str, Any]]) -> None:
    ended = {prompt: choice["finish_reason"] for prompt, choice in zip(PROMPTS, shown, strict=True)}
    assert not [prompt for prompt, choice in zip(PROMPTS, shown, strict=True) if loops(choice["token_ids"])], ended
    assert set(ended.values()) == {"stop"}, ended


def test_a_chat_and_a_client_get_the_same_text(shown: list[dict[str, Any]], told: list[Completion]) -> None:
    for choice, completion in zip(shown, told, strict=True):
        assert choice["token_ids"][: len(completion.token_ids)] == completion.token_ids


def test_a_stream_and_given_defaults_get_the_same_text(doors: Doors, told: list[Completion]) -> None:
    *_, last = doors.client.stream([{"role": "user", "content": PROMPTS[0]}])
    assert last.completion is not None and last.completion.token_ids == told[0].token_ids
    short = doors.client.chat(
        [{"role": "user", "content": PROMPTS[0]}], doors.client.get_default_sampling_params(max_tokens=SHORT)
    )
    assert short.token_ids == told[0].token_ids[:SHORT]


def test_generate_gets_the_same_text(doors: Doors, told: list[Completion], tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    found = ssd("generate", "--address", doors.client.address, "--prompts-file", str(file))
    assert [json.loads(line)["token_ids"] for line in found.splitlines()] == [each.token_ids for each in told]


def test_flags_change_what_the_model_says(doors: Doors, told: list[Completion]) -> None:
    neutral = "--repetition-penalty", "1", "--frequency-penalty", "0", "--presence-penalty", "0", "--json"
    longest = max(range(len(PROMPTS)), key=lambda number: len(told[number].token_ids))
    found = json.loads(ssd("generate", "--address", doors.client.address, PROMPTS[longest], *neutral))
    assert found["token_ids"] != told[longest].token_ids


def as_chat(doors: Doors, prompt: str) -> Any:
    format = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    return json.loads(chat_completion(doors, prompt, max_tokens=64, response_format=format)["message"]["content"])


def as_guided(doors: Doors, prompt: str) -> Any:
    found = chat_completion(doors, prompt, max_tokens=64, guided_json=PERSON)
    return json.loads(found["message"]["content"])


def as_required_tool(doors: Doors, prompt: str) -> Any:
    tool = {"type": "function", "function": {"name": "person", "parameters": PERSON}}
    found = chat_completion(doors, prompt, max_tokens=64, tools=[tool], tool_choice="required")
    return json.loads(found["message"]["tool_calls"][0]["function"]["arguments"])


def as_a_clients(doors: Doors, prompt: str) -> Any:
    form = Structured("json", json.dumps(PERSON))
    params = doors.client.get_default_sampling_params(structured=form, max_tokens=64)
    return json.loads(doors.client.generate(prompt, params, chat=True).text)


@pytest.mark.parametrize("asked", [as_chat, as_guided, as_required_tool, as_a_clients])
def test_the_models_penalties_do_not_act_in_a_grammar(doors: Doors, asked: Callable[[Doors, str], Any]) -> None:
    """They would punish the words of the prompt, which the answer repeats."""
    for name, age in AGES.items():
        assert asked(doors, f"{name} is {age} years old. Answer in JSON.") == {"name": name, "age": age}


def test_a_requests_own_penalties_act_in_a_grammar(doors: Doors) -> None:
    prompt = "Ann is 11 years old. Answer in JSON."
    free, same, other = (
        chat_completion(doors, prompt, max_tokens=64, guided_json=PERSON, **penalties)["token_ids"]
        for penalties in ({}, {"repetition_penalty": 1.0}, {"repetition_penalty": 1.3})
    )
    assert free == same != other


def test_a_free_answer_repeats_the_facts_of_its_prompt(doors: Doors) -> None:
    """A default penalty on the prompt's tokens would forbid it."""
    for name, age, city in (("Ann", 11, "Oslo"), ("Ines", 29, "Porto"), ("Oscar", 70, "Malmo")):
        prompt = (
            f"{name} is {age} years old and lives in {city}. "
            f"Write one sentence that introduces {name} with age and city."
        )
        said = chat_completion(doors, prompt, max_tokens=SHORT)["message"]["content"]
        assert all(fact in said for fact in (name, str(age), city)), said


def test_a_grammar_that_counts_tokens_is_decoded_without_speculation(doors: Doors) -> None:
    """As guidance's `gen(max_tokens=...)`; the ids are those of mode `ar`, also at a temperature."""
    lark = 'start: "Sky: " a "!" b\na[capture, max_tokens=12]: /(?s:.*)/\nb[max_tokens=6, stop="."]: /(?s:.*)/'
    for temperature in (0.0, 0.9):
        params = SamplingParams(structured=Structured("grammar", lark), temperature=temperature, seed=5, max_tokens=60)
        asked = [params, replace(params, speculation=Speculation("ar")), replace(params, structured=None)]
        counted, plain, free = doors.client.generate([PROMPTS[0]] * 3, asked)
        assert counted.token_ids == plain.token_ids and counted.text.startswith("Sky: ") and "!" in counted.text
        assert (counted.metrics.mode, counted.metrics.drafted_tokens) == ("ar", 0)
        assert free.metrics.mode != "ar"
