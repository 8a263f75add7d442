"""gpt-oss's harmony and Qwen's XML over HTTP: prompts, answers, and what is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import RequestError
from ssd.grammar.matcher import GrammarCompiler
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_http_tools import ASKED, CHATS, SERVER, both, calls, prompt
from tests.frontend.tool_model import HARMONY, HARMONY_MARKS, QWEN, WEATHER, Thinker, model, saying

VOCABULARY = 49152 + len(HARMONY_MARKS)
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}  # type: ignore[dict-item]


@pytest.fixture(scope="module", params=["special", "plain"])
def harmony(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """A model like gpt-oss, whose marks are special tokens, or text of several tokens."""
    yield from _serving(
        tmp_path_factory.mktemp("harmony"), HARMONY, HARMONY_MARKS if request.param == "special" else ()
    )


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    yield from _serving(tmp_path_factory.mktemp("qwen"), QWEN, ())


def _serving(directory: Path, template: str, special: tuple[str, ...]) -> Iterator[Thinker]:
    tokenizer = model(directory, template, special)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    with http_engine(SERVER, target=str(directory), vocab_size=VOCABULARY, max_model_len=2048) as engine:
        yield Thinker(engine, tokenizer)


class Enforced:
    """The grammar that the target gets for a request."""

    def __init__(self, thinker: Thinker, **body: Any) -> None:
        engine, self._tokenizer = thinker
        connection = engine.connection()
        connection.request("POST", CHATS, json.dumps({**ASKED, **body}), {"content-type": "application/json"})
        asked = engine.engine.target.next_submit().params.structured
        connection.close()
        assert asked is not None and asked.kind == "compiled"
        self._end = 2
        directory = self._tokenizer._directory
        self._grammar = GrammarCompiler(directory, VOCABULARY, [self._end]).compile(asked.source)

    def takes(self, text: str) -> bool:
        try:
            masks = self._grammar.begin().masks(self._tokenizer.encode(text))
        except RequestError:
            return False
        return bool(masks[-1][self._end])


def raw(thinker: Thinker, **body: Any) -> str:
    """The prompt, with special tokens."""
    engine, tokenizer = thinker
    status, answer = engine.post("/tokenize", **{"messages": ASKED["messages"], **body})
    assert status == 200, answer
    vocabulary = tokenizer.vocabulary()
    return b"".join(map(vocabulary.piece_bytes, answer["tokens"])).decode()


def info(engine: HttpEngine) -> tuple[str, str]:
    found = json.loads(engine.ask("GET", "/server_info")[2])
    return found["tool_call_parser"], found["reasoning_parser"]


# -- gpt-oss --------------------------------------------------------------------------------------------------------

THINKS = "<|channel|>analysis<|message|>Hm.\n\nRome?<|end|><|start|>assistant"
LOOKS = "<|channel|>commentary<|message|>Let me see.<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{"city": "São Paulo"}'
FINAL = "<|channel|>final<|message|>"


@pytest.mark.parametrize("each", [1, 3, 1000])
def test_gpt_oss_thinks_speaks_and_calls(harmony: Thinker, each: int) -> None:
    assert info(harmony.engine) == ("harmony", "harmony")
    with saying(harmony, f"{THINKS}{LOOKS}{THINKS}{CALL}<|call|>", each) as engine:
        choice = both(engine, tools=[WEATHER])
        assert calls(choice) == [("get_weather", {"city": "São Paulo"})] and choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] == "Let me see."
        assert choice["message"]["reasoning_content"] == "Hm.\n\nRome?\nHm.\n\nRome?"
        tool = {"type": "function", **WEATHER["function"]}  # type: ignore[dict-item]
        _, answer = engine.post("/v1/responses", input="Why?", tools=[tool])
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message", "reasoning", "function_call"]
    with saying(harmony, f"{THINKS}{FINAL}Sunny.<|return|>", each) as engine:
        message = both(engine)["message"]
        assert (message["content"], message["reasoning_content"]) == ("Sunny.", "Hm.\n\nRome?")


def test_gpt_oss_gets_the_effort_and_earlier_thoughts(harmony: Thinker) -> None:
    begin = "<|start|>system<|message|>Effort: {}<|end|><|start|>user<|message|>Why?<|end|>"
    assert raw(harmony) == begin.format("medium") + "<|start|>assistant"
    assert raw(harmony, reasoning_effort="high") == begin.format("high") + "<|start|>assistant"
    low = {"reasoning_effort": "low"}
    assert raw(harmony, reasoning_effort="high", chat_template_kwargs=low) == begin.format("low") + "<|start|>assistant"
    call = {"id": "c1", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    said = [
        *ASKED["messages"],
        {"role": "assistant", "content": "Look:", "tool_calls": [call], "reasoning_content": "Hm."},
        {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
        {"role": "assistant", "content": "It is", "reasoning_content": "So."},
    ]
    told = (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\nLook:<|end|>"
        '<|start|>assistant to=functions.get_weather<|channel|>commentary json<|message|>{"city": "Rome"}<|call|>'
        '<|start|>functions.get_weather to=assistant<|channel|>commentary<|message|>"Sunny"<|end|>'
        "<|start|>assistant<|channel|>final<|message|>It is"
    )
    assert raw(harmony, messages=said) == begin.format("medium") + told + "<|end|><|start|>assistant"
    assert raw(harmony, messages=said, continue_final_message=True) == begin.format("medium") + told
    with saying(harmony, " sunny.<|return|>") as engine:
        _, answer = engine.post(CHATS, **{**ASKED, "messages": said}, continue_final_message=True)
        assert answer["choices"][0]["message"]["content"] == " sunny."


@pytest.mark.parametrize("path", [CHATS, "/v1/responses"])
def test_an_effort_reaches_the_template(harmony: Thinker, path: str) -> None:
    asked = ASKED if path == CHATS else {"input": "Why?"}
    effort = {"reasoning_effort": "high"} if path == CHATS else {"reasoning": {"effort": "high", "summary": "auto"}}
    connection = harmony.engine.connection()
    connection.request("POST", path, json.dumps({**asked, **effort}), {"content-type": "application/json"})
    ids = harmony.engine.engine.target.next_submit().token_ids
    connection.close()
    assert "Effort: high" in harmony.tokenizer.decode(ids)


def test_gpt_oss_obeys_in_its_final_channel_or_in_a_call(harmony: Thinker) -> None:
    bad = CALL.replace("city", "town")
    asked = Enforced(harmony, response_format={"type": "json_object"})
    for text, possible in (
        (FINAL + "{}", True),
        (THINKS + THINKS + FINAL + "{}", True),
        ("{}", False),
        (THINKS + "{}", False),
        (THINKS + LOOKS + FINAL + "{}", False),
        (FINAL + "Hm. {}", False),
    ):
        assert asked.takes(text) is possible, text
    asked = Enforced(harmony, tools=[WEATHER], tool_choice="required")
    for text, possible in ((CALL, True), (THINKS + CALL, True), (FINAL + "No.", False), (THINKS, False), (bad, False)):
        assert asked.takes(text) is possible, text
    asked = Enforced(harmony, tools=[STRICT])
    for text, possible in (
        (THINKS + LOOKS + THINKS + CALL, True),
        (THINKS + LOOKS + FINAL + "No.", True),
        (THINKS + LOOKS + bad, False),
    ):
        assert asked.takes(text) is possible, text


# -- Qwen 3.5 -------------------------------------------------------------------------------------------------------

XML = "<tool_call>\n<function=get_weather>\n<parameter=city>\nSão Paulo\n</parameter>\n</function>\n</tool_call>"


@pytest.mark.parametrize("each", [1, 3, 1000])
def test_qwen_thinks_speaks_and_calls(qwen: Thinker, each: int) -> None:
    assert info(qwen.engine) == ("qwen3_coder", "think")
    assert prompt(qwen).endswith("assistant\n<think>\n")
    with saying(qwen, f"Hm.\n</think>\n\nLet me see.\n\n{XML}\n{XML}", each) as engine:
        choice = both(engine, tools=[WEATHER])
        assert calls(choice) == [("get_weather", {"city": "São Paulo"})] * 2
        assert (choice["message"]["reasoning_content"], choice["message"]["content"]) == ("Hm.", "Let me see.")
        assert choice["finish_reason"] == "tool_calls"
    with saying(qwen, XML, each) as engine:
        days = {"type": "object", "properties": {"city": {"type": "string"}}}
        asked = {"type": "function", "function": {"name": "get_weather", "parameters": days}}
        assert calls(both(engine, tools=[asked], chat_template_kwargs={"enable_thinking": False}))


def test_a_value_is_what_the_schema_of_the_request_says(qwen: Thinker) -> None:
    text = XML.replace("São Paulo", "7")
    for kind, value in (("string", "7"), ("integer", 7)):
        parameters = {"type": "object", "properties": {"city": {"type": kind}}}
        tool = {"type": "function", "function": {"name": "get_weather", "parameters": parameters}}
        with saying(qwen, f"</think>{text}") as engine:
            assert calls(both(engine, tools=[tool])) == [("get_weather", {"city": value})]


def test_qwen_obeys_in_xml(qwen: Thinker) -> None:
    asked = Enforced(qwen, tools=[WEATHER], tool_choice="required")
    for text, possible in (
        (f"Hm.</think>\n\n{XML}", True),
        (f"Hm.</think>\n\n{XML}\n{XML}", True),
        ("Hm.</think>\n\nNo.", False),
        (f"Hm.</think>\n\n{XML}".replace("city", "town"), False),
    ):
        assert asked.takes(text) is possible, text
    other = {"type": "function", "function": {"name": "other"}}
    asked = Enforced(qwen, tools=[STRICT, other])
    more = XML.replace("get_weather", "other").replace("city", "any")
    for text, possible in (("No.", True), (f"See: {XML}\n{more}", True), (XML.replace("city", "town"), False)):
        assert asked.takes(f"Hm.</think>\n\n{text}") is possible, text


@pytest.mark.parametrize("schema", [{"type": "string", "pattern": "a"}, {"enum": ["</parameter>"]}])
def test_a_text_that_xml_cannot_enforce_is_refused_by_name(qwen: Thinker, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": schema}}, "strict": True}}
    status, answer = qwen.engine.post(CHATS, **ASKED, tools=[tool], tool_choice="required")
    assert status == 400 and "the tool 'f' cannot be enforced" in answer["error"]["message"]
