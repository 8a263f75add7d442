"""Real processes of an engine whose draft is in the target's process, as `sd` has it where both are on one GPU."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator
from urllib.request import urlopen

import pytest
from msgspec.structs import replace

from ssd.client import Client
from ssd.config.engine import NEVER_S, EngineConfig
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.errors import RequestError
from ssd.launch import liveness
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.launch.supervisor import Engine
from tests.faults.engine import gone
from tests.models import tiny

PROMPTS = [tiny.token_ids(n, n) for n in (9, 22)]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineOptions]:
    folder = tmp_path_factory.mktemp("models")
    target = tiny.tokenizer(tiny.llama(folder / "target", vocab_size=300, max_position_embeddings=2048))
    draft = tiny.tokenizer(tiny.noisy_copy(target, folder / "draft", noise=0.01))
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(liveness, "STEP_TIMEOUT_S", 300.0)  # a busy machine may take longer than a minute for a step
        yield EngineOptions(target=str(target), draft=(str(draft),), max_num_seqs=2, max_model_len=512)


def inline(options: EngineOptions, **fields: object) -> EngineConfig:
    """As on one GPU."""
    config = resolve(options, ServerOptions(port=0))
    return replace(config, inline_draft=True, elastic_cores=False, idle_draft_s=NEVER_S, **fields)


@pytest.fixture(scope="module")
def engine(pair: EngineOptions) -> Iterator[Engine]:
    with Engine(inline(replace(pair, mode="sd", num_speculative_tokens=4))) as engine:
        yield engine


def params(mode: Mode, temperature: float) -> SamplingParams:
    speculation = Speculation(mode, 4 if mode in ("sd", "ssd") else 0)
    return SamplingParams(temperature, seed=3, max_tokens=24, ignore_eos=True, speculation=speculation, store=False)


def ready(client: Client) -> bool:
    try:
        client.generate(PROMPTS[:1], params("ar", 0.0))
    except RequestError as error:
        assert error.code == "restarting"
        return False
    return True


@pytest.mark.timeout(600)
def test_it_drafts_without_a_process_and_survives_the_death_of_its_target(engine: Engine) -> None:
    assert {*engine.pids} == {"target", "frontend"}
    with Client(engine.address) as client:
        plain = {heat: [one.token_ids for one in client.generate(PROMPTS, params("ar", heat))] for heat in (0.0, 0.8)}
        for kills in range(2):
            for heat, expected in plain.items():
                answers = client.generate(PROMPTS, params("sd", heat))
                assert [answer.token_ids for answer in answers] == expected
                assert all(answer.metrics.accepted_tokens > 0 for answer in answers)
            asked = SamplingParams(max_tokens=24, speculation=Speculation("auto"), store=False)
            assert client.generate(PROMPTS[:1], asked)[0].metrics.accepted_tokens > 0
            with urlopen(f"{engine.url}/server_info") as answer:
                assert json.load(answer)["draft_state"] == "up"
            if not kills:
                os.kill(pid := engine.pids["target"], signal.SIGKILL)
                assert gone(pid)
                while engine.pids.get("target") in (None, pid) or not ready(client):
                    time.sleep(0.1)
        assert {*engine.pids} == {"target", "frontend"}


@pytest.mark.timeout(600)
def test_beside_a_process_that_drafts_ahead_each_mode_has_its_draft(pair: EngineOptions) -> None:
    """As `auto` has them on one GPU. Neither death costs an id; without the process `sd` is drafted as before."""
    with Engine(inline(pair, inline_num_pages=200)) as engine, Client(engine.address) as client:
        assert {*engine.pids} == {"target", "draft", "frontend"}
        plain = [one.token_ids for one in client.generate(PROMPTS, params("ar", 0.8))]

        def accepted(mode: Mode) -> int:
            """Return what all answers had of a draft, whose ids are checked."""
            answers = client.generate(PROMPTS, params(mode, 0.8))
            assert [answer.token_ids for answer in answers] == plain
            return sum(answer.metrics.accepted_by_source.get("draft", 0) for answer in answers)

        while not accepted("ssd"):  # it may be late
            time.sleep(0.1)
        assert accepted("sd") > 0 and accepted("auto") >= 0 and accepted("ngram") == 0
        os.kill(pid := engine.pids["draft"], signal.SIGKILL)
        assert gone(pid) and accepted("sd") > 0
        while not accepted("ssd"):
            time.sleep(0.1)
        assert engine.pids["draft"] != pid
        os.kill(pid := engine.pids["target"], signal.SIGKILL)
        assert gone(pid)
        while engine.pids.get("target") in (None, pid) or not ready(client):
            time.sleep(0.1)
        assert accepted("sd") > 0
        while not accepted("ssd"):
            time.sleep(0.1)


@pytest.mark.parametrize("mode", ["ngram", "ssd"])
def test_other_modes_are_refused_by_name(engine: Engine, mode: Mode) -> None:
    with (
        Client(engine.address) as client,
        pytest.raises(RequestError, match=f"^mode {mode} is not served .*--inline-draft off"),
    ):
        client.generate(PROMPTS[:1], SamplingParams(speculation=Speculation(mode)))
