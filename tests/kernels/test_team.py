"""The threads of the kernels (team.c): every item once, whoever is late; nobody burns a core without work."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ssd.kernels import build, cpu

pytestmark = pytest.mark.skipif(not cpu.present(torch.device("cpu")), reason="no C compiler")

WORK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64)


def share(items: int, work: Callable[[int], None]) -> None:
    """Call `share` of team.h. Unlike the kernels' own calls, this one lets go of the GIL, which `work` needs."""
    library = ctypes.CDLL(str(build.library()))
    library.share.argtypes, library.share.restype = (ctypes.c_int64, WORK, ctypes.c_void_p), None
    library.share(items, WORK(lambda _, item: work(item)), None)


@pytest.mark.parametrize("items", [0, 1, 2, 3, 100])
def test_every_item_is_done_once_while_the_team_grows_and_shrinks(items: int) -> None:
    for count in (1, 4, 2, 1, 5, 3):
        torch.set_num_threads(count)
        for _ in range(50):
            done = list[int]()
            share(items, done.append)
            assert sorted(done) == list(range(items))


def test_the_others_take_what_a_late_thread_has_not_begun() -> None:
    """Whoever takes item 0 is held until all others are done: of divided work its own share would never be."""
    torch.set_num_threads(2)
    done, others = list[int](), threading.Event()

    def work(item: int) -> None:
        if item == 0:
            assert others.wait(60)
        done.append(item)
        if len(done) == 99:
            others.set()

    share(100, work)
    assert done[-1] == 0 and len(done) == 100


def states() -> list[str]:
    """The states of this process's threads: R computes or waits for a core, S sleeps."""
    stats = [task / "stat" for task in Path("/proc/self/task").iterdir()]
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in stats]


def test_threads_without_work_sleep() -> None:
    torch.set_num_threads(4)
    share(100, lambda item: None)
    deadline = time.monotonic() + 60
    while states().count("R") > 1 and time.monotonic() < deadline:  # this thread is one
        time.sleep(0.01)
    assert states().count("R") <= 1


def test_a_forked_process_has_a_team_of_its_own() -> None:
    script = f"""
import os, torch
from {__name__} import share
torch.set_num_threads(3)
share(10, lambda item: None)
child = os.fork()
before, done = len(os.listdir("/proc/self/task")), []
share(10, done.append)
assert sorted(done) == list(range(10))
if child == 0:
    assert len(os.listdir("/proc/self/task")) == before + 2  # its own
else:
    assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "3"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
