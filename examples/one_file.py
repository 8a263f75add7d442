"""The whole method in one file: plain decoding, speculative decoding and speculative speculative decoding.

    python examples/one_file.py

Three functions write one text with the built-in pair (target 135M, draft 28M parameters):

    ar   plain decoding: one pass of the target for one token
    sd   the draft guesses K tokens, then the target verifies them in one pass
    ssd  the draft guesses the next K tokens for every likely outcome *while* the target verifies

Terms are those of the paper (Kumar, Dao, May, "Speculative Speculative Decoding", arXiv 2603.03251).

Left out: two processes, and with them time. Here draft and target take turns, so it shows tokens per round and hit
rates, not speed. In the engine both work at once, and the cache is a board in shared memory (docs/design.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.models import hub, registry
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.pairs import borrowed
from ssd.speculation.noise import gumbel

PROMPT = "Write a short story about a lighthouse keeper."
TOKENS = 40  # how many to write
K = 4  # lookahead: draft tokens per speculation
F = 3  # fan-out: bonus tokens that the cache is prepared for, after each accepted length 0..K
CONTEXT, PAGES = 256, 16  # the longest text, and the pages of its KV cache


class Model:
    """A language model with a KV cache of its own for each of `texts` texts. Calling it gives logits."""

    def __init__(self, checkpoint: Checkpoint, texts: int) -> None:
        model = registry.load(checkpoint, torch.float32, torch.device("cpu"), CONTEXT, activations="int8")
        self.runner = Runner(model, texts * PAGES, CONTEXT // PAGES)
        self.cached: list[list[int]] = [[] for _ in range(texts)]  # the tokens whose keys and values are in each cache

    def __call__(self, texts: Sequence[list[int]], outputs: int) -> Tensor:
        """Logits [texts, outputs, vocabulary] after the last `outputs` tokens of each text, in one pass.

        Only what differs from the cached text is computed. A rejected guess needs no clean-up: it is overwritten.
        """
        rows = []
        for i, text in enumerate(texts):
            start, old = 0, self.cached[i]
            while start < min(len(old), len(text) - outputs) and old[start] == text[start]:
                start += 1
            rows.append(Row(text[start:], start, range(i * PAGES, (i + 1) * PAGES), outputs, slot=i))
            self.cached[i] = text
        return self.runner.forward(rows).view(len(rows), outputs, -1)


@dataclass
class Sampler:
    """Turns logits into scores whose argmax is the sample.

    Temperature 0 is greedy. Above it, Gumbel noise makes the argmax a sample. The noise depends on the seed and the
    token's position alone, so the target's text depends on prompt and seed, never on the draft. The draft adds the
    same noise to its own logits. That is *coupled* acceptance: a guess is right when it equals the target's sample.
    """

    temperature: float
    seed: int

    def scores(self, logits: Tensor, position: int) -> Tensor:
        """Scores [n, vocabulary] of `logits` [n, vocabulary] for the tokens at `position`, `position` + 1, ..."""
        if self.temperature == 0:
            return logits
        noise = [gumbel(self.seed, position + row, logits.shape[1]) for row in range(len(logits))]
        return logits / self.temperature + torch.stack(noise)


class Outcome(NamedTuple):
    """What a verification finds: the first `k` draft tokens are accepted, then comes the `bonus` token t*."""

    k: int
    bonus: int


@dataclass
class Pair:
    target: Model
    draft: Model
    sampler: Sampler


@dataclass
class Run:
    """The prompt with what follows it, the rounds that took, and how many of their outcomes were in the cache."""

    tokens: list[int]
    rounds: int = 0
    hits: int = 0


def guess(pair: Pair, texts: list[list[int]]) -> list[list[int]]:
    """The draft's next K tokens after each text: all texts in one batch, one token a pass."""
    speculations: list[list[int]] = [[] for _ in texts]
    for _ in range(K):
        longer = [text + speculation for text, speculation in zip(texts, speculations, strict=True)]
        for speculation, text, logits in zip(speculations, longer, pair.draft(longer, 1), strict=True):
            speculation.append(int(pair.sampler.scores(logits, len(text)).argmax()))
    return speculations


def verify(pair: Pair, tokens: list[int], speculation: list[int]) -> Outcome:
    """One pass of the target over all draft tokens. They are accepted as long as they are the target's own samples."""
    logits = pair.target([tokens + speculation], len(speculation) + 1)[0]
    samples = pair.sampler.scores(logits, len(tokens)).argmax(-1).tolist()
    k = 0
    while k < len(speculation) and speculation[k] == samples[k]:
        k += 1
    return Outcome(k, samples[k])


def prepare(pair: Pair, tokens: list[int], speculation: list[int]) -> dict[Outcome, list[int]]:
    """The cache: a next speculation for each likely outcome of this one, with F bonus tokens after every k in 0..K."""
    logits = pair.draft([tokens + speculation], K + 1)[0]
    scores = pair.sampler.scores(logits, len(tokens)).clone()
    for k, token in enumerate(speculation):
        scores[k, token] = -torch.inf  # the bonus token is another one: this one would have been accepted
    outcomes = [Outcome(k, bonus) for k in range(K + 1) for bonus in scores[k].topk(F).indices.tolist()]
    texts = [[*tokens, *speculation[:k], bonus] for k, bonus in outcomes]
    return dict(zip(outcomes, guess(pair, texts), strict=True))


def ar(pair: Pair, prompt: list[int]) -> Run:
    """Plain decoding: a verification without draft tokens, again and again."""
    run = Run(list(prompt))
    while len(run.tokens) < len(prompt) + TOKENS:
        run.tokens.append(verify(pair, run.tokens, []).bonus)
        run.rounds += 1
    return run


def sd(pair: Pair, prompt: list[int]) -> Run:
    """Speculative decoding: guess, then verify. The target waits for the draft in every round."""
    run = Run(list(prompt))
    while len(run.tokens) < len(prompt) + TOKENS:
        (speculation,) = guess(pair, [run.tokens])
        k, bonus = verify(pair, run.tokens, speculation)
        run.tokens += [*speculation[:k], bonus]
        run.rounds += 1
    return run


def ssd(pair: Pair, prompt: list[int]) -> Run:
    """Speculative speculative decoding: the draft prepares the next speculation while the target verifies this one."""
    run = Run(list(prompt))
    (speculation,) = guess(pair, [run.tokens])
    while len(run.tokens) < len(prompt) + TOKENS:
        cache = prepare(pair, run.tokens, speculation)  # in the engine, at the same time as the next line
        outcome = verify(pair, run.tokens, speculation)
        run.tokens += [*speculation[: outcome.k], outcome.bonus]
        run.rounds += 1
        if outcome in cache:
            run.hits += 1
            speculation = cache[outcome]
        else:
            (speculation,) = guess(pair, [run.tokens])  # the backup, just in time: wait for the draft, as `sd` does
    return run


def load() -> tuple[Model, Model, Path]:
    """The built-in target and draft, and the folder of their tokenizer. Fetches the target (93 MB) if it is missing."""
    target, draft = hub.ensure("smollm2"), hub.ensure("smollm2-draft")
    return Model(inspect(target), 1), Model(borrowed(inspect(draft), inspect(target)), F * (K + 1)), target


def main() -> None:
    torch.set_num_threads(1)  # models as small as these gain little from more
    target, draft, directory = load()
    tokenizer = Tokenizer(directory)
    prompt = tokenizer.encode_chat([ChatMessage("user", PROMPT)])
    end = len(prompt) + TOKENS
    for temperature in (0.0, 0.8):
        pair = Pair(target, draft, Sampler(temperature, seed=1))
        runs = {"ar": ar(pair, prompt), "sd": sd(pair, prompt), "ssd": ssd(pair, prompt)}
        print(f"temperature {temperature}: {tokenizer.decode(runs['ar'].tokens[len(prompt) : end])!r}")
        for name, run in runs.items():
            length, hits = (len(run.tokens) - len(prompt)) / run.rounds, run.hits / run.rounds
            same = "the same tokens" if run.tokens[:end] == runs["ar"].tokens else "OTHER TOKENS"
            print(f"  {name:3}  {length:.2f} tokens per round, hit rate {hits:.2f}, {same}")


if __name__ == "__main__":
    main()
