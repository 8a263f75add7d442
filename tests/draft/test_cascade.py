"""Drafts for drafts: exact at every level, whatever the smaller ones guess."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from ssd.config.params import Mode, Speculation
from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.draft.audit import PROMPTS, SAMPLED, Auditor, World, plainly, play, world_in
from tests.draft.pair import PAGE_SIZE, Draft, Pair, ScriptedTarget, config, params
from tests.models import tiny


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cascade")


@pytest.fixture(scope="module")
def world(folder: Path) -> World:
    return world_in(folder)


@pytest.fixture(scope="module")
def smaller(folder: Path, world: World) -> list[Runner]:
    """Two drafts of the draft: a good one, and below it one of another shape that is hardly ever right."""
    wild = tiny.llama(folder / "wild", seed=9, num_hidden_layers=1, hidden_size=16, intermediate_size=24)
    close = tiny.noisy_copy(folder / "draft", folder / "close", noise=0.01, seed=5)
    return [tiny.runner(wild, torch.float64), tiny.runner(close, torch.float64)]


@pytest.fixture(autouse=True)
def any_length(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dice decide how far smaller drafts guess: what is published must not depend on it."""
    dice = random.Random(4)
    monkeypatch.setattr("ssd.draft.cascade.best_length", lambda *_: dice.choice((0, 1, 1, 2, 3, 16)))


@pytest.mark.parametrize(
    ("speculation", "levels"),
    [
        pytest.param(Speculation("ssd", 4, (3,), "jit"), 1, marks=pytest.mark.thorough),
        (Speculation("ssd", 4, (3,), "jit"), 2),
        pytest.param(Speculation("ssd", 8, (1,), "jit"), 2, marks=pytest.mark.thorough),
        (Speculation("ssd", 4, (), "jit", budget=12), 1),
        (Speculation("sd", 4, (3,), "jit"), 1),
        (Speculation("sd", 8, (3,), "jit"), 2),
    ],
    ids=lambda s: f"{s.mode} {s.num_speculative_tokens} {s.fan_out}" if isinstance(s, Speculation) else f"{s} smaller",
)
def test_in_every_state_every_level_is_what_a_fresh_one_would_be(
    world: World, smaller: list[Runner], speculation: Speculation, levels: int
) -> None:
    """The last draft publishes what it would publish alone, and all caches hold what a prefill gives, over random
    rounds of three sequences with different laws, interrupted at random depths."""
    draft = Draft(config(speculation), *smaller[-levels:], world.draft)
    audit = Auditor(world, draft)
    *_, targets = play(draft, speculation, random.Random(f"{speculation} {levels}"), rounds=20)
    assert audit.helped
    assert len(audit.trunks) > 2
    for target in targets:
        target.release()
    draft.assert_empty()


@pytest.mark.parametrize(("mode", "temperature"), [("sd", 0.0), ("ssd", 0.8)])
def test_the_text_is_the_targets_and_fewer_forwards_write_it(
    world: World, smaller: list[Runner], monkeypatch: pytest.MonkeyPatch, mode: Mode, temperature: float
) -> None:
    """With a target, and long and shared prompts, which each drafter computes in chunks of its own."""
    monkeypatch.setattr("ssd.draft.cascade.best_length", lambda *_: 3)
    settings = config(Speculation(mode, 4, (2,), "jit"))
    prompts = [tiny.token_ids(n, n) for n in (5, 150, 30)] + [tiny.token_ids(30, 30)[:20]]
    forwards = {}
    for name, runners in {"alone": [world.draft], "helped": [*smaller, world.draft]}.items():
        draft = Draft(settings, *runners)
        if name == "helped":
            Auditor(world, draft)
        texts = Pair(settings, world.target, draft).run(prompts, params(4, 14, temperature))
        assert texts.ids == plainly(world, prompts, temperature, 14).ids
        draft.assert_empty()
        forwards[name] = draft.forwards
    if mode == "sd":  # how many chains a step of `ssd` grows depends on measured times
        assert forwards["helped"] < 0.9 * forwards["alone"]


@pytest.mark.parametrize("saguaro_c", [1.0, 0.5])
def test_the_ratio_rule_gets_the_same_tokens_and_draft_probs(
    world: World, smaller: list[Runner], saguaro_c: float
) -> None:
    """The last draft draws the tokens: from its distribution, with its own random stream."""
    speculation = Speculation("ssd", 4, (3,), "jit", sampler="rejection", saguaro_c=saguaro_c)
    drafts = [Draft(config(speculation), *below, world.draft) for below in ([], smaller)]
    targets = [ScriptedTarget(draft, 0, PROMPTS[2], SAMPLED, speculation) for draft in drafts]
    choice = random.Random(2)
    for _ in range(12):
        trees = [draft.engine.trees[0] for draft in drafts]
        chains = [{(c.fork, c.tokens[0]): c for c in tree.chains} for tree in trees]
        assert chains[0].keys() == chains[1].keys()
        for key, alone in chains[0].items():
            helped = chains[1][key]
            assert alone.tokens == helped.tokens
            for one, other in zip(alone.guesses, helped.guesses, strict=True):
                assert one.draft_probs is not None and other.draft_probs is not None
                assert (one.draft_probs - other.draft_probs).abs().max() <= 1e-6
        accepted = choice.randint(0, len(targets[0].in_flight))
        prepared = [token for fork, token in chains[0] if fork == accepted]
        token = choice.choice([*prepared, 7])
        if token not in targets[0].in_flight[accepted : accepted + 1]:
            assert targets[0].outcome(accepted, token, 4) == targets[1].outcome(accepted, token, 4)
            for target in targets:
                if target.waiting:
                    target.launch(4)


def test_a_level_without_pages_helps_no_more_and_harms_no_one(world: World, smaller: list[Runner]) -> None:
    speculation = Speculation("ssd", 4, (3,), "jit")
    draft = Draft(config(speculation), smaller[-1], world.draft)
    (below,) = draft.engine.smaller
    pool = below.drafter.pool
    held = [pool.allocate() for _ in range(pool.count - 9)]
    audit = Auditor(world, draft)
    texts = Pair(draft.config, world.target, draft).run(PROMPTS, params(4, 30))
    assert texts.ids == plainly(world, PROMPTS, 0.0, 30).ids
    assert audit.lost
    pool.release(held)
    draft.assert_empty()


def test_a_level_with_a_shorter_context_stops_at_its_end(folder: Path, world: World, smaller: list[Runner]) -> None:
    short = registry.load(inspect(folder / "close"), torch.float64, tiny.CPU, max_position=40, dummy=False)
    speculation = Speculation("ssd", 4, (3,), "jit")
    draft = Draft(config(speculation), Runner(short, 400, PAGE_SIZE), world.draft)
    Auditor(world, draft)
    texts = Pair(draft.config, world.target, draft).run(PROMPTS[:2], params(2, 45))
    assert texts.ids == plainly(world, PROMPTS[:2], 0.0, 45).ids
    draft.assert_empty()
