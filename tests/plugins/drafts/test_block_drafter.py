"""Block drafters: exact whatever they guess, and each guess what a plain forward says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from ssd.config.engine import EngineConfig, Features
from ssd.config.params import MAX_LOOKAHEAD, Mode, Speculation
from ssd.draft.engine import DraftEngine
from ssd.draft.tree import Tree
from ssd.execution.runner import Runner
from ssd.ipc.messages import Rehearse
from ssd.speculation.noise import gumbel
from ssd.speculation.sampling import perturbed
from tests.draft import pair
from tests.draft.pair import Draft, Pair
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import blocks, drafting, heads
from tests.plugins.drafts.drafting import LOOKAHEAD, MODES, PROMPTS, TEMPERATURES, params, speculation, total
from tests.plugins.drafts.drafting import patience as patience

FEATURES = Features(kind="block", layers=blocks.LAYERS, width=len(blocks.LAYERS) * tiny.SIZES["hidden_size"])


def config(mode: Mode, **fields: object) -> EngineConfig:
    return pair.config(speculation(mode), features=FEATURES, **fields)


@dataclass(frozen=True)
class World:
    """A target, its texts after PROMPTS by temperature, and two drafters: one that knows these very texts, and one of
    random weights. `plain`: both, by name, as a plain forward computes them."""

    target: Runner
    alone: dict[float, list[list[int]]]
    knowing: Runner
    random: Runner
    plain: dict[str, blocks.PlainBlock]


def with_pairs(texts: Sequence[Sequence[int]], folder: Path) -> Path:
    """A drafter whose first-order head says which token followed another one most often."""
    vocabulary = tiny.SIZES["vocab_size"]
    counts = torch.zeros(vocabulary, vocabulary)  # [next, before]
    for text in texts:
        for before, after in pairwise(text):
            counts[after, before] += 1
    random = blocks.block(folder / "pairs", "dspark", is_causal=True, markov_rank=vocabulary)
    first, second = (f"markov_head.markov_w{number}.weight" for number in (1, 2))
    return heads.edited(random, folder / "knowing", {first: 100 * torch.eye(vocabulary), second: counts.sqrt()})


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("drafters")
    checkpoint = tiny.tokenizer(heads.target(folder / "target"))
    target = tiny.runner(checkpoint, torch.float64)
    alone, texts = drafting.plain_texts(target)
    knowing = with_pairs(texts, folder)
    random = blocks.block(folder / "random", "dspark", seed=5, is_causal=True)
    runners = [blocks.runner(draft, checkpoint) for draft in (knowing, random)]
    plain = {draft.name: blocks.PlainBlock(draft, Plain(checkpoint), causal=True) for draft in (knowing, random)}
    return World(target, alone, *runners, plain)


class Auditor:
    """After every step, each chain and each trunk is what the drafter says: from hidden states of all committed tokens
    but the last, and from the tokens behind these."""

    def __init__(self, plain: blocks.PlainBlock, draft: Draft) -> None:
        self._plain, self.chains, self.behind = plain, 0, 0
        draft.watch = self

    def __call__(self, engine: DraftEngine) -> None:
        engine.drafter.pool.check()
        for tree in engine.trees.values():
            for chain in tree.chains:
                if chain.computed:
                    self._check(tree, [*tree.trunk[: chain.fork], chain.tokens[0]], chain.tokens[1:])
                    self.chains += 1
                    self.behind += chain.fork > 0
            if tree.speculation.mode == "sd" and tree.trunk:
                self._check(tree, [], tree.trunk)

    def _check(self, tree: Tree, behind: list[int], tokens: list[int]) -> None:
        """Check the tokens behind draft tokens `behind`, as far as one pass over these drafts them."""
        text = [*tree.tokens, *behind]
        for token, scores in zip(tokens, self._plain.each(text, tree.base, tokens), strict=False):
            found = perturbed(scores[None].float(), tree.law, [len(text)], lambda seed, at: gumbel(seed, at, 131))[0]
            assert found[token] >= found.max() - 1e-3
            text.append(token)


@TEMPERATURES
@MODES
def test_the_text_is_the_targets_whatever_the_drafter_thinks(world: World, mode: Mode, temperature: float) -> None:
    drafts = (world.random, world.knowing)
    found = [drafting.accepted_a_round(world, config(mode), head, temperature) for head in drafts]
    assert found[1] > found[0] + 0.3


@TEMPERATURES
@MODES
@pytest.mark.parametrize("drafter", ["knowing", "random"])
def test_every_guess_is_what_the_drafter_says(world: World, drafter: str, mode: Mode, temperature: float) -> None:
    draft = Draft(config(mode), getattr(world, drafter))
    audit = Auditor(world.plain[drafter], draft)
    Pair(draft.config, world.target, draft).run(PROMPTS[:2], params(temperature, 2))
    if mode == "ssd":
        assert audit.chains > 100 and audit.behind > 20


def test_more_tokens_than_a_block_take_another_pass(world: World) -> None:
    asked = Speculation("sd", blocks.BLOCK + 3, (3,), "jit")
    draft = Draft(pair.config(asked, features=FEATURES), world.knowing)
    longest = 0

    def watch(engine: DraftEngine) -> None:
        nonlocal longest
        longest = max(longest, *(len(tree.trunk) for tree in engine.trees.values()), 0)

    draft.watch = watch
    texts = Pair(draft.config, world.target, draft).run(PROMPTS, params(0.0))
    assert texts.ids == world.alone[0.0] and longest == blocks.BLOCK + 3
    draft.assert_empty()


@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
def test_other_rules_and_filters_have_the_targets_tokens(world: World, sampler: str) -> None:
    ruled = Speculation("ssd", LOOKAHEAD, (3,), "jit", sampler=sampler)
    draft = Draft(pair.config(ruled, features=FEATURES), world.knowing)
    asked = params(0.8, top_k=20, top_p=0.9)
    texts = Pair(draft.config, world.target, draft).run(PROMPTS, asked)
    if sampler == "coupled":
        assert texts.ids == Pair(pair.config(Speculation("ar")), world.target).run(PROMPTS, asked).ids
    assert total(texts, "accepted_tokens") > 0
    draft.assert_empty()


@MODES
def test_a_draft_that_is_lost_finds_all_hidden_states_again(world: World, mode: Mode) -> None:
    drafting.check_lost(world, config(mode), world.knowing, 0.3)


@TEMPERATURES
def test_prompts_in_pieces_and_pages_that_run_out(world: World, temperature: float) -> None:
    drafting.check_pieces(world, config("ssd"), world.knowing, temperature)


def test_hidden_states_that_are_not_there_cost_speed_only(world: World) -> None:
    drafting.check_scribbled(world, config("ssd"), world.knowing)


def test_steps_can_be_rehearsed(world: World) -> None:
    drafting.check_rehearsed(config("ssd"), world.knowing, 4 * blocks.BLOCK)


def test_steps_of_long_blocks_are_rehearsed_as_far_as_k_goes(world: World) -> None:
    draft = Draft(config("ssd"), world.knowing)
    draft.engine.drafter.block *= 10 * MAX_LOOKAHEAD
    draft.engine.handle(Rehearse(2, in_turn=True))
    assert draft.engine.step() and draft.board.telemetry().grown == 2 * MAX_LOOKAHEAD
