"""The process of one contestant: it opens its model, then answers until nobody asks any more."""

from __future__ import annotations

import os
import signal
import sys
import time
from multiprocessing.connection import Connection

from tools.compare_peers.contestants import CONTESTANTS, Answer, Answering, Begin


def serve(pipe: Connection) -> None:
    """Receive a `Begin` and say None when it is done; then answer every (prompt, tokens) with an `Answer`.

    A string says what went wrong, and is the end."""
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
    found, arrivals, begin = list[int](), list[tuple[float, int]](), time.perf_counter()

    def tell(token_ids: list[int]) -> None:
        found.extend(token_ids)
        arrivals.append((time.perf_counter() - begin, len(found)))

    answering(prompt, tokens, tell)
    return Answer(found, arrivals)


if __name__ == "__main__":
    serve(Connection(int(sys.argv[1])))
