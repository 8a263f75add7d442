"""An EAGLE-3 head as draft: exact whatever it guesses, and from the target's features wherever there are any."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from ssd.config.engine import EngineConfig, Features
from ssd.config.params import Mode, Speculation
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.engine import DraftEngine
from ssd.draft.forward import pending
from ssd.draft.static_shapes import TreeRunner
from ssd.draft.tree import Chain, Guess, Tree
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.messages import Admit, Verified
from ssd.ipc.public import Metrics
from ssd.law import Law
from ssd.plugins.drafts.eagle3_model import Eagle3
from ssd.plugins.drafts.head_drafter import StaticHeadDrafter
from ssd.speculation.noise import gumbel
from ssd.speculation.sampling import perturbed
from tests.draft import pair
from tests.draft.pair import Draft, Pair, Texts
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import drafting, heads
from tests.plugins.drafts.drafting import LOOKAHEAD, MODES, PROMPTS, TEMPERATURES, params, speculation, total
from tests.plugins.drafts.drafting import patience as patience

FEATURES = Features(kind="eagle3", layers=heads.LAYERS, width=heads.WIDTH)


def config(mode: Mode, **fields: Any) -> EngineConfig:
    return pair.config(speculation(mode), features=FEATURES, **fields)


@dataclass(frozen=True)
class World:
    """A target, its texts after PROMPTS by temperature, and two heads: one trained on these very texts, with its plain
    forward, and one of random weights."""

    target: Runner
    alone: dict[float, list[list[int]]]
    trained: Runner
    plain: heads.PlainHead
    random: Runner


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("heads")
    checkpoint = heads.target(folder / "target")
    target, plain = tiny.runner(checkpoint, torch.float64), Plain(checkpoint)
    alone, texts = drafting.plain_texts(target)
    directory = heads.head(folder / "trained", predicted=120)
    student = heads.PlainHead(directory, plain, torch.float32)
    student.train(texts, steps=100, depth=2 * LOOKAHEAD)
    student.save(directory)
    return World(
        target,
        alone,
        heads.runner(directory, checkpoint),
        heads.PlainHead(directory, plain),
        heads.runner(heads.head(folder / "random", seed=1), checkpoint),
    )


class Auditor:
    """After every step, every chain is what the head's plain forward says, from the target's features up to the last
    committed token."""

    def __init__(self, world: World, draft: Draft) -> None:
        self._logits = cache(lambda text, committed: world.plain.logits(text, committed))
        self.chains = self.behind = 0
        draft.watch = self

    def __call__(self, engine: DraftEngine) -> None:
        engine.drafter.pool.check()
        for tree in engine.trees.values():
            for chain in tree.chains:
                text = [*tree.tokens, *tree.trunk[: chain.fork], chain.tokens[0]]
                self._check(tree, text, chain.tokens[1:])
                self.chains += 1
                self.behind += chain.fork > 0 and chain.computed > 1
            if tree.speculation.mode == "sd":
                self._check(tree, tree.tokens, tree.trunk)

    def _check(self, tree: Tree, text: list[int], tokens: Sequence[int]) -> None:
        for index, token in enumerate(tokens):
            scores = self._scores(tree, (*text, *tokens[:index]))
            assert scores[token] >= scores.max() - 1e-3  # features travel in float32

    def _scores(self, tree: Tree, text: tuple[int, ...]) -> Tensor:
        logits = self._logits(text, tree.base)
        return perturbed(logits[None], tree.law, [len(text)], lambda seed, at: gumbel(seed, at, len(logits)))[0]


def length(texts: Texts, kind: str) -> float:
    """Mean acceptance length over all requests on hits or on misses."""
    tokens = sum(_tokens(metrics, kind) for metrics in texts.metrics)
    return tokens / total(texts, "hits" if kind == "hit" else "misses")


def _tokens(metrics: Metrics, kind: str) -> float:
    if kind == "hit":
        return metrics.mean_acceptance_length_on_hit * metrics.hits
    return metrics.mean_acceptance_length_on_miss * metrics.misses


@TEMPERATURES
@MODES
def test_the_text_is_the_targets_whatever_the_head_thinks(world: World, mode: Mode, temperature: float) -> None:
    drafts = (world.random, world.trained)
    found = [drafting.accepted_a_round(world, config(mode), head, temperature) for head in drafts]
    assert found[1] > 1.5 > 0.5 > found[0]


@TEMPERATURES
@MODES
def test_every_guess_is_made_from_the_newest_features_there_are(world: World, mode: Mode, temperature: float) -> None:
    draft = Draft(config(mode), world.trained)
    audit = Auditor(world, draft)
    Pair(draft.config, world.target, draft).run(PROMPTS[:2], params(temperature, 2))
    if mode == "ssd":
        assert audit.chains > 100 and audit.behind > 20


def test_a_hit_is_worth_no_less_than_a_miss(tmp_path: Path) -> None:
    """With a head that is often wrong: nothing is kept that was computed from the head's own wrong states."""
    checkpoint = heads.target(tmp_path / "target")
    target, prompts, tokens = tiny.runner(checkpoint, torch.float64), [tiny.token_ids(4 + n, n) for n in range(8)], 64
    asked = {t: pair.params(len(prompts), tokens, t) for t in (0.0, 0.8)}
    alone = {t: Pair(pair.config(Speculation("ar")), target).run(prompts, asked[t]).ids for t in asked}
    head = heads.head(tmp_path / "head", predicted=120)
    student = heads.PlainHead(head, Plain(checkpoint), torch.float32)
    texts = [(p + ids)[: 4 + tokens] for written in alone.values() for p, ids in zip(prompts, written, strict=True)]
    student.train(texts, steps=60, depth=2 * LOOKAHEAD)
    student.save(head)
    found: list[Metrics] = []
    for temperature, written in alone.items():
        draft = Draft(config("ssd"), heads.runner(head, checkpoint))
        run = Pair(draft.config, target, draft).run(prompts, asked[temperature])
        assert run.ids == written
        found += run.metrics
    together = Texts([], found, 0)
    assert min(total(together, "hits"), total(together, "misses")) > 100
    assert length(together, "hit") >= length(together, "miss") > 1.2


def test_what_was_drawn_keeps_its_probs_when_it_is_computed_again() -> None:
    """A chain grew while its outcome was on its way: its tokens and draft probabilities stay, as the target may have
    taken them up; its features are new."""
    old, new = torch.zeros(2), torch.ones(2)
    admit = Admit(
        0, 0, 0, [5, 6, 7], Law(temperature=1.0), Speculation("ssd", LOOKAHEAD, (1,), "jit", sampler="rejection")
    )
    tree = Tree(admit, 1, PageTable(PagePool(4, 4)), recurrent=True)
    assert pending(tree, 9) == [6, 7]
    tree.extended(2, [Guess(8, [8], old, old)])
    chain = Chain(0, [8, 9, 10], None, 0, computed=2, guesses=[Guess(9, [9], old, old), Guess(10, [10], old)])
    tree.chains.add(chain)
    assert tree.outcome(Verified(0, 0, 0, 8, None)) is chain
    assert (tree.trunk, tree.computed, pending(tree, 9)) == ([9, 10], 3, [8, 9, 10])
    tree.extended(1, [Guess(1, [1, 2], new, new)])
    assert tree.trunk == [9, 10] and tree.guesses[0].draft_probs is old and tree.guesses[0].token == 9
    assert tree.guesses[0].feature is new and tree.guesses[0].candidates == [1, 2]
    assert pending(tree, 9) == [9, 10]


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("depths", [1, 4])
@pytest.mark.parametrize(("mode", "temperature"), [("sd", 0.8), ("ssd", 0.0), ("ssd", 0.8)])
def test_in_static_shapes_its_guesses_are_the_same(
    world: World, mode: Mode, temperature: float, depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where a step is one graph: the features go in before it and come out after it, or stay on the device
    for the next depth. Steps of prompts, which fit no shape, and short ones follow one another."""
    monkeypatch.setattr(DepthPolicy, "depths", lambda self, trees, now: depths)
    prompts = [*PROMPTS, tiny.token_ids(40, 40), tiny.token_ids(1, 1)]
    asked, settings = params(temperature, len(prompts)), config(mode)
    static = TreeRunner(world.trained.model, settings)
    numbers, ids = [], []
    for head in (world.trained, static):
        draft = Draft(settings, head)
        texts = Pair(settings, world.target, draft).run(prompts, asked)
        assert isinstance(draft.engine.drafter, StaticHeadDrafter) == (head is static)
        numbers.append([(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics])
        ids.append(texts.ids)
        draft.assert_empty()
    assert numbers[0] == numbers[1] and ids[0] == ids[1]
    assert ids[0][: len(PROMPTS)] == world.alone[temperature]


@pytest.mark.usefixtures("replayed")
def test_warming_up_runs_every_static_shape(world: World) -> None:
    head = cast(Eagle3, world.trained.model)
    runner = TreeRunner(head, config("ssd", max_num_seqs=1))
    runner.warm_up(4)
    found = [(step.hidden.shape, steps.batch.tokens) for steps in runner._steps.values() for step in steps.ranked]
    assert found and all(shape == (tokens, head.width) for shape, tokens in found)


@MODES
def test_a_draft_that_is_lost_finds_all_features_again(world: World, mode: Mode) -> None:
    drafting.check_lost(world, config(mode), world.trained, 1.5)


def test_a_prefix_from_the_cache_has_its_features_beside_it(world: World) -> None:
    """A new draft, which has never seen the text, reads what the target computed for a finished request."""
    prompt = [*PROMPTS[0], *world.alone[0.0][0]]
    draft = Draft(config("ssd"), world.trained)
    both = Pair(draft.config, world.target, draft)
    texts = both.run(PROMPTS, params(0.0))
    assert texts.ids == world.alone[0.0] and total(texts, "cached_tokens") == 0
    draft.restart()
    both.proposer.session.join(draft.epoch)
    again = both.run(PROMPTS, params(0.0))
    assert again.ids == world.alone[0.0] and total(again, "cached_tokens") > 0
    assert total(again, "accepted_tokens") >= 0.9 * total(texts, "accepted_tokens")
    assert both.run([prompt], params(0.0, 1)).metrics[0].cached_tokens > 30
    draft.assert_empty()


@TEMPERATURES
def test_prompts_in_pieces_and_pages_that_run_out(world: World, temperature: float) -> None:
    drafting.check_pieces(world, config("ssd"), world.trained, temperature)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_weights_that_say_nothing_cost_speed_only(world: World, tmp_path: Path, value: float) -> None:
    checkpoint = heads.target(tmp_path / "target")
    spoiled = heads.runner(heads.head(tmp_path / "head", predicted=120), checkpoint, torch.float32)
    norm: Any = cast(Eagle3, spoiled.model)._norm  # in memory: a file with such numbers is refused
    for weight in (norm.weight, *(norm.kernel or ())[:1]):
        weight[::3] = value
    draft = Draft(config("ssd"), spoiled)
    assert Pair(draft.config, world.target, draft).run(PROMPTS, params(0.8)).ids == world.alone[0.8]
    draft.assert_empty()


def test_features_that_are_not_there_cost_speed_only(world: World) -> None:
    drafting.check_scribbled(world, config("ssd"), world.trained)


def test_steps_of_a_head_can_be_rehearsed(world: World) -> None:
    drafting.check_rehearsed(config("ssd"), world.trained, 4)
