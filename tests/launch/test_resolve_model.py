"""What a configuration takes from the models: a draft for the built-in target, the context, how it is sampled."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from ssd.config.engine import WeightFormat
from ssd.config.params import SamplingDefaults
from ssd.errors import UsageError
from ssd.launch import memory
from ssd.launch.memory import Sized
from ssd.launch.options import EngineOptions, chosen
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.models.checkpoint import inspect
from ssd.models.pull import BUILTIN
from ssd.models.resident import resident_bytes
from ssd.system import cgroups
from tests.launch.test_resolve import GIB, MIB, PAGE_BYTES, TARGET, cards, config, no_weights

__all__ = ["cards", "no_weights"]


def test_the_model_says_how_it_is_sampled_unless_nobody_asks_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for file in Path(TARGET).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    said = {"temperature": 0.6, "top_k": 20, "top_p": 7, "min_p": "x", "repetition_penalty": None, "do_sample": True}
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 2, **said}))
    options = EngineOptions(target=str(tmp_path), mode="ar")
    for server in (ServerOptions(), None):
        assert resolve(options, server).sampling == SamplingDefaults(temperature=0.6, top_k=20)
    assert [name for name in ("top_p", "min_p", "repetition_penalty") if f"{name} " in caplog.text] == [
        "top_p",
        "min_p",
    ]
    assert resolve(replace(options, generation_config="none")).sampling == SamplingDefaults()


@pytest.mark.parametrize(("do_sample", "temperature"), [(False, 0.0), (True, 0.6), (None, 0.6)])
def test_a_model_that_says_not_to_sample_is_greedy(tmp_path: Path, do_sample: bool | None, temperature: float) -> None:
    for file in Path(TARGET).iterdir():
        if file.name != "generation_config.json":
            (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.6, "do_sample": do_sample}))
    found = resolve(EngineOptions(target=str(tmp_path), mode="ar"))
    assert found.sampling == SamplingDefaults(temperature=temperature)


def test_a_built_in_target_that_was_pulled_by_an_older_version_has_the_sampling_of_this_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = tmp_path / "models" / "smollm2"
    shutil.copytree(TARGET, old, copy_function=os.symlink)
    (old / "generation_config.json").unlink()
    (old / "generation_config.json").write_text('{"eos_token_id": 2}')
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    assert BUILTIN["smollm2"].directory == old
    for target in ("smollm2", str(old)):
        found = resolve(EngineOptions(target=target, mode="ar")).sampling
        assert found.temperature == 0 and (found.frequency_penalty or 0) > 0


@pytest.mark.usefixtures("no_weights")
def test_where_memory_is_short_the_context_is_shorter_unless_a_length_was_asked_for(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 4 * 200 * 4 * PAGE_BYTES)
    found = config()
    assert (found.max_model_len, found.num_pages) == (199 * 16, 200), "of the target's pages one is for draft tokens"
    assert "memory for a context of 3184 tokens; the model's own has 8192" in caplog.text
    assert config(kv_cache_memory_bytes=11 * 4 * PAGE_BYTES).max_model_len == 160
    # The drafts have half as much, for all of them together.
    assert config(kv_cache_memory_bytes=400 * MIB, draft=(TARGET,)).max_model_len == 99 * 16
    assert config(kv_cache_memory_bytes=400 * MIB, draft=(TARGET, TARGET)).max_model_len == 49 * 16
    with pytest.raises(
        UsageError, match=r"smollm2 needs 1443 MiB of memory: .* with 8192 tokens of context; 563 MiB are"
    ):
        config(max_model_len=8192)


def test_weights_come_before_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A float32 target and a bfloat16 draft of the same weights."""
    model, room = inspect(Path(TARGET)), 4 * 200 * 4 * PAGE_BYTES
    monkeypatch.setattr(memory, "host_processes", lambda *_: 0)
    whole, half, int8 = (resident_bytes(model, *how) for how in (("float32",), ("bfloat16",), ("float32", "int8")))
    asked: dict[str, Any] = {"draft_dtype": "bfloat16", "draft_weights": "as-is", "draft": (TARGET,)}
    monkeypatch.setattr(cgroups, "available_bytes", lambda: whole + half + room)
    assert config(**asked, max_model_len=2048).num_pages == 200
    assert config(**asked).max_model_len == 199 * 16
    assert config(**asked, kv_cache_memory_bytes=400 * MIB).max_model_len == 199 * 16
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 2 * whole + room)
    assert config(**asked | {"draft_dtype": "float32"}, kv_cache_memory_bytes=400 * MIB).max_model_len == 99 * 16
    monkeypatch.setattr(cgroups, "available_bytes", lambda: int8 + room)
    assert config(mode="ar", quantize="int8", max_model_len=2048).num_pages == 200
    monkeypatch.setattr(cgroups, "available_bytes", lambda: whole)
    with pytest.raises(UsageError, match=r"smollm2 needs .* of memory"):
        config(mode="ar")


def test_processes_come_before_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    options = chosen(EngineOptions(mode="ar"))
    weights = memory.host_weights(options, Sized(inspect(Path(TARGET)), "float32"), [], [WeightFormat()])
    alone, room = memory.host_processes(options, False), 4 * 200 * 4 * PAGE_BYTES
    assert memory.host_processes(options, True) > alone
    monkeypatch.setattr(cgroups, "available_bytes", lambda: weights + alone + room)
    assert config(mode="ar", max_model_len=2048).num_pages == 200


@pytest.mark.parametrize("limit", [None, GIB])
def test_a_start_without_room_is_refused_with_the_memory_that_it_needs(
    limit: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cgroups, "memory_left", lambda: limit)
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 200 * MIB)
    with pytest.raises(UsageError) as refused:
        config()
    said = re.search(r"needs (\d+) MiB of memory: .* 512 tokens of context; 200 MiB are free(.*)", str(refused.value))
    assert said is not None and (said[2] == " below the limit of this container") is (limit is not None)
    needed = int(said[1]) * MIB
    monkeypatch.setattr(cgroups, "available_bytes", lambda: needed)
    assert 512 <= config().max_model_len <= 528
    monkeypatch.setattr(cgroups, "available_bytes", lambda: needed - MIB)
    with pytest.raises(UsageError, match="are free"):
        config()


@pytest.mark.parametrize("mode", ["ar", "ssd"])
def test_bytes_for_the_cache_that_were_asked_for_count(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(given: int) -> int:
        with pytest.raises(UsageError, match="are free") as error:
            config(mode=mode, kv_cache_memory_bytes=given, max_model_len=64)
        said = re.search(r"needs (\d+) MiB", str(error.value))
        assert said is not None
        return int(said[1])

    monkeypatch.setattr(cgroups, "available_bytes", lambda: 300 * MIB)
    assert refused(2000 * MIB) - refused(100 * MIB) == 1900


@pytest.mark.usefixtures("no_weights")
def test_what_is_free_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Others take memory meanwhile: context and cache still fit together."""
    free = iter(range(4 * 200 * 4 * PAGE_BYTES, 0, -4 * 4 * 4 * PAGE_BYTES))
    monkeypatch.setattr(cgroups, "available_bytes", lambda: next(free))
    found = config()
    assert (found.max_model_len, found.num_pages) == (199 * 16, 200)


@pytest.mark.usefixtures("no_weights")
def test_on_a_cpu_the_default_caches_hold_one_longest_sequence_or_all_shorter_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 64 * GIB)

    def pages(**asked: Any) -> tuple[int, int]:
        found = config(**asked)
        assert found.max_model_len == 8192
        return found.num_pages, found.draft_num_pages

    assert pages() == (8 * 129, 8 * 129)
    assert pages(max_num_seqs=2) == (513, 513)
    assert pages(max_model_len=8192) == (8 * 513, 8 * 513)
    assert pages(kv_cache_memory_bytes=GIB) == (GIB // (4 * PAGE_BYTES), 8 * 513)
    assert pages(draft_device="cuda") == (8 * 129, 8 * 513)


@pytest.mark.usefixtures("no_weights")
def test_a_draft_has_room_for_one_sequence_at_least(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 8 * 200 * 4 * PAGE_BYTES)
    assert config(max_model_len=320, draft=(TARGET,)).draft_num_pages == 8 * 21
    assert config(max_model_len=1600, draft=(TARGET,)).draft_num_pages == 200
    assert config(max_model_len=6000, draft=(TARGET,)).draft_num_pages == 376
