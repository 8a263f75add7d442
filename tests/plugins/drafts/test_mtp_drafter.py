"""The MTP head of a target's own checkpoint as draft: exact whatever it guesses, and right where it was trained."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import pytest
import torch

from ssd.config.engine import EngineConfig, Features
from ssd.config.params import Mode, Speculation
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.runner import Runner
from ssd.execution.states import StateRoom
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.draft import pair
from tests.draft.pair import Draft, Pair, Texts
from tests.models import tiny
from tests.models.knobs import RECURRENT
from tests.plugins.drafts import drafting
from tests.plugins.drafts import mtp as heads
from tests.plugins.drafts.drafting import LOOKAHEAD, MODES, PROMPTS, TEMPERATURES, params, speculation, total
from tests.plugins.drafts.drafting import patience as patience
from tests.plugins.drafts.test_head_drafter import Auditor

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3_5_text": RECURRENT["qwen3_5_text"],
}


def config(asked: Speculation, layers: int) -> EngineConfig:
    return pair.config(asked, features=Features(kind="mtp", layers=(layers,), width=tiny.SIZES["hidden_size"]))


@dataclass(frozen=True)
class World:
    """A target, its texts after PROMPTS by temperature, and two heads: a random one, and one trained on these texts."""

    target: Runner
    layers: int
    alone: dict[float, list[list[int]]]
    random: Runner
    trained: Runner
    plain: heads.PlainHead

    def draft(self, mode: Mode, head: Runner) -> Draft:
        return Draft(config(speculation(mode), self.layers), head)

    def run(self, mode: Mode, head: Runner, temperature: float) -> Texts:
        draft = self.draft(mode, head)
        settings = draft.config
        texts = Pair(settings, self.target, draft).run(PROMPTS, params(temperature))
        draft.assert_empty()
        return texts


@pytest.fixture(scope="module", params=FAMILIES)
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> World:
    kind, knobs = FAMILIES[request.param]
    directory = heads.with_head(tiny.model(kind, tmp_path_factory.mktemp("target") / "target", **knobs))
    checkpoint = inspect(directory)
    model = registry.load(checkpoint, torch.float64, tiny.CPU, tiny.MAX_POSITION)
    target = Runner(model, 512, 4, state_room=StateRoom(8, 64))
    alone, texts = drafting.plain_texts(target)
    random, plain = heads.runner(directory, torch.float64), heads.PlainHead(directory)
    plain.train(texts, steps=600, depth=2 * LOOKAHEAD)
    plain.save()
    return World(
        target, checkpoint.count("num_hidden_layers"), alone, random, heads.runner(directory, torch.float64), plain
    )


@TEMPERATURES
@MODES
def test_the_text_is_the_targets_whatever_the_head_thinks(world: World, mode: Mode, temperature: float) -> None:
    accepted = []
    for head in (world.random, world.trained):
        texts = world.run(mode, head, temperature)
        assert texts.ids == world.alone[temperature]
        accepted.append(total(texts, "accepted_tokens") / total(texts, "rounds"))
    assert accepted[1] > 1.2 > 0.5 > accepted[0]


@MODES
def test_every_guess_is_made_from_the_newest_features_there_are(world: World, mode: Mode) -> None:
    """The target's as far as the text is committed, then the head's own."""
    draft = world.draft(mode, world.trained)
    audit = Auditor(cast(Any, world), draft)
    Pair(draft.config, world.target, draft).run(PROMPTS[:2], params(0.0, 2))
    if mode == "ssd":
        assert audit.chains > 100 and audit.behind > 20


@MODES
def test_prompts_have_the_hits_that_they_have_without_a_head(world: World, mode: Mode) -> None:
    prompts = [[*tiny.token_ids(23, 1), *tiny.token_ids(3 + n, 100 + n)] for n in range(4)]
    draft, found = world.draft(mode, world.trained), []
    for each in (Pair(draft.config, world.target, draft), Pair(pair.config(Speculation("ar")), world.target)):
        found.append([each.run([prompt], params(0.0, 1)).metrics[0].cached_tokens for prompt in prompts * 2])
    assert found[0] == found[1] and min(found[0][2:]) > 0
    draft.assert_empty()


@pytest.mark.usefixtures("replayed")
def test_in_static_shapes_its_guesses_are_the_same(world: World) -> None:
    settings = config(speculation("ssd"), world.layers)
    numbers = []
    for head in (world.trained, TreeRunner(world.trained.model, settings)):
        texts = world.run("ssd", head, 0.8)
        numbers.append([(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics])
        assert texts.ids == world.alone[0.8]
    assert numbers[0] == numbers[1]
