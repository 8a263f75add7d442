"""The frontend's side of its text workers (`ssd.frontend.text_server`): queues, retries, restarts."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import msgspec

from ssd.errors import SsdError, UsageError
from ssd.frontend import text_jobs
from ssd.frontend.detokenization import TemplateFacts, Vocabulary
from ssd.frontend.text_jobs import Broken, Check, Job, TextWorker, WorkerEnded, cpu_seconds, frame
from ssd.system import interpreter

log = logging.getLogger("ssd.frontend")

_TRIES = 2
_PATIENCE_S = 60.0  # wall time beyond a job's CPU time, for a process that is stopped or starved
_LAST_WORDS_S = 1.0
_FIRST_DELAY_S, _MOST_LOSSES = 0.1, 5  # for a process lost as it starts; as in `ssd.launch.restarts`
_KILLED = (signal.SIGKILL, signal.SIGTERM)  # from outside: the job is not to blame


class TextPool:
    """Owns the text server and the queues of its workers, in whose processes texts are handled.

    Lives in one event loop. A job waits only for the jobs of its own worker. If the process dies, the job is tried once
    more in a new one, unless it took too much CPU time."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._workers = {worker: _Queue() for worker in TextWorker}
        self._server: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._starting = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []
        self._listening: asyncio.Task[None] | None = None

    async def start(self) -> Vocabulary:
        """Load the tokenizer and return its vocabulary, without chat if the chat template is unusable.

        Raises UsageError where the tokenizer cannot be loaded."""
        if not (self._directory / "tokenizer.json").is_file():
            return Vocabulary()
        vocabulary = await self._start_server()
        self._tasks += [asyncio.create_task(self._serve(worker, queue)) for worker, queue in self._workers.items()]
        if not vocabulary.has_chat:
            return vocabulary
        checked = await self._check_chat()
        if isinstance(checked, Broken) and checked.code == "invalid_request":  # else the template is not to blame
            log.warning("no chat with this model: %s", checked.message)
            return msgspec.structs.replace(vocabulary, has_chat=False, no_chat=checked.message)
        if isinstance(checked, TemplateFacts):
            return msgspec.structs.replace(vocabulary, template=checked)
        return vocabulary

    async def _check_chat(self) -> TemplateFacts | Broken:
        """Return the facts of the chat template, or Broken; try again, some times, while its process is lost."""
        losses = 0
        while True:
            checked: TemplateFacts | Broken = await self.do(TextWorker.CHAT, Check())
            if not isinstance(checked, Broken) or checked.code != "overloaded":
                return checked
            losses += 1
            try:
                await _back_off("text worker for chat", checked.message, losses)
            except SsdError as error:
                return Broken(str(error))

    def do(self, worker: TextWorker, job: Job) -> asyncio.Future[Any]:
        """Return a future of the job's reply, or of a `Broken`. Cancelling it before its turn removes the job."""
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        if self._tasks:
            self._workers[worker].add(future, job)
        else:
            future.set_result(Broken("this model has no tokenizer; give token ids"))
        return future

    def close(self) -> None:
        for task in (*self._tasks, *filter(None, [self._listening])):
            task.cancel()
        for queue in self._workers.values():
            queue.drop_connection()
        self._end_server()

    # -- the server -------------------------------------------------------------------------------------------------

    async def _start_server(self) -> Vocabulary:
        """Start the server, again if a signal ends it. Raises UsageError for a tokenizer that cannot be loaded."""
        losses = 0
        while True:
            news, code = await self._start_server_once()
            if isinstance(news, Vocabulary):
                return news
            if isinstance(news, Broken):
                raise UsageError(news.message)
            if code >= 0 or code == -signal.SIGXCPU:
                raise UsageError(f"cannot read {self._directory / 'tokenizer.json'}: {_named(code)}")
            losses += 1
            await _back_off("text server", _named(code), losses)

    async def _start_server_once(self) -> tuple[Any, int]:
        """Start a server; return its first message, and its exit code if it ended without a message."""
        ours, theirs = socket.socketpair()
        with theirs:
            self._server = subprocess.Popen(
                interpreter.child_command("ssd.frontend.text_server", str(theirs.fileno()), str(self._directory)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        self._control = ours.dup()
        reader, writer = await asyncio.open_connection(sock=ours, limit=text_jobs.MAX_FRAME)
        news = await _read(reader, text_jobs.NEWS)
        if isinstance(news, Vocabulary):
            self._listening = asyncio.create_task(self._listen(reader, writer, self._server))
            return news, 0
        writer.close()
        self._end_server()
        return news, self._server.returncode

    async def _listen(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, server: subprocess.Popen[bytes]
    ) -> None:
        while isinstance(news := await _read(reader, text_jobs.NEWS), WorkerEnded):
            self._workers[TextWorker(news.worker)].ended(news.code)
        writer.close()
        if self._server is server:
            self._end_server()

    def _end_server(self) -> None:
        if self._control is not None and self._server is not None:
            self._control.close()
            self._control = None
            self._server.kill()
            self._server.wait()

    async def _connect(self, worker: TextWorker, queue: _Queue) -> None:
        """Start a process for a worker, with a new server if the old one is lost. Raises UsageError, OSError."""
        async with self._starting:
            if self._control is None:
                log.warning("the text server was lost; starting another one")
                await self._start_server()
        if self._control is None:
            raise ConnectionError("the text server was lost as it started")
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._control, [bytes([worker])], [theirs.fileno()])
        queue.connect(*await asyncio.open_connection(sock=ours, limit=text_jobs.MAX_FRAME))

    # -- jobs -------------------------------------------------------------------------------------------------------

    async def _serve(self, worker: TextWorker, queue: _Queue) -> None:
        while True:
            await queue.wait()
            await self._serve_one(worker, queue)

    async def _serve_one(self, worker: TextWorker, queue: _Queue) -> None:
        # A function of its own frees text and reply before the next wait.
        future, job = queue.take()
        if future.done():
            return
        try:
            reply = await self._try(worker, queue, job)
        except Exception:
            log.exception("a bug in handling a text:")
            reply = Broken("the text could not be handled", "internal_error")
        if not future.done():
            future.set_result(reply)

    async def _try(self, worker: TextWorker, queue: _Queue, job: Job) -> Any:
        code: int | None = None
        for _ in range(_TRIES):
            try:
                if queue.process is None:
                    await self._connect(worker, queue)
                async with asyncio.timeout(cpu_seconds(job) + _PATIENCE_S):
                    reply = await queue.ask(job)
                if reply is not None:
                    if job.is_long:
                        queue.drop_connection()
                    return reply
                code = await queue.death()
            except (OSError, SsdError, TimeoutError) as error:
                log.warning("a text could not be handled: %s", error or "its process does not answer")
                self._end_server()
            queue.drop_connection()
            if code == -signal.SIGXCPU:
                return Broken(f"this text takes more than {cpu_seconds(job)} s of processor time")
        if code is None or -code in _KILLED:
            return Broken("the text could not be handled at the moment; try again", "overloaded")
        return Broken(f"this text ends the process that handles it: {_named(code)}")


class _Queue:
    def __init__(self) -> None:
        self._jobs: dict[asyncio.Future[Any], Job] = {}
        self._more = asyncio.Event()
        self._oldest = False
        self.process: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self._end: asyncio.Queue[int] = asyncio.Queue()

    def add(self, future: asyncio.Future[Any], job: Job) -> None:
        self._jobs[future] = job
        self._more.set()
        future.add_done_callback(lambda done: self._jobs.pop(done, None))

    async def wait(self) -> None:
        while not self._jobs:
            self._more.clear()
            await self._more.wait()

    def take(self) -> tuple[asyncio.Future[Any], Job]:
        """Take the shortest and the oldest job in turn: long jobs delay no short one, and none starves."""
        self._oldest = not self._oldest
        if self._oldest:
            future = next(iter(self._jobs))
        else:
            future = min(self._jobs, key=lambda waiting: self._jobs[waiting].size)
        return future, self._jobs.pop(future)

    def connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.process, self._end = (reader, writer), asyncio.Queue()

    async def ask(self, job: Job) -> Any | None:
        """Return the process's reply to a job; None if the process has gone."""
        assert self.process is not None
        reader, writer = self.process
        writer.write(frame(job))
        with contextlib.suppress(ConnectionError):
            await writer.drain()
        return await _read(reader, text_jobs.REPLY)

    def ended(self, code: int) -> None:
        self._end.put_nowait(code)

    async def death(self) -> int | None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LAST_WORDS_S):
                return await self._end.get()
        return None

    def drop_connection(self) -> None:
        if self.process is not None:
            self.process[1].close()
            self.process = None


async def _read(reader: asyncio.StreamReader, decoder: msgspec.msgpack.Decoder[Any]) -> Any | None:
    try:
        (length,) = text_jobs.LENGTH.unpack(await reader.readexactly(text_jobs.LENGTH.size))
        if length > text_jobs.MAX_FRAME:
            return None
        return decoder.decode(await reader.readexactly(length))
    except (asyncio.IncompleteReadError, ConnectionError, msgspec.DecodeError):
        return None


async def _back_off(who: str, how: str, losses: int) -> None:
    if losses > _MOST_LOSSES:
        raise SsdError(f"the {who} was lost {losses} times in a row as it started: {how}")
    delay = _FIRST_DELAY_S * 2.0 ** (losses - 1)
    log.warning("the %s was lost as it started (%s), restarting it in %.1f s", who, how, delay)
    await asyncio.sleep(delay)


def _named(code: int) -> str:
    return f"it ends with status {code}" if code >= 0 else f"it ends with {signal.Signals(-code).name}"
