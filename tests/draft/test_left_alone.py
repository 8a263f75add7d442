"""A draft that is silent, wrong or broken is left alone and tried again; no token changes in any state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

import pytest

from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.ipc.board import BoardWriter, Prepared
from ssd.ipc.messages import Admit, Release
from ssd.ipc.public import Message
from tests.draft.audit import PROMPTS, World, plainly
from tests.draft.pair import PAGE_SIZE, VOCABULARY, Clock, Draft, Pair, config, params, use_clock
from tests.models import tiny


@pytest.fixture(autouse=True)
def real_time() -> Iterator[None]:
    """Afterwards."""
    yield
    use_clock(time)


Fault = Callable[[BoardWriter, Callable[..., None]], Callable[..., None]]
TOKENS = 150


def silent(writer: BoardWriter, publish: Callable[..., None]) -> Callable[..., None]:
    return lambda *entries: None


def lying(writer: BoardWriter, publish: Callable[..., None]) -> Callable[..., None]:
    """Sound entries of tokens that are never right."""

    def lie(slot: int, entries: Sequence[Prepared]) -> None:
        publish(slot, [entry._replace(ids=[(token + 1) % VOCABULARY for token in entry.ids]) for entry in entries])

    return lie


def scribbling(writer: BoardWriter, publish: Callable[..., None]) -> Callable[..., None]:
    """The right keys over what is no chain."""

    def scribble(slot: int, entries: Sequence[Prepared]) -> None:
        publish(slot, entries)
        writer.slots[slot, [entry.entry for entry in entries], -1] += 1

    return scribble


def forgetful(writer: BoardWriter, publish: Callable[..., None]) -> Callable[..., None]:
    """Nothing of the first request."""
    return lambda slot, entries: entries[0].key.request == 0 or publish(slot, entries)


class Watched:
    """A pair whose draft, which is the target's own model, has a fault while `broken` says so; what it was told, and in
    which states the target saw it. A verification takes fifty milliseconds, and nothing else any time but a sleep."""

    def __init__(self, world: World, speculation: Speculation, fault: Fault, steps: int | None = None) -> None:
        self.clock = clock = Clock()
        use_clock(clock)
        settings = config(speculation)
        self.draft = Draft(settings, Runner(world.target.model, 400, PAGE_SIZE), steps=steps)
        self.pair = Pair(settings, world.target, self.draft)
        self.pair.post = self._post
        self.pair.between_steps = self._look
        outcomes = self.pair.proposer.outcomes
        self.pair.proposer.outcomes = lambda results: clock.sleep(0.05) or outcomes(results)  # type: ignore
        self._fault, self._publish = fault, self.draft._writer.publish
        self.heard: list[Message] = []
        self.states: list[str] = []
        self.drafted: list[int] = []
        self.broken(True)

    def broken(self, so: bool) -> None:
        writer = self.draft._writer
        writer.publish = self._fault(writer, self._publish) if so else self._publish  # type: ignore[method-assign]

    def _post(self, message: Message) -> bool:
        self.heard.append(message)
        return self.pair.deliver(message)

    def _look(self) -> None:
        self.states.append(self.pair.proposer.state)

    def run(self, prompts: list[list[int]], laws: list[SamplingParams]) -> list[list[int]]:
        texts = self.pair.run(prompts, laws)
        self.drafted = [metrics.drafted_tokens for metrics in texts.metrics]
        return texts.ids


@pytest.mark.parametrize("fault", [silent, lying, scribbling])
@pytest.mark.parametrize(("mode", "temperature"), [("sd", 0.0), ("ssd", 0.0), ("ssd", 0.8)])
def test_it_is_left_alone(world: World, fault: Fault, mode: Mode, temperature: float) -> None:
    """Also where K is fixed: few rounds have waited for it or verified its tokens, and it hears of few."""
    watched = Watched(world, Speculation(mode, 4, (3,), "jit"), fault)
    ids = watched.run(PROMPTS, params(len(PROMPTS), TOKENS, temperature))
    assert ids == plainly(world, PROMPTS, temperature, TOKENS).ids
    assert watched.states.count("up") < TOKENS / 2
    assert watched.clock.now < 1000 + 0.05 * len(watched.states) + 0.75, "so long was it waited for in all"
    assert sum(watched.drafted) <= 4 * len(PROMPTS) * (24 + 4)
    assert (watched.pair.proposer.counters.rejected > 0) == (fault is scribbling)
    watched.draft.assert_empty()


def test_a_draft_may_be_found_dead_as_one_of_several_requests_is_given_up(world: World) -> None:
    watched = Watched(world, Speculation("sd", 4, (3,), "jit"), forgetful)
    watched.pair.post = lambda message: not isinstance(message, Release) and watched.pair.deliver(message)
    assert watched.run(PROMPTS, params(4, TOKENS)) == plainly(world, PROMPTS, 0.0, TOKENS).ids
    assert "down" in watched.states and sum(watched.drafted) > 0


def test_a_draft_that_lies_is_left_alone_where_k_is_chosen(world: World) -> None:
    watched = Watched(world, Speculation("ssd", 0, (), "jit"), lying)
    assert watched.run(PROMPTS, params(4, TOKENS)) == plainly(world, PROMPTS, 0.0, TOKENS).ids
    assert sum(watched.drafted) <= 8 * len(PROMPTS) * 40


@pytest.mark.parametrize("fault", [silent, lying, scribbling])
@pytest.mark.parametrize("mode", ["sd", "ssd"])
def test_it_is_of_use_again_when_it_is_well(world: World, fault: Fault, mode: Mode) -> None:
    """One request tries; then the others follow, one a round."""
    watched = Watched(world, Speculation(mode, 4, (3,), "jit"), fault)
    look = watched.pair.between_steps

    def recover() -> None:
        look()
        if watched.states[-1] == "open":
            watched.broken(False)
            watched.draft.steps = None

    watched.pair.between_steps = recover
    ids = watched.run(PROMPTS, params(4, TOKENS))
    assert ids == plainly(world, PROMPTS, 0.0, TOKENS).ids
    order = [state for state, before in zip(watched.states, ["", *watched.states], strict=False) if state != before]
    assert order == ["up", "open", "half_open", "up"]
    again = [message.request for message in watched.heard if isinstance(message, Admit)][4:]
    assert sorted(again) == [0, 1, 2, 3]
    assert watched.states[-1] == "up" and sum(watched.drafted) > 100
    watched.draft.assert_empty()


def test_a_new_request_may_be_the_trial(world: World) -> None:
    watched = Watched(world, Speculation("ssd", 4, (3,), "jit"), silent, steps=0)
    watched.run([tiny.token_ids(5, 5)], params(1, 60))
    assert "open" in watched.states and watched.pair.proposer.state != "up"
    watched.broken(False)
    watched.draft.steps = None
    watched.draft._writer.tick()  # as an idle draft does every 0.1 s
    watched.run([tiny.token_ids(5, 5)], params(1, 30))
    watched.run([tiny.token_ids(6, 6)], params(1, 30))
    assert watched.pair.proposer.state == "up" and watched.drafted[0] > 0


def test_one_request_that_the_draft_has_lost_returns_alone(world: World) -> None:
    """The others keep the draft meanwhile."""
    watched = Watched(world, Speculation("sd", 1, (3,), "jit"), silent)
    watched.broken(False)
    look = watched.pair.between_steps

    def lose() -> None:
        look()
        if len(watched.states) == 6:
            watched.draft.engine._drop(2)

    watched.pair.between_steps = lose
    ids = watched.run(PROMPTS, params(4, TOKENS))
    assert ids == plainly(world, PROMPTS, 0.0, TOKENS).ids
    admitted = [message.request for message in watched.heard if isinstance(message, Admit)]
    assert admitted == [0, 1, 2, 3, 2] and set(watched.states) == {"up"}
    assert watched.drafted[2] > 40
    watched.draft.assert_empty()


def test_it_is_spoken_of_once_a_minute(world: World, caplog: pytest.LogCaptureFixture) -> None:
    """However often it is given up and taken back, as fast as that is possible."""
    watched = Watched(world, Speculation("ssd", 4, (3,), "jit"), silent)
    look = watched.pair.between_steps

    def turn() -> None:
        look()
        watched.broken(watched.states[-1] == "up")

    watched.pair.between_steps = turn
    watched.run(PROMPTS, params(len(PROMPTS), TOKENS, 0.0))
    changes = sum(before != after for before, after in zip(watched.states, watched.states[1:], strict=False))
    assert changes >= 3 and watched.states.count("half_open")
    (said,) = [record.message for record in caplog.records if "the draft" in record.message]
    assert said.startswith("goes on without the draft")
