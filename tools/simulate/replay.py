"""Replays a target's recorded answers to the real draft: which outcomes it prepared, and what rounds bring.

Under greedy and `coupled` sampling a verification's outcome follows from the answer alone, so no target runs. The draft
takes as many steps in a round as it can use: what arrives late in an engine does not count here."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from msgspec.structs import replace

from ssd import LLM
from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_FAN_OUT, Speculation
from ssd.draft.engine import DraftEngine
from ssd.draft.process import load
from ssd.draft.tree import Tree
from ssd.errors import UsageError
from ssd.execution.runner import Runner
from ssd.ipc.board import BoardWriter, size_bytes
from ssd.ipc.messages import Admit, Launch, Launched, Outcomes, Release, Retune, Verified
from ssd.ipc.process import memory_file
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.law import Law
from ssd.plugins.bench.datasets import texts
from ssd.speculation.acceptance import common_prefix_length
from ssd.speculation.fan_out import optimal_fan_out
from ssd.tuning.estimates import Learner, Mean
from tools.distill.evaluation import Answer, paths

ALLOCATIONS = ("theorem", "joint")
_RETUNE_EVERY = 16  # rounds, as in `ssd.tuning.tuner`


class Replayed(NamedTuple):
    """What a replay brought. `chains` is the mean number of chains that were started in a round."""

    temperature: float
    budget: int
    allocation: str
    rounds: int
    hit_rate: float
    tokens: float
    chains: float


@dataclass
class _Counts:
    rounds: int = 0
    hits: int = 0
    tokens: int = 0
    chains: int = 0


def record(datasets: Sequence[str], prompts: int, tokens: int, temperature: float) -> list[Answer]:
    """Return the built-in target's answers to the first `prompts` prompts of each data set."""
    with LLM(mode="ar") as llm:
        found = [text for name in datasets for text in texts(name, prompts)]
        return paths(llm, found, temperature, tokens)


class Replay:
    """A draft that one answer after another is told to; it keeps what it has learned."""

    def __init__(self, config: EngineConfig, runners: Sequence[Runner], speculation: Speculation) -> None:
        descriptor = memory_file("board", size_bytes(1))
        self._engine = DraftEngine(config, runners, BoardWriter(descriptor, 1), 1, config.vocab_size)
        os.close(descriptor)
        self._speculation, self._learner, self._counts = speculation, Learner(), _Counts()
        self._acceptance = Mean(0.5)

    def run(self, answers: Sequence[Answer]) -> _Counts:
        """Play all answers to their last K tokens."""
        for request, answer in enumerate(answers):
            self._play(request, answer.text.token_ids, answer.text.prompt, answer.law)
        return self._counts

    def _play(self, request: int, tokens: Sequence[int], prompt: int, law: Law) -> None:
        lookahead = self._speculation.num_speculative_tokens
        engine, committed = self._engine, prompt + 1  # the prefill has emitted the first
        engine.handle(Admit(request, 0, 0, list(tokens[:committed]), law, self._speculation))
        tree = engine.trees[request]
        self._work()
        while committed < len(tokens) - lookahead:
            accepted = common_prefix_length(tree.trunk[: tree.in_flight], tokens[committed:])
            bonus = tokens[committed + accepted]
            self._count(tree, accepted, bonus)
            engine.handle(Outcomes([self._outcome(tree, accepted, bonus)]))
            self._work()
            if tree.in_flight is None:
                engine.handle(Launched([Launch(request, tree.round, min(lookahead, len(tree.trunk)))]))
                self._work()
            committed += accepted + 1
            self._retune(tree)
        engine.handle(Release([request]))

    def _outcome(self, tree: Tree, accepted: int, bonus: int) -> Verified:
        """The message about an outcome: the prepared speculation is in flight next, or the draft is waited for."""
        chain = next((c for c in tree.chains if (c.fork, c.tokens[0]) == (accepted, bonus) and c.computed), None)
        in_flight = None if chain is None else min(tree.lookahead, chain.computed)
        return Verified(tree.request, tree.round, accepted, bonus, in_flight)

    def _count(self, tree: Tree, accepted: int, bonus: int) -> None:
        prepared = [chain.tokens[0] for chain in tree.chains if chain.fork == accepted]
        counts, hit = self._counts, bonus in prepared
        counts.rounds += 1
        counts.hits += hit
        counts.tokens += accepted + 1
        counts.chains += tree.chains.entries
        self._acceptance.note_outcome(tree.in_flight or 0, accepted)
        self._learner.looked_up(len(prepared), 1 + prepared.index(bonus) if hit else None)

    def _retune(self, tree: Tree) -> None:
        """Give Theorem 12's list for what was measured."""
        asked = self._speculation
        if asked.fan_out and self._counts.rounds % _RETUNE_EVERY == 0:
            lookahead = asked.num_speculative_tokens
            found = optimal_fan_out(self._acceptance.value, self._learner.misses()[1], lookahead, asked.budget)
            self._speculation = replace(asked, fan_out=tuple(min(count, MAX_FAN_OUT) for count in found))
            self._engine.handle(Retune([(tree.request, self._speculation)]))

    def _work(self) -> None:
        while self._engine.step():
            pass


@torch.inference_mode()
def replayed(
    answers: Callable[[float], list[Answer]], temperatures: Sequence[float], budgets: Sequence[int], lookahead: int
) -> list[Replayed]:
    """Return what each allocation of each budget brings; `answers` are those at a temperature. Raises UsageError."""
    if min(budgets) <= lookahead:
        raise UsageError(f"a budget is at least one chain for each of {lookahead + 1} accepted lengths")
    config = resolve(EngineOptions(num_speculative_tokens=lookahead, budget=max(budgets), max_num_seqs=1))
    runners, found = load(config), list[Replayed]()
    for temperature in temperatures:
        told = answers(temperature)
        for budget in budgets:
            for allocation in ALLOCATIONS:
                fan_out = optimal_fan_out(0.5, 0.6, lookahead, budget) if allocation == "theorem" else ()
                speculation = Speculation("ssd", lookahead, fan_out, "jit", budget=budget)
                counts = Replay(config, runners, speculation).run(told)
                rates = (count / counts.rounds for count in (counts.hits, counts.tokens, counts.chains))
                found.append(Replayed(temperature, budget, allocation, counts.rounds, *rates))
    return found
