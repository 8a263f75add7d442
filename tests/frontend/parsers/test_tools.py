"""Calls in answers of the core's formats: cut anywhere they are the same, and what is no call is content."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from ssd.errors import UsageError
from ssd.frontend.parsers.tools import ToolCall, ToolParser
from ssd.system import registered
from tests.frontend.parsers.random_calls import (
    OFFERED,
    Calls,
    Parsed,
    as_json,
    check_bounds,
    check_cuts,
    check_noise,
    copied,
    formats_of,
    parsed,
)

CUTS = 10_000  # in all formats together
FORMATS = formats_of(Path(__file__).parent)


def written(random: random.Random, format: str, calls: Calls) -> str:
    space = random.choice(("", "\n", " \n"))
    if format == "hermes":
        return space.join(f"<tool_call>{space}{as_json(random, *one)}{space}</tool_call>" for one in calls)
    joined = f"{space};{space}".join(as_json(random, *one, "parameters") for one in calls)
    return f"<|python_tag|>{joined}"


@pytest.mark.parametrize("format", FORMATS)
def test_no_cut_changes_an_answer_and_nothing_is_lost(format: str) -> None:
    check_cuts(format, CUTS // len(FORMATS) // 5, FORMATS[format]["broken"], written)


@pytest.mark.parametrize("format", FORMATS)
def test_noise_is_content_to_the_letter(format: str) -> None:
    check_noise(format, FORMATS[format]["broken"])


# -- what each format takes -----------------------------------------------------------------------------------------

ADD = [ToolCall("add", '{"a": 1}')]
LLAMA = '{"name": "add", "parameters": {"a": 1}}'
OTHER = LLAMA.replace("add", "other")


@pytest.mark.parametrize(
    ("format", "text", "expected"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"a": 1}}', Parsed("", ADD)),
        ("hermes", 'Yes.\n<tool_call>\n{"name":"add","arguments":{"a": 1}}\n</tool_call>\n', Parsed("Yes.", ADD)),
        ("hermes", '<tool_call>{"name": "f"}</tool_call> So', Parsed("So", [ToolCall("f", "{}")])),
        ("llama3_json", LLAMA, Parsed("", ADD)),
        ("llama3_json", f" {LLAMA}; {LLAMA}", Parsed("", ADD * 2)),
        ("llama3_json", f"{LLAMA}; {OTHER}", Parsed("; " + OTHER, ADD)),
        ("llama3_json", OTHER, Parsed(OTHER, [])),
        ("llama3_json", f"<|python_tag|>{OTHER}", Parsed("", [ToolCall("other", '{"a": 1}')])),
        ("llama3_json", f"See {LLAMA}", Parsed(f"See {LLAMA}", [])),
        ("llama3_json", '{"name": "add"}', Parsed('{"name": "add"}', [])),
    ],
)
def test_a_format_takes(format: str, text: str, expected: Parsed) -> None:
    assert parsed(format, [text]) == expected


def test_a_call_is_told_as_soon_as_it_is_complete_and_text_before_it_at_once() -> None:
    parser: ToolParser = registered.load(registered.TOOLS, "hermes")(OFFERED)
    assert parser.feed("Sure. <tool") == ["Sure."]
    assert parser.feed("box>") == [" <toolbox>"]
    assert parser.feed('<tool_call>{"name": "add", "arguments": {"a": 1}') == []
    assert parser.feed("}") == ADD


@pytest.mark.parametrize("deep", ["[", '{"a":'])
@pytest.mark.parametrize("format", FORMATS)
def test_depth_and_length_are_bounded(format: str, deep: str) -> None:
    check_bounds(format, FORMATS[format]["start"], deep)


def test_white_space_without_end_costs_no_more_than_its_length() -> None:
    """Joining it again with each piece would copy 400 GB."""
    pieces = ["\n   "] * 450_000
    assert parsed("hermes", ["x", *pieces, "y"]) == Parsed(f"x{''.join(pieces)}y", [])
    assert parsed("hermes", [*pieces, "y"]).content == "".join(pieces) + "y"


def test_many_strings_are_not_read_again_for_each() -> None:
    texts = ["{" + '"id": "x", ' * count + '"name": "add", "arguments": {}}' for count in (1000, 2000)]
    few, many = (copied("hermes", text, 0) for text in texts)
    assert many <= 2 * few + 100


def test_a_template_says_its_format() -> None:
    for template, format in (
        ('{{ "<tool_call>\\n" ~ tool_call.function | tojson ~ "</tool_call>" }}', "hermes"),
        ('Respond in the format {"name": function name, "parameters": dictionary of', "llama3_json"),
        ("{{ messages }}", ""),
    ):
        assert registered.fitting(registered.TOOLS, template) == format


def test_an_unknown_parser_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(UsageError, match=r"--tool-call-parser 'qwen': there are auto, none, (\w+, )*hermes, "):
        registered.check(registered.TOOLS, "--tool-call-parser", "qwen")


PLUGIN = """
from ssd.frontend.parsers.source import Reading
from ssd.frontend.parsers.tools import ToolParser

class Shout(ToolParser):
    @classmethod
    def fits(cls, template: str) -> bool:
        return "SHOUT" in template

    def parse(self) -> Reading[None]:
        while (yield from self._content("CALL ")):
            yield from self._json_call()
"""
USES = """
from ssd.system import registered
name = registered.fitting(registered.TOOLS, "SHOUT")
parser = registered.load(registered.TOOLS, name)({"add": None})
print(name, parser.feed('So: CALL {"name": "add"} Done.'))
"""


def test_an_installed_package_adds_a_parser(tmp_path: Path) -> None:
    (tmp_path / "shouting.py").write_text(PLUGIN)
    about = tmp_path / "shouting-1.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: shouting\nVersion: 1\n")
    (about / "entry_points.txt").write_text("[ssd.tool_parsers]\nshout = shouting:Shout\n")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", USES], env=environment, capture_output=True, text=True)
    assert done.stdout == "shout ['So:', ToolCall(name='add', arguments='{}'), ' Done.']\n", done.stderr
