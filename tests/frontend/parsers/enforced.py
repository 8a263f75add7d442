"""Answers that the grammar of a format allows, drawn at random, and checks of them: the formats are the tests' own."""

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
from ssd.frontend.parsers.rules import CallableFunction, Rules, Unfit
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
FUNCTIONS = [
    CallableFunction("get_weather", WEATHER, True),
    CallableFunction("note.write", None, False),
    CallableFunction("add", ADD, False),
]
SCHEMAS: dict[str, dict[str, Any]] = {"get_weather": WEATHER, "note.write": {"maxProperties": 0}, "add": ADD}


def forms(markers: dict[str, tuple[str, ...]]) -> list[tuple[str, tuple[str, ...]]]:
    """Each format with its markers as tokens: all of them, the first alone, and none."""
    return [(format, some) for format, all in markers.items() for some in (all, all[:1], ())]


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


def check_forced(format: str, markers: tuple[str, ...], several: bool) -> None:
    """Let the grammar of forced calls draw calls and nothing else."""
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


def check_allowed(format: str, markers: tuple[str, ...], bad: str) -> None:
    """See that the grammar allows text, and of the calls those that obey: not `bad`."""
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
    assert not world.allows(allowed, bad)


def check_beside_a_schema(format: str, markers: tuple[str, ...], before: str = "") -> None:
    """See that an answer beside a schema is calls, or obeys it after the mark `before`."""
    world, chance = World(markers), random.Random(format)
    schema = {"type": "object", "properties": {"name": {"type": "string"}, "age": {"type": "integer"}}}
    schema["required"] = ["name", "age"]
    rules = Rules(FUNCTIONS, world.ids, True)
    forced = rules.grammar(parser(format).forced(rules))
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


def check_unfit(format: str, function: CallableFunction) -> None:
    """See that a tool which a format cannot call is refused by its name."""
    with pytest.raises(Unfit, match=f"the tool '{function.name}' cannot be enforced"):
        parser(format).forced(Rules([function], World(()).ids, True))
