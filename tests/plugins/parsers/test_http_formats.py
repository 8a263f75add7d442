"""gpt-oss's harmony and Qwen's XML over HTTP: prompts, answers, and what is enforced."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import ServerConfig
from ssd.errors import RequestError
from ssd.grammar.matcher import GrammarCompiler
from tests.frontend.http_engine import HttpEngine, http_engine
from tests.frontend.test_http_tools import ASKED, BOB, CHATS, PERSON, both, calls, enforced, prompt, takes
from tests.frontend.tool_model import QWEN, SERVER, WEATHER, Thinker, model, saying, thinking

# A template like that of gpt-oss, as far as parsers and histories depend on it.
HARMONY_MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|call|>", "<|return|>")
HARMONY = """\
<|start|>system<|message|>Effort: {{ reasoning_effort or "medium" }}<|end|>
{%- if tools %}<|start|>developer<|message|>{{ tools | tojson }}<|end|>{% endif %}
{%- for message in messages %}
{%- if message.tool_calls %}
{%- if message.content and message.thinking %}{{ raise_exception("content beside thinking") }}{% endif %}
{%- if message.thinking %}<|start|>assistant<|channel|>analysis<|message|>{{ message.thinking }}<|end|>{% endif %}
{%- set call = message.tool_calls[0].function %}<|start|>assistant to=functions.{{ call.name }}<|channel|>commentary \
json<|message|>{{ call.arguments | tojson }}<|call|>
{%- elif message.role == "tool" %}<|start|>functions.{{ message.name }} to=assistant<|channel|>commentary<|message|>\
{{ message.content | tojson }}<|end|>
{%- elif message.role == "assistant" %}<|start|>assistant<|channel|>final<|message|>{{ message.content }}<|end|>
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|end|>
{%- endif %}{% endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif %}"""
VOCABULARY = 49152 + len(HARMONY_MARKS)
STRICT = {"type": "function", "function": {**WEATHER["function"], "strict": True}}


@pytest.fixture(scope="module", params=["special", "plain"])
def harmony(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinker]:
    """A model like gpt-oss, whose marks are special tokens, or text of several tokens."""
    marks = HARMONY_MARKS if request.param == "special" else ()
    yield from _serving(tmp_path_factory.mktemp("harmony"), HARMONY, marks)


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
        asked = engine.submitted(CHATS, **ASKED, **body).params.structured
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
        tool = {"type": "function", **WEATHER["function"]}
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
    assert "Effort: high" in harmony.prompt(path, **asked, **effort)


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


# -- others -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("format", ["gemma4", "functiongemma", "deepseek_v32", "internlm", "phi4_mini_json"])
def test_a_format_without_a_grammar_calls_in_plain_text_beside_a_schema(tmp_path: Path, format: str) -> None:
    server = ServerConfig(names=("scripted",), port=0, tool_call_parser=format)
    asked = {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"schema": PERSON}}}
    call = '{"name": "get_weather", "parameters": {"city": "Rome"}}'
    with thinking(tmp_path, "{{ tools }}{{ messages[0].content }}", server=server) as one:
        matcher, tokenizer = enforced(one, **asked), one.tokenizer
        assert takes(matcher, tokenizer, call) and takes(matcher, tokenizer, BOB)
        assert not takes(matcher, tokenizer, "Hi") and not takes(matcher, tokenizer, "{}")
        with saying(one, call) as engine:
            assert calls(both(engine, **asked)) == [("get_weather", {"city": "Rome"})]
        with saying(one, BOB) as engine:
            assert both(engine, **asked)["message"]["content"] == BOB


def test_markers_that_are_special_tokens_are_read_and_others_stay_hidden(tmp_path: Path) -> None:
    template = "{{ tools }}{{ messages[0].content }}{{ '[TOOL_CALLS]' if never }}"
    special = ("[TOOL_CALLS]", "[ARGS]", "[OTHER]")
    text = 'Well.[OTHER][TOOL_CALLS]get_weather[ARGS]{"city": "Rome"}'
    with thinking(tmp_path, template, special, vocab_size=49155) as one, saying(one, text) as engine:
        choice = both(engine, tools=[WEATHER])
        assert calls(choice) == [("get_weather", {"city": "Rome"})] and choice["message"]["content"] == "Well."
        assert both(engine)["message"]["content"] == 'Well.get_weather{"city": "Rome"}'


KIMI = (
    "{% for m in messages %}<{{ m.role }}>{% for c in m.tool_calls or [] %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "{{ m.tool_call_id or '' }}{{ m.content }}{% endfor %}{{ tools }}"
)
DEEPSEEK = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is none %}{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}{% else %}{{ m.content }}{% endif %}{% endfor %}{{ tools }}"
)
TWO_CALLS = [
    {"id": f"c{index}", "type": "function", "function": {"name": "get_weather", "arguments": '{"city": "Rome"}'}}
    for index in range(2)
]
HISTORY = [
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": None, "tool_calls": TWO_CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "Sunny"},
    {"role": "assistant", "content": "", "tool_calls": [{**TWO_CALLS[0], "id": "c2"}]},
]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        (
            KIMI,
            "<user>Why?<assistant>{0}0{1}{0}1{1}<tool>functions.get_weather:1Sunny<assistant>{0}2{1}".format(
                "<|tool_call_begin|>functions.get_weather:",
                '<|tool_call_argument_begin|>{"city": "Rome"}<|tool_call_end|>',
            ),
        ),
        (
            DEEPSEEK,
            "<user>Why?<assistant>{0}{0}<tool>Sunny<assistant>{0}".format(
                '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
            ),
        ),
        (
            DEEPSEEK.replace("c.function.arguments", "c.function.arguments|tojson").replace("is none", "== ''"),
            "<user>Why?<assistant>{0}{0}<tool>Sunny<assistant>{0}".format(
                '<｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{"city": "Rome"}<｜tool▁call▁end｜>'
            ),
        ),
    ],
    ids=["kimi", "deepseek", "deepseek of vllm"],
)
def test_a_template_gets_calls_as_it_takes_them(tmp_path: Path, template: str, expected: str) -> None:
    with thinking(tmp_path, template) as one:
        assert prompt(one, messages=HISTORY).removesuffix("None") == expected
