"""Runs of several settings on the same prompts, by turns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeAlias

from msgspec.structs import replace

from ssd.bench.progress import watched
from ssd.bench.settings import Protocol, Setting
from ssd.client import Client, Completion, Prompt
from ssd.params import SamplingParams

Clients: TypeAlias = Mapping[bool, Client]  # by Setting.all_cores
WARM_UP: list[int] = [1, 2, 3]  # token ids, as there may be no tokenizer
_WARM_UP_TOKENS = 16


class Turn(NamedTuple):
    """What one setting did in its turn; `tok_s` is of all its sequences together."""

    completions: list[Completion]
    tok_s: float


Runs: TypeAlias = dict[str, list[Turn]]  # by Setting.name; the n-th turns of all settings belong together


def warm_up(clients: Clients, settings: Sequence[Setting]) -> None:
    for setting in settings:
        params = SamplingParams(max_tokens=_WARM_UP_TOKENS, ignore_eos=True, speculation=setting.speculation)
        clients[setting.all_cores].generate([WARM_UP], params)


def latency(
    clients: Clients,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    temperature: float,
    protocol: Protocol,
) -> Runs:
    """One request at a time; a turn is one prompt, and its speed that of decoding alone."""
    runs: Runs = {setting.name: [] for setting in settings}
    warm_up(clients, settings)
    for index, prompt in enumerate(watched(prompts, f"T = {temperature:g}")):
        _read(clients, [prompt], settings, protocol)
        for setting in settings:
            params = protocol.params(setting, temperature, index)
            (completion,) = clients[setting.all_cores].generate([prompt], params, chat=protocol.chat)
            runs[setting.name].append(Turn([completion], completion.metrics.tokens_per_second))
    return runs


def throughput(
    clients: Clients,
    prompts: Sequence[Prompt],
    settings: Sequence[Setting],
    temperature: float,
    protocol: Protocol,
    batch_size: int,
    repeats: int,
) -> Runs:
    """`batch_size` requests at a time; a turn is all prompts once, and its speed all their tokens over the time that
    the batches took. Settings take turns batch by batch."""
    runs: Runs = {setting.name: [] for setting in settings}
    warm_up(clients, settings)
    batches = range(0, len(prompts), batch_size)
    for _ in watched(range(repeats), f"batch {batch_size}, T = {temperature:g}"):
        done: dict[str, list[Completion]] = {setting.name: [] for setting in settings}
        seconds = dict.fromkeys(done, 0.0)
        for start in batches:
            batch = prompts[start : start + batch_size]
            _read(clients, batch, settings, protocol)
            for setting in settings:
                params = [protocol.params(setting, temperature, start + index) for index in range(len(batch))]
                began = time.perf_counter()
                done[setting.name] += clients[setting.all_cores].generate(batch, params, chat=protocol.chat)
                seconds[setting.name] += time.perf_counter() - began
        for name, completions in done.items():
            tokens = sum(len(completion.token_ids) for completion in completions)
            runs[name].append(Turn(completions, tokens / seconds[name]))
    return runs


def readers(settings: Sequence[Setting]) -> Sequence[Setting]:
    """One setting for each engine, which has its target and its draft, if it uses one, read a prompt."""
    by_engine = {setting.all_cores: setting for setting in sorted(settings, key=lambda each: each.speculation.mode)}
    return list(by_engine.values())  # sorted: "ar" comes before those with a draft


def _read(clients: Clients, batch: Sequence[Prompt], settings: Sequence[Setting], protocol: Protocol) -> None:
    """Target and draft keep the prompts that they have read: nobody's turn may be the one that reads them."""
    for setting in readers(settings):
        params = replace(protocol.params(setting, 0.0, 0), max_tokens=2)
        clients[setting.all_cores].generate(batch, params, chat=protocol.chat)
