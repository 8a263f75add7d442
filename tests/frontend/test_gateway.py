"""The real gateway between real sockets: a scripted target behind it, hand-made clients in front of it."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import pytest

from ssd.config.params import SamplingDefaults, SamplingParams, Speculation
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.messages import Emission
from ssd.ipc.public import (
    Cancel,
    Chunk,
    Describe,
    Description,
    Done,
    Failed,
    Generate,
    Metrics,
    TokenLogprob,
    Usage,
    pack,
)
from tests.frontend.raw_client import RawClient, Setup, prompt, scripted_frontend
from tests.scripted_engine import MODEL, engine_config, gateway_process, scripted_engine

TOKENIZER = Tokenizer(MODEL)


@pytest.fixture
def setup() -> Iterator[Setup]:
    with scripted_frontend() as setup:
        yield setup


# -- start and end --------------------------------------------------------------------------------------------------


def test_as_a_process_it_reports_ready_and_stopped_and_ends_with_its_parent() -> None:
    with scripted_engine() as engine:
        with gateway_process(engine, engine_config()) as process:
            engine.target.shake_hands()
            assert engine.status() == "ready"
            engine.drain()
            assert engine.status() == "stopped"
            assert process.poll() is None, "the supervisor ends it"
        assert process.returncode == 0


def test_it_may_have_as_many_connections_as_the_system_lets_it() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (200, hard))
    try:
        with scripted_engine() as engine, gateway_process(engine, engine_config()) as process:
            engine.target.shake_hands()
            assert engine.status() == "ready"
            now, _ = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert now == min(hard, 65536)


def test_drain_refuses_the_new_finishes_the_open_and_then_stops(setup: Setup) -> None:
    target = setup.engine.target
    setup.client.send(prompt(1))
    first = target.next_submit().request
    setup.engine.drain()
    setup.engine.drain()  # the supervisor repeats itself
    name = 2
    while not setup.client.answered:  # what the gateway reads before it reads the order is served like the first
        setup.client.send(prompt(name))
        while not setup.client.answered and len(target.open) < name:
            target.pump(10)
        name += 1
    refused = setup.client.receive()
    assert refused == Failed(refused.id, "shutting_down", "the engine is shutting down")
    target.step(*[Emission(request, [], finish_reason="length") for request in target.open - {first}])
    target.step(Emission(first, [28120], finish_reason="length"))
    answers = [setup.client.receive() for _ in range(refused.id)]
    assert [type(answer) for answer in answers] == [Done] * (refused.id - 2) + [Chunk, Done]
    assert setup.engine.status() == "stopped"


# -- requests -------------------------------------------------------------------------------------------------------


def test_a_request_is_tokenised_completed_and_streamed(setup: Setup) -> None:
    setup.client.send(prompt(5, "Why is the sky blue?", max_tokens=3))
    submit = setup.engine.target.next_submit()
    assert submit.token_ids == TOKENIZER.encode("Why is the sky blue?")
    assert submit.params.seed is not None
    assert submit.params.speculation == Speculation("ar")
    assert submit.request >> 32 == 7
    first, second = TOKENIZER.encode("Because"), TOKENIZER.encode(" light scatters")
    setup.engine.target.step(Emission(submit.request, first))
    assert setup.client.receive() == Chunk(5, "Because", first)
    metrics = Metrics(rounds=2)
    setup.engine.target.step(Emission(submit.request, second, finish_reason="length", metrics=metrics))
    assert setup.client.receive() == Chunk(5, " light scatters", second)
    usage = Usage(len(submit.token_ids), len(first + second))
    assert setup.client.receive() == Done(5, "length", "", submit.token_ids, usage, metrics)


def test_one_step_serves_many_requests_of_many_clients(setup: Setup) -> None:
    other = RawClient(setup.engine.address)
    for client in (setup.client, other):  # the same name twice: names belong to clients
        client.send(prompt(1))
        client.send(prompt(2))
    submits = [setup.engine.target.next_submit().request for _ in range(4)]
    assert len(set(submits)) == 4
    setup.engine.target.step(*[Emission(request, [28120], finish_reason="stop") for request in submits])
    for client in (setup.client, other):
        answers = [client.receive() for _ in range(4)]
        assert [type(answer) for answer in answers] == [Chunk, Done, Chunk, Done]
        assert {answer.id for answer in answers} == {1, 2}
    other.close()


def test_a_stop_string_across_tokens_cuts_text_ids_and_logprobs_and_ends_the_work(setup: Setup) -> None:
    ids = TOKENIZER.encode("one two. three four")
    cut = next(n for n in range(len(ids)) if "two. th" in TOKENIZER.decode(ids[:n]))
    setup.client.send(prompt(1, stop=("two. th",), logprobs=0))
    request = setup.engine.target.next_submit().request
    logprobs = [TokenLogprob(token, -1.0, []) for token in ids]
    setup.engine.target.step(Emission(request, ids[:1], logprobs[:1]))
    chunks = [setup.client.receive()]
    setup.engine.target.step(Emission(request, ids[1:], logprobs[1:], metrics=Metrics(rounds=2)))
    chunks.append(setup.client.receive())
    done = setup.client.receive()
    assert "".join(chunk.text for chunk in chunks) + done.text == "one "
    assert chunks[0].token_ids + chunks[1].token_ids == ids[:cut]
    assert chunks[0].logprobs + chunks[1].logprobs == logprobs[:cut]
    assert (done.finish_reason, done.usage.completion_tokens, done.metrics.rounds) == ("stop", cut, 2)
    setup.engine.target.wait_abort(request)


def test_text_held_back_comes_with_the_end(setup: Setup) -> None:
    setup.client.send(prompt(1, stop=("lazy dog",)))
    request = setup.engine.target.next_submit().request
    setup.engine.target.step(Emission(request, TOKENIZER.encode("the lazy"), finish_reason="length"))
    assert setup.client.receive().text == "the "
    done = setup.client.receive()
    assert (done.text, done.finish_reason) == ("lazy", "length")


def test_a_failure_in_the_target_fails_that_request_alone(setup: Setup) -> None:
    setup.client.send(prompt(1))
    setup.client.send(prompt(2))
    first, second = (setup.engine.target.next_submit().request for _ in range(2))
    setup.engine.target.step(Emission(first, [], finish_reason="error", error="not a number in the logits"))
    assert setup.client.receive() == Failed(1, "engine_error", "not a number in the logits")
    setup.engine.target.step(Emission(second, [28120], finish_reason="stop"))
    assert isinstance(setup.client.receive(), Chunk)
    assert setup.client.receive().finish_reason == "stop"


def test_describe(setup: Setup) -> None:
    assert setup.client.ask(Describe()) == Description(
        "scripted", ["scripted"], "", Speculation("ar"), 49152, 256, True, SamplingDefaults()
    )


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("request_", "code", "message"),
    [
        (Generate(1, ""), "invalid_request", "the prompt is empty"),
        (Generate(1, token_ids=[]), "invalid_request", "the prompt is empty"),
        (Generate(1, messages=[]), "invalid_request", "the prompt is empty"),
        (Generate(1), "invalid_request", "exactly one of prompt, token_ids and messages; got none"),
        (Generate(1, "a", [1]), "invalid_request", "got prompt, token_ids"),
        (Generate(1, token_ids=[49152]), "invalid_request", "token id 49152 is outside"),
        (Generate(1, token_ids=[5] * 256), "context_length_exceeded", "256 tokens; the context of 256 tokens"),
        (Generate(1, "a", params=SamplingParams(speculation=Speculation("ssd"))), "invalid_request", "needs a draft"),
        (
            Generate(1, "a", params=SamplingParams(speculation=Speculation(saguaro_c=0.5))),
            "invalid_request",
            "saguaro-c",
        ),
        (
            Generate(1, "a", params=SamplingParams(speculation=Speculation("ar", 4, (1, 2)))),
            "invalid_request",
            "fan-out lists 2 numbers",
        ),
    ],
)
def test_what_cannot_be_served_is_refused_with_a_reason(
    setup: Setup, request_: Generate, code: str, message: str
) -> None:
    answer = setup.client.ask(request_)
    assert isinstance(answer, Failed)
    assert answer.code == code
    assert message in answer.message
    assert not setup.engine.target.open


def test_an_open_name_cannot_be_used_again_until_it_ends(setup: Setup) -> None:
    setup.client.send(prompt(1))
    submit = setup.engine.target.next_submit()
    assert setup.client.ask(prompt(1)) == Failed(1, "invalid_request", "request 1 is already open")
    setup.engine.target.step(Emission(submit.request, [], finish_reason="stop"))
    assert isinstance(setup.client.receive(), Done)
    setup.client.send(prompt(1))
    assert setup.engine.target.next_submit().request != submit.request


# -- cancel, loss, garbage ------------------------------------------------------------------------------------------


def test_cancel_aborts_in_the_target_and_ends_the_request_once(setup: Setup) -> None:
    setup.client.send(prompt(1))
    request = setup.engine.target.next_submit().request
    setup.engine.target.step(Emission(request, [28120]))
    chunk = setup.client.receive()
    done = setup.client.ask(Cancel(1))
    assert (done.finish_reason, done.usage.completion_tokens) == ("abort", len(chunk.token_ids))
    setup.engine.target.wait_abort(request)
    setup.engine.target.step(Emission(request, [28120], finish_reason="length"))  # it had not read the abort yet
    setup.client.send(Cancel(1))
    assert isinstance(setup.client.ask(Describe()), Description), "nothing else came for request 1"


def test_a_client_that_is_gone_frees_its_requests_and_disturbs_no_other(setup: Setup) -> None:
    gone = RawClient(setup.engine.address)
    gone.send(prompt(1))
    gone.send(prompt(2))
    lost = [setup.engine.target.next_submit().request for _ in range(2)]
    setup.client.send(prompt(1))
    kept = setup.engine.target.next_submit().request
    gone.close()
    while not setup.engine.target.aborted:
        setup.engine.target.step(Emission(lost[0], [28120]), Emission(kept, [28120]))
        assert isinstance(setup.client.receive(), Chunk)
        setup.engine.target.pump()
    setup.engine.target.wait_abort(lost[1])
    setup.engine.target.step(Emission(kept, [], finish_reason="stop"))
    while isinstance(answer := setup.client.receive(), Chunk):
        pass
    assert answer.finish_reason == "stop"


def test_an_emission_for_a_request_nobody_waits_for_is_aborted_again(setup: Setup) -> None:
    setup.engine.target.step(Emission(12345, [1]))
    setup.engine.target.wait_abort(12345)


def test_bad_frames_from_clients_and_target_are_counted_and_dropped(setup: Setup) -> None:
    header = pack(Describe())[0]
    bombs = [
        (b"",),
        (b"x",),
        (header,),
        (header, b""),
        (header, b"\xc1"),
        (header, b"\x91" * 5000),
        (header, pack(Done(1, "stop", "", [], Usage(0, 0), Metrics()))[1]),
        (header, pack(Generate(-1, "a"))[1]),
        (header, pack(Generate(1, "a", params=SamplingParams(temperature=float("nan"))))[1]),
        (b"SSD\xff\0\0\0\0", pack(Describe())[1]),
        (header, pack(Describe())[1], b"more"),
        (header, b"\x80\x04\x95."),
    ]
    for bomb in bombs:
        setup.client.send_frames(*bomb)
    setup.client.send(prompt(1))
    request = setup.engine.target.next_submit().request
    assert setup.frontend.manager.bad_frames == len(bombs)
    setup.engine.target.garbage(b"nonsense")
    setup.engine.target.garbage(header, b"\xc1")
    setup.engine.target.step(Emission(request, [28120], finish_reason="stop"))
    assert isinstance(setup.client.receive(), Chunk)
    assert isinstance(setup.client.receive(), Done)
    assert setup.frontend.manager.bad_frames == len(bombs) + 2
