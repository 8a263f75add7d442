"""JSON Schemas that a real engine must obey in every mode while its draft is killed (docs/exactness.md).

\b
    python -m tools.schemas                               # 300 schemas, a tiny pair with the built-in tokenizer
    python -m tools.schemas --builtin --schemas 24        # the built-in pair
    python -m tools.schemas --silent                      # objects that say nothing of other keys

Every schema is asked for once in mode ar, eight at a time; its ids are the reference. Then come the other modes at
each batch size. cut: the answer reached --tokens, so that it need not be whole JSON; invalid: any other answer that
does not obey its schema; altered: other ids than in ar. Exit status 1 when an answer is invalid or altered.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import click
from rich.console import Console

from ssd.cli.outputs import grid
from ssd.client import Client, Completion
from ssd.config.params import Mode, SamplingParams, Speculation, Structured
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.restarts import Restarts
from ssd.launch.supervisor import Engine
from ssd.models.pull import BUILTIN
from ssd.plugins.bench.environment import environment
from tools.schemas.making import Schema, fault, schemas
from tools.soak import tiny

_TOKENIZER = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")
_MOST_AT_A_TIME = 8


class Setting(NamedTuple):
    mode: Mode
    temperature: float
    batch: int


@click.command(help=__doc__)
@click.option("--schemas", "count", type=click.IntRange(1), default=300, show_default=True)
@click.option("--seed", default=0, show_default=True)
@click.option("--tokens", type=click.IntRange(1), default=96, show_default=True, help="of an answer, at most")
@click.option("--modes", default="sd,ssd", show_default=True, help="compared with ar, with commas")
@click.option("--temperature", "temperatures", type=click.FloatRange(0), multiple=True, default=(0.0, 1.0))
@click.option("--batch-size", "batches", type=click.IntRange(1, _MOST_AT_A_TIME), multiple=True, default=(1, 8))
@click.option("--kill-every", type=click.FloatRange(0.01), default=3.0, show_default=True, help="seconds, on average")
@click.option("--builtin", is_flag=True, help="the built-in pair")
@click.option("--silent", is_flag=True, help="leave out additionalProperties: false")
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    count: int,
    seed: int,
    tokens: int,
    modes: str,
    temperatures: tuple[float, ...],
    batches: tuple[int, ...],
    kill_every: float,
    builtin: bool,
    silent: bool,
    out: Path | None,
) -> None:
    made, rows, faults = schemas(count, seed, silent), list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as folder:
        target, draft = ("smollm2", "smollm2-draft") if builtin else _tiny_pair(Path(folder))
        options = EngineOptions(target=target, draft=(draft,), max_num_seqs=_MOST_AT_A_TIME)
        with Engine(resolve(options), Restarts(float("inf"), 0.1)) as engine, Client(engine.address) as client:
            for temperature in temperatures:
                expected: list[list[int]] = []
                for mode, batch in [("ar", _MOST_AT_A_TIME), *product(modes.split(","), batches)]:
                    setting = Setting(mode, temperature, batch)  # type: ignore[arg-type]
                    with _killed(engine, kill_every) as kills:
                        began = time.monotonic()
                        answers = _answers(client, made, setting, tokens)
                        seconds = time.monotonic() - began
                    expected = expected or [answer.token_ids for answer in answers]
                    found = _faults(made, answers)
                    faults += [{**setting._asdict(), **each} for each in found]
                    counts = _counts(answers, expected) | {"invalid": len(found), "kills": len(kills)}
                    rows.append({**setting._asdict(), **counts, "seconds": round(seconds, 1)})
    Console(width=160).print(grid("", list(rows[0]), [[str(value) for value in row.values()] for row in rows]))
    for each in faults:
        click.echo(json.dumps(each))
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "rows": rows, "faults": faults}, indent=1))
    if any(row["invalid"] or row["altered"] for row in rows):
        raise SystemExit(1)


def _tiny_pair(folder: Path) -> tuple[str, str]:
    """Write a tiny pair with the built-in target's tokenizer. Returns the folders of target and draft."""
    known = BUILTIN["smollm2"].directory
    made = tiny.pair(folder, vocab_size=json.loads((known / "config.json").read_text())["vocab_size"])
    for directory in made:
        for name in _TOKENIZER:
            shutil.copy(known / name, directory)
    return str(made[0]), str(made[1])


def _answers(client: Client, made: Sequence[Schema], setting: Setting, tokens: int) -> list[Completion]:
    prompts = [f"Example {index}, in JSON:" for index in range(len(made))]
    params = [
        SamplingParams(
            temperature=setting.temperature,
            seed=index,
            max_tokens=tokens,
            speculation=Speculation(setting.mode, 4, (3,), "jit"),
            structured=Structured("json", json.dumps(schema)),
        )
        for index, schema in enumerate(made)
    ]
    if setting.batch == _MOST_AT_A_TIME:
        return client.generate(prompts, params)
    answers: list[Completion] = []
    for first in range(0, len(made), setting.batch):
        these = slice(first, first + setting.batch)
        answers += client.generate(prompts[these], params[these])
    return answers


def _faults(made: Sequence[Schema], answers: Sequence[Completion]) -> list[dict[str, Any]]:
    """Return each whole answer that does not obey its schema, and why."""
    found = []
    for schema, answer in zip(made, answers, strict=True):
        if answer.finish_reason != "length" and (why := fault(schema, answer.text)):
            found.append({"schema": schema, "text": answer.text, "why": why})
    return found


def _counts(answers: Sequence[Completion], expected: Sequence[list[int]]) -> dict[str, int]:
    return {
        "answers": len(answers),
        "tokens": sum(len(answer.token_ids) for answer in answers),
        "rounds": sum(answer.metrics.rounds for answer in answers),
        "cut": sum(answer.finish_reason == "length" for answer in answers),
        "altered": sum(answer.token_ids != ids for answer, ids in zip(answers, expected, strict=True)),
    }


@contextmanager
def _killed(engine: Engine, every_s: float) -> Iterator[list[int]]:
    """SIGKILL the draft after random pauses with this mean until the block ends. Yields the ids of those killed."""
    dice, kills, end = random.Random(0), list[int](), threading.Event()

    def kill() -> None:
        while not end.wait(dice.expovariate(1 / every_s)):
            pid = engine.pids.get("draft")
            if pid is not None and pid not in kills:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills.append(pid)

    thread = threading.Thread(target=kill)
    thread.start()
    try:
        yield kills
    finally:
        end.set()
        thread.join()


if __name__ == "__main__":
    main()
