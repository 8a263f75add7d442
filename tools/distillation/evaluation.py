"""Stage evaluate: what a draft is worth along the target's own paths, teacher-forced, for both acceptance rules.

Under greedy and `coupled` these are the engine's own figures but for rounding: a draft token is accepted when it equals
the path's, so all that speculation ever sees is a prefix of the path (the last K tokens of an answer are left out). For
`rejection` acceptance is drawn and hits are expectations, and an accepted token that differs from the path's is taken
to lead on as the path does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Literal

import torch
from rich.progress import track
from torch import Tensor, nn

from distillation.corpus import LONGEST
from distillation.shards import Conversation
from distillation.teacher import batches, score
from ssd import LLM, SamplingParams
from ssd.execution.runner import Runner
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Law, argmax, perturbed, ranked

Rule = Literal["coupled", "rejection"]


@dataclass(frozen=True)
class Answer:
    """An answer of the target at `law`."""

    text: Conversation
    law: Law


@dataclass
class Tally:
    """Counts over rounds. `tried` and `accepted` by position in the speculation (tried: all before it were accepted),
    `hits` by fan-out."""

    rounds: int = 0
    tokens: int = 0
    tried: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    hits: dict[int, float] = field(default_factory=dict)

    def figures(self) -> dict[str, object]:
        """Acceptance in all and by position, tokens per round, hit rate by fan-out."""
        return {
            "acceptance": sum(self.accepted) / max(1, sum(self.tried)),
            "by_position": [a / max(1, t) for a, t in zip(self.accepted, self.tried, strict=True)],
            "tokens_per_round": self.tokens / max(1, self.rounds),
            "hit_rate": {fan_out: hits / max(1, self.rounds) for fan_out, hits in self.hits.items()},
        }


def paths(llm: LLM, prompts: Sequence[str], temperature: float, tokens: int) -> list[Answer]:
    """The target's answers to `prompts` in chat format, a seed for each."""
    laws = [Law(temperature, seed=1000 + number) for number in range(len(prompts))]
    params = [SamplingParams(temperature=temperature, seed=law.seed, max_tokens=tokens) for law in laws]
    answers = llm.generate(list(prompts), params, chat=True)
    texts = [Conversation(a.prompt_token_ids + a.token_ids, len(a.prompt_token_ids)) for a in answers]
    return [Answer(text, law) for text, law in zip(texts, laws, strict=True) if text.answer > 1]


def evaluate(
    draft: Runner, target: Runner, found: Sequence[Answer], rule: Rule, lookahead: int, fan_outs: Sequence[int]
) -> Tally:
    """Play rounds of `lookahead` draft tokens along every path."""
    tally = Tally(tried=[0] * lookahead, accepted=[0] * lookahead, hits=dict.fromkeys(fan_outs, 0.0))
    noise = NoiseCache(target.model.shape.vocab_size, torch.device("cpu"))
    waiting = iter(found)
    for batch in track(list(batches([path.text for path in found], LONGEST)), rule, transient=True):
        counts = [text.answer for text in batch]
        runners = (draft,) if rule == "coupled" else (draft, target)
        logits = [_full(score(runner, batch).float().cpu(), target).split(counts) for runner in runners]
        for path, *laws in zip(islice(waiting, len(batch)), *logits, strict=True):
            if rule == "coupled":
                _coupled(tally, path, *laws, noise, lookahead)
            else:
                _rejection(tally, path, *laws, lookahead)
    return tally


def _full(logits: Tensor, target: Runner) -> Tensor:
    """`logits` over the target's whole vocabulary: a draft may predict some ids only."""
    return nn.functional.pad(logits, (0, target.model.shape.vocab_size - logits.shape[-1]), value=-torch.inf)


def _coupled(tally: Tally, path: Answer, q: Tensor, noise: NoiseCache, lookahead: int) -> None:
    own = path.text.token_ids[path.text.prompt :]
    scores = perturbed(q, path.law, range(path.text.prompt, len(path.text.token_ids)), noise)
    guesses, candidates = argmax(scores), ranked(scores, max(tally.hits) + 1)
    right = [guess == token for guess, token in zip(guesses, own, strict=True)]
    position = 1  # prefill has emitted the first
    while position < len(own) - lookahead:
        k = next((k for k in range(lookahead) if not right[position + k]), lookahead)
        _count(tally, k)
        bonus, excluded = position + k, guesses[position + k] if k < lookahead else -1
        order = [token for token in candidates[bonus] if token != excluded]
        for fan_out in tally.hits:
            tally.hits[fan_out] += own[bonus] in order[:fan_out]
        position += k + 1


def _rejection(tally: Tally, path: Answer, q: Tensor, p: Tensor, lookahead: int) -> None:
    draft, target = (torch.softmax(logits / path.law.temperature, -1) for logits in (q, p))
    overlap = torch.minimum(draft, target).sum(-1).tolist()
    residual = (target - draft).clamp_min_(0)
    residual /= residual.sum(-1, keepdim=True).clamp_min(1e-30)
    # The rejected token is left out of the candidates: where it was among the first F, the next one moves up.
    rejected = (draft - target).clamp_min_(0)
    rejected /= rejected.sum(-1, keepdim=True).clamp_min(1e-30)
    order = torch.topk(q, max(tally.hits) + 1).indices
    shares = residual.gather(1, order)
    moved_up = rejected.gather(1, order).cumsum(-1)[:, :-1] * shares[:, 1:]
    after_rejection = (shares.cumsum(-1)[:, :-1] + moved_up).tolist()
    after_all = target.gather(1, order).cumsum(-1).tolist()
    dice, position = Random(path.law.seed), 1
    while position < len(overlap) - lookahead:
        k = next((k for k in range(lookahead) if dice.random() >= overlap[position + k]), lookahead)
        _count(tally, k)
        mass = (after_all if k == lookahead else after_rejection)[position + k]
        for fan_out in tally.hits:
            tally.hits[fan_out] += mass[fan_out - 1]
        position += k + 1


def _count(tally: Tally, accepted: int) -> None:
    tally.rounds += 1
    tally.tokens += accepted + 1
    for index in range(min(accepted + 1, len(tally.tried))):
        tally.tried[index] += 1
        tally.accepted[index] += index < accepted
