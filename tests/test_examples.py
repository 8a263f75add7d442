"""The programs in examples/ run as they are, and say what the engine says."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd import LLM, SamplingParams
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine

EXAMPLES = Path(__file__).parent.parent / "examples"
TOKENS = 16


def program(file: Path, *arguments: str) -> str:
    """What an example prints; it must end well."""
    command = [sys.executable, str(file), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4) as llm:
        yield llm


def test_one_file_is_short_and_says_what_the_engine_says(llm: LLM, tmp_path: Path) -> None:
    """In every mode, as a program that writes fewer tokens than the one a reader starts."""
    text = (EXAMPLES / "one_file.py").read_text()
    assert len(text.splitlines()) <= 200
    file = tmp_path / "one_file.py"
    file.write_text(re.sub(r"^TOKENS = 40\b", f"TOKENS = {TOKENS}", text, count=1, flags=re.MULTILINE))
    printed = program(file)
    question = re.search(r'^PROMPT = "(.*)"$', text, re.MULTILINE)
    assert question is not None
    found = re.findall(r"^temperature (.*): ('.*'|\".*\")$", printed, re.MULTILINE)
    assert [temperature for temperature, _ in found] == ["0.0", "0.8"]
    for temperature, said in found:
        params = SamplingParams(temperature=float(temperature), seed=1, max_tokens=TOKENS, ignore_eos=True)
        assert ast.literal_eval(said) == llm.generate(question[1], params, chat=True)[0].text
    assert printed.count("the same tokens") == 6 and "OTHER" not in printed
    for length, hits in re.findall(r"^  ssd +(\S+) tokens per round, hit rate (\S+),", printed, re.MULTILINE):
        assert float(length) > 1 and float(hits) > 0


def test_the_client_streams_several_requests_at_once(llm: LLM) -> None:
    printed = program(EXAMPLES / "client.py", llm.engine.address)
    assert printed.count("tokens per round") == 3


def test_the_agent_makes_the_same_calls_in_fewer_rounds() -> None:
    engine = Engine(resolve(EngineOptions(mode="ngram"), ServerOptions(port=0)))
    engine.start()
    try:
        assert engine.url is not None
        printed = program(EXAMPLES / "agent.py", engine.url)
    finally:
        engine.stop(drain=0)
    assert "the same calls each time" in printed
    without, first, again = map(int, re.findall(r", (\d+) rounds$", printed, re.MULTILINE))
    assert again < first < without
