"""Runs tokenizer and chat template within limits: `python -m ssd.frontend.text_server FD DIRECTORY`.

Both are the model's own code: they may take any time and memory, or abort their process. The server loads them once and
sends the vocabulary to the frontend. Then it reads bytes, each the number of a text worker together with a socket, and
forks a process for each. The kernel kills a process that breaks a limit, and the next job gets another fork."""

from __future__ import annotations

import array
import contextlib
import ctypes
import gc
import os
import resource
import select
import signal
import socket
import sys
from pathlib import Path

import msgspec

from ssd.config.params import Structured
from ssd.errors import RequestError, SsdError
from ssd.frontend import text_jobs
from ssd.frontend.text_jobs import TextWorker, frame, read_frame
from ssd.frontend.tokenization import Tokenizer
from ssd.grammar.lark import counts_tokens
from ssd.grammar.matcher import GrammarCompiler
from ssd.grammar.source import loosened, serialized
from ssd.models.checkpoint import inspect, stop_token_ids

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_LOAD_CPU_S = 120
_LOAD_BYTES = 8 << 30


def main() -> None:
    control, directory = socket.socket(fileno=int(sys.argv[1])), Path(sys.argv[2])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # its threads would not survive a fork
    _confine()
    _limit_memory(_LOAD_BYTES)
    _limit_cpu(_LOAD_CPU_S)
    with contextlib.suppress(ConnectionError):  # the frontend has gone
        _serve(control, directory)


def _serve(control: socket.socket, directory: Path) -> None:
    try:
        tokenizer = Tokenizer(directory)
        welcome = tokenizer.vocabulary()
    except SsdError as error:
        control.sendall(frame(text_jobs.Broken(str(error))))
        return
    except BaseException as error:  # a panic of the library is no Exception
        control.sendall(frame(text_jobs.Broken(f"cannot read {directory / 'tokenizer.json'}: {_said(error)}")))
        return
    control.sendall(frame(welcome))
    del welcome
    gc.freeze()
    _limit_cpu(None)
    _Server(control, tokenizer, directory).run()


class _Server:
    def __init__(self, control: socket.socket, tokenizer: Tokenizer, directory: Path) -> None:
        self._control, self._tokenizer, self._directory = control, tokenizer, directory
        self._workers: dict[int, TextWorker] = {}  # by process id
        self._woken, wakes = os.pipe()
        os.set_blocking(wakes, False)
        signal.set_wakeup_fd(wakes)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def run(self) -> None:
        """Fork workers until the frontend has gone, then kill all of them."""
        try:
            while True:
                ready, _, _ = select.select([self._control.fileno(), self._woken], [], [])
                if self._woken in ready:
                    os.read(self._woken, 64)
                    self._reap()
                if self._control.fileno() in ready:
                    number, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
                    if not number:
                        break
                    self._fork(TextWorker(number[0]), descriptors[0])
        finally:
            for pid in self._workers:
                os.kill(pid, signal.SIGKILL)

    def _fork(self, worker: TextWorker, descriptor: int) -> None:
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                signal.set_wakeup_fd(-1)
                self._control.close()
                _work(self._tokenizer, self._directory, worker, socket.socket(fileno=descriptor))
                code = 0
            except ConnectionError:
                code = 0  # the frontend has gone
            finally:
                os._exit(code)
        os.close(descriptor)
        self._workers[pid] = worker

    def _reap(self) -> None:
        for pid in list(self._workers):
            found, status = os.waitpid(pid, os.WNOHANG)
            if not found:
                continue
            worker, code = self._workers.pop(pid), os.waitstatus_to_exitcode(status)
            if code:
                self._control.sendall(frame(text_jobs.WorkerEnded(worker, code)))


def _work(tokenizer: Tokenizer, directory: Path, worker: TextWorker, connection: socket.socket) -> None:
    """Do one job after another; return after a long text, since the end of the process frees the text's memory."""
    _die_with_parent()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # a panic writes there; its message is in the reply
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    os.nice(text_jobs.NICENESS.get(worker, 0))
    memory = text_jobs.memory_bytes()
    _limit_memory(memory)
    file = connection.makefile("rb")
    compiler: GrammarCompiler | None = None
    while (job := read_frame(file, text_jobs.JOB)) is not None:
        try:
            if isinstance(job, text_jobs.Compile):
                _limit_cpu(_LOAD_CPU_S)
                if compiler is None:
                    checkpoint = inspect(directory, weights=False)
                    compiler = GrammarCompiler(directory, checkpoint.count("vocab_size"), stop_token_ids(checkpoint))
                compiler.load()
                _limit_cpu(text_jobs.cpu_seconds(job))
                reply = frame(_compiled(compiler, job))
            else:
                _limit_cpu(text_jobs.cpu_seconds(job))
                reply = _done(tokenizer, job)
            if len(reply) > text_jobs.MAX_FRAME:
                reply = frame(text_jobs.Broken(f"the result takes more than {text_jobs.MAX_FRAME >> 20} MiB"))
        except RequestError as error:
            reply = frame(text_jobs.Broken(str(error), param=error.param))
        except SsdError as error:
            reply = frame(text_jobs.Broken(str(error)))
        except MemoryError:
            reply = frame(text_jobs.Broken(f"this text takes more than {memory >> 20} MiB of memory"))
        except BaseException as error:  # a panic of the library is no Exception
            reply = frame(text_jobs.Broken(f"the model's tokenizer breaks over this text: {_said(error)}"))
        connection.sendall(reply)
        if job.is_long:
            return


def _compiled(compiler: GrammarCompiler, job: text_jobs.Compile) -> text_jobs.Compiled:
    """Compile a grammar and return its text, if need be without some keywords of its schema. Raises RequestError."""
    left_out: set[str] = set()
    try:
        text = serialized(job.asked, job.free)
        grammar = compiler.compile(text)
    except RequestError:
        loose, left_out = loosened(job.asked)
        helped = ('"format"', '"oneOf"', '"unevaluatedProperties"')
        if not left_out and not any(word in job.asked.source for word in helped):
            raise
        text = serialized(loose, job.free)
        grammar = compiler.compile(text)
    names = sorted({*left_out, *grammar.left_out()})
    return text_jobs.Compiled(Structured("compiled", text), names, counts_tokens(text))


def _done(tokenizer: Tokenizer, job: text_jobs.Encode | text_jobs.Fill | text_jobs.Decode | text_jobs.Check) -> bytes:
    if isinstance(job, text_jobs.Check):
        return frame(tokenizer.check_chat())
    if isinstance(job, text_jobs.Decode):
        return frame(text_jobs.Decoded(tokenizer.decode(job.token_ids)))
    if isinstance(job, text_jobs.Fill):
        assert tokenizer.fill_in is not None, "the vocabulary says so"
        return _encoded(tokenizer.fill_in.ids(job.prefix, job.suffix, job.files, job.most if job.fits else None), job)
    if job.messages is not None:
        ids = tokenizer.encode_chat(job.messages, job.chat, job.plain_tools)
    else:
        ids = tokenizer.encode(job.prompt or "", job.add_special_tokens)
    if job.keep is not None:
        ids = ids[-job.keep :]
    return _encoded(ids, job, job.as_json)


def _encoded(ids: list[int], job: text_jobs.Encode | text_jobs.Fill, as_json: bool = False) -> bytes:
    if len(ids) > job.most:
        return frame(text_jobs.Encoded(len(ids), b""))
    data = msgspec.json.encode(ids) if as_json else array.array("I", ids).tobytes()
    return frame(text_jobs.Encoded(len(ids), data))


def _confine() -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    ctypes.CDLL(None).prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _die_with_parent()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _limit_memory(more: int) -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + more
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _limit_cpu(seconds: int | None) -> None:
    # Rounded up to the next whole second; None removes the limit.
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if seconds is None:
        resource.setrlimit(resource.RLIMIT_CPU, (hard, hard))
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    limit = int(used.ru_utime + used.ru_stime) + 1 + seconds
    resource.setrlimit(resource.RLIMIT_CPU, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:256]


if __name__ == "__main__":
    main()
