"""The mock in the target's place: what a frontend may send it, and what it gets."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ssd.config.params import SamplingParams, Speculation
from ssd.ipc import sockets
from ssd.ipc.messages import Abort, Hello, Ready, Submit
from ssd.plugins.mock.process import ROUND_VARIABLE
from tests.frontend_dealer import Frontend
from tests.scripted_engine import child_process, engine_config


@contextmanager
def mock(round_ms: str = "0", **config: Any) -> Iterator[Frontend]:
    """The mock's process, and a frontend that has not said hello."""
    directory = tempfile.mkdtemp(prefix="ssd-test-", dir="/tmp")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ROUND_VARIABLE, round_ms)
        with child_process("target", "ssd.plugins.mock", directory, engine_config(load_format="mock", **config)):
            frontend = Frontend(f"ipc://{directory}/{sockets.ENGINE}")
            try:
                yield frontend
            finally:
                frontend.context.destroy(linger=0)
    shutil.rmtree(directory, ignore_errors=True)  # the mock removes it too


@contextmanager
def met(round_ms: str = "0", **config: Any) -> Iterator[Frontend]:
    """The same after the hello."""
    with mock(round_ms, **config) as frontend:
        frontend.send(Hello("frontend"))
        assert frontend.receive() == Ready()
        yield frontend


def submit(request: int, tokens: int, **params: Any) -> Submit:
    asked = SamplingParams(seed=request, max_tokens=tokens, ignore_eos=True, speculation=Speculation("ar"), **params)
    return Submit(request, [1, 2, request], asked)


def test_a_bad_frame_is_dropped() -> None:
    with met() as frontend:
        frontend.socket.send_multipart([b"junk", b"more"])
        frontend.send(submit(1, 1))
        assert len(frontend.until_the_end(1)) == 1


def test_no_emission_follows_an_abort_whether_the_request_runs_or_waits() -> None:
    with met("5", max_num_seqs=2) as frontend:
        for request in (1, 2, 3, 4):
            frontend.send(submit(request, 250))
        frontend.step()  # may have begun before the others came
        assert {emission.request for emission in frontend.step().emissions} == {1, 2}
        for request in (3, 1):  # 3 cannot have begun in the place of 1
            frontend.send(Abort(request))
        frontend.send(submit(5, 1))
        seen = [emission.request for emission in frontend.until_the_end(5)]
        began = seen.index(4)
        assert 3 not in seen
        assert 1 not in seen[began:], "4 has the place of 1, and was read before it"


def test_one_that_waits_runs_when_all_that_ran_have_ended() -> None:
    with met("20", max_num_seqs=1) as frontend:
        for request in range(4):
            frontend.send(submit(request, 1))
        assert [emission.request for emission in frontend.until_the_end(3)] == [0, 1, 2, 3]


def test_one_step_serves_all_that_run_and_tells_how_busy_it_is() -> None:
    with met("20", max_num_seqs=4) as frontend:
        for request in range(6):
            frontend.send(submit(request, 30))
        frontend.step()  # may have begun before the last request came
        step = frontend.step()
        load = step.load
        assert (load.running, load.waiting, load.kv_cache_usage) == (4, 2, 1.0)
        assert {emission.request for emission in step.emissions} == {0, 1, 2, 3}
        assert load.batched_tokens == sum(emission.drafted + 1 for emission in step.emissions)
        assert load.verify_seconds == pytest.approx(0.02)


def test_a_new_frontend_ends_what_the_old_one_had_asked_for() -> None:
    with met("20", max_num_seqs=1) as old:
        for request in (1, 2):
            old.send(submit(request, 250))
        old.step()
        new = Frontend(old.address, b"frontend-2")
        new.send(Hello("frontend"))
        assert new.receive() == Ready()
        new.send(submit(3, 1))
        assert [emission.request for emission in new.until_the_end(3)] == [3]
        new.context.destroy(linger=0)


@pytest.mark.parametrize("aborted", [False, True], ids=["ended", "aborted"])
def test_at_the_end_nothing_is_busy(aborted: bool) -> None:
    with met("5") as frontend:
        frontend.send(submit(1, 250 if aborted else 1))
        step = frontend.step()
        if aborted:
            frontend.send(Abort(1))
            while step.emissions:
                step = frontend.step()
        assert (step.load.running, step.load.waiting, step.load.kv_cache_usage) == (0, 0, 0.0)


def test_metrics_come_with_the_end_and_always_where_a_text_may_end_it() -> None:
    with met() as frontend:
        frontend.send(submit(1, 40))
        frontend.send(submit(2, 40, stop=("never",)))
        emissions = frontend.until_the_end(2)
        assert all(each.metrics is not None for each in emissions if each.request == 2)
        assert all((each.metrics is None) == (each.finish_reason is None) for each in emissions if each.request == 1)


def test_log_probabilities_of_a_prompt_come_with_the_first_tokens() -> None:
    with met() as frontend:
        frontend.send(submit(1, 40, prompt_logprobs=1, logprobs=0))
        first, *others = frontend.until_the_end(1)
        assert first.prompt_logprobs is not None
        assert [entry.token_id for entry in first.prompt_logprobs] == [2, 1]
        assert all(each.prompt_logprobs is None and each.logprobs for each in others)


def test_an_embedding_depends_on_the_pooling() -> None:
    with met() as frontend:
        found = []
        for pooling in ("mean", "last", "mean"):
            frontend.send(submit(1, 1, pooling=pooling))
            (end,) = frontend.until_the_end(1)
            assert (end.finish_reason, end.token_ids, len(end.embedding or b"")) == ("stop", [], 32)
            found.append(end.embedding)
        assert found[0] == found[2] != found[1]
