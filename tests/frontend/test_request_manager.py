"""The request manager alone in an event loop: what it admits, and what one request's end is to others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.engine import Limits, ServerConfig
from ssd.errors import RequestError
from ssd.frontend import admission, request_manager
from ssd.frontend.detokenization import Detokenizer
from ssd.frontend.http.endpoints import server_info
from ssd.frontend.request import Request
from ssd.frontend.request_manager import RequestManager
from ssd.frontend.text_jobs import Decode, Encode
from ssd.ipc.messages import Emission, Load, Step, Submit
from ssd.ipc.public import Chunk, Failed, Message
from tests.frontend.http_engine import http_engine
from tests.frontend.raw_client import ids, prompt
from tests.scripted_engine import PATIENCE_S, engine_config

LONG = "word " * 200  # within the context, and still to be encoded after a turn of the loop


def with_manager(body: Callable[[RequestManager, list[Message]], Coroutine[Any, Any, None]], **limits: Any) -> None:
    """Run `body` with a request manager that is ready, and what it sends to the target."""

    async def run() -> None:
        sent: list[Message] = []

        def send(message: Message) -> bool:
            sent.append(message)
            return True

        server = ServerConfig(names=("scripted",), limits=Limits(**limits))
        manager = RequestManager(engine_config(server=server), 1, send)
        await manager.texts.load()
        manager.target_back()
        await body(manager, sent)
        manager.texts.close()

    asyncio.run(asyncio.wait_for(run(), PATIENCE_S))


def ignore(request: Request) -> None:
    pass


def test_lookups_are_bounded_and_hold_up_no_admission() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        lookups = [
            asyncio.create_task(manager.texts.look_up(Encode("word " * 10_000))) for _ in range(admission._LOOKUPS)
        ]
        await asyncio.sleep(0)
        with pytest.raises(RequestError) as caught:
            await manager.texts.look_up(Encode("four"))
        assert caught.value.code == "overloaded"
        accepted = asyncio.Event()
        manager.open(prompt(1, "word"), lambda request: accepted.set())
        await accepted.wait()
        assert not all(lookup.done() for lookup in lookups)
        assert {found.count for found in await asyncio.gather(*lookups)} == {10_001}
        assert (await manager.texts.look_up(Decode([28120]))).text == "hello"

    with_manager(body)


def test_of_a_cancelled_prompt_nothing_is_kept_or_encoded() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        first = [manager.open(prompt(n, LONG), ignore) for n in range(4)]
        for request in first:
            manager.cancel(request)
        await asyncio.sleep(0)
        assert manager.open_requests == 0
        accepted = asyncio.Event()
        manager.open(prompt(4, LONG), lambda request: accepted.set())
        await accepted.wait()
        assert len(sent) == 1

    with_manager(body, max_open_requests=4)


def test_more_at_once_than_may_ever_be_open_is_refused_for_good() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        manager.check(4)
        manager.open(ids(1), ignore)
        for count, code in ((3, None), (4, "overloaded"), (5, "invalid_request")):
            if code is None:
                manager.check(count)
                continue
            with pytest.raises(RequestError) as caught:
                manager.check(count)
            assert caught.value.code == code

    with_manager(body, max_open_requests=4)


def test_a_bug_in_one_requests_tokens_ends_that_request_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    feed = Detokenizer.feed

    def broken(self: Detokenizer, token_ids: list[int], ended: bool = False) -> Any:
        if 13 in token_ids:
            raise ValueError("a bug")
        return feed(self, token_ids, ended)

    async def body(manager: RequestManager, sent: list[Message]) -> None:
        first, second = manager.open(ids(1), ignore), manager.open(ids(2), ignore)
        manager.step(Step([Emission(first.number, [13]), Emission(second.number, [28120])]))
        assert first.output.head == Failed(1, "internal_error", "the tokens could not be passed on")
        assert isinstance(second.output.head, Chunk)
        assert manager.open_requests == 1

    monkeypatch.setattr(Detokenizer, "feed", broken)
    with_manager(body)


def test_over_http_too_many_lookups_are_refused_for_now(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "_LOOKUPS", 0)
    with http_engine() as http:
        for path, body in (("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [5]})):
            status, answer = http.post(path, **body)
            assert (status, answer["error"]["code"]) == (429, "overloaded")


def test_what_the_target_had_begun_fails_with_it_and_the_rest_is_submitted_to_the_next() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        begun, waiting, cancelled = (manager.open(ids(n), ignore) for n in (1, 2, 3))
        manager.step(Step([Emission(begun.number, [28120])], Load(running=3)))
        submits = list(sent)
        manager.target_lost()
        assert (manager.state, manager.load.running) == ("restarting", 0)
        assert begun.ended and not waiting.ended
        with pytest.raises(RequestError) as caught:
            manager.check()
        assert caught.value.code == "restarting"
        manager.cancel(cancelled)
        sent.clear()
        manager.target_back()
        assert manager.state == "ready" and sent == [submits[1]]
        manager.step(Step([Emission(waiting.number, [28120], finish_reason="length")]))
        assert isinstance(waiting.output.head, Chunk) and waiting.output.head.token_ids == [28120]

    with_manager(body)


@pytest.mark.parametrize("draining", [False, True])
def test_a_prompt_that_was_encoded_while_there_was_no_target_is_submitted_once(draining: bool) -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        accepted = asyncio.Event()
        request = manager.open(prompt(1, LONG), lambda _: accepted.set())
        manager.target_lost()
        manager.state = "draining" if draining else manager.state
        await accepted.wait()
        assert sent == []
        manager.target_back()
        assert [message.request for message in sent if isinstance(message, Submit)] == [request.number]

    with_manager(body)


def test_submitting_again_waits_where_the_transport_is_full_and_forgets_nothing() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        requests = [manager.open(ids(n), ignore) for n in range(5)]
        send, room = manager._submissions.send, iter([True, False, False, True, False, True, True, True])
        manager._submissions.send = lambda message: next(room) and send(message)
        sent.clear()
        manager.target_lost()
        manager.target_back()
        while len(sent) < len(requests):
            await asyncio.sleep(0.001)
        assert [m.request for m in sent if isinstance(m, Submit)] == [request.number for request in requests]

    with_manager(body)


def test_a_target_lost_twice_gets_nothing_of_the_first_time() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        for n in range(3):
            manager.open(ids(n), ignore)
        send = manager._submissions.send
        manager._submissions.send = lambda message: False
        manager.target_lost()
        manager.target_back()
        manager.target_lost()
        manager._submissions.send = send
        sent.clear()
        await asyncio.sleep(3 * request_manager._AGAIN_S)
        assert sent == []
        manager.target_back()
        assert len(sent) == 3

    with_manager(body)


def test_a_request_that_two_targets_died_with_is_not_given_to_a_third() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        suspect = manager.open(ids(1), ignore)
        for ended in (False, True):
            assert not suspect.ended
            manager.target_lost()
            manager.target_lost()  # that of a target which never said hello
            assert suspect.ended is ended
            innocent = None if ended else manager.open
            manager.target_back()
            if innocent is not None:
                second = innocent(ids(2), ignore)
        assert isinstance(suspect.output.head, Failed) and suspect.output.head.code == "engine_restarted"
        assert not second.ended

    with_manager(body)


def test_without_a_target_in_a_drain_everyone_is_told_also_whose_prompt_is_being_encoded() -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        encoding, waiting = manager.open(prompt(1, LONG), ignore), manager.open(ids(2), ignore)
        manager.state = "draining"
        manager.target_lost()
        for request in (encoding, waiting):
            assert isinstance(request.output.head, Failed) and request.output.head.code == "engine_restarted"
        assert manager.open_requests <= 1, "what a worker has in its hands counts until it is done"

    with_manager(body)


@pytest.mark.parametrize(
    ("draft", "state", "said"),
    [
        (None, "down", "ready"),
        ("draft", "up", "ready"),
        ("draft", "parked", "ready"),
        ("draft", "open", "degraded"),
        ("draft", "down", "degraded"),
    ],
)
def test_an_engine_without_the_draft_it_should_have_is_degraded(draft: str | None, state: Any, said: str) -> None:
    async def body(manager: RequestManager, sent: list[Message]) -> None:
        manager.config = replace(manager.config, draft=draft)
        manager.step(Step([], Load(draft_state=state)))
        info = server_info(manager)
        assert (info["state"], info["draft_state"]) == (said, draft and state)
        manager.state = "draining"
        assert server_info(manager)["state"] == "draining"

    with_manager(body)
