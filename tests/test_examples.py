"""The programs in examples/ run as they are, and say what the engine says."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from ssd import LLM, SamplingParams
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage

EXAMPLES = Path(__file__).parent.parent / "examples"


def program(name: str, *arguments: str) -> str:
    """What an example prints; it must end well."""
    command = [sys.executable, str(EXAMPLES / name), *arguments]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4) as llm:
        yield llm


@pytest.fixture(scope="module")
def one_file() -> ModuleType:
    spec = importlib.util.spec_from_file_location("one_file", EXAMPLES / "one_file.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    return module


def test_one_file_says_what_the_engine_says(llm: LLM, one_file: ModuleType) -> None:
    target, draft, directory = one_file.load()
    prompt = Tokenizer(directory).encode_chat([ChatMessage("user", one_file.PROMPT)])
    for temperature in (0.0, 0.8):
        params = SamplingParams(temperature=temperature, seed=1, max_tokens=one_file.TOKENS, ignore_eos=True)
        (engine,) = llm.generate([prompt], params)
        pair = one_file.Pair(target, draft, one_file.Sampler(temperature, seed=1))
        for run in (one_file.ar(pair, prompt), one_file.sd(pair, prompt), one_file.ssd(pair, prompt)):
            assert run.tokens[len(prompt) :][: one_file.TOKENS] == engine.token_ids
        assert run.hits > 0 and run.rounds < one_file.TOKENS  # the last run: `ssd`


def test_one_file_runs_as_a_program_and_is_short(one_file: ModuleType) -> None:
    assert len((EXAMPLES / "one_file.py").read_text().splitlines()) <= 200
    printed = program("one_file.py")
    assert printed.count("the same tokens") == 6 and "OTHER" not in printed


def test_the_client_streams_several_requests_at_once(llm: LLM) -> None:
    printed = program("client.py", llm.engine.address)
    assert printed.count("tokens per round") == 3
