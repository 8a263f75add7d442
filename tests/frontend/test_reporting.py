"""What the frontend tells a watcher, and the line in its log: in the event loop of a test."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from ssd.frontend import reporting as module
from ssd.frontend.reporting import LogLine, Reporting
from ssd.frontend.request_manager import RequestManager
from ssd.ipc.messages import Emission, FrontendReport, Load, Step, Submit
from ssd.ipc.public import Message, Metrics
from tests.frontend.raw_client import ids
from tests.frontend.test_request_manager import ignore, with_manager
from tests.scripted_engine import PATIENCE_S

METRICS = Metrics(time_to_first_token_ms=5.0)


def answered(manager: RequestManager, sent: list[Message], *emissions: tuple[list[int], dict[str, Any]]) -> None:
    """A request that gets these emissions, one a step."""
    manager.open(ids(1), ignore)
    submit = sent[-1]
    assert isinstance(submit, Submit)
    for tokens, fields in emissions:
        manager.step(Step([Emission(submit.request, tokens, **fields)], Load(running=1, kv_cache_usage=0.5)))


async def until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def watched(
    body: Callable[[RequestManager, list[Message], Reporting, list[FrontendReport]], Coroutine[Any, Any, None]],
) -> None:
    async def run(manager: RequestManager, sent: list[Message]) -> None:
        reports: list[FrontendReport] = []
        await body(manager, sent, Reporting(manager, reports.append), reports)

    with_manager(run)


def test_rounds_and_ends_are_told_once_and_only_while_someone_watches() -> None:
    async def body(
        manager: RequestManager, sent: list[Message], reporting: Reporting, reports: list[FrontendReport]
    ) -> None:
        answered(manager, sent, ([5], {"finish_reason": "stop"}))
        assert manager.observers == []
        reporting.watch(0.4)
        hit = {"drafted": 4, "accepted": 2, "cache": "hit", "source": "draft"}
        answered(manager, sent, ([5], {}), ([6, 7, 8], hit), ([9], {"finish_reason": "length", "metrics": METRICS}))
        await until(lambda: manager.observers == [])
        rounds = [round for report in reports for round in report.rounds]
        told = [
            (round.tokens, round.drafted, round.accepted, round.cache, round.first, round.source) for round in rounds
        ]
        assert told == [(1, 0, 0, "", True, ""), (3, 4, 2, "hit", False, "draft"), (1, 0, 0, "", False, "")]
        (end,) = [end for report in reports for end in report.ended]
        assert (end.completion_tokens, end.reason, end.metrics) == (5, "length", METRICS)
        assert reports[-1].load.kv_cache_usage == 0.5
        before = len(reports)
        reporting.watch(0.4)
        await until(lambda: len(reports) > before + 1)
        assert not any(report.rounds for report in reports[before:])

    watched(body)


def test_who_goes_on_watching_is_told_without_a_gap() -> None:
    async def body(
        manager: RequestManager, sent: list[Message], reporting: Reporting, reports: list[FrontendReport]
    ) -> None:
        for _ in range(4):
            reporting.watch(0.3)
            assert manager.observers == [reporting]
            await asyncio.sleep(0.15)
        assert manager.observers == [reporting]

    watched(body)


def test_what_is_too_much_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_ROUNDS", 2)
    monkeypatch.setattr(module, "MAX_ENDED", 0)

    async def body(
        manager: RequestManager, sent: list[Message], reporting: Reporting, reports: list[FrontendReport]
    ) -> None:
        reporting.watch(0.3)
        answered(manager, sent, ([5], {}), ([6], {}), ([7], {}), ([8], {"finish_reason": "stop"}))
        await until(lambda: len(reports) > 1)
        assert (len(reports[1].rounds), len(reports[1].ended), reports[1].dropped) == (2, 0, 3)

    watched(body)


def test_the_line_in_the_log() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        line = LogLine(manager)
        last = {"drafted": 4, "accepted": 0, "cache": "late", "finish_reason": "stop"}
        hit = {"drafted": 4, "accepted": 2, "cache": "hit"}
        answered(manager, sent, ([5], {}), ([6, 7, 8], hit), ([9], last))
        expected = "2.5 tok/s, 1 running, 0 waiting, 1 ended, KV cache 50%, acceptance length 2.00, hit rate 50%"
        assert line.text(2.0) == expected

    with_manager(body)


def test_it_is_written_while_things_happen(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(module, "LOG_PERIOD_S", 0.02)
    caplog.set_level(logging.INFO, "ssd.frontend")

    async def body(manager: RequestManager, sent: list[Message]) -> None:
        LogLine(manager)
        for count in (1, 2):
            await asyncio.sleep(0.1)  # some periods in which nothing happens
            assert len(caplog.messages) == count - 1
            answered(manager, sent, ([5], {}))
            while len(caplog.messages) < count:
                await asyncio.sleep(0.01)
            assert "tok/s, 1 running" in caplog.messages[-1]

    with_manager(body)
