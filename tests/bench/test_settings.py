"""What is compared, and what an engine needs for it."""

from __future__ import annotations

import pytest

from ssd.bench.settings import Setting, Sweep, widest
from ssd.config.params import Mode, Speculation
from ssd.errors import UsageError

ALL: tuple[Mode, ...] = ("ar", "sd", "ssd")
AUTO = Speculation(num_speculative_tokens=0, fan_out=(), backup="auto")


def names(sweep: Sweep) -> list[str]:
    return [setting.name for setting in sweep.settings(AUTO)]


def test_a_mode_is_a_row_and_is_named_after_what_is_swept() -> None:
    assert names(Sweep(ALL)) == ["ar", "sd", "ssd"]
    assert names(Sweep(ALL, (4,), ((3,),), ("jit",))) == ["ar", "sd", "ssd"]
    assert names(Sweep(ALL, (2, 0), ((3,), (1,)), ("jit", "none")))[:3] == ["ar", "sd K=2", "sd K=auto"]
    assert names(Sweep(("ssd",), (2, 4), ((3,),), ("jit", "none"))) == [
        "ssd K=2 jit",
        "ssd K=2 none",
        "ssd K=4 jit",
        "ssd K=4 none",
    ]
    assert names(Sweep(("ssd",), (2,), ((3, 2, 1), (), "theorem"))) == ["ssd F=3,2,1", "ssd F=auto", "ssd F=theorem"]


def test_what_is_not_swept_is_as_the_engine_has_it() -> None:
    base = Speculation("ssd", 3, (2,), "none", "rejection", 0.5, 20)
    ar, sd, ssd = Sweep(ALL, lookaheads=(5,)).settings(base)
    assert ar.speculation == Speculation("ar")
    assert ssd.speculation == Speculation("ssd", 5, (2,), "none", "rejection", 0.5, 20)
    by_theorem = Speculation("ssd", 3, (), "none", allocation="theorem")
    assert Sweep(("ssd",)).settings(by_theorem)[0].speculation == by_theorem
    assert Sweep(("ssd",), (), ((),)).settings(by_theorem)[0].speculation.allocation == "joint"
    assert (sd.speculation.mode, sd.speculation.num_speculative_tokens) == ("sd", 5)


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        (Sweep(("ar",), (2, 4)), "-k has several values"),
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
    settings = Sweep(ALL, (2, 10), ((5,), (1,))).settings(AUTO)
    room = widest(settings, AUTO)
    assert (room.mode, room.num_speculative_tokens, room.fan_out, room.chains) == ("ssd", 10, (), 55)
    assert widest(Sweep(ALL).settings(AUTO), AUTO) == AUTO
