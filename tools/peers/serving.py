"""The process of one contestant: it opens it, then answers until nobody asks any more."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection

from peers.contestants import CONTESTANTS, Answering, Files


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer, and when how many of them were there: (seconds, count)."""

    token_ids: list[int]
    arrivals: list[tuple[float, int]]

    @property
    def tokens_per_second(self) -> float:
        """After the first: the prompt's time is left out."""
        (began, first), (ended, last) = self.arrivals[0], self.arrivals[-1]
        return (last - first) / (ended - began)


@dataclass(frozen=True)
class Begin:
    """Which contestant to be, with which models, on which cores."""

    name: str
    files: Files
    cores: Sequence[int]


def serve(pipe: Connection) -> None:
    """Told a `Begin`, say None when that is done; then answer every (prompt, tokens) with an `Answer`. A string is what
    went wrong, and the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # who asks decides, and closes the pipe
    try:
        begin: Begin = pipe.recv()
        os.sched_setaffinity(0, begin.cores)
        os.environ |= {"OMP_NUM_THREADS": str(len(begin.cores)), "MKL_NUM_THREADS": str(len(begin.cores))}
        with CONTESTANTS[begin.name].opened(begin.files, len(begin.cores)) as answering:
            pipe.send(None)
            while True:
                pipe.send(_answer(answering, *pipe.recv()))
    except (EOFError, BrokenPipeError):
        pass
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def _answer(answering: Answering, prompt: list[int], tokens: int) -> Answer:
    found, arrivals = list[int](), list[tuple[float, int]]()

    def tell(token_ids: list[int]) -> None:
        found.extend(token_ids)
        arrivals.append((time.perf_counter(), len(found)))

    answering(prompt, tokens, tell)
    return Answer(found, arrivals)
