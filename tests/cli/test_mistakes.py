"""A hundred mistakes, each answered by one clear line: `mistakes.txt` has the commands and what they say.

Plugins have such a file too, beside their tests."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest
from click.testing import CliRunner

from ssd.cli.main import main
from ssd.ipc import keys
from ssd.launch.supervisor import Engine
from ssd.models.pull import BUILTIN
from tests.cli.launched import running
from tests.scripted_engine import MODEL

FILE = Path(__file__).with_name("mistakes.txt")
OF_PLUGINS = sorted(FILE.parents[1].glob("plugins/*/mistakes.txt"))
WIDEST = 300
LIMIT_S = 60
PNG = b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR"
DEEP = "[" * 100_000
SIZES = {"num_attention_heads": 4, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 256}
TEXTS = {
    "large/config.json": json.dumps(SIZES | {"model_type": "llama", "vocab_size": 2**31 - 1}),
    "broken/config.json": '{"model_type": "llama",',
    "strange/config.json": '{"model_type": "warp"}',
    "broken.toml": "port = ",
    "unknown.toml": "max-num-seq = 3",
    "wrong.toml": 'port = "many"',
    "broken.jsonl": '{"prompt": "fine"}\n{"prompt": \n',
    "empty.jsonl": "",
    "long.jsonl": '{"prompt": "' + 9000 * "word " + '"}',
    "object.jsonl": '{"text": "no prompt"}',
    "list.jsonl": '{"prompt": "fine"}\n\n["prompt"]\n',
    "number.jsonl": '{"prompt": 3}',
    "nothing.jsonl": '{"prompt": ""}',
    "surrogate.jsonl": '{"prompt": "\\ud800"}',
    "typo.toml": "prot = 80",
    "color.toml": "color = 1",
    "far.toml": "port = 70000",
    "decimal.toml": "max-num-seqs = 2.7",
    "several.toml": "port = [1]",
    "half.toml": "port = 8000.5",
    "two.toml": "http = 2",
    "words.toml": 'max-num-seqs = "many"',
    "zero.toml": 'uds = "\\u0000x"',
    "deep.toml": f"port = {DEEP}",
    "nested.toml": "config = 'other.toml'",
    "model.toml": 'model = "smollm2"',
    "open.txt": "one\n",
    "two.txt": "one\n\ntwo\n",
    "list.json": "[1, 2]",
    "schema.json": '{"type": "warp"}',
    "grammar.lark": "start: missing",
    "keys.txt": "",
    "folder/notes.txt": "no model is here",
}


class Mistake(NamedTuple):
    """A command, whether it is a process of its own, and the line that it is answered with, where `...` is any text."""

    command: str
    alone: bool
    said: str


def mistakes(*files: Path) -> list[Mistake]:
    """Return the entries of files: `$ COMMAND`, or `% COMMAND` for a process of its own, and what is said."""
    lines = [line for file in files for line in file.read_text().splitlines() if line and not line.startswith("#")]
    assert len(lines) % 2 == 0
    return [Mistake(lines[n][2:], lines[n][0] == "%", lines[n + 1]) for n in range(0, len(lines), 2)]


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A folder with the files of the mistakes, and `ssd` to call."""
    folder = Path(tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp"))  # a short path, for the engine's sockets
    for name, text in TEXTS.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name in ("keys.txt", "two.txt"):
        (folder / name).chmod(0o600)
    (folder / "open.txt").chmod(0o644)
    os.mkfifo(folder / "pipe", 0o600)
    keys.new_server(folder / "keys")
    (folder / "picture.png").write_bytes(PNG)
    (folder / "picture.gguf").write_bytes(PNG)
    (folder / "empty.gguf").touch()
    (folder / "cut.gguf").write_bytes(b"GGUF\3\0\0\0\1\0\0\0\0\0\0\0\1\0\0\0\0\0\0\0\4\0\0\0\0\0\0\0gene")
    target = BUILTIN["smollm2"].directory
    (folder / "base").mkdir()
    for file in target.iterdir():
        if file.name != "chat_template.jinja":
            (folder / "base" / file.name).symlink_to(file)
    shutil.copytree(MODEL, folder / "truncated")
    os.truncate(folder / "truncated" / "model.safetensors", 100_000)
    shutil.copytree(MODEL, folder / "other")
    tokenizer = (MODEL / "tokenizer.json").read_text()
    (folder / "other" / "tokenizer.json").write_text(tokenizer.replace("<|im_start|>", "<|something else|>"))
    (folder / "ssd").write_text(f'#!/bin/sh\nexec {sys.executable} -m ssd.cli.main "$@"\n')
    (folder / "ssd").chmod(0o755)
    (folder / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    (folder / "nvidia-smi").chmod(0o755)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("XDG_RUNTIME_DIR", str(folder))  # where no other engine runs
        environment.setenv("CUDA_VISIBLE_DEVICES", "")
        environment.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        environment.setenv("PYTHONPATH", os.getcwd())
        yield folder
    shutil.rmtree(folder)


@pytest.fixture(scope="module")
def names(place: Path) -> Iterator[dict[str, str]]:
    """A running engine, a port that is taken, and where no engine listens."""
    with running("--port", "0") as (process, said), socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        yield {
            "DEEP": DEEP,
            "ENGINE": said["ready"],
            "PID": str(process.pid),
            "URL": said["http"],
            "TAKEN": str(taken.getsockname()[1]),
        }


def named(text: str, names: dict[str, str]) -> str:
    """Return `text` with values in place of the names of `names`."""
    return re.sub(r"\$(\w+)", lambda found: names.get(found[1], found[0]), text)


def answer(mistake: Mistake, place: Path, names: dict[str, str]) -> tuple[int, str, str]:
    """Exit status, standard output and standard error."""
    command = named(mistake.command, names)
    if mistake.alone:
        with subprocess.Popen(
            ["sh", "-c", command],
            cwd=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                stdout, stderr = process.communicate(timeout=LIMIT_S)
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
        return process.returncode, stdout, stderr
    words = shlex.split(command)
    start = words.index("ssd")
    environment = dict(word.split("=", 1) for word in words[:start])
    before = os.getcwd()
    os.chdir(place)
    try:
        result = CliRunner(env=environment).invoke(main, words[start + 1 :])
    finally:
        os.chdir(before)
    assert isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.stdout, result.stderr


@pytest.mark.parametrize("mistake", mistakes(FILE, *OF_PLUGINS), ids=lambda mistake: mistake.command)
def test_a_mistake_is_answered_by_one_clear_line(
    mistake: Mistake, place: Path, names: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def start(self: Engine, timeout: float = 0.0) -> None:
        raise AssertionError("a process would have been started")

    monkeypatch.setattr(Engine, "start", start)
    status, stdout, stderr = answer(mistake, place, names)
    (line,) = stderr.splitlines()
    assert stdout == "" and (status in (1, 2) if mistake.alone else status == 2)
    assert re.fullmatch(".*".join(map(re.escape, named(mistake.said, names).split("..."))), line), line
    assert line.startswith("error: ") and len(line) <= WIDEST


def test_there_are_a_hundred() -> None:
    commands = [mistake.command for mistake in mistakes(FILE)]
    assert len(set(commands)) == len(commands) >= 100
