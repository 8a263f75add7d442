"""Texts of every mode in the situations that go wrong elsewhere.

`python -m tests.exactness.situations [MODULE:FAMILIES ...]` prints a table.
A situation returns the ids that a speculating engine gave, and the expected ids. A cold start is compared with
transformers; the other situations are compared with plain decoding in another engine."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

from ssd.config.params import Mode, SamplingParams, Speculation
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny
from tests.models.knobs import RECURRENT, Knobs

MODES: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd")
FAMILIES = {name: RECURRENT[name] for name in ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")}
PROMPTS = [tiny.token_ids(length, seed=7 * length) for length in (1, 3, 5, 17, 40)]
TALKS = 39

Ids = list[list[int]]


class World:
    """A tiny checkpoint, drafts that are right, half right and wrong, and transformers' answers."""

    def __init__(self, folder: Path, kind: str, knobs: dict[str, Any]) -> None:
        directory = tiny.model(kind, folder / "target", seed=3, **knobs)
        wrong = tiny.model(kind, folder / "wrong", seed=4, **knobs)
        half = tiny.noisy_copy(directory, folder / "half", noise=0.004)
        self.target, self.plain = tiny.runner(directory), tiny.runner(directory)
        self.drafts = {name: tiny.runner(one) for name, one in (("right", directory), ("half", half), ("wrong", wrong))}
        self._oracle = tiny.oracle(directory)

    def pair(self, mode: Mode, draft: str = "half", **fields: Any) -> Pair:
        settings = config(Speculation(mode, 4, (3,), "jit"), **fields)
        return Pair(settings, self.target, None if mode == "ar" else Draft(settings, self.drafts[draft]))

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """transformers' answer, each token from a forward over the whole text."""
        text = list(prompt)
        for _ in range(count):
            text.append(int(tiny.oracle_logits(self._oracle, text)[-1].argmax()))
        return text[len(prompt) :]

    def plainly(self, prompts: Sequence[list[int]], laws: Sequence[SamplingParams]) -> Ids:
        """Plain decoding in an engine of its own, which has seen nothing before."""
        return Pair(config(Speculation("ar")), self.plain).run(prompts, laws).ids


def cold(world: World, mode: Mode) -> tuple[Ids, Ids]:
    return world.pair(mode).run(PROMPTS, params(len(PROMPTS), 24)).ids, [world.greedy(p, 24) for p in PROMPTS]


def preempted(world: World, mode: Mode) -> tuple[Ids, Ids]:
    """Pages for the half of them: the others are computed again, as far as no state of theirs was saved."""
    prompts, laws = [tiny.token_ids(17 + index, seed=index) for index in range(6)], params(6, 24)
    texts = world.pair(mode, max_model_len=60, num_pages=24).run(prompts, laws)
    assert texts.preemptions > 0
    return texts.ids, world.plainly(prompts, laws)


def warm(world: World, mode: Mode) -> tuple[Ids, Ids]:
    """39 conversations of three turns, some of them at once; each turn's text begins with all that was said before."""
    shared, pair = tiny.token_ids(23, seed=1), world.pair(mode)
    texts = [[*shared, *tiny.token_ids(3 + talk % 5, seed=100 + talk)] for talk in range(TALKS)]
    cached, found, expected = 0, list[list[int]](), list[list[int]]()
    for turn in range(3):
        for first in range(0, TALKS, 8):
            prompts = texts[first : first + 8]
            laws = params(len(prompts), 7)
            answers = pair.run(prompts, laws)
            found += answers.ids
            expected += world.plainly(prompts, laws)
            cached += sum(metrics.cached_tokens > 0 for metrics in answers.metrics)
            for text, answer in zip(prompts, answers.ids, strict=True):
                text += [*answer, *tiny.token_ids(2, seed=turn)]
    assert cached > 2 * TALKS, "most turns began from a prefix that was computed before"
    return found, expected


def hits(world: World, mode: Mode, draft: str = "half") -> tuple[list[int], list[int]]:
    """How many tokens come from the cache: of prompts that begin alike, and of prompts that go on after an answer."""
    pair, shared = world.pair(mode, draft), tiny.token_ids(23, seed=1)

    def cached(prompt: list[int]) -> int:
        return pair.run([prompt], params(1, 7)).metrics[0].cached_tokens

    alike = [cached([*shared, *tiny.token_ids(3 + index, seed=100 + index)]) for index in (0, 1, 2, 3, 0, 1)]
    after = []
    for length in (20, 24, 29, 32, 36):
        prompt = tiny.token_ids(9, seed=length)
        after.append(cached([*prompt, *pair.run([prompt], params(1, length)).ids[0], 5, 6]))
    return alike, after


def draft_killed(world: World, mode: Mode) -> tuple[Ids, Ids]:
    """In every seventh step another draft takes over, which knows nothing."""
    pair, steps = world.pair(mode), iter(range(10_000))

    def kill() -> None:
        if next(steps) % 7 == 6 and pair.draft is not None:
            pair.draft.restart()
            pair.proposer.session.join(pair.draft.epoch)

    pair.between_steps = kill
    laws = params(len(PROMPTS), 24)
    return pair.run(PROMPTS, laws).ids, world.plainly(PROMPTS, laws)


SITUATIONS: tuple[Callable[[World, Mode], tuple[Ids, Ids]], ...] = (cold, warm, preempted, draft_killed)


def differing(found: Ids, expected: Ids) -> tuple[int, int]:
    """Return how many tokens differ, of how many."""
    pairs = [(a, b) for one, other in zip(found, expected, strict=True) for a, b in zip(one, other, strict=True)]
    return sum(a != b for a, b in pairs), len(pairs)


def table(families: Knobs) -> Iterator[str]:
    """Yield the lines of a Markdown table: tokens that differ, of how many, over all modes."""
    yield "| family | " + " | ".join(one.__name__.replace("_", " ") for one in SITUATIONS) + " |"
    yield "|---" * (1 + len(SITUATIONS)) + "|"
    for family in families:
        with tempfile.TemporaryDirectory() as folder:
            world, cells = World(Path(folder), *families[family]), []
            for situation in SITUATIONS:
                counts = [differing(*situation(world, mode)) for mode in MODES]
                cells.append(" of ".join(str(sum(column)) for column in zip(*counts, strict=True)))
            yield f"| `{family}` | {' | '.join(cells)} |"


if __name__ == "__main__":
    for name in sys.argv[1:] or ["tests.exactness.situations:FAMILIES"]:
        for line in table(resolve_name(name)):
            print(line, flush=True)
