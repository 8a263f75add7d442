"""The real target behind a frontend that dies: what it had asked for runs no more and holds no memory."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator

import pytest

from ssd.config.params import SamplingParams, Speculation
from ssd.ipc import sockets
from ssd.ipc.messages import Emission, Hello, Ready, Step, Submit
from tests.frontend_dealer import Frontend
from tests.models import tiny
from tests.scripted_engine import child_process, engine_config


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A target with a tiny model, in its own process."""
    model = tiny.llama(tmp_path_factory.mktemp("model"), max_position_embeddings=4096)
    config = engine_config(target=str(model), vocab_size=tiny.SIZES["vocab_size"], max_model_len=2048, max_num_seqs=2)
    directory = tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp")
    with child_process("target", "ssd.verifier", directory, config):
        yield f"ipc://{directory}/{sockets.ENGINE}"
    shutil.rmtree(directory, ignore_errors=True)


def met(address: str, number: int) -> Frontend:
    frontend = Frontend(address, b"frontend-%d" % number)
    frontend.send(Hello("frontend"))
    assert frontend.receive() == Ready()
    return frontend


def submit(request: int, tokens: int) -> Submit:
    asked = SamplingParams(seed=request, max_tokens=tokens, ignore_eos=True, speculation=Speculation("ar"))
    return Submit(request, [1, 2, request], asked)


def last_step(frontend: Frontend, request: int) -> Step:
    while True:
        step = frontend.step()
        if any(each.request == request and each.finish_reason for each in step.emissions):
            return step


def ids(emissions: list[Emission]) -> list[int]:
    return [token for emission in emissions for token in emission.token_ids]


@pytest.mark.parametrize("successor", [False, True])
def test_requests_of_a_dead_frontend_are_released(address: str, successor: bool) -> None:
    """Noticed by the next emission that cannot be delivered, or at the latest by the hello of the next frontend."""
    alone = met(address, 1)
    alone.send(submit(9, 40))
    expected = ids(alone.until_the_end(9))
    for request in (1, 2, 3):
        alone.send(submit(request, 2000))
    while alone.step().load.waiting < 1:
        pass
    if successor:
        following = met(address, 2)
        alone.context.destroy(linger=0)
    else:
        alone.context.destroy(linger=0)
        following = met(address, 2)
    following.send(submit(9, 40))
    emissions = following.until_the_end(9)
    assert {emission.request for emission in emissions} == {9}
    assert ids(emissions) == expected
    following.send(submit(10, 1))
    load = last_step(following, 10).load
    assert (load.running, load.waiting, load.kv_cache_usage) == (0, 0, 0.0)
    following.context.destroy(linger=0)


def test_a_message_of_an_old_frontend_is_not_heard(address: str) -> None:
    old, new = met(address, 3), met(address, 4)
    old.send(submit(20, 2000))
    new.send(submit(21, 30))
    assert {emission.request for emission in new.until_the_end(21)} == {21}
    for frontend in (old, new):
        frontend.context.destroy(linger=0)
