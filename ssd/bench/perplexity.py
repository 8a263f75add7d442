"""How likely the target finds what each setting said."""

from __future__ import annotations

import math
from typing import NamedTuple

from ssd.bench.progress import watched
from ssd.bench.runs import Runs
from ssd.client import Client, Completion
from ssd.params import SamplingParams, Speculation

_SCORE = SamplingParams(max_tokens=1, prompt_logprobs=0, speculation=Speculation("ar"))


class _Loss(NamedTuple):
    """Of an answer: nats, and the tokens that they are of."""

    nats: float
    tokens: int


def perplexities(client: Client, runs: Runs) -> dict[str, float]:
    """The perplexity of all answers of each setting under the target at temperature 1, given their prompts. An answer
    that several settings gave is scored once."""
    answers = {name: [answer for turn in turns for answer in turn.completions] for name, turns in runs.items()}
    distinct = {_ids(answer): answer for each in answers.values() for answer in each}
    most = client.describe().max_model_len - 1  # one is left for the token that a request has to ask for
    losses = {ids: _loss(client, answer, most) for ids, answer in watched(list(distinct.items()), "perplexity")}
    found = {}
    for name, each in answers.items():
        nats, tokens = map(sum, zip(*(losses[_ids(answer)] for answer in each), strict=True))
        found[name] = math.exp(nats / max(1, tokens))
    return found


def _ids(answer: Completion) -> tuple[int, ...]:
    return (*answer.prompt_token_ids, -1, *answer.token_ids)


def _loss(client: Client, answer: Completion, most: int) -> _Loss:
    ids = [*answer.prompt_token_ids, *answer.token_ids][:most]
    (scored,) = client.generate([ids], _SCORE)
    entries = (scored.prompt_logprobs or [])[len(answer.prompt_token_ids) - 1 :]
    return _Loss(-sum(entry.logprob for entry in entries), len(entries))
