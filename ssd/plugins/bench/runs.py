"""Runs several settings by turns on the same prompts, and scores their answers."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, TypeAlias, TypeVar

from msgspec.structs import replace

from ssd.client import Client, Completion, Prompt
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.plugins.bench.settings import Protocol, Setting

WARM_UP: list[int] = [1, 2, 3]  # token ids, as there may be no tokenizer
READ_TOKENS = 3  # of a request that only makes both models read a prompt: several, so that the draft takes part
_WARM_UP_TOKENS = 16
_READERS: tuple[Mode, ...] = ("ar", "ngram", "auto", "ssd", "sd")  # `sd` waits until the draft has read the prompt
_Item = TypeVar("_Item")
_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, speculation=Speculation("ar"))


class BenchTurn(NamedTuple):
    """The answers of one setting in its turn; `tok_s` counts all sequences of the batch."""

    completions: list[Completion]
    tok_s: float


Runs: TypeAlias = dict[str, list[BenchTurn]]  # by Setting.name; the n-th turns of all settings belong together


def warm_up(client: Client, settings: Sequence[Setting]) -> None:
    for setting in settings:
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, speculation=setting.speculation)
        client.generate([WARM_UP], params)


def measure(
    client: Client,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    temperature: float,
    protocol: Protocol,
    batch_size: int = 1,
    repeats: int = 1,
    decoding: bool = True,
) -> Runs:
    """Run `batch_size` requests at a time, each batch in one setting after the other; prompts fill up the last batch.

    A turn is a batch. Its speed is all tokens over the time of the batch, or for one request that of `decoding`."""
    runs: Runs = {setting.name: [] for setting in settings}
    warm_up(client, settings)
    starts = [*range(0, len(prompts), batch_size)] * repeats
    for start in watched(starts, f"batch {batch_size}, T = {temperature:g}"):
        numbers = [(start + index) % len(prompts) for index in range(batch_size)]
        batch = [prompts[number] for number in numbers]
        _read(client, batch, settings, protocol)
        for setting in settings:
            params = [protocol.params(setting, temperature, number) for number in numbers]
            began = time.perf_counter()
            completions = client.generate(batch, params, chat=protocol.chat)
            seconds = time.perf_counter() - began
            tokens = sum(len(completion.token_ids) for completion in completions)
            speed = completions[0].metrics.tokens_per_second if batch_size == 1 and decoding else tokens / seconds
            runs[setting.name].append(BenchTurn(completions, speed))
    return runs


def reader(settings: Sequence[Setting]) -> Setting:
    """Return a setting by which target and draft, if there is one, read a prompt."""
    return max(settings, key=lambda each: _READERS.index(each.speculation.mode))


def _read(client: Client, batch: Sequence[Prompt], settings: Sequence[Setting], protocol: Protocol) -> None:
    params = replace(protocol.params(reader(settings), 0.0, 0), max_tokens=READ_TOKENS)
    client.generate(batch, params, chat=protocol.chat)


def perplexities(client: Client, runs: Runs) -> dict[str, float]:
    """Return the perplexity of each setting's answers under the target at temperature 1, with prompts."""
    answers = {name: [answer for turn in turns for answer in turn.completions] for name, turns in runs.items()}
    distinct = {_ids(answer): answer for each in answers.values() for answer in each}
    most = client.describe().max_model_len - 1  # a request has to ask for a token
    losses = {ids: _loss(client, answer, most) for ids, answer in watched(list(distinct.items()), "perplexity")}
    found = {}
    for name, each in answers.items():
        nats, tokens = map(sum, zip(*(losses[_ids(answer)] for answer in each), strict=True))
        found[name] = math.exp(nats / max(1, tokens))
    return found


def _ids(answer: Completion) -> tuple[int, ...]:
    return (*answer.prompt_token_ids, -1, *answer.token_ids)


def _loss(client: Client, answer: Completion, most: int) -> tuple[float, int]:
    ids = [*answer.prompt_token_ids, *answer.token_ids][:most]
    (scored,) = client.generate([ids], _SCORE)
    entries = (scored.prompt_logprobs or [])[len(answer.prompt_token_ids) - 1 :]
    return -sum(entry.logprob for entry in entries), len(entries)


def watched(items: Sequence[_Item], description: str) -> Iterator[_Item]:
    with bar(len(items), description) as advance:
        for item in items:
            yield item
            advance()


@contextmanager
def bar(total: int, description: str) -> Iterator[Callable[[], None]]:
    """Show a bar on stderr if that is a terminal; yield a function to call after each step."""
    if not sys.stderr.isatty():
        yield lambda: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(description, total=total)
        yield lambda: progress.advance(task)
