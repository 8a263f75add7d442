"""What is compared, what an engine needs for it, and where it computes."""

from __future__ import annotations

from typing import Any

import pytest

from ssd.config.emulation import DeviceTimes, ForwardTime
from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, Speculation
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.plugins.bench.environment import hardware, runs_on
from ssd.plugins.bench.options import BatchOptions, ServeOptions
from ssd.plugins.bench.runs import reader
from ssd.plugins.bench.settings import Setting, Sweep, sized, widest
from tests.cli.test_option_tables import check_described

ALL: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd", "auto")
AUTO = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")


def names(sweep: Sweep) -> list[str]:
    return [setting.name for setting in sweep.settings(AUTO)]


def test_a_mode_is_a_row_and_is_named_after_what_is_swept() -> None:
    assert names(Sweep(ALL)) == names(Sweep(ALL, (4,), ((3,),), ("jit",))) == list(ALL)
    swept = names(Sweep(ALL, (2, 0), ((3,), (1,)), ("jit", "none")))
    assert swept[:4] == ["ar", "ngram", "sd K=2", "sd K=auto"] and swept[-1] == "auto" and len(swept) == 13
    assert names(Sweep(("ssd",), (2, 4), ((3,),), ("jit", "none"))) == [
        "ssd K=2 jit",
        "ssd K=2 none",
        "ssd K=4 jit",
        "ssd K=4 none",
    ]
    assert names(Sweep(("ssd",), (2,), ((3, 2, 1), (), "theorem"))) == ["ssd F=3,2,1", "ssd F=auto", "ssd F=theorem"]


def test_what_is_not_swept_is_as_the_engine_has_it() -> None:
    base = Speculation("ssd", 3, (2,), "none", "rejection", 0.5, 20)
    ar, ngram, sd, ssd, auto = Sweep(ALL, lookaheads=(5,)).settings(base)
    assert ar.speculation == Speculation("ar")
    assert ngram.speculation == Speculation("ngram", 3, (2,), "none", "rejection", 0.5, 20)
    assert auto.speculation == Speculation("auto", 3, (2,), "none", "rejection", 0.5, 20)
    assert ssd.speculation == Speculation("ssd", 5, (2,), "none", "rejection", 0.5, 20)
    by_theorem = Speculation("ssd", 3, (), "none", allocation="theorem")
    assert Sweep(("ssd",)).settings(by_theorem)[0].speculation == by_theorem
    assert Sweep(("ssd",), (), ((),)).settings(by_theorem)[0].speculation.allocation == "joint"
    assert (sd.speculation.mode, sd.speculation.num_speculative_tokens) == ("sd", 5)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        (Sweep(("ar", "ngram", "auto"), (2, 4)), "-k has several values"),
        (Sweep(("ar", "sd"), (), ((1,), (2,))), "--fan-out has several values"),
        (Sweep(("sd",), (), (), ("jit", "none")), "--backup has several values"),
        (Sweep(("ssd",), (4,), ((1, 2),)), "ssd: fan-out lists 2 numbers"),
        (Sweep(ALL, (), (), ("prayer",)), "no backup 'prayer'"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused(sweep: Sweep, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        sweep.settings(AUTO)


def test_an_engine_has_room_for_all_and_no_draft_for_none() -> None:
    assert widest([Setting("ar", Speculation("ar"))], AUTO).mode == "ar"
    assert widest(Sweep(("ar", "ngram")).settings(AUTO), AUTO).mode == "ngram"
    room = widest(Sweep(("ar", "sd", "ssd"), (2, 10), ((5,), (1,))).settings(AUTO), AUTO)
    assert (room.mode, room.num_speculative_tokens, room.fan_out, room.chains) == ("ssd", 10, (), 55)
    assert widest(Sweep(ALL).settings(AUTO), AUTO) == AUTO and AUTO.mode == "auto"
    assert widest(Sweep(ALL, (12,)).settings(AUTO), AUTO).longest == 12


def test_an_engine_without_a_draft_is_only_for_modes_without_one() -> None:
    alone = EngineOptions(target="org/model", mode="ssd")
    assert sized(alone, Sweep(("ar",)).settings(AUTO)).mode == "ar"
    assert sized(alone, Sweep(("ar", "ngram", "auto")).settings(AUTO)).mode == "auto"
    with pytest.raises(UsageError, match=r"sd needs a draft for target org/model: give --draft, or --modes ar,ngram"):
        sized(alone, Sweep(ALL).settings(AUTO))


def test_a_prompt_is_read_by_a_mode_whose_draft_reads_it_too() -> None:
    assert reader(Sweep(ALL).settings(AUTO)).name == "sd"
    assert reader(Sweep(("auto", "ngram", "ar")).settings(AUTO)).name == "auto"


@pytest.mark.parametrize("table", [BatchOptions, ServeOptions])
def test_every_option_is_described(table: type[BatchOptions | ServeOptions]) -> None:
    check_described(table)


TIMES = DeviceTimes(verify=ForwardTime(0.015), depth=ForwardTime(0.002))


@pytest.mark.parametrize(
    ("places", "expected", "sentence"),
    [
        (
            {"target_cpus": (0, 1, 2), "draft_cpus": (5,), "elastic_cores": True},
            ["4 cores", "4 cores", "4 cores", "3+1 cores", "4 cores"],
            "Equal hardware: every mode has cores 0, 1, 2, 5. ssd divides them: cores 0, 1, 2 for the target and "
            "core 5 for the draft.",
        ),
        (
            {"target_cpus": (0,), "draft_cpus": (1, 2)},
            ["1 core", "1 core", "1+2 cores", "1+2 cores", "1+2 cores"],
            "Extra hardware: the target has core 0 in every mode, modes with a draft have cores 1, 2 as well.",
        ),
        (
            {"target_cpus": (0,), "draft_cpus": (0,)},
            ["1 core"] * 5,
            "Equal hardware: in every mode target and draft share the cores.",
        ),
        (
            {"device": "cuda", "draft_device": "cuda:1"},
            ["cuda:0", "cuda:0", *["cuda:0+cuda:1"] * 3],
            "Extra hardware: the target has cuda in every mode, modes with a draft have cuda:1 as well.",
        ),
        (
            {"device": "cuda:0", "draft_device": "cuda:0", "tensor_parallel_size": 2},
            ["cuda:0-1", "cuda:0-1", *["cuda:0-1+cuda:0"] * 3],
            "Equal hardware: in every mode target and draft share cuda:0.",
        ),
        (
            {"device": "cuda", "draft_cpus": (4, 5)},
            ["cuda:0", "cuda:0", *["cuda:0+2 cores"] * 3],
            "Extra hardware: the target has cuda in every mode, modes with a draft have cores 4, 5 as well.",
        ),
        (
            {"target_cpus": (0,), "draft_cpus": (1,), "emulate": TIMES},
            [""] * 5,
            "Extra hardware: the draft has a device of its own, which ar and ngram do not use.",
        ),
    ],
)
def test_where_a_mode_computes_is_said(places: dict[str, Any], expected: list[str], sentence: str) -> None:
    config = EngineConfig(target="t", draft="d", **places)
    assert [runs_on(config, mode) for mode in ALL] == expected
    assert hardware(config) == sentence


def test_an_engine_without_a_draft_computes_on_its_own_cores() -> None:
    config = EngineConfig(target="t", speculation=Speculation("ngram", 4, (3,), "jit"), target_cpus=(0, 1))
    assert runs_on(config, "ngram") == runs_on(config, "auto") == "2 cores" and hardware(config) == ""
