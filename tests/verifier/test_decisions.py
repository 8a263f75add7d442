"""Every miss, wait, gate and choice of a real target and draft leaves a sentence with the numbers that decided."""

from __future__ import annotations

import logging
import os
import re
import time
from collections.abc import Callable
from itertools import chain

import pytest

from ssd.config.params import Speculation
from ssd.ipc.messages import LinkLoad, Outcomes
from ssd.ipc.process import memory_file
from ssd.ipc.public import Message
from ssd.ipc.trace_ring import FIGURES, SIZE_BYTES, Mark, Moment, TraceReader, TraceRing, plan_figures, spans
from ssd.speculation.theory import LinearCost
from ssd.tuning.knowledge import Knowledge
from ssd.tuning.plan import Plan
from ssd.tuning.tuner import Tuning
from ssd.verifier import misses
from ssd.verifier.draft_session import DraftSession
from tests.draft.audit import World
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PROMPTS = [tiny.token_ids(30, 30), [5, 6, 7, 8] * 6, tiny.token_ids(9, 9)]
JIT = Speculation("ssd", 4, (1,), "jit")
NUMBER = r"(-?[\d.e+]+)"


def moments(
    world: World,
    speculation: Speculation = JIT,
    steps: int | None = None,
    rtt: float = 0.0,
    change: Callable[[Pair], None] = lambda pair: None,
    elastic: bool = False,
    lengths: tuple[int, ...] = (30, 30),
) -> list[Moment]:
    """What a target and its draft recorded, which takes `steps` steps for each message, far away where `rtt` is."""
    settings, descriptor = config(speculation), memory_file("trace", SIZE_BYTES)
    draft = Draft(settings, world.draft, steps=steps)
    draft.show_link(LinkLoad(rtt, *[0] * 6))
    pair = Pair(settings, world.target, draft, elastic=elastic, trace=TraceRing(descriptor, "target"))
    change(pair)
    pair.run(PROMPTS[: len(lengths)], [params(1, length)[0] for length in lengths])
    found = spans(TraceReader(descriptor, "target").news(), 2**62)[1]
    os.close(descriptor)
    return found


def loses(pair: Pair) -> None:
    """The draft hears twelve messages, and none from then on."""
    deliver, heard = pair.deliver, list[Message]()

    def post(message: Message) -> bool:
        heard.append(message)
        return len(heard) < 12 and deliver(message)

    pair.post = post


PAYS = f"{NUMBER} tokens? in {NUMBER} ms, {NUMBER} tok/s; without it the batch brings {NUMBER} tok/s"
WAITED = f"the target waited {NUMBER} ms for (1|2) rows?: {NUMBER} of {NUMBER} tokens? came, expected every {NUMBER} ms"
STILL = f"the target has seen no progress of the draft for {NUMBER} ms"
CASES = {
    Mark.TOKEN_NOT_COVERED: (
        {},
        "missed, .*: the draft prepared [1-9] tokens? after [0-4] accepted tokens?, not the one that came",
    ),
    Mark.K_NOT_COVERED: (
        {"steps": 1},
        f"missed, .*: the draft prepared {NUMBER} outcomes?, none with [1-4] accepted tokens?",
    ),
    Mark.LATE: ({"steps": 0}, f"missed, late: nothing of its round is prepared yet; {STILL}"),
    Mark.DRAFT_DOWN: ({"change": loses}, "missed, .*: the draft is down, has given it up, or is not told of it yet"),
    Mark.UNSEEN: ({"elastic": True}, f"does not wait, .*: the draft has shown nothing of it for {NUMBER} ms"),
    Mark.NO_GAIN: (
        {"rtt": 1.0},
        f"does not wait, .*: [1-4] draft tokens?, {NUMBER} ms each, for (1|2) rows? would bring {PAYS}",
    ),
    Mark.STALLED: ({"steps": 0}, f"does not wait, .*: [1-4] tokens? would pay, but .* a wait in vain {NUMBER} ms ago"),
    Mark.SILENT: (
        {"steps": 0},
        f"stops waiting, silent: 0 of [1-4] draft tokens? came, and nothing for {NUMBER} ms, .+",
    ),
    Mark.WAITED: ({}, f"{WAITED}; waiting was to bring {PAYS}"),
    Mark.FIRST_ROUND: ({}, "missed, first round: nothing can be prepared for it"),
    Mark.HIT: ({}, "hit: draft tokens were prepared"),
}


@pytest.mark.parametrize("mark", CASES, ids=lambda mark: mark.name.lower())
def test_what_was_decided_is_said_with_its_numbers(world: World, mark: Mark) -> None:
    how, sentence = CASES[mark]
    found = [moment for moment in moments(world, **how) if moment.mark is mark]  # type: ignore[arg-type]
    assert found
    begin = "" if mark.of_rows else r"request (0|1) "
    for moment in found[:1]:
        assert re.fullmatch(begin + sentence, moment.line), moment.line


def test_what_a_draft_last_did_is_counted_from_its_last_progress_and_not_from_the_last_round(world: World) -> None:
    began, session = time.monotonic_ns(), list[DraftSession]()
    for moment in moments(world, steps=0, change=lambda pair: session.append(pair.proposer.session)):
        if moment.mark is Mark.LATE:
            assert 0 <= 1e6 * moment.figures[1] <= moment.at - began
    (session_,) = session
    moved = session_.still_s(100.0) and 100.0 - session_.still_s(100.0)
    session_.tell(Outcomes([]))
    session_.end_round(200.0, 0.01)
    assert session_.still_s(300.0) == pytest.approx(300.0 - moved)
    board = session_.board.telemetry
    session_.board.telemetry = lambda: board()._replace(progress=10**6)  # type: ignore[method-assign]
    session_.end_round(400.0, 0.01)
    assert session_.still_s(500.0) == 100.0


def test_one_that_is_not_told_is_not_known_and_one_prepared_without_a_token_is_late(world: World) -> None:
    lost = moments(world, change=loses)
    assert any(moment.line.endswith("unseen: the draft does not know it") for moment in lost)
    late = Moment(Mark.LATE, 0, 3, (1.0, 12.34))
    assert late.line.startswith("request 3 missed, late: its outcome is prepared, but has no token yet; ")
    assert late.line.endswith("no progress of the draft for 12.3 ms")


def test_the_numbers_of_a_gate_are_those_that_it_compared(world: World) -> None:
    """A wait pays if it brings more tokens a second than the batch; a round trip of a second never does."""
    for moment in moments(world, rtt=1.0) + moments(world):
        figures = dict(zip(FIGURES[moment.mark], moment.figures, strict=True))
        if moment.mark in (Mark.NO_GAIN, Mark.WAITED):
            assert figures["rate"] == pytest.approx(1e3 * figures["gain"] / figures["ms"])
            assert (figures["rate"] > figures["speed"]) is (moment.mark is Mark.WAITED)


def test_mode_sd_always_waits(world: World) -> None:
    found = moments(world, Speculation("sd", 4, (1,)))
    assert {moment.mark for moment in found} == {Mark.WAITED}
    assert re.fullmatch(f"{WAITED}; its policy always waits", found[0].line)


def test_a_row_without_hope_says_price_and_worth(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(misses.MissCosts, "pricing", lambda costs: lambda more: 5.0 * more)
    found = [m for m in moments(world, Speculation("ssd", 0, (1,), "ngram")) if m.mark is Mark.HOPELESS]
    begin = "request 0 does not wait, hopeless: a proposal would bring "
    assert re.fullmatch(f"{begin}0[.]{NUMBER} tokens, and costs the time of 5 tokens", found[0].line), found[0].line


def test_a_change_of_plan_says_what_both_plans_should_bring(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Three rows get no draft, two get one. The log has the sentence of the trace."""
    chosen = list[list[tuple[Plan, float]]]()
    choice = Tuning.choice

    def noted(tuning: Tuning, asked: Speculation) -> list[tuple[Plan, float]]:
        chosen.append(choice(tuning, asked))
        return chosen[-1]

    def planned(tuning: Tuning, asked: Speculation) -> Plan:
        plan(tuning, asked)  # which ranks the others
        return Plan("ssd", 2, 3, (1, 1, 1), 80.0) if tuning._batch <= 2 else Plan("ngram", speed=90.0)

    def knows(pair: Pair) -> None:
        verify, step = LinearCost(0.05, 5e-4), LinearCost(0.005, 0.0)
        tables = {"verify": verify, "step": step, "verify_beside": verify, "step_beside": step}
        known = {name: {n: cost.at(n) for n in (1, 2, 3, 4, 8, 64)} for name, cost in tables.items()}
        pair.proposer.tuning.recall(Knowledge(tables=known))

    plan = Tuning.plan
    monkeypatch.setattr(Tuning, "choice", noted)
    monkeypatch.setattr(Tuning, "plan", planned)
    with caplog.at_level(logging.INFO, "ssd.target"):
        found = moments(world, Speculation("auto", 0, ()), change=knows, lengths=(60, 60, 10))
    plans = [moment for moment in found if moment.mark is Mark.PLAN]
    assert {"ngram", "ssd, K 2, 3 chains"} == {re.split(r": |, [\d.]+ tok", moment.line)[1] for moment in plans}
    figures = [tuple(chain(*(plan_figures(s, p.mode, p.lookahead, p.chains) for p, s in each))) for each in chosen[::2]]
    assert [moment.figures for moment in plans] == figures
    assert {moment.detail for moment in plans} == {1, 2, 3}
    assert {record.getMessage() for record in caplog.records} >= {plans[0].line}
