"""`ssd chat` as a process, through a pipe and on a terminal, with the mock engine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ssd.config.params import SamplingParams
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.launch.supervisor import Engine
from tests.cli.terminal import WIDTH, Terminal, terminal
from tests.faults.engine import running_engine
from tests.mock import MOCK, ROUND_VARIABLE, oracle
from tests.plugins.chat.test_markdown import whole
from tests.scripted_engine import MODEL

pytestmark = pytest.mark.mock

TOKENIZER = Tokenizer(MODEL)
CONTEXT = 600
PARAMS = SamplingParams(seed=7, max_tokens=12, ignore_eos=True)
FLAGS = ["--seed", "7", "--max-tokens", "12", "--ignore-eos"]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Slow enough that an answer can be interrupted."""
    os.environ[ROUND_VARIABLE] = "20"
    try:
        with running_engine(load_format="mock", max_model_len=CONTEXT) as engine:
            yield engine
    finally:
        del os.environ[ROUND_VARIABLE]


def answer(*said: str, system: str | None = None, params: SamplingParams = PARAMS) -> str:
    """What the mock answers to a conversation; the last of `said` is the question."""
    messages = [] if system is None else [ChatMessage("system", system)]
    for index, text in enumerate(said):
        messages.append(ChatMessage("assistant" if index % 2 else "user", text))
    ids, _ = oracle(TOKENIZER.encode_chat(messages), params, 49152, CONTEXT).whole()
    return TOKENIZER.decode(ids)


def command(*arguments: str) -> list[str]:
    return ["-m", "ssd.cli.main", "chat", *FLAGS, *arguments]


def piped(text: str, *arguments: str) -> tuple[int, str, list[str]]:
    """Exit status, standard output, and the lines of standard error."""
    done = subprocess.run([sys.executable, *command(*arguments)], input=text.encode(), capture_output=True)
    return done.returncode, done.stdout.decode(), done.stderr.decode().splitlines()


# -- through a pipe -------------------------------------------------------------------------------------------------


def test_every_line_is_answered_and_the_answers_alone_are_on_stdout(engine: Engine, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    code, out, errors = piped(f"hello\n\nand then?\n/stats\n/save {file}\n/exit\nnever", "--address", engine.address)
    first = answer("hello")
    second = answer("hello", first, "and then?")
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert all(line.startswith("12 tokens, ") and line.endswith("; cut at max_tokens") for line in errors[:2])
    assert errors[2].startswith("2 answers: 24 tokens, ")
    assert errors[3:] == [f"saved in {file}"]
    saved = json.loads(file.read_text())
    assert [message["content"] for message in saved["messages"]] == ["hello", first, "and then?", second]


def test_commands_change_what_is_asked(engine: Engine) -> None:
    lines = ["one", "/clear", "/set max_tokens 5", "/set seed 8", "two"]
    code, out, errors = piped("\n".join(lines), "--system", "Be brief.", "--address", engine.address)
    changed = SamplingParams(seed=8, max_tokens=5, ignore_eos=True)
    expected = [answer("one", system="Be brief."), answer("two", system="Be brief.", params=changed)]
    assert (code, out) == (0, "".join(f"{text}\n" for text in expected))
    assert errors[1:3] == ["max_tokens 5", "seed 8"]


def test_a_message_may_have_several_lines(engine: Engine) -> None:
    text = 'one\\\ntwo\n"""three\n/set\n"""\n"""four"""\n/system """Be\nbrief."""\nfive\\'
    code, out, errors = piped(text, "--address", engine.address)
    said: list[str] = []
    for question in ("one\ntwo", "three\n/set", "four"):
        said += [question, answer(*said, question)]
    last = answer(*said, "five\\", system="Be\nbrief.")
    assert (code, out) == (0, "".join(f"{text}\n" for text in [*said[1::2], last]))
    assert "system: Be" in errors


def test_the_last_question_is_asked_again(engine: Engine) -> None:
    lines = ["one", "two", "/set seed 8", "/retry", "three", "/clear"]
    code, out, _ = piped("\n".join(lines), "--address", engine.address)
    changed = SamplingParams(seed=8, max_tokens=12, ignore_eos=True)
    first = answer("one")
    again = answer("one", first, "two", params=changed)
    last = answer("one", first, "two", again, "three", params=changed)
    assert (code, out) == (0, "".join(f"{text}\n" for text in (first, answer("one", first, "two"), again, last)))
    code, out, (error,) = piped("/retry", "--address", engine.address)
    assert (code, out, error) == (2, "", "error: there is no question to ask again")


def test_an_engine_of_its_own() -> None:
    code, out, errors = piped("hello\n", *MOCK, "--max-model-len", str(CONTEXT))
    assert (code, out) == (0, f"{answer('hello')}\n")
    assert len(errors) == 1


def test_a_conversation_that_is_too_long_ends_with_the_engines_reason(engine: Engine) -> None:
    code, out, (_, error) = piped("hello\n" + "word " * CONTEXT, "--address", engine.address)
    assert (code, out) == (1, f"{answer('hello')}\n")
    assert error.startswith("error: ") and f"context of {CONTEXT} tokens" in error
    assert error.endswith("/clear begins a new conversation")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("/sing", ["no command /sing", "/help"]),
        ("/set temperature hot", ["temperature hot", "float"]),
        ("/save", ["/save FILE"]),
        ("/save /nonexistent/chat.md", ["/nonexistent/chat.md", "No such file"]),
        ("/save {existing}", ["exists"]),
    ],
)
def test_a_bad_command_is_one_line(engine: Engine, tmp_path: Path, line: str, words: list[str]) -> None:
    existing = tmp_path / "old.json"
    existing.write_text("old")
    code, out, (error,) = piped(line.format(existing=existing), "--address", engine.address)
    assert (code, out) == (2, "")
    assert error.startswith("error: ") and all(word in error for word in words)
    assert existing.read_text() == "old"


def test_what_is_no_text_is_refused(engine: Engine) -> None:
    done = subprocess.run([sys.executable, *command("--address", engine.address)], input=b"\xff\n", capture_output=True)
    assert done.returncode == 2
    assert done.stderr.startswith(b"error: standard input is not text")


@pytest.mark.parametrize("flags", [["--temperature", "-1"], ["--system", "\udcff"], ["--top-p", "0"]])
def test_bad_options_are_found_before_anything_starts(flags: list[str]) -> None:
    code, out, (error,) = piped("hello\n", "--target", "nonesuch", *flags)
    assert (code, out) == (2, "")
    assert "nonesuch" not in error


def test_a_model_without_a_chat_format_is_refused(engine: Engine, tmp_path: Path) -> None:
    for file in Path(engine.config.target).iterdir():
        if file.suffix not in (".safetensors", ".jinja") and file.name != "tokenizer_config.json":
            os.symlink(file, tmp_path / file.name)
    code, _, (error,) = piped("hello\n", *MOCK, "--target", str(tmp_path))
    assert code == 2
    assert "no chat format" in error


def test_an_interrupt_ends_a_chat_through_a_pipe(engine: Engine) -> None:
    arguments = [sys.executable, *command("--max-tokens", "500", "--address", engine.address)]
    with subprocess.Popen(arguments, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(b"hello\n")
        assert process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.wait(20) == 130


# -- on a terminal --------------------------------------------------------------------------------------------------


@pytest.fixture
def chat(engine: Engine) -> Iterator[Terminal]:
    with terminal(*command("--address", engine.address)) as chat:
        chat.wait_for("/help.*> ")
        yield chat


def test_an_answer_is_drawn_with_its_figures_below(chat: Terminal) -> None:
    chat.type("hello\r")
    chat.wait_for("12 tokens, .* tok/s.*> ")
    lines = chat.lines()
    drawn = lines[lines.index("> hello") + 1 :]
    expected = whole(WIDTH, answer("hello"))
    assert drawn[: len(expected)] == expected
    assert drawn[len(expected)].startswith("12 tokens, ")


def test_ctrl_c_stops_an_answer_and_what_was_said_stays(chat: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    chat.type("/set max_tokens 500\r")
    chat.wait_for("max_tokens 500.*> ")
    chat.type("go on\r")
    chat.wait_for("go on\r\n.*\x1b\\[2K.*\x1b\\[2K")  # drawn more than once
    chat.type("\x03")
    chat.wait_for("stopped.*> ")
    chat.type(f"/save {file}\r")
    chat.wait_for("saved in.*> ")
    question, said = (message["content"] for message in json.loads(file.read_text())["messages"])
    full = answer("go on", params=SamplingParams(seed=7, max_tokens=500, ignore_eos=True))
    assert question == "go on"
    assert said and full.startswith(said) and said != full
    lines = chat.lines()
    assert lines[lines.index("> go on") + 1 : lines.index("stopped")] == whole(WIDTH, said)
    chat.type("/set max_tokens 5\r")
    chat.wait_for("max_tokens 5\r.*> ")
    chat.type("more\r")
    chat.wait_for("5 tokens, .*> ")
    chat.type("/exit\r")
    assert chat.end() == 0
    after = answer("go on", said, "more", params=SamplingParams(seed=7, max_tokens=5, ignore_eos=True))
    lines = chat.lines()
    assert lines[lines.index("> more") + 1] == whole(WIDTH, after)[0]


def test_an_error_is_one_line_and_the_chat_goes_on(chat: Terminal) -> None:
    chat.type("/set temperature hot\r")
    chat.wait_for("error: temperature hot.*> ")
    chat.type("/nonsense\r")
    chat.wait_for("error: no command /nonsense.*> ")
    chat.type(" /hello\r")
    chat.wait_for("12 tokens.*> ")


def test_a_retry_that_fails_keeps_the_old_answer(chat: Terminal, tmp_path: Path) -> None:
    file = tmp_path / "chat.json"
    chat.type("hello\r")
    chat.wait_for("12 tokens.*> ")
    chat.type(f"/system {'word ' * CONTEXT}\r")
    chat.wait_for("system: .*> ")
    chat.type("/retry\r")
    chat.wait_for("error: .*> ")
    chat.type(f"/save {file}\r")
    chat.wait_for("saved in.*> ")
    contents = [message["content"] for message in json.loads(file.read_text())["messages"]]
    assert contents[1:] == ["hello", answer("hello")]


def test_a_request_to_end_is_no_request_to_stop_an_answer(chat: Terminal) -> None:
    chat.type("/set max_tokens 500\r")
    chat.wait_for("max_tokens 500\r.*> ")
    chat.type("go on\r")
    chat.wait_for("go on\r\n.*\x1b\\[2K")
    chat.process.terminate()
    assert chat.end() == 143
    assert "stopped" not in chat.lines()


def test_what_is_typed_during_an_answer_is_read_after_it(chat: Terminal) -> None:
    chat.type("hello\r")
    chat.wait_for("hello\r\n.*\x1b\\[2K")
    chat.type("/exit\r")
    assert chat.end() == 0
    lines = chat.lines()
    assert lines[-1] == "> /exit"
    expected = whole(WIDTH, answer("hello"))
    assert lines[lines.index("> hello") + 1 :][: len(expected)] == expected


def test_what_is_typed_before_ctrl_c_begins_the_next_line(chat: Terminal, tmp_path: Path) -> None:
    """With its corrections."""
    file = tmp_path / "chat.json"
    chat.type("/set max_tokens 500\r")
    chat.wait_for("max_tokens 500\r.*> ")
    chat.type("hello\r")
    chat.wait_for("hello\r\n.*\x1b\\[2K")
    chat.type("gox\x7f on")
    chat.type("\x03")
    chat.wait_for("stopped.*> gox.*on")
    chat.type(" now\r")
    chat.wait_for("now\r\n.*\x1b\\[2K")
    chat.type(f"\x03/save {file}\r")
    chat.wait_for("stopped.*saved in.*> ")
    said = json.loads(file.read_text())["messages"]
    assert [message["content"] for message in said if message["role"] == "user"] == ["hello", "go on now"]
    assert "go" not in "".join(chat.lines()).partition("> hello")[2].partition("stopped")[0]


def test_a_long_text_pasted_during_an_answer_is_kept(chat: Terminal) -> None:
    chat.type("hello\r")
    chat.wait_for("hello\r\n.*\x1b\\[2K")
    chat.type("#" * 5000)
    chat.wait_for("12 tokens, .*> ")
    while chat.written.count(b"#", chat.mark) < 5000:
        assert chat.read_more(), "a terminal that waits for whole lines keeps 4095"


def test_ctrl_c_drops_a_message_of_several_lines(chat: Terminal) -> None:
    chat.type('"""one\r')
    chat.wait_for(r"\.\.\. ")
    chat.type("two")
    chat.wait_for("two")
    while b"> " not in chat.written[chat.mark :]:  # readline misses a signal that comes just before it begins to wait
        chat.type("\x03")
        while chat.read_more(1.0):
            pass
    chat.type('"""three\r"""\r')
    chat.wait_for("12 tokens.*> ")
    expected = whole(WIDTH, answer("three"))
    lines = chat.lines()
    assert lines[lines.index('... """') + 1 :][: len(expected)] == expected


@pytest.mark.parametrize(("key", "status"), [("\x04", 0), ("\x03", 130)])
def test_keys_at_the_prompt_end_the_chat(chat: Terminal, key: str, status: int) -> None:
    assert chat.end(key) == status
    assert "Traceback" not in chat.written.decode()
