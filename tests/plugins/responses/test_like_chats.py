"""`/v1/responses` does with tools, formats and parameters as `/v1/chat/completions` does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingDefaults
from tests.frontend.http_engine import http_engine
from tests.frontend.test_http_tools import PLAIN_CALL, ROLES, TOLD
from tests.frontend.tool_model import FUNCTION, Thinker, saying, thinking

PATH = "/v1/responses"
TOOL: dict[str, Any] = {"type": "function", **FUNCTION}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    with thinking(tmp_path_factory.mktemp("plain"), ROLES) as thinker:
        yield thinker


def test_it_samples_as_the_model_says() -> None:
    defaults = SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1, frequency_penalty=0.5)
    with http_engine(sampling=defaults) as engine:
        params = engine.submitted(PATH, input="Why?").params
        assert (params.temperature, params.top_k, params.repetition_penalty) == (0.6, 20, 1.1)
        params = engine.submitted(PATH, input="Why?", text={"format": {"type": "json_object"}}).params
        assert (params.repetition_penalty, params.frequency_penalty) == (1.0, 0.0), "they do not act in a grammar"


def test_calls_and_results_are_told_plainly(plain: Thinker) -> None:
    arguments = '{"city":  "Rome"}', "{}"
    items = [
        {"role": "user", "content": "Why?"},
        {"type": "message", "role": "assistant", "content": "So."},
        *(
            {"type": "function_call", "call_id": f"c{number}", "name": "get_weather", "arguments": text}
            for number, text in enumerate(arguments)
        ),
        {"type": "function_call_output", "call_id": "c0", "output": "Sunny"},
        {"type": "function_call_output", "call_id": "other", "output": "Rain"},
    ]
    told = (
        '<user>Why?<assistant>So.\n{"name": "get_weather", "parameters": {"city":  "Rome"}}; '
        '{"name": "get_weather", "parameters": {}}<user>Result of "get_weather":\nSunny\n\nResult:\nRain'
    )
    assert plain.prompt(PATH, input=items, tools=[TOOL]) == f"<system>{TOLD}{told}<assistant>"


def test_a_plain_call_is_one(plain: Thinker) -> None:
    with saying(plain, f"{PLAIN_CALL}; {PLAIN_CALL}") as engine:
        _, answer = engine.post(PATH, input="Why?", tools=[TOOL])
        assert [(item["type"], item["name"]) for item in answer["output"]] == [("function_call", "get_weather")] * 2


def test_tools_may_be_refused_where_the_template_has_no_place_for_them(tmp_path: Path) -> None:
    with thinking(tmp_path, ROLES, server=ServerConfig(names=("scripted",), port=0, tools="refuse")) as one:
        status, answer = one.engine.post(PATH, input="Why?", tools=[TOOL])
        assert (status, answer["error"]["param"]) == (400, "tools")
        assert "no place for tools" in answer["error"]["message"]
