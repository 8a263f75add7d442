"""Checks of drafts that read a target's hidden states: every such draft is exact, and finds its states again."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.ipc.messages import Rehearse
from ssd.speculation.theory import DraftWait
from tests.draft import pair
from tests.draft.pair import Draft, Pair, Texts
from tests.models import tiny
from tests.plugins.drafts.heads import scribbling

PROMPTS = [tiny.token_ids(n, n) for n in (4, 9, 1, 13)]
TOKENS, LOOKAHEAD = 32, 3
LENGTH = 13 + TOKENS  # of the texts that a draft is trained on
MODES = pytest.mark.parametrize("mode", ["sd", "ssd"])
TEMPERATURES = pytest.mark.parametrize("temperature", [0.0, 0.8])


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A target that waits for its draft however slow the machine is, so that a miss has draft tokens."""
    monkeypatch.setattr(
        "ssd.verifier.misses.depth_worth_waiting_for", lambda ready, missed, longest, *_: DraftWait(longest)
    )


def speculation(mode: Mode) -> Speculation:
    return Speculation(mode, LOOKAHEAD, (3,), "jit")


def params(temperature: float, count: int = len(PROMPTS), **fields: Any) -> list[SamplingParams]:
    return pair.params(count, TOKENS, temperature, **fields)


def plain_texts(target: Runner) -> tuple[dict[float, list[list[int]]], list[list[int]]]:
    """Return the target's answers to PROMPTS by temperature, and PROMPTS with longer answers."""
    longer = [
        replace(one, max_tokens=LENGTH - len(p)) for t in (0.0, 0.8) for one, p in zip(params(t), PROMPTS, strict=True)
    ]
    ids = Pair(pair.config(Speculation("ar")), target).run(PROMPTS * 2, longer).ids
    alone = {0.0: [text[:TOKENS] for text in ids[:4]], 0.8: [text[:TOKENS] for text in ids[4:]]}
    return alone, [[*p, *text] for p, text in zip(PROMPTS * 2, ids, strict=True)]


def total(texts: Texts, name: str) -> int:
    return sum(getattr(metrics, name) for metrics in texts.metrics)


def accepted_a_round(world: Any, settings: EngineConfig, runner: Runner, temperature: float) -> float:
    """Check that the text is the target's; return how many draft tokens it accepts."""
    draft = Draft(settings, runner)
    texts = Pair(settings, world.target, draft).run(PROMPTS, params(temperature))
    assert texts.ids == world.alone[temperature]
    draft.assert_empty()
    return total(texts, "accepted_tokens") / total(texts, "rounds")


def check_lost(world: Any, settings: EngineConfig, runner: Runner, accepted: float) -> None:
    """A new draft knows only the committed tokens, and the target computes no token twice for it."""
    draft = Draft(settings, runner)
    both = Pair(settings, world.target, draft)
    steps = 0

    def kill() -> None:
        nonlocal steps
        steps += 1
        if steps == 4:
            draft.restart()
            both.proposer.session.join(draft.epoch)

    both.between_steps = kill
    texts = both.run(PROMPTS, params(0.0))
    assert texts.ids == world.alone[0.0]
    assert total(texts, "accepted_tokens") > accepted * total(texts, "rounds")
    draft.assert_empty()


def check_pieces(world: Any, settings: EngineConfig, runner: Runner, temperature: float) -> None:
    """Long prompts beside short ones, in chunks, with a target that must preempt: the same tokens, no page left."""
    prompts = [*PROMPTS, tiny.token_ids(90, 90), tiny.token_ids(90, 90)[:70], tiny.token_ids(1, 1)]
    asked = params(temperature, len(prompts))
    alone = Pair(pair.config(Speculation("ar")), world.target).run(prompts, asked)
    settings = replace(settings, max_num_batched_tokens=16, num_pages=60, max_model_len=200)
    draft = Draft(settings, runner, steps=4)
    texts = Pair(settings, world.target, draft).run(prompts, asked)
    assert texts.ids == alone.ids and texts.preemptions > 0
    assert total(texts, "accepted_tokens") > 0
    draft.assert_empty()


def check_scribbled(world: Any, settings: EngineConfig, runner: Runner) -> None:
    """Nothing is drafted from hidden states that are not there, and nothing fails."""
    draft = Draft(settings, runner)
    both = Pair(settings, world.target, draft)
    assert draft.shown is not None
    both.between_steps = scribbling(draft.shown)
    assert both.run(PROMPTS, params(0.0)).ids == world.alone[0.0]
    draft.assert_empty()


def check_rehearsed(settings: EngineConfig, runner: Runner, grown: int) -> None:
    draft = Draft(settings, runner)
    draft.engine.handle(Rehearse(4, in_turn=True))
    assert draft.engine.step() and draft.board.telemetry().grown == grown
    draft.engine.handle(Rehearse(0))
    draft.assert_empty()
