"""Audits of a draft: its plain forward says what it should publish, a fresh prefill what its cache should hold."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

from ssd.config.params import Speculation
from ssd.draft.cascade import SmallerDraft
from ssd.draft.engine import DraftEngine
from ssd.draft.tree import Tree
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.law import Law
from ssd.speculation.fan_out import fan_out_at
from tests.boards import lookup
from tests.draft.pair import PAGE_SIZE, Draft, Pair, ScriptedTarget, Texts, config, params
from tests.exactness.plain import Plain
from tests.models import tiny

GREEDY = Law()
SAMPLED = Law(temperature=0.8, top_k=40, top_p=0.95, min_p=0.01, seed=77)
PROMPTS = [tiny.token_ids(n, n) for n in (4, 9, 22, 13)]


@dataclass(frozen=True)
class World:
    """A target (in float64, and deterministic in float32) and a draft that agrees with it about every other time.
    `next` and `best` come from the draft's plain forward: the next token, and the likeliest ones, best first."""

    target: Runner
    single: Runner
    draft: Runner
    next: Callable[[tuple[int, ...], Law], int]
    best: Callable[[tuple[int, ...], Law], list[int]]


def world_in(folder: Path, **knobs: Any) -> World:
    """Write the checkpoints of a world and load them."""
    target = tiny.llama(folder / "target", seed=3, **knobs)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    plain = Plain(draft)
    return World(
        tiny.runner(target, torch.float64),
        tiny.runner(target, torch.float32, deterministic=True),
        tiny.runner(draft, torch.float64),
        cache(plain.next),
        cache(lambda text, law: plain.scores(text, law).topk(20).indices.tolist()),
    )


def plainly(world: World, prompts: list[list[int]], temperature: float, tokens: int) -> Texts:
    """What the target writes without any draft."""
    return Pair(config(Speculation("ar")), world.target).run(prompts, params(len(prompts), tokens, temperature))


def copied(text: list[int], committed: int, shortest: int = 2) -> int:
    """What followed the longest suffix of `text`, of 6 tokens to `shortest`, the last time that it ended among its
    first `committed` tokens; -1 if it never did."""
    for n in range(6, shortest - 1, -1):
        for end in range(min(committed, len(text) - 1), n - 1, -1):
            if text[end - n : end] == text[-n:]:
                return text[end]
    return -1


class Auditor:
    """Checks the draft after every message and every step: its cache, its candidates, and what the target could read.
    `retuned`: fan-outs and K change while a tree grows, or cells are few, so that counts are not checked. `mixed`: and
    some chains may have been chosen jointly, others by lists."""

    def __init__(self, world: World, draft: Draft, retuned: bool = False, mixed: bool = False) -> None:
        self._world, self._draft, self._retuned, self._mixed = world, draft, retuned or mixed, mixed
        self._fresh = Runner(draft.runners[-1].model, 64, PAGE_SIZE)
        self.helped = self.lost = False
        self.depths: set[int] = set()
        self.trunks: set[int] = set()
        self.forks: set[tuple[int, int]] = set()
        self.corrected = 0
        draft.watch = self

    def __call__(self, engine: DraftEngine) -> None:
        engine.drafter.pool.check()
        for tree in engine.trees.values():
            self._check_cache(tree)
            self._check_candidates(tree)
            self._check_published(tree)
        for smaller in engine.smaller:
            self._check_smaller(smaller, engine)

    def _check_cache(self, tree: Tree) -> None:
        """Keys and values of the path are those of a fresh prefill, whatever was accepted, rejected or promoted."""
        assert tree.table.missing(tree.computed) == 0
        if tree.computed == 0:
            return
        self._fresh.forward([Row(tree.path[: tree.computed], 0, range(64), outputs=0)])
        cache = self._draft.runners[-1].cache
        slots = cache.slots(tree.table.pages, 0, tree.computed)
        for kept, fresh in ((cache.keys, self._fresh.cache.keys), (cache.values, self._fresh.cache.values)):
            assert (kept[:, slots] - fresh[:, : tree.computed]).abs().max() <= 1e-10

    def _check_smaller(self, smaller: SmallerDraft, engine: DraftEngine) -> None:
        """The same for the paths and chains of a smaller draft, whose trees and cells are the larger one's."""
        drafter = smaller.drafter
        drafter.pool.check()
        assert set(smaller._paths) <= set(engine.trees)
        chains = {chain.cell: (tree, chain) for tree in engine.trees.values() for chain in tree.chains}
        assert set(smaller._chains) <= set(chains)
        fresh = Runner(drafter.runner.model, 64, PAGE_SIZE)
        for request, path in smaller._paths.items():
            self.lost |= path._lost
            if path.tokens:
                fresh.forward([Row(path.tokens, 0, range(64), outputs=0)])
                slots = drafter.runner.cache.slots(path.table.pages, 0, len(path.tokens))
                for kept, new in (
                    (drafter.runner.cache.keys, fresh.cache.keys),
                    (drafter.runner.cache.values, fresh.cache.values),
                ):
                    assert (kept[:, slots] - new[:, : len(path.tokens)]).abs().max() <= 1e-10
            self.helped |= path.tokens[: engine.trees[request].base] == engine.trees[request].tokens
        for cell, tokens in smaller._chains.items():
            tree, chain = chains[cell]
            before = tree.base + chain.fork
            fresh.forward([Row([*tree.path[:before], *tokens], 0, range(64), outputs=0)])
            span = slice(before, before + len(tokens))
            for kept, new in (
                (drafter.chain_cache.blocks[0][0], fresh.cache.keys),
                (drafter.chain_cache.blocks[0][1], fresh.cache.values),
            ):
                assert (kept[:, cell, : len(tokens)] - new[:, span]).abs().max() <= 1e-10

    def _check_candidates(self, tree: Tree) -> None:
        """The candidates at each node are the likeliest next tokens, without the token in flight there."""
        in_flight = tree.trunk[: tree.in_flight or 0]
        if tree.joint or self._mixed:
            self._check_jointly(tree, in_flight)
            return
        chains = [*tree.chains, *tree.chains.waiting]
        for fork in {chain.fork for chain in chains}:
            found = [chain.tokens[0] for chain in chains if chain.fork == fork]
            wanted = fan_out_at(fork, len(in_flight), tree.speculation.fan_out)
            best = self._world.best(tuple(tree.tokens + in_flight[:fork]), tree.law)
            expected = [token for token in best if token not in in_flight[fork : fork + 1]][:wanted]
            if self._retuned:
                expected = [token for token in best if token in found and token not in in_flight[fork : fork + 1]]
            assert found == expected
            self.forks.add((fork, len(in_flight)))

    def _check_jointly(self, tree: Tree, in_flight: list[int]) -> None:
        """At most `budget` outcomes have cells; their tokens are among the likeliest, or copied from the text."""
        placed = sum(chain.cell is not None for chain in tree.chains)
        assert placed + len(tree.chains.waiting) <= tree.speculation.budget or self._retuned
        for fork in {chain.fork for chain in tree.chains}:
            text = tree.tokens + in_flight[:fork]
            found = {chain.tokens[0] for chain in tree.chains if chain.fork == fork}
            known = {*self._world.best(tuple(text), tree.law), copied(text, tree.base)} - {*in_flight[fork : fork + 1]}
            assert found <= known
            self.forks.add((fork, len(in_flight)))

    def _check_published(self, tree: Tree) -> None:
        """What the board says at any depth is what the draft alone would write after that outcome."""
        for chain in tree.chains:
            ids = lookup(self._draft.board, tree.slot, tree.key(chain.fork, chain.tokens[0])) or []
            assert len(ids) == min(chain.computed, tree.lookahead) or (self._retuned and len(ids) <= chain.computed)
            self._check_text(tree, [*tree.tokens, *tree.trunk[: chain.fork], chain.tokens[0]], ids)
            self.depths.add(len(ids))
        if tree.answers is not None:
            ids = lookup(self._draft.board, tree.slot, tree.answers) or []
            assert ids == tree.trunk[: len(ids) if self._retuned else tree.lookahead]
            self._check_text(tree, tree.tokens, ids)
            self.trunks.add(len(ids))

    def _check_text(self, tree: Tree, text: list[int], ids: list[int]) -> None:
        for index, token in enumerate(ids):
            before = [*text, *ids[:index]]
            expected = self._world.next(tuple(before), tree.law)
            repeated = copied(before, tree.base, 6) if tree.joint or self._mixed else -1
            self.corrected += repeated not in (-1, expected)
            assert token == (expected if repeated < 0 else repeated) or (self._mixed and token == expected)


def play(
    draft: Draft, speculation: Speculation, choice: random.Random, rounds: int = 40, tells: bool = False
) -> Iterator[list[ScriptedTarget]]:
    """Play `rounds` of random outcomes on three sequences with different laws; yields them after every round."""
    laws = (GREEDY, SAMPLED, replace(SAMPLED, seed=5, top_k=0, top_p=1.0))
    targets = [
        ScriptedTarget(draft, i, tiny.token_ids(3 + 5 * i, i), law, speculation, tells=tells)
        for i, law in enumerate(laws)
    ]
    for _ in range(rounds):
        target = choice.choice(targets)
        if len(target.tokens) < 180:
            drive(target, choice)
        assert draft.engine.trees[target.request].tokens == target.tokens
        yield targets


def drive(target: ScriptedTarget, choice: random.Random) -> None:
    """One round of a sequence: a likely or unlikely outcome, a hit or a miss, taken up whole, in part or not at all."""
    draft = target.draft
    draft.steps = choice.choice((0, 1, 2, 3, None))
    accepted = choice.choice((len(target.in_flight), choice.randint(0, len(target.in_flight))))
    refused = target.in_flight[accepted : accepted + 1]
    prepared = [c.tokens[0] for c in draft.engine.trees[target.request].chains if c.fork == accepted]
    unlikely = [token for token in range(60) if token not in refused]
    token = choice.choice(prepared if prepared and choice.random() < 0.7 else unlikely)
    most = choice.choice((target.speculation.num_speculative_tokens,) * 3 + (0, 1, 2))
    wait = most > 0 and choice.random() < 0.7
    hit = target.outcome(accepted, token, most, wait, late=choice.choice((0, 0, 1, 2)))
    if not hit and target.waiting:
        draft.work(choice.choice((0, 1, 3, None)))
        target.launch(most)
