"""Forwards that take their time: which ones, and that the engine says the same with them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace

from ssd.config.emulation import DeviceTimes, ForwardTime, StatedAgreement
from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, SamplingParams, Speculation
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.llm import running
from ssd.plugins.bench.emulation import pacing
from ssd.plugins.bench.emulation.chains import write_pair
from ssd.verifier.loading import load
from tests.models import tiny
from tests.verifier.scripted import make_engine, submit, tiny_llama


def test_every_forward_waits_for_the_time_of_its_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock that stands still: what is waited for is what was stated, after the forward."""
    ends: list[float] = []
    monkeypatch.setattr(pacing.time, "perf_counter", lambda: 100.0)
    monkeypatch.setattr(pacing, "wait_until", ends.append)
    model, rows = tiny_llama(), [Row([1, 2, 3], 0, range(4)), Row([4], 0, range(1, 4))]
    logits = pacing.PacedRunner(ForwardTime(0.015, 0.001), model, 4, 16).forward(rows)
    assert ends == [100.0 + 0.015 + 4 * 0.001]
    assert torch.equal(logits, Runner(model, 4, 16).forward(rows))


@pytest.mark.parametrize(
    ("times", "order"),
    [(ForwardTime(0.015), ["computed", "meanwhile", "waited"]), (None, ["meanwhile", "computed"])],
    ids=["device", "none"],
)
def test_what_may_wait_is_done_while_a_device_computes(
    monkeypatch: pytest.MonkeyPatch, times: ForwardTime | None, order: list[str]
) -> None:
    """Without one there is no such moment: it comes first."""
    happened: list[str] = []
    monkeypatch.setattr(pacing, "wait_until", lambda end: happened.append("waited"))
    model = tiny_llama()
    runner = Runner(model, 64, 4) if times is None else pacing.PacedRunner(times, model, 64, 4)
    computed = runner.states

    def noticed(*given: Any) -> Any:
        happened.append("computed")
        return computed(*given)

    monkeypatch.setattr(runner, "states", noticed)
    engine = make_engine(runner=runner)
    engine.submit(submit(0, [1, 2, 3], max_tokens=2))
    engine.step(lambda: happened.append("meanwhile"))
    assert happened == order


def test_without_times_a_runner_is_the_plain_one(tmp_path: Path) -> None:
    config = EngineConfig(target=str(tiny.llama(tmp_path / "target")), num_pages=128, max_model_len=512)
    times = DeviceTimes(ForwardTime(1e-3), ForwardTime(0.0))
    assert type(load(config)[0]) is Runner
    assert type(load(replace(config, emulate=times))[0]) is pacing.PacedRunner


def test_the_wait_ends_at_its_time_and_not_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """It sleeps most of it and looks at the clock for the rest; a time that has passed is not waited for."""
    now, slept = [10.0], list[float]()

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    def look() -> float:
        now[0] += 1e-6
        return now[0]

    monkeypatch.setattr(pacing.time, "perf_counter", look)
    monkeypatch.setattr(pacing.time, "sleep", sleep)
    pacing.wait_until(10.015)
    assert now[0] >= 10.015 and sum(slept) == pytest.approx(0.0147, abs=1e-5)
    pacing.wait_until(5.0)
    assert len(slept) == 1


@pytest.mark.parametrize("temperature", [pytest.param(0.0, marks=pytest.mark.thorough), 1.0])
def test_every_mode_says_the_same(tmp_path: Path, temperature: float) -> None:
    pair = write_pair(tmp_path / "pair", StatedAgreement(0.8, 0.8, 4, 3))
    options = EngineOptions(
        target=str(pair.target), draft=(str(pair.draft),), max_model_len=512, max_num_seqs=4, draft_dtype="float32"
    )
    config = replace(resolve(options), emulate=DeviceTimes(ForwardTime(2e-3), ForwardTime(0.2e-3)))
    prompts = [[n, 2 * n, 3 * n] for n in range(4)]
    with running(config) as (_, client):

        def params(mode: Mode) -> list[SamplingParams]:
            return [
                SamplingParams(
                    temperature=temperature,
                    seed=seed,
                    max_tokens=200,
                    ignore_eos=True,
                    speculation=Speculation(mode, 4, (3,), "jit"),
                )
                for seed in range(len(prompts))
            ]

        plain, sd, ssd = (client.generate(prompts, params(mode)) for mode in ("ar", "sd", "ssd"))
    ids = [completion.token_ids for completion in plain]
    assert [completion.token_ids for completion in sd] == ids
    assert [completion.token_ids for completion in ssd] == ids
    # How many is a busy machine's to say: it may leave the draft alone for a while.
    assert sum(completion.metrics.accepted_tokens for completion in sd) > 0
