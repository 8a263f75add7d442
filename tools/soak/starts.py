"""Kills a process of an engine that is starting, at a random instant: `starts(40, seed=0)`.

The engine is `ssd generate`, `ssd launch`, or an `LLM` in a program, with the built-in pair. It must come up, answer as
in mode ar, print no traceback, and leave no process, no run directory and no name in `/dev/shm`."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

from ssd.client import Client
from ssd.config.params import SamplingParams
from ssd.system import interpreter
from tools import processes
from tools.soak.processes import children, roles, running, shared_memory

FORMS = ("generate", "launch", "LLM")
VICTIMS = ("draft", "target", "frontend", "text")
MODES = ("ssd", "sd", "auto", "ar")
PROMPT, TOKENS = "The capital of France is", 8
_NOBODY: Mapping[str, Kill] = MappingProxyType({})
_PART = 0.7  # of a start, after its processes have appeared
_PATIENCE_S, _END_S, _LOOK_S = 180.0, 3.0, 0.002
_LLM = f"""
import json, sys
from ssd import LLM, SamplingParams
with LLM(**json.loads(sys.argv[1])) as llm:
    print("ready: LLM", flush=True)
    (completion,) = llm.generate([{PROMPT!r}], SamplingParams(max_tokens={TOKENS}, temperature=0, seed=1))
    print(json.dumps({{"token_ids": completion.token_ids}}))
"""


@dataclass
class Start:
    """The outcome of one start. `killed`: roles killed before it was ready. `wrong`: the faults, "" for none."""

    killed: set[str]
    ready_s: float
    token_ids: list[int]
    wrong: str


class Kill(NamedTuple):
    """When to kill a process: seconds after it first appears. The text processes are several: `which` picks one."""

    after: float
    which: float = 0.0


def starts(count: int, seed: int, forms: Sequence[str] = FORMS) -> dict[str, Any]:
    """In each form of engine, start until each kind of process was killed `count` times, in modes by lot.

    The first fifth of these kills has starts of its own. In the others every process is killed in the same start.
    Return how long starts took, beside undisturbed ones, and what was wrong."""
    luck, rows, wrong = random.Random(seed), list[dict[str, Any]](), list[str]()
    expected = start("generate", {"mode": "ar"}).token_ids
    for form in forms:
        usual = {mode: [start(form, {"mode": mode}) for _ in range(3)] for mode in MODES}
        longest = {mode: median(one.ready_s for one in ones) for mode, ones in usual.items()}
        found: dict[tuple[str, ...], list[Start]] = {(): [one for ones in usual.values() for one in ones]}
        alone = max(1, count // 5)
        for victims, wanted in [*(((role,), alone) for role in VICTIMS), (VICTIMS, count - alone)]:
            done = found[victims] = []
            while any(sum(role in one.killed for one in done) < wanted for role in victims):
                mode = luck.choice(MODES[:3] if "draft" in victims else MODES)
                kills = {role: Kill(luck.uniform(0.0, _PART * longest[mode]), luck.random()) for role in victims}
                done.append(start(form, {"mode": mode}, kills))
        for victims, done in filter(itemgetter(1), found.items()):
            for one in done:
                one.wrong += "" if one.token_ids == expected else f" {one.token_ids}"
            wrong += [f"{form} {victims}: {one.wrong}" for one in done if one.wrong]
            times = sorted(one.ready_s for one in done if bool(one.killed) == bool(victims))
            seconds = {"fastest": times[0], "median": median(times), "slowest": times[-1]}
            killed = {role: sum(role in one.killed for one in done) for role in victims}
            failed = sum(bool(one.wrong) for one in done)
            row = {"form": form, "starts": len(done), "killed": killed, "failed": failed}
            rows.append(row | {name: round(value, 2) for name, value in seconds.items()})
            print(json.dumps(rows[-1]), flush=True)
    return {"starts": rows, "failed": len(wrong), "wrong": wrong}


def start(form: str, options: Mapping[str, str], kills: Mapping[str, Kill] = _NOBODY) -> Start:
    """Start an engine with these options, kill processes by their role, and end it when it has answered."""
    names = shared_memory()
    with tempfile.TemporaryDirectory(prefix="s") as folder:
        one = _Starting(Path(folder), form, options)
        try:
            killed = one.come_up(kills)
            ready_s = one.seconds
            token_ids = one.answer()
        finally:
            one.handle.kill()
            one.handle.wait()
        wrong = one.faults() + [f"left {name}" for name in shared_memory() - names]
    return Start(killed, ready_s, token_ids, "; ".join(wrong))


class _Starting:
    """The process that starts an engine, and the processes under it."""

    def __init__(self, folder: Path, form: str, options: Mapping[str, str]) -> None:
        flags = [text for name, value in options.items() for text in (f"--{name.replace('_', '-')}", value)]
        say = ("--raw", "--json", "--temperature", "0", "--seed", "1", "--max-tokens", str(TOKENS))
        command = {
            "generate": ("-m", "ssd.cli.main", "generate", PROMPT, *say, *flags),
            "launch": ("-m", "ssd.cli.main", "launch", "--port", "0", *flags),
            "LLM": ("-c", _LLM, json.dumps(dict(options))),
        }[form]
        self._form, self._began, self._seen = form, time.monotonic(), set[int]()
        self._runs, self._out, self._errors = folder / "r", folder / "out", folder / "errors"
        self._runs.mkdir()
        with self._out.open("w") as out, self._errors.open("w") as errors:
            environment = processes.environment() | {"XDG_RUNTIME_DIR": str(self._runs)}
            self.handle = subprocess.Popen(
                interpreter.command(*command), stdin=subprocess.DEVNULL, stdout=out, stderr=errors, env=environment
            )

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    def come_up(self, kills: Mapping[str, Kill]) -> set[str]:
        """Wait until the engine can serve or has ended. Return the roles that were killed before that."""
        due, waiting = dict[str, float](), dict(kills)
        while self.handle.poll() is None and "ready: " not in self._out.read_text() and self.seconds < _PATIENCE_S:
            found = self._processes()
            # `ssd generate` does not say when its request begins, which a lost target or frontend would end.
            if self._form == "generate" and any(self._runs.glob("*/client.sock")):
                break
            for role in waiting.keys() & {role for role, pids in found.items() if pids}:
                if time.monotonic() >= due.setdefault(role, time.monotonic() + waiting[role].after):
                    os.kill(found[role][int(waiting.pop(role).which * len(found[role]))], signal.SIGKILL)
            time.sleep(_LOOK_S)
        return kills.keys() - waiting.keys()

    def _processes(self) -> dict[str, list[int]]:
        """Return the process ids by role; under `text` the text server and its workers."""
        found = {role: [pid] for role, pid in roles(self.handle.pid).items()}
        servers = [pid for frontend in found.get("frontend", []) for pid in children(frontend)]
        found["text"] = servers + [worker for server in servers for worker in children(server)]
        self._seen.update(pid for pids in found.values() for pid in pids)
        return found

    def answer(self) -> list[int]:
        """Return the ids of the answer, none if there is none, and let the engine end."""
        with suppress(Exception):
            if self._form == "launch":
                address = self._out.read_text().partition("ready: ")[2].strip()
                with Client(address) as client:
                    completion = client.generate(PROMPT, SamplingParams(max_tokens=TOKENS, temperature=0, seed=1))
                self._processes()
                self.handle.terminate()
                self.handle.wait(_PATIENCE_S)
                return list(completion.token_ids)
            self.handle.wait(_PATIENCE_S)
            return list(json.loads(self._out.read_text().splitlines()[-1])["token_ids"])
        return []

    def faults(self) -> list[str]:
        """Return what is not as it must be after the end."""
        errors = self._errors.read_text()
        found = [errors] if self.handle.returncode or "Traceback" in errors or "Exception ignored" in errors else []
        deadline = time.monotonic() + _END_S
        while running(self._seen) and time.monotonic() < deadline:
            time.sleep(_LOOK_S)
        return found + [f"left {name}" for name in (*running(self._seen), *self._runs.iterdir())]
