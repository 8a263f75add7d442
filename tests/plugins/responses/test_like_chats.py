"""`/v1/responses` does with tools, formats and parameters as `/v1/chat/completions` does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.config.params import SamplingDefaults
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.test_http_other_bodies import submitted as sampled
from tests.frontend.test_http_tools import PLACE, PLAIN_CALL, ROLES, TOLD, submitted, told_plainly
from tests.frontend.tool_model import WEATHER, model, saying

PATH = "/v1/responses"
SERVER = ServerConfig(names=("scripted",), port=0)
TOOL: dict[str, Any] = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("schema", "word"),
    [
        ({"type": "array", "uniqueItems": True}, "uniqueItems"),
        ({"type": "string", "format": "wat"}, "wat"),
        ({"not": {"type": "string"}}, "not"),
    ],
)
def test_a_strict_schema_is_obeyed_or_refused(scripted: HttpEngine, schema: dict[str, Any], word: str) -> None:
    text = {"format": {"type": "json_schema", "name": "x", "schema": schema, "strict": True}}
    status, answer = scripted.post(PATH, input="Why?", text=text)
    assert status == 400 and word in answer["error"]["message"]


def test_it_samples_as_the_model_says() -> None:
    with http_engine(sampling=SamplingDefaults(temperature=0.6, top_k=20)) as engine:
        params = sampled(engine, PATH, {"input": "Why?"})[1]
        assert (params.temperature, params.top_k) == (0.6, 20)


def test_calls_and_results_are_told_plainly(tmp_path: Path) -> None:
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
    with told_plainly(tmp_path) as one:
        assert submitted(one, PATH, input=items, tools=[TOOL]) == f"<system>{TOLD}{told}<assistant>"


def test_a_plain_call_is_one(tmp_path: Path) -> None:
    with told_plainly(tmp_path) as one, saying(one, f"{PLAIN_CALL}; {PLAIN_CALL}"):
        _, answer = one.engine.post(PATH, input="Why?", tools=[TOOL])
        assert [(item["type"], item["name"]) for item in answer["output"]] == [("function_call", "get_weather")] * 2


def test_tools_may_be_refused_where_the_template_has_no_place_for_them(tmp_path: Path) -> None:
    for name, template in (("plain", ROLES), ("place", f"{PLACE}<tool_call>")):
        model(tmp_path / name, template)
        server = ServerConfig(names=("scripted",), port=0, tools="refuse")
        with http_engine(server, target=str(tmp_path / name)) as engine, answering(engine, [5]):
            status, answer = engine.post(PATH, input="Why?", tools=[TOOL])
            if name == "plain":
                assert (status, answer["error"]["param"]) == (400, "tools")
                assert "no place for tools" in answer["error"]["message"]
            else:
                assert status == 200
