"""What answers count and repeat, and requests that end before they have begun."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import re
import signal
from itertools import chain
from typing import Any

import pytest

from ssd.config.params import SamplingParams
from ssd.errors import RequestError
from ssd.frontend.admission import checked_ids, most_scored
from ssd.frontend.http import exchange
from ssd.frontend.http.connection import HttpConnection
from ssd.frontend.http.exchange import Gone
from ssd.frontend.http.generation import Generation
from ssd.frontend.request import Request
from ssd.frontend.request_manager import RequestManager
from ssd.ipc import sockets
from ssd.ipc.messages import Emission, Step
from ssd.ipc.public import Generate, TokenLogprob, pack
from tests.frontend.http_engine import HttpEngine, answering, http_engine
from tests.frontend.test_gateway import TOKENIZER
from tests.scripted_engine import engine_config, text_processes

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
BODY = {"model": "scripted", "prompt": "a", "max_tokens": 4}
IDS = TOKENIZER.encode("one two three")


# -- seeds and sums -------------------------------------------------------------------------------------------------


def test_without_a_seed_every_prompt_and_choice_has_its_own(scripted: HttpEngine) -> None:
    connection = scripted.begin(COMPLETIONS, prompt=["a", "a"], n=2)
    seeds = {scripted.engine.target.next_submit().params.seed for _ in range(4)}
    assert len(seeds) == 4
    connection.close()


def test_a_prompt_counts_once_and_so_does_what_was_cached_of_it(http: HttpEngine) -> None:
    _, answer = http.post(COMPLETIONS, **BODY | {"prompt": ["a", "a b"], "n": 3})
    assert answer["usage"]["prompt_tokens"] == len(TOKENIZER.encode("a")) + len(TOKENIZER.encode("a b"))
    assert answer["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    assert answer["usage"]["completion_tokens"] == 6 * len(IDS)
    assert answer["usage"]["completion_tokens_details"]["accepted_prediction_tokens"] == 6 * 4


def test_no_tokens_are_no_tokens(http: HttpEngine) -> None:
    body = BODY | {"prompt": "Why?", "max_tokens": 0, "echo": True, "return_token_ids": True}
    _, answer = http.post(COMPLETIONS, **body)
    (choice,) = answer["choices"]
    assert (choice["text"], choice["token_ids"], choice["finish_reason"]) == ("Why?", [], "length")
    prompt = len(TOKENIZER.encode("Why?"))
    assert [answer["usage"][f"{name}_tokens"] for name in ("prompt", "completion", "total")] == [prompt, 0, prompt]


def test_a_stop_string_waits_for_enough_tokens(http: HttpEngine) -> None:
    for enough, text in ((0, "one "), (1, "one "), (2, "one two three")):
        _, answer = http.post(COMPLETIONS, **BODY | {"stop": "two", "min_tokens": enough})
        assert answer["choices"][0]["text"] == text


def test_the_end_token_has_no_log_probability_in_a_chat(scripted: HttpEngine) -> None:
    """Usage and ids count it as before, and completions show it."""
    for stream in (False, True):
        for path, body, count in (
            (CHATS, {"messages": [{"role": "user", "content": "Why?"}], "logprobs": True}, 2),
            (COMPLETIONS, {"prompt": "Why?", "logprobs": 0}, 3),
        ):
            connection = scripted.begin(path, **body, stream=stream, return_token_ids=True, max_tokens=9)
            request = scripted.engine.target.next_submit().request
            for ids, reason in (([35], None), ([28120, 2], "stop")):
                entries = [TokenLogprob(token, -0.5, []) for token in ids]
                scripted.engine.target.step(Emission(request, ids, entries, reason))  # type: ignore[arg-type]
            content = connection.getresponse().read().decode()
            events = [json.loads(event) for event in re.findall(r"^(?:data: )?({.*})$", content, re.MULTILINE)]
            shown = [event["choices"][0].get("logprobs") or {} for event in events]
            assert sum(len(each.get("content", each.get("tokens", ()))) for each in shown) == count
            assert [i for event in events for i in event["choices"][0].get("token_ids", ())] == [35, 28120, 2]


# -- echoes ---------------------------------------------------------------------------------------------------------


def test_a_text_is_echoed_as_it_was_sent(http: HttpEngine) -> None:
    text = "<|im_start|>Why?<|im_end|>"
    _, answer = http.post(COMPLETIONS, **BODY | {"prompt": text, "echo": True, "logprobs": 0})
    (choice,) = answer["choices"]
    assert choice["text"] == text + TOKENIZER.decode(IDS)
    assert "".join(choice["logprobs"]["tokens"]).startswith(text)


def test_ids_are_echoed_as_their_text(http: HttpEngine) -> None:
    _, answer = http.post(COMPLETIONS, **BODY | {"prompt": TOKENIZER.encode("Why?"), "echo": True})
    assert answer["choices"][0]["text"] == "Why?" + TOKENIZER.decode(IDS)


def test_a_tokenizer_of_another_model_is_named_as_the_cause() -> None:
    config = engine_config(vocab_size=2)
    with pytest.raises(RequestError, match="the tokenizer beside the model does not match it"):
        checked_ids([2], 1, Generate(0, "Why?"), config)
    with pytest.raises(RequestError, match=r"of 2 tokens$"):
        checked_ids([2], 1, Generate(0, token_ids=[2]), config)


@pytest.mark.parametrize("alternatives", [0, 1, 20])
def test_a_prompt_with_log_probabilities_half_fills_a_message_at_most(alternatives: int) -> None:
    config = engine_config(max_model_len=2**20, num_pages=2**16, vocab_size=2**31 - 1)
    most = most_scored(alternatives)

    def ask(length: int) -> list[int]:
        message = Generate(0, token_ids=[5] * length, params=SamplingParams(prompt_logprobs=alternatives))
        return checked_ids([5] * length, length, message, config)

    assert len(ask(most)) == most
    with pytest.raises(RequestError, match=f"{most + 1} tokens.* at most {most}"):
        ask(most + 1)
    entry = TokenLogprob(2**31 - 1, -1.5, [(2**31 - 1, -1.5)] * alternatives)
    step = Step([Emission(2**63 - 1, [], prompt_logprobs=[entry] * most)])
    assert 0.8 < len(pack(step)[1]) / (sockets.INTERNAL_BYTES / 2) <= 1


def test_a_prompt_that_is_too_long_to_be_echoed_with_log_probabilities_is_refused() -> None:
    length = most_scored(20) + 1
    with http_engine(max_model_len=65536, num_pages=4096) as engine, answering(engine, [5]):
        body = BODY | {"prompt": [5] * length, "echo": True, "max_tokens": 1}
        assert engine.post(COMPLETIONS, **body)[0] == 200
        status, answer = engine.post(COMPLETIONS, **body, logprobs=20)
        assert (status, answer["error"]["param"]) == (400, "prompt")
        assert "log-probabilities with 20 alternatives" in answer["error"]["message"]


# -- ends before the beginning --------------------------------------------------------------------------------------


@pytest.mark.parametrize("stream", [True, False])
def test_a_drain_ends_a_request_whose_prompt_is_still_being_encoded(stream: bool) -> None:
    with http_engine() as engine:
        for pid in text_processes():
            os.kill(pid, signal.SIGSTOP)
        connection = engine.begin(COMPLETIONS, prompt="Why?", stream=stream)
        while not json.loads(engine.ask("GET", "/server_info")[2])["requests"]["open"]:
            pass
        engine.engine.drain(0.1)
        answer = connection.getresponse()
        content = answer.read().decode()
        assert answer.status == 200 and '"finish_reason":"abort"' in content
        assert not stream or content.endswith("data: [DONE]\n\n")


def test_a_bug_in_opening_a_choice_ends_those_that_are_open(
    scripted: HttpEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = RequestManager.open

    def only_once(self: RequestManager, message: Generate, *more: Any, **named: Any) -> Request:
        if message.id == 1:
            raise ValueError("a bug")
        return opened(self, message, *more, **named)

    monkeypatch.setattr(RequestManager, "open", only_once)
    connection = scripted.begin(COMPLETIONS, n=2, prompt=[5])
    request = scripted.engine.target.next_submit().request
    answer = connection.getresponse()
    assert (answer.status, json.loads(answer.read())["error"]["code"]) == (500, "internal_error")
    scripted.engine.target.wait_abort(request)


def test_speculation_may_be_switched_off_where_there_is_none(http: HttpEngine) -> None:
    assert http.post(COMPLETIONS, **BODY, speculative={"enabled": False})[0] == 200


def test_the_server_is_done_with_what_it_has_answered(http: HttpEngine) -> None:
    gc.collect()
    gc.disable()
    try:
        for stream in (True, False, True, False):
            assert http.ask("POST", COMPLETIONS, BODY | {"stream": stream})[0] == 200
        # Without the garbage collector; the end of the last may still be on its way.
        left = [one for one in gc.get_objects() if isinstance(one, HttpConnection | Generation | Request)]
        assert len(left) <= 3
    finally:
        gc.enable()


# -- large ones -----------------------------------------------------------------------------------------------------

LONG = list(range(300, 500))


@pytest.mark.parametrize("body", [{"logprobs": 3}, {"logprobs": 3, "echo": True}, {"logprobs": 0}], ids=str)
def test_a_large_completion_is_made_of_what_a_stream_brings(body: dict[str, object]) -> None:
    with http_engine() as engine, answering(engine, LONG):
        asked = BODY | body | {"prompt": LONG[:20], "max_tokens": 200, "n": 2}
        _, answer = engine.post(COMPLETIONS, **asked)
        events = engine.events(COMPLETIONS, **asked | {"echo": False})
    for index, choice in enumerate(answer["choices"]):
        told = [event["choices"][0] for event in events if event["choices"][0]["index"] == index]
        before = 20 if body.get("echo") else 0
        for name in ("tokens", "token_logprobs", "top_logprobs"):
            parts = [each["logprobs"][name] for each in told if each["logprobs"]]
            whole = choice["logprobs"][name]
            assert (whole and whole[before:]) == (None if parts[0] is None else list(chain.from_iterable(parts))), name
        assert len(choice["logprobs"]["tokens"]) == len(choice["logprobs"]["text_offset"]) == before + 200


def test_a_large_chat_is_made_of_what_a_stream_brings() -> None:
    with http_engine() as engine, answering(engine, LONG):
        asked = {"model": "scripted", "messages": [{"role": "user", "content": "Why?"}]}
        asked |= {"logprobs": True, "top_logprobs": 3}
        _, answer = engine.post(CHATS, **asked)
        events = engine.events(CHATS, **asked)
    told = [event["choices"][0]["logprobs"] for event in events]
    (choice,) = answer["choices"]
    assert choice["logprobs"]["content"] == [entry for each in told if each for entry in each["content"]]
    assert len(choice["logprobs"]["content"]) == 200


class Making:
    """Large answers without a request, and who had a turn: each item that was made, and "other" for the rest."""

    def __init__(self) -> None:
        self.turns: list[str] = []
        self._lock = asyncio.Lock()

    def answer(self) -> Generation:
        return Generation(None, None, None, [], self._lock)  # type: ignore[arg-type]

    async def make(self, answer: Generation, items: int) -> list[int]:
        def double(item: int) -> int:
            self.turns.append("item")
            return 2 * item

        return [int(bytes(made)) for made in await answer._each(double, range(items))]

    async def others(self) -> None:
        while True:
            self.turns.append("other")
            await asyncio.sleep(0)


def test_others_have_their_turn_while_large_answers_are_made() -> None:
    making = Making()

    async def play() -> None:
        others = asyncio.create_task(making.others())
        made = await asyncio.gather(*[making.make(making.answer(), 1000) for _ in range(5)])
        others.cancel()
        assert made == [[2 * item for item in range(1000)]] * 5

    asyncio.run(play())
    stretches = [len(stretch) for stretch in "".join(turn[0] for turn in making.turns).split("o")]
    assert sum(stretches) == 5000
    # The first pieces, with which small answers end, come at once.
    assert max(stretches) <= 5 * 64 and sorted(stretches)[-2] <= 64


def test_an_answer_is_not_made_for_a_client_that_has_left() -> None:
    making = Making()
    answer = making.answer()

    async def play() -> None:
        made = asyncio.create_task(making.make(answer, 1000))
        await asyncio.sleep(0)
        answer._left()
        with pytest.raises(Gone):
            await made

    asyncio.run(play())
    assert len(making.turns) < 1000


@pytest.mark.parametrize("size", [1, 10])
def test_an_answer_in_several_parts_arrives_whole(http: HttpEngine, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "_PART", size)
    _, answer = http.post(COMPLETIONS, **BODY | {"max_tokens": 100})
    assert answer["choices"][0]["text"] == TOKENIZER.decode(IDS)
    assert http.ask("GET", "/health")[::2] == (200, b"")
