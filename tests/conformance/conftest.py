"""A running `ssd launch`, as other programs find it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.conformance.repeating import ANSWERS, STRICT_ANSWERS, repeating

PEOPLE = [{"name": "Ann", "age": 11}, {"name": "Bob", "age": 42}, {"name": "Emma", "age": 8}]
TEXTS = [f"{person['name']} is {person['age']} years old. Answer in JSON." for person in PEOPLE]
_PATIENCE_S = 60
os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else litellm asks for prices when it is imported


@contextmanager
def launched(*options: str, **environment: str) -> Iterator[str]:
    """The address of HTTP of an engine with these options; it must end well."""
    command = [sys.executable, "-m", "ssd.cli.main", "launch", "--port", "0", *options]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment})
    assert process.stdout is not None
    try:
        http, ready = process.stdout.readline(), process.stdout.readline()
        assert http.startswith("http: ") and ready.startswith("ready: "), "the engine did not start"
        yield http.removeprefix("http: ").strip()
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(_PATIENCE_S) == 0


@contextmanager
def saying(directory: Path, answers: Mapping[str, Sequence[str]]) -> Iterator[str]:
    """The address of a model that says `answers`, named as its directory.
    It drafts for itself, so every draft token is accepted."""
    model = str(repeating(directory, answers))
    names = ("--served-model-name", directory.name, "--reasoning-parser", "think")
    with launched("--target", model, "--draft", model, "--mode", "sd", "-k", "5", *names) as url:
        yield url


@pytest.fixture(scope="session")
def server() -> Iterator[str]:
    """The built-in pair."""
    with launched() as url:
        yield url


@pytest.fixture(scope="session")
def caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A tiny model, named caller, that thinks, calls get_weather twice and answers from what that returns."""
    with saying(tmp_path_factory.mktemp("models") / "caller", ANSWERS) as url:
        yield url


@pytest.fixture(scope="session")
def strict_caller(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The same with one call, in the tokens that the grammar of a strict tool forces."""
    with saying(tmp_path_factory.mktemp("models") / "caller", STRICT_ANSWERS) as url:
        yield url


@pytest.fixture(scope="session")
def mock_server() -> Iterator[str]:
    """The real frontend before an engine without a model."""
    with launched("--load-format", "mock") as url:
        yield url
