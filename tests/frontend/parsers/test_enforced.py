"""Answers that the grammar of a format allows, drawn at random: its parser reads valid calls out of each."""

from __future__ import annotations

import json
import random
from typing import Any

import jsonschema
import numpy as np
import pytest
from llguidance import LLMatcher, LLTokenizer
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from ssd.config.params import Structured
from ssd.frontend.parsers.rules import Function, Rules, Unfit
from ssd.frontend.parsers.tools import ToolCall, ToolParser
from ssd.system import registered

END = "<end>"
WEATHER: dict[str, Any] = {
    "properties": {
        "city": {"type": "string", "maxLength": 6},
        "kind": {"enum": ['it\'s "x"', None, True, "\u0001é🙂", 2.5]},
        "days": {"$ref": "#/$defs/days"},
        "note": {"type": "object", "properties": {"a": {"const": "]})"}}, "additionalProperties": False},
    },
    "required": ["city"],
    "additionalProperties": False,
    "$defs": {"days": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2}},
}
ADD: dict[str, Any] = {
    "type": "object",
    "properties": {"b": {"type": "integer", "minimum": -9, "maximum": 9}, "a": {"enum": ["x", "</tool_call>"]}},
    "required": ["a"],
    "additionalProperties": False,
}
FUNCTIONS = [Function("get_weather", WEATHER, True), Function("note.write", None, False), Function("add", ADD, False)]
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "note.write": {"maxProperties": 0}, "add": ADD}
MARKERS = {
    "hermes": ("<tool_call>", "</tool_call>"),
    "llama3_json": ("<|python_tag|>",),
    "mistral": ("[TOOL_CALLS]", "[ARGS]"),
    "pythonic": ("<|tool_call_start|>", "<|tool_call_end|>"),
    "harmony": ("<|channel|>", "<|constrain|>", "<|message|>", "<|start|>", "<|end|>"),
    "qwen3_coder": ("<tool_call>", "</tool_call>"),
    "granite": ("<|tool_call|>",),
    "glm45": ("<tool_call>", "</tool_call>"),
    "deepseek_v3": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "deepseek_v31": ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>"),
    "kimi_k2": ("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
}
FORMS = [(format, markers) for format in MARKERS for markers in (MARKERS[format], MARKERS[format][:1], ())]


class World:
    """A tokenizer of single bytes, and of markers that are tokens."""

    def __init__(self, markers: tuple[str, ...]) -> None:
        bytes = {char: index for index, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
        self.tokenizer = Tokenizer(BPE(bytes, []))
        self.tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        self.tokenizer.decoder = decoders.ByteLevel()
        self.tokenizer.add_special_tokens([END, *markers])
        self.end = self.tokenizer.token_to_id(END)
        self.matching = LLTokenizer(self.tokenizer.to_str(), eos_token=[self.end])

    def ids(self, marker: str) -> list[int]:
        found = self.tokenizer.token_to_id(marker)
        return [] if found is None else [found]

    def answer(self, grammar: str, chance: random.Random) -> str | None:
        """A random text of the grammar; None if it becomes long."""
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        ids: list[int] = []
        likely = {self.end, *(i for char in '"}])\\n,(' for i in self.tokenizer.encode(char).ids)}
        while len(ids) < 400:
            bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")
            possible = bits.nonzero()[0].tolist()
            favoured = sorted(likely.intersection(possible))
            token = chance.choice(favoured if favoured and chance.random() < 0.5 else possible)
            if token == self.end:
                return str(self.tokenizer.decode(ids, skip_special_tokens=False))
            ids.append(token)
            assert matcher.consume_token(token)
        return None

    def allows(self, grammar: str, text: str) -> bool:
        matcher = LLMatcher(self.matching, grammar, log_level=0)
        assert not matcher.is_error(), matcher.get_error()
        return matcher.consume_tokens(self.tokenizer.encode(text).ids) and matcher.is_accepting()


def parser(format: str) -> type[ToolParser]:
    found: type[ToolParser] = registered.load(registered.TOOLS, format)
    return found


def read(format: str, text: str) -> tuple[list[ToolCall], str]:
    reading = parser(format)({function.name: function.parameters for function in FUNCTIONS}, exact=True)
    pieces = [*reading.feed(text), *reading.finish()]
    return [one for one in pieces if isinstance(one, ToolCall)], "".join(one for one in pieces if isinstance(one, str))


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize(("format", "markers"), FORMS)
def test_what_is_forced_is_calls_and_nothing_else(format: str, markers: tuple[str, ...], several: bool) -> None:
    world, chance, counts = World(markers), random.Random(format), set()
    rules = Rules(FUNCTIONS, world.ids, several)
    grammar = rules.grammar(parser(format).forced(rules))
    for _ in range(12):
        if (text := world.answer(grammar, chance)) is None:
            continue
        calls, content = read(format, text)
        assert calls and not content, text
        for call in calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        counts.add(len(calls))
    assert 1 in counts and (several or counts == {1})


@pytest.mark.parametrize(("format", "markers"), FORMS)
def test_what_is_allowed_is_text_and_calls_that_obey(format: str, markers: tuple[str, ...]) -> None:
    world = World(markers)
    rules = Rules(FUNCTIONS, world.ids, True)
    forced = rules.grammar(parser(format).forced(rules))
    rules = Rules(FUNCTIONS, world.ids, True)
    allowed = rules.grammar(parser(format).allowed(rules))
    chance = random.Random(format)
    for text in ("", "Let me see: {} [x] <b>\n", "日本 [1, 2]"):
        assert world.allows(allowed, text), text
    for _ in range(8):
        call = world.answer(forced, chance)
        if call is not None and "<arg_value></tool_call>" not in call:  # encoding would make a token of the value
            assert world.allows(allowed, call), call
    bad = {
        "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>',
        "llama3_json": '{"name": "add", "parameters": {"a": 1}}',
        "mistral": '[TOOL_CALLS][{"name": "add", "arguments": {"a": 1}}]',
        "pythonic": "[add(a=1)]",
        "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1}',
        "qwen3_coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>",
        "granite": '<|tool_call|>[{"name": "add", "arguments": {"a": 1}}]',
        "glm45": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>",
        "deepseek_v3": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
            '{"a": 1}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        "deepseek_v31": (
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>add<｜tool▁sep｜>"
            '{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>'
        ),
        "kimi_k2": (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
            '{"a": 1}<|tool_call_end|><|tool_calls_section_end|>'
        ),
    }[format]
    assert not world.allows(allowed, bad)


@pytest.mark.parametrize(("format", "markers"), FORMS)
def test_beside_a_schema_an_answer_is_calls_or_obeys_it(format: str, markers: tuple[str, ...]) -> None:
    world, chance = World(markers), random.Random(format)
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema["required"] = ["name", "age"]
    rules = Rules(FUNCTIONS, world.ids, True)
    forced = rules.grammar(parser(format).forced(rules))
    before = "<|channel|>final<|message|>" if format == "harmony" else ""
    for asked in (Structured("json", json.dumps(schema)), Structured("json_object")):
        rules = Rules(FUNCTIONS, world.ids, True)
        grammar = rules.grammar(parser(format).calls_or_answer(rules, asked))
        for text in ('{"name": "Bob", "age": 7}', '{\n "name":"add","age":1}'):
            assert world.allows(grammar, before + text), text
        assert world.allows(grammar, before + '{"city": "Rome"}') is (asked.kind == "json_object")
        assert not world.allows(grammar, before + "Let me see.") and not world.allows(grammar, "")
        for _ in range(8):
            if (call := world.answer(forced, chance)) is not None:
                assert world.allows(grammar, call) is world.allows(forced, call), call


@pytest.mark.parametrize(
    ("format", "function"),
    [
        ("hermes", Function("f", {"type": "string"}, False)),
        ("pythonic", Function("f", {"anyOf": [{"required": ["a"]}]}, False)),
        ("pythonic", Function("f", {"properties": {"not a name": {}}}, False)),
        ("pythonic", Function("f", {"properties": {}, "required": ["a"]}, False)),
        ("pythonic", Function("f", {"properties": []}, False)),
        ("pythonic", Function("f g", None, False)),
    ],
)
def test_what_a_format_cannot_say_is_refused_by_name(format: str, function: Function) -> None:
    with pytest.raises(Unfit, match=f"the tool '{function.name}' cannot be enforced"):
        parser(format).forced(Rules([function], World(()).ids, True))


def of_one(world: World, function: Function) -> str:
    rules = Rules([function], world.ids, False)
    return rules.grammar(parser("llama3_json").forced(rules))


NO_ARGUMENTS: list[Any] = [
    None,
    {},
    {"type": "object", "description": "Nothing."},
    {"type": "object", "properties": {}, "required": []},
]


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("parameters", NO_ARGUMENTS, ids=str)
def test_a_tool_that_names_no_arguments_gets_none(parameters: Any, strict: bool) -> None:
    world = World(())
    forced = of_one(world, Function("f", parameters, strict))
    assert world.allows(forced, '{"name": "f", "parameters": {}}')
    assert not world.allows(forced, '{"name": "f", "parameters": {"a": 1}}')


@pytest.mark.parametrize("strict", [False, True])
def test_arguments_that_a_tool_does_not_name_are_not_there(strict: bool) -> None:
    world = World(())
    parameters = {"properties": {"a": {"properties": {"b": {"type": "integer"}}}}}
    for given, other, possible in (
        (parameters, '"c"', False),
        ({**parameters, "additionalProperties": True}, '"c"', True),
    ):
        forced = of_one(world, Function("f", given, strict))
        for name, fits in (('"a"', True), (other, possible)):
            assert world.allows(forced, f'{{"name": "f", "parameters": {{{name}: {{"b": 1}}}}}}') is fits
        assert not world.allows(forced, '{"name": "f", "parameters": {"a": {"c": 1}}}')
