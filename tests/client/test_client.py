"""Both clients, which differ only in how they wait, against the real gateway with a scripted target behind it."""

from __future__ import annotations

import gc
import itertools
import signal
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import zmq
from msgspec.structs import replace

from ssd.client import Client, Completion, StreamChunk
from ssd.client.inboxes import MAX_UNREAD
from ssd.config.params import SamplingDefaults, SamplingParams
from ssd.errors import EngineDeadError, RequestError, RequestTimeoutError, UsageError
from ssd.frontend import gateway
from ssd.ipc import sockets
from ssd.ipc.messages import Emission, Submit
from ssd.ipc.public import ChatMessage, TokenLogprob
from tests.client.serving import TOKENIZER, LoopClient, echo, endless, serving, wait_until
from tests.scripted_engine import (
    ScriptedEngine,
    engine_config,
    following,
    gateway_process,
    gateway_thread,
    scripted_engine,
)


@pytest.fixture(params=[Client, LoopClient])
def connect(request: pytest.FixtureRequest) -> type[Client]:
    kind: type[Client] = request.param
    return kind


@pytest.fixture(scope="module")
def echoing() -> Iterator[ScriptedEngine]:
    with serving(echo) as engine:
        yield engine


@pytest.fixture
def client(connect: type[Client], echoing: ScriptedEngine) -> Iterator[Client]:
    with connect(echoing.address) as client:
        yield client


def test_a_stream_yields_the_rounds_and_then_the_completion(client: Client) -> None:
    ids = TOKENIZER.encode("one two three four five")
    *chunks, last = client.stream("one two three four five")
    assert [token for chunk in chunks for token in chunk.token_ids] == ids
    assert "".join(chunk.text for chunk in chunks) == "one two three four five"
    assert last.completion is not None
    assert last.completion.text == "one two three four five"
    assert last.completion.token_ids == last.completion.prompt_token_ids == ids
    assert (last.completion.finish_reason, last.completion.metrics.rounds) == ("length", 3)
    assert last.completion.logprobs is None


def test_chats_and_token_ids_stream_too(client: Client) -> None:
    messages = [ChatMessage("user", "hi")]
    *_, last = client.stream(messages)
    assert last.completion and last.completion.token_ids == TOKENIZER.encode_chat(messages)
    *_, last = client.stream([7, 8, 9])
    assert last.completion and last.completion.token_ids == [7, 8, 9]


def test_streams_of_one_client_may_be_read_alternately(client: Client) -> None:
    pairs = list(itertools.zip_longest(client.stream("a b c d"), client.stream("1 2 3 4")))
    assert "".join(a.text for a, _ in pairs if a) == "a b c d"
    assert "".join(b.text for _, b in pairs if b) == "1 2 3 4"


def test_one_prompt_gives_one_completion(client: Client) -> None:
    completion = client.generate("one two", SamplingParams(max_tokens=1))
    assert isinstance(completion, Completion)
    assert (completion.text, completion.usage.completion_tokens) == ("one", 1)


def test_a_batch_larger_than_the_window_comes_back_in_input_order(client: Client) -> None:
    prompts = ["word " * (1 + n % 5) + str(n) for n in range(1500)]
    assert [completion.text for completion in client.generate(prompts)] == prompts


def test_a_batch_takes_token_ids_chats_and_parameters_for_each(client: Client) -> None:
    assert [c.token_ids for c in client.generate([[1, 2], [3, 4, 5]])] == [[1, 2], [3, 4, 5]]
    (chat,) = client.generate(["hi"], chat=True)
    assert chat.token_ids == TOKENIZER.encode_chat([ChatMessage("user", "hi")])
    params = [SamplingParams(max_tokens=n) for n in (1, 3)]
    assert [len(c.token_ids) for c in client.generate([[1, 2, 3, 4]] * 2, params)] == [1, 3]
    with pytest.raises(ValueError, match="2 prompts, but 1"):
        client.generate(["a", "b"], [SamplingParams()])
    assert client.generate([]) == []


def test_logprobs_come_with_every_token_when_asked_for(connect: type[Client]) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        for token in submit.token_ids:
            yield Emission(submit.request, [token], [TokenLogprob(token, -0.5, [(1, -2.0)])])
        yield Emission(submit.request, [], finish_reason="length")

    with serving(script) as engine, connect(engine.address) as client:
        completion = client.generate("one two", SamplingParams(logprobs=1))
        assert completion.logprobs is not None
        assert [entry.token_id for entry in completion.logprobs] == completion.token_ids
        assert completion.prompt_logprobs is None


def test_logprobs_of_the_prompt_come_with_the_first_chunk(connect: type[Client]) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        entries = [TokenLogprob(token, -0.5, []) for token in submit.token_ids[1:]]
        yield Emission(submit.request, [28120], prompt_logprobs=entries)
        yield Emission(submit.request, [28120], finish_reason="length")

    with serving(script) as engine, connect(engine.address) as client:
        first, *others, last = client.stream("one two three", SamplingParams(prompt_logprobs=0))
        assert last.completion is not None
        assert first.prompt_logprobs == last.completion.prompt_logprobs
        assert first.prompt_logprobs is not None and all(chunk.prompt_logprobs is None for chunk in others)
        assert [entry.token_id for entry in first.prompt_logprobs] == last.completion.prompt_token_ids[1:]


def test_signs_of_life_are_no_part_of_an_answer(connect: type[Client], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_SILENCE_S", 0.02)

    def script(submit: Submit) -> Iterator[Emission]:
        for _ in range(200):  # rounds of others
            yield Emission(submit.request, [])
        yield from echo(submit)

    with serving(script) as engine, connect(engine.address) as client:
        *chunks, last = client.stream("one two three")
        assert all(chunk.token_ids for chunk in chunks)
        assert last.completion is not None and last.completion.text == "one two three"


def test_describe_tells_what_is_served(client: Client) -> None:
    description = client.describe()
    assert (description.model, description.max_model_len, description.chat) == ("scripted", 256, True)


def test_without_parameters_the_engine_samples_as_the_model_says_and_given_ones_are_literal(
    connect: type[Client],
) -> None:
    submitted: list[SamplingParams] = []

    def script(submit: Submit) -> Iterator[Emission]:
        submitted.append(submit.params)
        return echo(submit)

    defaults, hello = (
        SamplingDefaults(temperature=0.6, top_k=20, repetition_penalty=1.1),
        {"role": "user", "content": "hi"},
    )
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine())
        stack.enter_context(gateway_thread(engine, engine_config(sampling=defaults)))
        stack.enter_context(following(engine, script))
        client = stack.enter_context(connect(engine.address))
        own = client.get_default_sampling_params()
        assert own == SamplingParams(0.6, 20, repetition_penalty=1.1)
        asked = client.get_default_sampling_params(max_tokens=3, temperature=0)
        assert asked == SamplingParams(0, 20, repetition_penalty=1.1, max_tokens=3)
        for params, expected in ((None, own), (asked, asked), (SamplingParams(), SamplingParams())):
            submitted.clear()
            list(client.stream("a", params))
            list(client.stream([hello], params))
            client.generate("a", params)
            client.generate(["a", [7]], params)
            client.chat([hello], params)
            client.chat([[hello], [ChatMessage("user", "ho")]], params)
            found = [replace(each, seed=None, speculation=None) for each in submitted]
            assert found == [expected] * 8


def test_a_chat_is_one_conversation_or_several(client: Client) -> None:
    hi, ho = ChatMessage("user", "hi"), {"role": "user", "content": "ho"}
    single, both = client.chat([hi]), client.chat([[hi], [ho]])
    assert isinstance(single, Completion) and single.token_ids == TOKENIZER.encode_chat([hi])
    assert [each.token_ids for each in both] == [TOKENIZER.encode_chat([m]) for m in (hi, ChatMessage("user", "ho"))]
    with pytest.raises(UsageError, match="a message of a chat has a role and a content"):
        next(client.stream([{"role": "cook", "content": "x"}]))


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("prompts", "params", "words"),
    [
        ([1, 2, 3], None, "a prompt is a text, token ids or a conversation, not int; a batch is a list of them"),
        ([{"role": "user", "content": "hi"}], None, "not dict; a batch is a list of them"),
        ("hi", {"max_tokens": 3}, "params is a SamplingParams, not dict"),
    ],
)
def test_other_types_are_named(client: Client, prompts: Any, params: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        client.generate(prompts, params)


@pytest.mark.parametrize(
    ("prompt", "params", "code", "message"),
    [
        ("", SamplingParams(), "invalid_request", "empty"),
        ("word " * 300, SamplingParams(), "context_length_exceeded", "context of 256"),
        ("a", SamplingParams(temperature=float("nan")), "invalid_request", "temperature is not a number"),
        ("a", SamplingParams(temperature="warm"), "invalid_request", "temperature"),  # type: ignore[arg-type]
        ("a", SamplingParams(max_tokens=0), "invalid_request", "max_tokens"),
        ("a", SamplingParams(top_p=0.0), "invalid_request", "top_p"),
        ("\udcff", SamplingParams(), "invalid_request", "surrogates"),
        ([-1], SamplingParams(), "invalid_request", "token_ids"),
        ("a" * 2**22, SamplingParams(), "invalid_request", "bytes"),
    ],
)
def test_bad_requests_are_refused_and_the_client_goes_on(
    client: Client, prompt: str | list[int], params: SamplingParams, code: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        client.generate([prompt], params)
    assert caught.value.code == code
    assert client.generate("fine").text == "fine"


def test_one_failure_in_a_batch_is_raised_and_the_rest_is_cancelled(connect: type[Client]) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        if submit.token_ids == [13]:
            return iter([Emission(submit.request, [], finish_reason="error", error="broken row")])
        return endless(submit)

    with serving(script) as engine, connect(engine.address) as client:
        with pytest.raises(RequestError, match="broken row") as caught:
            client.generate([[13], [1], [2]])
        assert caught.value.code == "engine_error"
        client.describe()  # the gateway has read the cancels
        wait_until(lambda: len(set(engine.target.aborted)) == 2)


def test_closing_a_stream_early_cancels_its_request(connect: type[Client]) -> None:
    with serving(endless) as engine, connect(engine.address) as client:
        stream = client.stream("a")
        assert set(next(stream).token_ids) == {28120}
        stream.close()
        wait_until(lambda: len(set(engine.target.aborted)) == 1)
        assert set(next(client.stream("b")).token_ids) == {28120}


def test_closing_the_client_frees_its_requests(connect: type[Client]) -> None:
    with serving(endless) as engine:
        client = connect(engine.address)
        stream = client.stream("a")
        next(stream)
        client.close()
        client.close()
        stream.close()
        with pytest.raises(EngineDeadError, match="this client is closed"):
            client.generate("b")
        wait_until(lambda: len(set(engine.target.aborted)) == 1)


def test_no_engine_at_all_is_told(connect: type[Client]) -> None:
    with pytest.raises(EngineDeadError, match=r"no engine answers at ipc:///tmp/ssd-nowhere.* \(waited 0.2 s\)"):
        connect("ipc:///tmp/ssd-nowhere/client.sock", timeout=0.2)
    with pytest.raises(UsageError, match="no address"):
        connect("nonsense")


def test_something_that_is_no_engine_is_told(connect: type[Client]) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        address = f"ipc://{directory}/other.sock"
        router = sockets.router(context, address)
        with pytest.raises(EngineDeadError, match="does not answer as an engine"):
            connect(address, timeout=0.2)
        assert router.poll(0), "the question was asked"
        context.destroy(linger=0)


def test_an_engine_killed_under_a_stream_is_told_and_what_it_sent_is_delivered(connect: type[Client]) -> None:
    with scripted_engine() as engine, gateway_process(engine, engine_config()) as process:
        engine.target.shake_hands()
        assert engine.status() == "ready"
        client = connect(engine.address, timeout=1.0)
        received: list[str] = []
        failures: list[str] = []

        def read() -> None:
            try:
                received.extend(chunk.text for chunk in client.stream("a"))
            except EngineDeadError as error:
                failures.append(str(error))

        thread = threading.Thread(target=read)
        thread.start()
        request = engine.target.next_submit().request
        engine.target.step(Emission(request, TOKENIZER.encode("one")))
        wait_until(lambda: received)
        process.send_signal(signal.SIGKILL)
        thread.join()
        assert received == ["one"]
        assert failures == [f"the engine at {engine.address} went away"]
        with pytest.raises(EngineDeadError, match="no engine answers"):
            client.generate("again")
        client.close()


def test_answers_sent_before_the_engine_went_are_not_lost(connect: type[Client]) -> None:
    with scripted_engine() as engine, ExitStack() as stack:
        stack.enter_context(gateway_thread(engine, engine_config()))
        stack.enter_context(following(engine, echo))
        with connect(engine.address, timeout=1.0) as client:
            stream = client.stream("one two three four five six seven")
            first = next(stream).text
            wait_until(lambda: not engine.target.open)  # the target has said everything
            stack.close()  # the gateway drains and goes
            rest = "".join(chunk.text for chunk in stream)
            assert first + rest == "one two three four five six seven"


# -- time and loss --------------------------------------------------------------------------------------------------


def test_a_request_that_takes_too_long_is_cancelled(connect: type[Client]) -> None:
    with serving(endless) as engine, connect(engine.address, request_timeout=0.2) as client:
        stream = client.stream("a")
        received = []
        with pytest.raises(RequestTimeoutError) as caught:
            for chunk in stream:
                received.append(chunk)
        assert caught.value.code == "timeout"
        assert received, "what came in time was delivered"
        with pytest.raises(RequestTimeoutError):
            client.generate(["b", "c"], timeout=0.1)
        wait_until(lambda: len(set(engine.target.aborted)) == 3)
        client.describe()


def test_time_that_is_enough_changes_nothing(client: Client) -> None:
    assert client.generate("one two", timeout=60).text == "one two"
    assert "".join(chunk.text for chunk in client.stream("one two", timeout=60)) == "one two"


def test_a_silent_engine_is_waited_for_as_long_as_a_request_may_take(connect: type[Client]) -> None:
    with serving(lambda submit: iter(())) as engine, connect(engine.address) as client:
        with pytest.raises(RequestTimeoutError):
            client.generate("a", timeout=0.1)
        wait_until(lambda: engine.target.aborted)


def test_a_client_goes_on_with_the_next_engine_at_its_address(connect: type[Client]) -> None:
    with scripted_engine() as engine:
        with gateway_process(engine, engine_config()) as process:
            engine.target.shake_hands()
            assert engine.status() == "ready"
            client = connect(engine.address, timeout=1.0)
            streams = [client.stream("a"), client.stream("b")]
            for stream in streams:
                begin(stream, engine)
            process.send_signal(signal.SIGKILL)
            process.wait()
        engine.notice()
        for stream in streams:
            with pytest.raises(EngineDeadError, match="went away"):
                next(stream)
        with pytest.raises(EngineDeadError, match="no engine answers"):
            client.generate("too early")
        engine.close()
        after = ScriptedEngine(engine.directory)
        with gateway_thread(after, engine_config(target_name="the next one")):
            with following(after, echo):
                assert client.describe().model == "the next one"
                assert client.generate("one two").text == "one two"
            assert after.target.aborted == [], "nothing of the old requests has crossed"
            client.close()
        after.close()


def test_a_forgotten_client_leaves_like_a_closed_one() -> None:
    with serving(endless) as engine:
        client = Client(engine.address)
        stream = client.stream("a")
        next(stream)
        del client, stream
        gc.collect()
        wait_until(lambda: engine.target.aborted)


def begin(stream: Iterator[StreamChunk], engine: ScriptedEngine) -> None:
    """Read one token, which the engine emits meanwhile."""
    emit = threading.Thread(target=lambda: engine.target.step(Emission(engine.target.next_submit().request, [28120])))
    emit.start()
    assert next(stream).token_ids == [28120]
    emit.join()


# -- back-pressure --------------------------------------------------------------------------------------------------


def test_a_stream_left_unread_while_another_is_read_ends_as_a_slow_reader(connect: type[Client]) -> None:
    with serving(endless) as engine, connect(engine.address) as client:
        left, read = client.stream("a"), client.stream("b")
        next(left)
        for _ in read:
            if engine.target.aborted:
                break
        unread = 0
        with pytest.raises(RequestError, match="unread in this client") as caught:
            for chunk in left:
                unread += len(chunk.token_ids)
                assert unread <= MAX_UNREAD
        assert caught.value.code == "slow_reader"
        assert set(next(read).token_ids) == {28120}, "the other goes on"
        read.close()


def test_completions_may_be_of_any_length_while_others_are_waited_for(connect: type[Client]) -> None:
    def script(submit: Submit) -> Iterator[Emission]:
        for _ in range(50):
            yield Emission(submit.request, [28120] * 100)
        yield Emission(submit.request, [], finish_reason="length")

    with serving(script) as engine, connect(engine.address) as client:
        completions = client.generate(["a", "b"])
        assert [len(completion.token_ids) for completion in completions] == [5000, 5000]


def test_what_nobody_reads_stays_with_the_engine_which_aborts_it(connect: type[Client]) -> None:
    with ExitStack() as stack:
        engine = stack.enter_context(scripted_engine())
        stack.enter_context(gateway_thread(engine, engine_config()))
        client = stack.enter_context(connect(engine.address))
        stream = client.stream("a")
        begin(stream, engine)
        (request,) = engine.target.open
        while not engine.target.aborted:
            engine.target.step(*[Emission(request, [28120])] * 100)
            engine.target.pump(1)
        with pytest.raises(RequestError, match=r"the client did not read|lay unread") as caught:
            for _ in stream:
                pass
        assert caught.value.code == "slow_reader"
