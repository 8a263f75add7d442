"""What is asked for as devices, and what the paper's were."""

from __future__ import annotations

import click
import msgspec
import pytest

from ssd.config.emulation import DeviceTimes, ForwardTime, StatedAgreement
from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_CHAINS
from ssd.errors import UsageError
from ssd.plugins.bench.emulation.agreement import PRESETS, Preset, acceptance_length, line
from ssd.plugins.bench.emulation.options import Emulated
from ssd.plugins.bench.setup import emulated


def parsed(text: str) -> DeviceTimes | Preset:
    return Emulated().convert(text, None, None)


LLAMA = PRESETS["llama"].times


def test_times_are_given_by_name_in_any_order() -> None:
    expected = DeviceTimes(ForwardTime(15e-3), ForwardTime(2e-3))
    assert parsed("verify=15ms,depth=2ms") == parsed("depth = 2ms, verify = 15ms") == expected
    assert parsed("verify=15ms+2us,depth=0") == DeviceTimes(ForwardTime(15e-3, 2e-6), ForwardTime(0.0))


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_goes_by_its_name_and_its_times_as_they_are_written(name: str) -> None:
    assert parsed(name) is PRESETS[name] and PRESETS[name].name == name
    written = emulated(PRESETS[name].times)
    again = parsed(written)
    assert isinstance(again, DeviceTimes) and emulated(again) == written


def test_a_preset_states_acceptance_at_known_temperatures_only() -> None:
    assert PRESETS["llama"].agreement(1.0) == StatedAgreement(0.771, 0.85, 7, 3)
    with pytest.raises(UsageError, match=r"llama states no acceptance at temperature 0.5, only at 0, 1"):
        PRESETS["llama"].agreement(0.5)


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("lama", r"'lama' is neither a preset \(llama, qwen, eagle3\) nor NAME=TIME"),
        ("", "neither a preset"),
        ("verify=15ms", "lacks the time of depth"),
        ("verify=15ms,verify=16ms,depth=1ms", "'verify' is given twice"),
        ("verify=15ms,draft=1ms", "'draft' is none of verify, depth"),
        ("verify=15,depth=1ms", "'15' is not a time"),
        ("verify=-1ms,depth=1ms", "'-1ms' is not a time"),
    ],
)
def test_anything_else_is_refused_with_its_cause(text: str, cause: str) -> None:
    with pytest.raises(click.BadParameter, match=cause):
        parsed(text)


def test_the_presets_say_what_was_published() -> None:
    """Tokens a second of `sd` in the re-run and of the paper's means, with the overhead that the re-run had."""
    for name, published in (("llama", 181.7), ("qwen", 136.8)):
        preset = PRESETS[name]
        verify_s, depth_s = line(preset.times.verify).at(1 + preset.lookahead), line(preset.times.depth).at(1)
        round_s = verify_s + preset.lookahead * depth_s + 2.9e-3
        assert acceptance_length(preset.agreement(0.0)) / round_s == pytest.approx(published, rel=0.02)
        assert preset.fan_out * (preset.lookahead + 1) <= MAX_CHAINS


def test_the_times_reach_every_process() -> None:
    config = EngineConfig(target="t", draft="d", emulate=LLAMA)
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


@pytest.mark.parametrize("fields", [{"cascade": ("small",)}, {"load_format": "mock"}], ids=["cascade", "mock"])
def test_what_has_other_devices_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(UsageError, match="a target and one draft"):
        EngineConfig(target="t", draft="d", emulate=LLAMA, **fields)  # type: ignore[arg-type]
