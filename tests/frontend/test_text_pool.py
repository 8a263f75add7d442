"""Text processes with real models' files, sound and hostile: what a text costs, and whom."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from ssd.errors import SsdError, UsageError
from ssd.frontend import text_jobs, text_pool
from ssd.frontend.text_jobs import Broken, Check, Decode, Encode, Encoded, TextWorker
from ssd.frontend.text_pool import TextPool
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.system.interpreter import child_command
from tests.scripted_engine import MODEL, PATIENCE_S, text_processes

HELLO = [ChatMessage("user", "Hello there")]
SHORT = Encode("Why is the sky blue?", most=100)
CHAT = Encode(messages=HELLO, most=100)


def with_pool(directory: Path, body: Callable[[TextPool], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        pool = TextPool(directory)
        try:
            await body(pool)
        finally:
            pool.close()

    asyncio.run(asyncio.wait_for(run(), 4 * PATIENCE_S))


def model(tmp_path: Path, template: str = "{{ messages[0].content }}", **changes: Any) -> Path:
    """The packaged tokenizer with another template and other parts."""
    tokenizer = json.loads((MODEL / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer | changes))
    (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_the_replies_are_those_of_the_tokenizer() -> None:
    tokenizer = Tokenizer(MODEL)
    text = "Why is the sky blue? 日本語 🙂" * 40

    async def body(pool: TextPool) -> None:
        vocabulary = await pool.start()
        assert vocabulary == tokenizer.vocabulary()
        ids = tokenizer.encode(text)
        for worker in (TextWorker.PROMPT, TextWorker.LONG, TextWorker.LOOKUP):
            found = await pool.do(worker, Encode(text, most=10_000))
            assert memoryview(found.ids).cast("I").tolist() == ids and found.count == len(ids)
        told = await pool.do(TextWorker.LOOKUP, Encode(text, most=10_000, as_json=True))
        assert json.loads(told.ids) == ids
        assert await pool.do(TextWorker.PROMPT, Encode(text, most=10)) == Encoded(len(ids), b"")
        chat = await pool.do(TextWorker.CHAT, CHAT)
        assert memoryview(chat.ids).cast("I").tolist() == tokenizer.encode_chat(HELLO)
        assert (await pool.do(TextWorker.LOOKUP, Decode(ids))).text == text

    with_pool(MODEL, body)
    assert text_processes() == []


def test_a_long_text_holds_up_no_short_one() -> None:
    async def body(pool: TextPool) -> None:
        await pool.start()
        long = [pool.do(worker, Encode("word " * 250_000, most=1)) for worker in (TextWorker.LONG, TextWorker.LOOKUP)]
        for _ in range(20):
            assert (await pool.do(TextWorker.PROMPT, SHORT)).count
            assert (await pool.do(TextWorker.CHAT, CHAT)).count
        assert not any(job.done() for job in long)
        assert [found.count for found in await asyncio.gather(*long)] == [250_001] * 2

    with_pool(MODEL, body)


@pytest.mark.parametrize(
    ("template", "cause"),
    [
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "2 s of processor time"),
        ("{{ [1] * 4 * 10 ** 8 }}", "chat template"),
        ("{{ messages[0].content.ljust(2 * 10 ** 9) }}", "chat template"),
        ("{% for a in range(50000) %}{{ 'x' * 1000 }}{% endfor %}", "it makes more than"),
    ],
    ids=["loops", "constant", "width", "output"],
)
def test_a_hostile_template_costs_its_own_request(tmp_path: Path, template: str, cause: str) -> None:
    async def body(pool: TextPool) -> None:
        assert (await pool.start()).has_chat
        chat = pool.do(TextWorker.CHAT, CHAT)
        assert isinstance(await pool.do(TextWorker.PROMPT, SHORT), Encoded)
        reply = await chat
        assert isinstance(reply, Broken) and cause in reply.message

    with_pool(model(tmp_path, template), body)


@pytest.mark.parametrize("template", ["{{ 9 ** (9 ** 9) }}", "{% if %}"], ids=["constant", "syntax"])
def test_a_template_that_breaks_while_it_is_read_costs_chat_alone(tmp_path: Path, template: str) -> None:
    async def body(pool: TextPool) -> None:
        vocabulary = await pool.start()
        assert not vocabulary.has_chat and vocabulary.no_chat
        assert isinstance(await pool.do(TextWorker.PROMPT, SHORT), Encoded)

    with_pool(model(tmp_path, template), body)


def backtracking() -> dict[str, Any]:
    """A pattern whose search the library gives up with a panic."""
    return {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}}


def growing() -> dict[str, Any]:
    replace = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1000}
    return {"normalizer": {"type": "Sequence", "normalizers": [replace, replace, replace]}}


@pytest.mark.parametrize("changes", [backtracking(), growing()], ids=["backtracking", "growing"])
def test_a_hostile_tokenizer_costs_its_own_request(tmp_path: Path, changes: dict[str, Any]) -> None:
    async def body(pool: TextPool) -> None:
        await pool.start()
        reply = await pool.do(TextWorker.PROMPT, Encode("a" * 60 + "b", most=100))
        assert isinstance(reply, Broken), reply
        assert isinstance(await pool.do(TextWorker.PROMPT, Encode("sky blue", most=100)), Broken | Encoded)

    with_pool(model(tmp_path, **changes), body)


def long_tokens(length: int, count: int) -> dict[str, Any]:
    """A vocabulary whose tokens stand for so many characters each."""
    return {
        "model": {"type": "WordLevel", "vocab": {"w" * (n + 1): n for n in range(count)}, "unk_token": "w"},
        "decoder": {"type": "Replace", "pattern": {"String": "w"}, "content": "x" * length},
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": None,
        "added_tokens": [],
    }


@pytest.mark.parametrize(
    "content",
    [{}, long_tokens(10_000, 1), long_tokens(4000, 100)],
    ids=["nothing", "a long token", "many long tokens"],
)
def test_a_tokenizer_that_cannot_be_used_is_named(tmp_path: Path, content: dict[str, Any]) -> None:
    (tmp_path / "tokenizer.json").write_text(json.dumps({"version": "1.0", **content} if content else {}))

    async def body(pool: TextPool) -> None:
        with pytest.raises(UsageError, match=r"tokenizer\.json"):
            await pool.start()

    with_pool(tmp_path, body)


def killing(monkeypatch: pytest.MonkeyPatch, wanted: int, fault: signal.Signals) -> list[int]:
    """The process ids of the text servers from now on. The first `wanted` are killed at once."""
    popen, started = text_pool.subprocess.Popen, []

    def start(*arguments: Any, **options: Any) -> Any:
        process = popen(*arguments, **options)
        if len(started) < wanted:
            process.send_signal(fault)
        started.append(process.pid)
        return process

    monkeypatch.setattr(text_pool.subprocess, "Popen", start)
    return started


@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_a_server_that_is_killed_as_it_starts_is_replaced(
    monkeypatch: pytest.MonkeyPatch, fault: signal.Signals
) -> None:
    started = killing(monkeypatch, 2, fault)

    async def body(pool: TextPool) -> None:
        assert await pool.start() == Tokenizer(MODEL).vocabulary()
        assert len(started) == 3

    with_pool(MODEL, body)


def test_a_server_that_is_killed_whenever_it_starts_is_told_as_that(monkeypatch: pytest.MonkeyPatch) -> None:
    started = killing(monkeypatch, 100, signal.SIGKILL)

    async def body(pool: TextPool) -> None:
        with pytest.raises(SsdError, match=r"^the text server was lost 6 times in a row as it started: .*SIGKILL$"):
            await pool.start()
        assert len(started) == 6

    with_pool(MODEL, body)


def test_a_worker_that_is_killed_as_it_checks_the_template_is_replaced(tmp_path: Path) -> None:
    """A job is tried twice, so both processes have to die before the check is asked for again."""
    slow = "{{ messages[0].content }}" * 3000 + "{{ tools }}"

    async def body(pool: TextPool) -> None:
        starting, killed = asyncio.create_task(pool.start()), set[int]()
        while len(killed) < 2:
            assert not starting.done(), "too late"
            for pid in set(text_processes()[1:]) - killed:
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
            await asyncio.sleep(0.001)
        assert (await starting).template.takes_tools

    with_pool(model(tmp_path, slow), body)


def test_a_worker_that_is_killed_whenever_it_checks_the_template_costs_chat_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(text_pool, "_FIRST_DELAY_S", 0.0)
    ask, killed = text_pool._Queue.ask, set[int]()

    async def kill_and_ask(connection: Any, job: Any) -> Any:
        if isinstance(job, Check):
            while not (alive := set(text_processes()[1:]) - killed):
                await asyncio.sleep(0.001)
            for pid in alive:
                os.kill(pid, signal.SIGKILL)
            killed.update(alive)
        return await ask(connection, job)

    monkeypatch.setattr(text_pool._Queue, "ask", kill_and_ask)

    async def body(pool: TextPool) -> None:
        vocabulary = await pool.start()
        cause = "the text worker for chat was lost 6 times in a row as it started: "
        assert not vocabulary.has_chat and vocabulary.no_chat.startswith(cause)
        assert isinstance(await pool.do(TextWorker.PROMPT, SHORT), Encoded)

    with_pool(MODEL, body)
    assert "no chat with this model: the text worker for chat was lost" in caplog.text


def test_a_server_whose_frontend_has_gone_meanwhile_ends_without_a_word() -> None:
    ours, theirs = socket.socketpair()
    command = child_command("ssd.frontend.text_server", str(theirs.fileno()), str(MODEL))
    ours.close()
    with theirs:
        done = subprocess.run(command, pass_fds=[theirs.fileno()], stderr=subprocess.PIPE, timeout=PATIENCE_S)
    assert (done.returncode, done.stderr) == (0, b"")


def test_many_long_texts_hold_up_no_short_one() -> None:
    async def body(pool: TextPool) -> None:
        await pool.start()
        long = [pool.do(TextWorker.LONG, Encode("word " * 20_000, most=1)) for _ in range(40)]
        await pool.do(TextWorker.LONG, Encode("word " * 4_000, most=1))
        assert sum(job.done() for job in long) < 20
        for job in long:
            job.cancel()

    with_pool(MODEL, body)


def test_the_end_of_the_server_is_not_blamed_on_the_text(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body(pool: TextPool) -> None:
        await pool.start()
        asked = pool.do(TextWorker.LONG, Encode("word " * 800_000, most=1))
        while not asked.done():
            for pid in text_processes():
                os.kill(pid, signal.SIGKILL)
            await asyncio.sleep(0.05)
        assert asked.result().code == "overloaded"

    with_pool(MODEL, body)


@pytest.mark.parametrize("stop", [signal.SIGKILL, signal.SIGSTOP])
def test_a_text_process_that_is_killed_costs_no_request(stop: signal.Signals, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ssd.frontend.text_pool._PATIENCE_S", -1.0)  # a stopped one is given up after a second

    async def body(pool: TextPool) -> None:
        await pool.start()
        expected = await pool.do(TextWorker.PROMPT, SHORT)
        for victims in (slice(1, None), slice(0, 1), slice(0, None)):
            for pid in text_processes()[victims]:
                os.kill(pid, stop)
            assert await pool.do(TextWorker.PROMPT, SHORT) == expected

    with_pool(MODEL, body)


@pytest.mark.parametrize(("free", "most"), [(0, 256 << 20), (2 << 30, 512 << 20), (64 << 30, 1 << 30)])
def test_a_text_may_take_a_part_of_what_is_free(free: int, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_jobs, "available_bytes", lambda: free)
    assert text_jobs.memory_bytes() == most
