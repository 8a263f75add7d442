"""`--sampler rejection` from end to end: draft probabilities through the arena, the ratio rule, misses and backups."""

from __future__ import annotations

import os
from collections import Counter
from itertools import product

import numpy as np
import pytest
import torch
from scipy import stats

from ssd.config.params import SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.ipc.board import TRUNK, Key
from ssd.ipc.draft_probs import DraftProbsArena
from ssd.ipc.layouts import draft_probs_layout
from ssd.ipc.process import memory_file
from ssd.law import Law
from ssd.speculation.sampling import probabilities
from tests.draft.audit import World
from tests.draft.pair import PAGE_SIZE, Draft, Pair, config
from tests.exactness.plain import Plain
from tests.models import tiny

PROMPT = tiny.token_ids(9, 9)
LAW = Law(temperature=0.9, top_k=3)
TOKENS = 4


def ratio(mode: str, c: float = 1.0, lookahead: int = 2) -> Speculation:
    return Speculation(mode, lookahead, (2,), "jit", sampler="rejection", saguaro_c=c)  # type: ignore[arg-type]


def sampled(seed: int, tokens: int = TOKENS + 2) -> SamplingParams:
    return SamplingParams(temperature=LAW.temperature, top_k=LAW.top_k, seed=seed, max_tokens=tokens, ignore_eos=True)


@pytest.fixture(scope="module")
def law(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[int, ...], float]:
    """The joint distribution of the first tokens after PROMPT, by plain forwards."""
    plain = Plain(tiny.llama(tmp_path_factory.mktemp("plain") / "target", seed=3))
    joint: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(TOKENS):
        longer = {}
        for text, weight in joint.items():
            p = probabilities(plain.logits([*PROMPT, *text])[-1:], LAW)[0]
            longer |= {(*text, int(x)): weight * float(p[x]) for x in p.nonzero()}
        joint = longer
    return joint


@pytest.mark.parametrize(
    "speculation",
    [ratio("ssd", 0.3), ratio("sd"), ratio("ar")],
    ids=lambda s: f"{s.mode} C={s.saguaro_c}",
)
def test_chi_square_of_the_first_tokens(
    world: World, law: dict[tuple[int, ...], float], speculation: Speculation
) -> None:
    """The distribution of the text is the target's, with hits, misses and rejections mixed. The draft takes few steps a
    round, so that some speculations are partial."""
    count, together = 960, 32
    settings = config(speculation, max_num_seqs=together)
    observed: Counter[tuple[int, ...]] = Counter()
    rounds = Counter[str]()
    draft = Draft(settings, world.draft, steps=3)
    for first in range(0, count, together):
        pair = Pair(settings, world.target, draft if speculation.mode != "ar" else None)
        texts = pair.run([PROMPT] * together, [sampled(seed) for seed in range(first, first + together)])
        observed.update(tuple(ids[:TOKENS]) for ids in texts.ids)
        for metrics in texts.metrics:
            rounds.update(hits=metrics.hits, misses=metrics.misses, accepted=metrics.accepted_tokens)
            rounds.update(rejected=metrics.drafted_tokens - metrics.accepted_tokens)
    assert set(observed) <= set(law)
    cells = sorted(law, key=lambda text: law[text])
    rare = [text for text in cells if law[text] * count < 5]
    often = [text for text in cells if law[text] * count >= 5]
    counts = [observed[text] for text in often] + ([sum(observed[text] for text in rare)] if rare else [])
    expected = [law[text] * count for text in often] + ([sum(law[text] for text in rare) * count] if rare else [])
    assert stats.chisquare(counts, expected, sum_check=False).pvalue > 1e-6
    if speculation.mode != "ar":
        assert min(rounds["accepted"], rounds["rejected"]) > 100
    if speculation.mode == "ssd":
        assert min(rounds["hits"], rounds["misses"]) > 50


@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_a_draft_that_is_the_target_is_never_rejected(world: World, mode: str) -> None:
    """q = p bit for bit: draft probabilities that were rounded, or read from another place or chain, would show."""
    settings = config(ratio(mode, lookahead=4), deterministic=True)
    draft = Draft(settings, Runner(world.single.model, 400, PAGE_SIZE, deterministic=True))
    prompts = [tiny.token_ids(n, n) for n in (3, 16, 41, 150)]
    texts = Pair(settings, world.single, draft).run(prompts, [sampled(seed, 31) for seed in range(4)])
    for metrics in texts.metrics:
        assert metrics.drafted_tokens > 15 and metrics.accepted_tokens == metrics.drafted_tokens
    draft.assert_empty()


def test_without_an_arena_nothing_drawn_is_verified(world: World) -> None:
    settings = config(Speculation("ssd", 2, (2,), "jit"))
    draft = Draft(settings, world.draft)
    asked = SamplingParams(temperature=0.9, seed=1, max_tokens=12, ignore_eos=True, speculation=ratio("ssd"))
    texts = Pair(settings, world.target, draft).run([PROMPT], [asked])
    assert len(texts.ids[0]) == 12 and texts.metrics[0].drafted_tokens == 0


def test_at_temperature_zero_the_rule_is_greedy(world: World) -> None:
    settings = config(ratio("ssd", 0.5))
    greedy = [SamplingParams(max_tokens=20, ignore_eos=True)]
    texts = Pair(settings, world.target, Draft(settings, world.draft)).run([PROMPT], greedy)
    assert texts.ids == Pair(config(Speculation("ar")), world.target).run([PROMPT], greedy).ids
    assert texts.metrics[0].hits > 0


# -- the arena --------------------------------------------------------------------------------------------------------

KEY = Key(epoch=1, request=7, round=2, base=9, accepted=1, token=4)
ROWS = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.25, 0.75]])


@pytest.fixture
def arena() -> DraftProbsArena:
    layout = draft_probs_layout(2, Speculation("ssd", 2, (1,), "jit"), 3)
    descriptor = memory_file("draft-probs", layout.size_bytes)
    made = DraftProbsArena(descriptor, layout)
    os.close(descriptor)
    return made


@pytest.mark.parametrize("entry", [0, 1, TRUNK])
def test_what_was_written_is_read(arena: DraftProbsArena, entry: int) -> None:
    arena.write(1, entry, KEY, 0, [0], [ROWS[0]])
    assert len(arena.read(1, entry, KEY, [0])) == 0
    arena.show()
    assert torch.equal(arena.read(1, entry, KEY, [0, 2]), ROWS[:1])
    arena.write(1, entry, KEY, 1, [2], [ROWS[1]])
    arena.show()
    assert torch.equal(arena.read(1, entry, KEY, [0, 2]), ROWS)
    for other in range(3):
        assert len(arena.read(0, other, KEY, [0])) == 0


def test_draft_probs_of_a_smaller_vocabulary_end_with_zeros(arena: DraftProbsArena) -> None:
    arena.write(0, 0, KEY, 0, [1], [torch.tensor([0.25, 0.75])])
    arena.show()
    assert arena.read(0, 0, KEY, [1]).tolist() == [[0.25, 0.75, 0]]


@pytest.mark.parametrize("field", range(len(Key._fields)))
def test_draft_probs_for_anything_else_are_none(arena: DraftProbsArena, field: int) -> None:
    arena.write(0, 0, KEY, 0, [0], [ROWS[0]])
    arena.show()
    other = Key(*(value + (index == field) for index, value in enumerate(KEY)))
    assert len(arena.read(0, 0, other, [0])) == 0
    assert len(arena.read(0, 0, KEY, [1])) == 0
    assert len(arena.read(0, 0, KEY, [0])) == 1


@pytest.mark.parametrize(
    "row", [[0.5, 0.2, 0.1], [1.5, -0.5, 0.0], [0.0, 0.5, 0.5], [np.nan, 0.5, 0.5], [np.inf, 0, 0]], ids=str
)
def test_what_is_no_distribution_with_the_token_is_not_used(arena: DraftProbsArena, row: list[float]) -> None:
    arena.write(0, 0, KEY, 0, [0, 2], [torch.tensor(row), ROWS[1]])
    arena.show()
    assert len(arena.read(0, 0, KEY, [0, 2])) == 0


def test_a_row_that_is_being_written_is_not_read(arena: DraftProbsArena) -> None:
    arena.write(0, 0, KEY, 0, [0, 2], list(ROWS))
    arena.show()
    arena._headers[0, 0, 1, 0] = 0
    assert len(arena.read(0, 0, KEY, [0, 2])) == 1


def test_a_row_that_is_overwritten_while_it_is_read_is_not_used(
    arena: DraftProbsArena, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena.write(0, 0, KEY, 0, [0, 2], list(ROWS))
    arena.show()

    def overtaken(rows: torch.Tensor, tokens: list[int]) -> list[bool]:
        """While the device copies, the draft writes the second row again."""
        arena.write(0, 0, KEY, 1, [2], [ROWS[1]])
        arena.show()
        return [True] * len(tokens)

    monkeypatch.setattr("ssd.ipc.draft_probs._are_distributions", overtaken)
    assert len(arena.read(0, 0, KEY, [0, 2])) == 1


def test_versions_are_written_when_the_device_is_done(arena: DraftProbsArena, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    monkeypatch.setattr("ssd.ipc.draft_probs.settle", lambda rows: seen.append(int(arena._headers[..., 0].sum())))
    for _ in range(2):  # the second time over what is shown
        arena.write(0, 0, KEY, 0, [0, 2], list(ROWS))
        arena.show()
        arena.show()
        assert len(arena.read(0, 0, KEY, [0, 2])) == 2
    assert seen == [0, 0]


def test_beyond_the_arena_nothing_is_written_or_read(arena: DraftProbsArena) -> None:
    for entry, start in product((3, 62), (0, 5)):
        arena.write(0, entry, KEY, start, [0], [ROWS[0]])
    arena.write(0, 0, KEY, 2, [0], [ROWS[0]])
    arena.show()
    assert len(arena.read(0, 3, KEY, [0])) == len(arena.read(0, 62, KEY, [0])) == 0
    assert not arena._headers.any() and len(arena.read(0, 0, KEY, [0])) == 0
