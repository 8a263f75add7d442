"""Clients of the gateway that do not read, leave, or ask for too much: what it costs them, and nobody else."""

from __future__ import annotations

import signal

import pytest

from ssd.errors import EngineDeadError
from ssd.frontend import gateway, request_manager
from ssd.ipc import sockets
from ssd.ipc.connection import Answer, Connection
from ssd.ipc.messages import Emission
from ssd.ipc.public import Cancel, Chunk, Describe, Description, Done, Failed, Generate, Message, pack
from tests.frontend.http_engine import http_engine
from tests.frontend.raw_client import FLOOD, RawClient, Setup, prompt, scripted_frontend
from tests.scripted_engine import engine_config, gateway_process, scripted_engine

FOR_EVER = 3600.0


def stuck_client(setup: Setup) -> tuple[RawClient, int]:
    """A client that can be sent nothing more, and its open request."""
    client = RawClient(setup.engine.address)
    client.stop_reading()
    client.send(prompt(1))
    return client, setup.engine.target.next_submit().request


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_refusal_takes_no_other_request_of_its_client_with_it() -> None:
    with scripted_frontend() as setup:
        for name in range(0, 40, 2):  # the two are usually read in the same turn
            setup.client.send(prompt(name, ""))
            setup.client.send(prompt(name + 1))
            assert setup.client.receive() == Failed(name, "invalid_request", "the prompt is empty")
            done = setup.client.ask(Cancel(name + 1))
            assert isinstance(done, Done) and done.id == name + 1


def test_refusals_that_nobody_reads_keep_no_others_back_and_hold_up_no_end() -> None:
    with scripted_frontend(max_open_requests=64) as setup:
        leaving, staying = RawClient(setup.engine.address), RawClient(setup.engine.address)
        for client in (leaving, staying):
            for name in range(FLOOD):
                client.send_frames(*pack(prompt(name, "")))
        client = setup.client
        assert client.ask(prompt(1, "")) == Failed(1, "invalid_request", "the prompt is empty")
        leaving.close()
        setup.engine.drain(FOR_EVER)
        assert setup.engine.status() == "stopped"
        staying.close()


# -- clients that do not read ---------------------------------------------------------------------------------------


def test_one_that_does_not_read_delays_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_AGAIN_S", FOR_EVER)
    with scripted_frontend() as setup:
        stuck, unread = stuck_client(setup)
        setup.client.send(prompt(1))
        read = setup.engine.target.next_submit().request
        for _ in range(3):
            setup.engine.target.step(Emission(unread, [28120]), Emission(read, [28120]))
            assert isinstance(setup.client.receive(), Chunk)
        stuck.close()


def test_so_many_tokens_may_be_unread_and_not_one_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_manager, "MAX_UNREAD", 200)
    with scripted_frontend() as setup:
        stuck, unread = stuck_client(setup)
        setup.engine.target.step(Emission(unread, [28120] * 150))
        setup.engine.target.step(Emission(unread, [28120] * 50))
        setup.client.send(prompt(1))
        read = setup.engine.target.next_submit().request
        setup.engine.target.step(Emission(read, [28120]))
        assert isinstance(setup.client.receive(), Chunk)
        setup.client.send(prompt(2))
        setup.engine.target.next_submit()  # comes after all that the steps before it have caused
        assert setup.engine.target.aborted == []
        setup.engine.target.step(Emission(unread, [28120]))
        setup.engine.target.wait_abort(unread)
        assert read in setup.engine.target.open
        while isinstance(answer := stuck.receive(), Description):
            pass
        assert (answer.id, answer.code) == (1, "slow_reader")
        stuck.close()


def test_so_long_may_they_be_unread() -> None:
    with scripted_frontend(slow_reader_seconds=0.3) as setup:
        stuck, unread = stuck_client(setup)
        setup.client.send(prompt(1))
        read = setup.engine.target.next_submit().request
        setup.engine.target.step(Emission(read, [28120]), Emission(unread, [28120]))
        setup.engine.target.wait_abort(unread)
        assert isinstance(setup.client.receive(), Chunk)
        assert setup.engine.target.open == {read}, "what has been delivered is not unread, however long ago"
        stuck.close()


def test_more_tokens_than_may_be_unread_may_come_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(request_manager, "MAX_UNREAD", 200)
    with scripted_frontend() as setup:
        setup.client.send(prompt(1))
        request = setup.engine.target.next_submit().request
        setup.engine.target.step(Emission(request, [28120] * 201))
        assert setup.client.receive().token_ids == [28120] * 201


def test_who_reads_outlives_a_stall_of_the_frontend() -> None:
    """Steps that have piled up do not count as unread before they can have been read."""
    with scripted_engine() as engine, gateway_process(engine, engine_config()) as process:
        engine.target.shake_hands()
        assert engine.status() == "ready"
        client = RawClient(engine.address)
        client.send(prompt(1))
        request = engine.target.next_submit().request
        process.send_signal(signal.SIGSTOP)
        for _ in range(500):
            engine.target.step(Emission(request, [28120] * 100))
        process.send_signal(signal.SIGCONT)
        engine.target.step(Emission(request, [], finish_reason="length"))
        tokens = 0
        while isinstance(answer := client.receive(), Chunk):
            tokens += len(answer.token_ids)
        assert isinstance(answer, Done) and tokens == 50_000
        client.close()


# -- clients that leave ---------------------------------------------------------------------------------------------


def test_one_that_leaves_while_its_requests_wait_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gateway, "_SILENCE_S", 0.05)
    with scripted_frontend() as setup:
        setup.client.send(prompt(7))
        kept = setup.engine.target.next_submit().request
        gone = RawClient(setup.engine.address)
        gone.send(prompt(1))
        lost = setup.engine.target.next_submit().request
        assert setup.client.receive_any() == Chunk(7, "", []), "a sign of life"
        gone.close()
        setup.engine.target.wait_abort(lost)
        assert setup.engine.target.open == {kept}


# -- clients that ask for too much ----------------------------------------------------------------------------------


def test_a_message_has_four_mebibytes_at_most() -> None:
    def sized(size: int) -> Message:
        return Generate(1, "x" * (size - len(pack(Generate(1, ""))[1]) - 4))  # a longer text has a longer length field

    assert len(pack(sized(sockets.PUBLIC_BYTES))[1]) == sockets.PUBLIC_BYTES == 4 * 2**20
    with scripted_frontend() as setup:
        connection = Connection(setup.engine.address)
        answer = asked(connection, sized(sockets.PUBLIC_BYTES))
        assert isinstance(answer, Failed) and answer.code == "context_length_exceeded"
        assert isinstance(asked(connection, sized(sockets.PUBLIC_BYTES + 1)), EngineDeadError)
        connection.close()
        assert isinstance(setup.client.ask(Describe()), Description)


def asked(connection: Connection, message: Message) -> Answer | EngineDeadError:
    while not connection.offer(message):
        connection.wait(sending=True, deadline=None)
    while (answer := connection.take()) is None:
        connection.wait(sending=False, deadline=None)
    return answer


def test_what_is_no_message_shows_in_the_metrics() -> None:
    with http_engine() as http:
        client = RawClient(http.engine.address)
        client.send_frames(b"no", b"message")
        assert isinstance(client.ask(Describe()), Description)
        assert b'\nssd:bad_frames_total{model_name="scripted"} 1.0\n' in http.ask("GET", "/metrics")[2]
        client.close()
