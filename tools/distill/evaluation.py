"""Stage evaluate: what a draft is worth along the target's own answers, for both acceptance rules.

Under greedy and `coupled` these are the engine's own figures but for rounding: a draft token is accepted if it equals
the answer's, so speculation only ever sees a prefix of the answer (its last K tokens are left out). Under `rejection`
acceptance is drawn and hits are expectations; after an accepted token that differs, the answer is taken to go on
unchanged."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from random import Random
from typing import Literal, TypeVar

import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor

from ssd import LLM, SamplingParams
from ssd.execution.runner import Runner
from ssd.law import Law
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed, ranked
from ssd.tuning.knowledge import Agreement
from tools.distill.shards import Conversation
from tools.distill.teacher import batches, score

Rule = Literal["coupled", "rejection"]
RULES: tuple[Rule, ...] = ("coupled", "rejection")
Draft = Callable[[Sequence[Conversation]], Sequence[Tensor]]
"""Returns, for conversations, the logits [sum of answers, V] of all tokens of their answers: one tensor for the first
place of a speculation, one for the second, and so on; the last one serves for all further places."""

_BATCH = 512  # tokens
_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Answer:
    """An answer of the target, sampled as `law` says."""

    text: Conversation
    law: Law


@dataclass
class Tally:
    """Counts over rounds.

    `tried` and `accepted` are by position in the speculation (tried: all before it were accepted), `hits` by fan-out.
    """

    rounds: int = 0
    tokens: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hits: dict[int, float] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        """Return the acceptance in all and by position, tokens per round, hit rates by fan-out, and the rounds."""
        return {
            "acceptance": sum(self.accepted) / max(1, sum(self.tried)),
            "by_position": [a / max(1, t) for a, t in zip(self.accepted, self.tried, strict=True)],
            "tokens_per_round": self.tokens / max(1, self.rounds),
            "hit_rate": {fan_out: hits / max(1, self.rounds) for fan_out, hits in self.hits.items()},
            "rounds": self.rounds,
        }


def agreement(tallies: Sequence[Tally]) -> Agreement:
    """Return what an engine may begin with: the rates of all rounds of the tallies, with their numbers of samples.

    Every fan-out from 1 on must have been counted. The rate of a rank is that of the rounds that missed at all ranks
    before."""
    tried = map(sum, zip(*(tally.tried for tally in tallies), strict=True))
    accepted = map(sum, zip(*(tally.accepted for tally in tallies), strict=True))
    rounds = sum(tally.rounds for tally in tallies)
    hits = [0.0, *(sum(tally.hits[fan_out] for tally in tallies) for fan_out in sorted(tallies[0].hits))]
    ranks = ((after - before, round(rounds - before)) for before, after in pairwise(hits))
    return Agreement(_rates(zip(accepted, tried, strict=True)), _rates(ranks))


def _rates(counts: Iterable[tuple[float, int]]) -> tuple[tuple[float, int], ...]:
    """Return rates and numbers of samples of (happened, tried), without what was never tried."""
    return tuple((round(min(1.0, happened / tried), 4), tried) for happened, tried in counts if tried)


def paths(llm: LLM, prompts: Sequence[str], temperature: float, tokens: int) -> list[Answer]:
    """Return the target's answers to `prompts` in chat format, with a seed for each."""
    laws = [Law(temperature, seed=1000 + number) for number in range(len(prompts))]
    params = [SamplingParams(temperature=temperature, seed=law.seed, max_tokens=tokens) for law in laws]
    answers = llm.generate(list(prompts), params, chat=True)
    texts = [Conversation(a.prompt_token_ids + a.token_ids, len(a.prompt_token_ids)) for a in answers]
    return [Answer(text, law) for text, law in zip(texts, laws, strict=True) if text.answer > 1]


def evaluate(
    draft: Draft, target: Runner, found: Sequence[Answer], rule: Rule, lookahead: int, fan_outs: Sequence[int]
) -> Tally:
    """Count what rounds of `lookahead` draft tokens along every answer accept and hit."""
    tally = Tally(tried=[0] * lookahead, accepted=[0] * lookahead, hits=dict.fromkeys(fan_outs, 0.0))
    noise = NoiseCache(target.model.shape.vocab_size, torch.device("cpu"))
    waiting = iter(found)
    todo = list(batches([path.text for path in found], _BATCH))
    for batch in track(todo, rule, transient=True, console=Console(stderr=True)):
        counts = [text.answer for text in batch]
        drafted = [logits.split(counts) for logits in draft(batch)]
        if rule == "coupled":
            for path, *q in zip(islice(waiting, len(batch)), *drafted, strict=True):
                _coupled(tally, path, q, noise, lookahead)
        else:
            own = score(target, batch).float().cpu().split(counts)
            for path, p, *q in zip(islice(waiting, len(batch)), own, *drafted, strict=True):
                _rejection(tally, path, q, p, lookahead)
    return tally


def _coupled(tally: Tally, path: Answer, q: Sequence[Tensor], noise: NoiseCache, lookahead: int) -> None:
    own = path.text.token_ids[path.text.prompt :]
    positions = range(path.text.prompt, len(path.text.token_ids))
    scores = [perturbed(logits, path.law, positions, noise) for logits in q]
    guesses = _for_all([argmax(one) for one in scores], lookahead)
    candidates = _for_all([ranked(one, max(tally.hits) + 1).ids for one in scores], lookahead)
    position = 1  # prefill has emitted the first
    while position < len(own) - lookahead:
        k = next((k for k in range(lookahead) if guesses[k][position + k] != own[position + k]), lookahead)
        _count(tally, k)
        bonus = position + k
        excluded = guesses[k][bonus] if k < lookahead else -1
        order = [token for token in candidates[k][bonus] if token != excluded]
        for fan_out in tally.hits:
            tally.hits[fan_out] += own[bonus] in order[:fan_out]
        position += k + 1


def _rejection(tally: Tally, path: Answer, q: Sequence[Tensor], p: Tensor, lookahead: int) -> None:
    target = torch.softmax(p / path.law.temperature, -1)
    drafts = [torch.softmax(logits / path.law.temperature, -1) for logits in q]
    overlap = _for_all([torch.minimum(draft, target).sum(-1).tolist() for draft in drafts], lookahead)
    after_rejection = _for_all([_after_rejection(draft, target, max(tally.hits)) for draft in drafts], lookahead)
    best = torch.topk(q[-1], max(tally.hits)).indices
    after_all = target.gather(1, best).cumsum(-1).tolist()
    rng, position = Random(path.law.seed), 1
    while position < len(target) - lookahead:
        k = next((k for k in range(lookahead) if rng.random() >= overlap[k][position + k]), lookahead)
        _count(tally, k)
        mass = after_all[position + k] if k == lookahead else after_rejection[k][position + k]
        for fan_out in tally.hits:
            tally.hits[fan_out] += mass[fan_out - 1]
        position += k + 1


def _after_rejection(draft: Tensor, target: Tensor, most: int) -> list[list[float]]:
    """Return [n, most]: the mass of the draft's 1, 2, ... best tokens under the distribution after a rejection.

    The rejected token is left out: if it was among the first F, the next one moves up."""
    residual = (target - draft).clamp_min_(0)
    residual /= residual.sum(-1, keepdim=True).clamp_min(1e-30)
    rejected = (draft - target).clamp_min_(0)
    rejected /= rejected.sum(-1, keepdim=True).clamp_min(1e-30)
    order = torch.topk(draft, most + 1).indices
    shares = residual.gather(1, order)
    moved_up = rejected.gather(1, order).cumsum(-1)[:, :-1] * shares[:, 1:]
    return (shares.cumsum(-1)[:, :-1] + moved_up).tolist()


def _for_all(found: list[_Found], lookahead: int) -> list[_Found]:
    """Return one item for each place of a speculation, and one for the place after it; the last repeats."""
    return found + found[-1:] * (lookahead + 1 - len(found))


def _count(tally: Tally, accepted: int) -> None:
    tally.rounds += 1
    tally.tokens += accepted + 1
    for index in range(min(accepted + 1, len(tally.tried))):
        tally.tried[index] += 1
        tally.accepted[index] += index < accepted
