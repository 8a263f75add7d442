"""A fork of a program with an engine: it is told that the engine is its parent's, and ends nothing of it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import gc, multiprocessing, os, sys
from pathlib import Path
from ssd import LLM, SamplingParams
from ssd.client import Client
from ssd.errors import EngineDeadError, UsageError
from tests.scripted_engine import SMALL

def ask(llm, stream, chunks):
    for call in (lambda: llm.generate([[1, 2]]), lambda: llm.chat([{"role": "user", "content": "x"}]),
                 lambda: next(stream)):
        try:
            print(call())
        except UsageError as error:
            assert "make the LLM in the process that uses it" in str(error)
    try:
        print(next(chunks))
    except EngineDeadError as error:
        assert "is a fork of" in str(error)

llm = LLM(**SMALL)
directory = Path(llm.engine.address.removeprefix("ipc://")).parent
params = SamplingParams(seed=1, max_tokens=64, ignore_eos=True)
expected = llm.generate([[1, 2, 3]], params)[0].token_ids
client = Client(llm.engine.address)
for way in ("close", "collect", "exit", "multiprocessing"):
    stream, chunks = llm.stream([1, 2, 3], params), client.stream([1, 2, 3], params)
    got = next(stream).token_ids, next(chunks).token_ids
    if way == "multiprocessing":
        child = multiprocessing.get_context("fork").Process(target=ask, args=(llm, stream, chunks))
        child.start()
        child.join()
        assert child.exitcode == 0
    elif (pid := os.fork()) == 0:
        ask(llm, stream, chunks)
        if way == "close":
            llm.close()
        elif way == "collect":
            del llm, stream, chunks, client
            gc.collect()
        sys.exit()
    else:
        assert os.waitpid(pid, 0)[1] == 0
    assert directory.exists(), way
    for begun, rest in zip(got, (stream, chunks)):
        assert [*begun, *(token for chunk in rest for token in chunk.token_ids)] == expected, way
    assert llm.generate([[1, 2, 3]], params)[0].token_ids == expected and llm.engine.failure is None
llm.close()
assert not directory.exists()
"""


def test_a_fork_is_told_that_the_engine_is_its_parents_and_ends_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert done.stdout + done.stderr == "" and done.returncode == 0
