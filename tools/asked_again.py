"""Speed of requests that are asked again, or that resemble earlier ones: with and without the suffix memory.

\b
    python -m tools.asked_again examples/edit-loop.jsonl
    python -m tools.asked_again gsm8k.jsonl --requests 20 --passes 2 --batch-size 8

Each engine is started anew for each repeat, and the engines take turns. A line of the file has a `prompt`, or `turns`
of a user, or `messages` with answers: then the model answers each of the user's, and goes on from the answer given
there. Speeds count all tokens of a pass over its whole time, prompts included. Exit status 1 if ids differ from ar's.
"""

from __future__ import annotations

import json
import time
from collections.abc import Generator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple, TypeAlias

import click
from rich.progress import track

from ssd import LLM, Completion, SamplingParams
from ssd.cli.outputs import console, grid
from ssd.plugins.bench.environment import environment

ENGINES: dict[str, dict[str, Any]] = {
    "ar": {"mode": "ar"},
    "without memory": {"mode": "auto", "suffix_memory": 0},
    "with memory": {"mode": "auto"},
}

Message: TypeAlias = dict[str, Any]


class Pass(NamedTuple):
    """One pass over all requests: their answers, and the tokens per second."""

    answers: list[Completion]
    tok_s: float


class Conversation:
    """The questions of one line of a file, turn by turn."""

    def __init__(self, line: Message) -> None:
        messages = line.get("messages")
        given = messages or [{"role": "user", "content": turn} for turn in line.get("turns") or [line["prompt"]]]
        self._given = [{"role": each["role"], "content": each["content"]} for each in given]
        self._own = not messages

    def turns(self) -> Generator[list[Message], str, None]:
        """Yield what is asked in each turn; the text of its answer must be sent back."""
        said: list[Message] = []
        for message in self._given:
            said.append(message)
            if message["role"] == "user":
                answer = yield list(said)
                if self._own:
                    said.append({"role": "assistant", "content": answer})


def one_pass(llm: LLM, conversations: Sequence[Conversation], batch: int, params: SamplingParams) -> Pass:
    """Ask everything once, `batch` conversations at a time, turn by turn."""
    answers, seconds = list[Completion](), 0.0
    for start in range(0, len(conversations), batch):
        running = [conversation.turns() for conversation in conversations[start : start + batch]]
        asked = [next(turns) for turns in running]
        while running:
            began = time.perf_counter()
            found = llm.chat(asked, params)
            seconds += time.perf_counter() - began
            answers += found
            going, running, asked = running, [], []
            for turns, completion in zip(going, found, strict=True):
                with suppress(StopIteration):
                    asked.append(turns.send(completion.text))
                    running.append(turns)
    return Pass(answers, sum(len(answer.token_ids) for answer in answers) / seconds)


def per_round(answers: Sequence[Completion]) -> float:
    """Return the tokens of a mean round."""
    rounds = max(1, sum(answer.metrics.rounds for answer in answers))
    return 1 + sum(answer.metrics.accepted_tokens for answer in answers) / rounds


@click.command(help=__doc__)
@click.argument("file", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--requests", type=click.IntRange(1), default=20, show_default=True, help="lines of the file")
@click.option("--tokens", type=click.IntRange(2), default=96, show_default=True, help="of an answer, at most")
@click.option("--passes", type=click.IntRange(1), default=2, show_default=True, help="how often all is asked")
@click.option("--batch-size", "batch", type=click.IntRange(1, 8), default=1, show_default=True)
@click.option("--repeats", type=click.IntRange(1), default=3, show_default=True)
@click.option("--temperature", type=click.FloatRange(0), default=0.0, show_default=True)
@click.option("--json", "out", type=click.Path(path_type=Path), help="write every figure here")
def main(
    file: Path, requests: int, tokens: int, passes: int, batch: int, repeats: int, temperature: float, out: Path | None
) -> None:
    lines = [json.loads(line) for line in islice(file.read_text().splitlines(), requests)]
    conversations = [Conversation(line) for line in lines]
    params = SamplingParams(max_tokens=tokens, temperature=temperature, seed=0)
    found: dict[tuple[str, int], list[Pass]] = {}
    for _ in track(range(repeats), "repeats", console=console(), transient=True):
        for name, options in ENGINES.items():
            with LLM(**options) as llm:
                llm.generate([[1, 2, 3]], SamplingParams(max_tokens=16, ignore_eos=True, store=False))
                for number in range(1, passes + 1):
                    turn = one_pass(llm, conversations, batch, params)
                    found.setdefault((name, number), []).append(turn)
    ids = {key: [[answer.token_ids for answer in turn.answers] for turn in turns] for key, turns in found.items()}
    same = all(each == ids["ar", 1][0] for turns in ids.values() for each in turns)
    rows, figures = [], []
    for (name, number), turns in found.items():
        over = {other: _over(turns, found[other, number]) for other in ("ar", "without memory")}
        mean = per_round([answer for turn in turns for answer in turn.answers])
        tok_s = median(turn.tok_s for turn in turns)
        speeds = [turn.tok_s for turn in turns]
        figures.append({"engine": name, "pass": number, "tok_s": speeds, "over": over, "tokens_a_round": mean})
        cells = (f"{tok_s:.0f}", *(f"{ratio:.2f}" for ratio in over.values()), f"{mean:.2f}")
        rows.append((name, str(number), *cells))
    title = f"{file.name}: {len(turns[0].answers)} answers a pass, {batch} at a time, T = {temperature:g}"
    columns = ("engine", "pass", "tok/s", "over ar", "over no memory", "tokens a round")
    console().print(grid(title, columns, rows, left=2))
    click.echo("ids: those of ar" if same else "ids DIFFER from those of ar")
    if out is not None:
        out.write_text(json.dumps({"environment": environment(), "rows": figures, "same_ids": same}, indent=1))
    if not same:
        raise SystemExit(1)


def _over(turns: Sequence[Pass], others: Sequence[Pass]) -> float:
    """Return the median ratio of the turns of one repeat."""
    return median(mine.tok_s / other.tok_s for mine, other in zip(turns, others, strict=True))


if __name__ == "__main__":
    main()
