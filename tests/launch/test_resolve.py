"""Names, sizes and cores become a configuration that fits the models and the machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from ssd.config import gpus
from ssd.config.engine import EngineConfig, WeightFormat
from ssd.config.gpus import Gpu
from ssd.config.params import Speculation
from ssd.config.roles import roles
from ssd.errors import UsageError
from ssd.ipc.layouts import draft_probs_layout
from ssd.launch import memory, mps
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.server import ServerOptions
from ssd.models.checkpoint import inspect
from ssd.models.pull import BUILTIN
from ssd.models.resident import device_bytes
from ssd.models.sizes import ModelSizes
from ssd.system import cgroups, registered
from tests.models import tiny
from tests.scripted_engine import MODEL

# The built-in target: 30 layers, 3 KV heads of 64, 8192 positions.
PAGE_BYTES = 16 * 2 * 30 * 3 * 64
MIB, GIB = 2**20, 2**30
TARGET = str(BUILTIN["smollm2"].directory)


OF_CPU = {"dtype": "float32", "draft_device": "cpu", "max_num_seqs": 8, "max_num_batched_tokens": 256}


def config(**options: Any) -> EngineConfig:
    """With the same numbers on every device."""
    return resolve(EngineOptions(**{"target": TARGET, "draft": (str(MODEL),), **OF_CPU, **options}))


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """The cores that this process may use, for the test to change."""
    allowed: set[int] = {0, 1, 2, 3, 4, 5, 6, 7}
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: allowed)
    return allowed


@pytest.fixture(autouse=True)
def cards(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """The GPUs of this machine, for the test to change."""
    there = [Gpu(16 * GIB, 15 * GIB), Gpu(80 * GIB, 79 * GIB)]
    monkeypatch.setattr(gpus, "present", lambda: there)
    monkeypatch.setattr(mps, "state", lambda: "running")
    return there


@pytest.fixture
def no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """All free memory is for the caches."""
    monkeypatch.setattr(memory, "host_weights", lambda *_: 0)
    monkeypatch.setattr(memory, "host_processes", lambda *_: 0)


def test_the_models_are_named_and_described() -> None:
    found = config()
    assert (found.target, found.draft, found.target_name) == (TARGET, str(MODEL), "smollm2")
    assert found.vocab_size == 49152
    assert len(found.digest) == 64


def test_several_drafts_are_a_cascade_whose_last_one_speaks_to_the_target() -> None:
    found = config(draft=(str(MODEL), "smollm2-draft"))
    assert (found.cascade, found.draft_name) == ((str(MODEL),), "smollm2-draft, smollm2-draft")
    assert found.draft is not None
    with pytest.raises(UsageError, match="no-such-model"):
        config(draft=("no-such-model", str(MODEL)))


def test_without_speculation_no_draft_is_loaded() -> None:
    assert config(mode="ar").draft is None


def test_the_context_is_the_models_own() -> None:
    assert config().max_model_len == 8192
    assert config(device="cuda").max_model_len == 8192
    assert config(max_model_len=8192).max_model_len == 8192
    with pytest.raises(UsageError, match="8193 is more than the 8192"):
        config(max_model_len=8193)


@pytest.mark.usefixtures("no_weights")
def test_the_cache_holds_every_sequence_unless_memory_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = 8 * (2048 // 16 + 1)
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 16 * GIB)
    assert (config(max_model_len=2048).num_pages, config(max_model_len=2048).draft_num_pages) == (wanted, wanted)
    monkeypatch.setattr(cgroups, "available_bytes", lambda: 4 * 200 * 4 * PAGE_BYTES)
    assert config(max_model_len=2048).num_pages == 200
    assert config(max_model_len=2048, dtype="bfloat16").num_pages == 400
    assert config(max_model_len=2048, kv_cache_memory_bytes=300 * 4 * PAGE_BYTES).num_pages == 300
    with pytest.raises(UsageError, match="no room for the KV cache"):
        config(max_model_len=2048, kv_cache_memory_bytes=100 * 4 * PAGE_BYTES)


def test_on_a_gpu_the_cache_gets_what_is_left() -> None:
    """Of 16 GiB, 1.75 of which are neither to be used nor needed by the weights; the draft gets what it can use."""
    alone = config(device="cuda", max_model_len=2048)
    bytes_each = 4 * PAGE_BYTES
    assert 12 * GIB < alone.num_pages * bytes_each < (0.9 * 16 - 0.1 - 1) * GIB
    half = config(device="cuda", max_model_len=2048, gpu_memory_utilization=0.5)
    assert alone.num_pages - half.num_pages == pytest.approx(0.4 * 16 * GIB / bytes_each, abs=1)
    wanted = 8 * (2048 // 16 + 1)
    assert alone.draft_num_pages == half.draft_num_pages == wanted
    beside = config(device="cuda", draft_device="cuda", max_model_len=2048)
    assert beside.num_pages < alone.num_pages and beside.draft_num_pages == wanted
    elsewhere = config(device="cuda", draft_device="cuda:1", max_model_len=2048)
    assert (elsewhere.num_pages, elsewhere.draft_num_pages) == (alone.num_pages, wanted)
    assert config(device="cuda:1").num_pages > 4 * alone.num_pages
    assert config(device="cuda", kv_cache_memory_bytes=GIB).num_pages == GIB // bytes_each
    host = config(draft_device="cuda", max_model_len=2048)
    assert (host.num_pages, host.draft_num_pages) == (wanted, wanted)


def test_a_draft_ends_for_want_of_use_only_on_this_machines_cpu_and_where_the_mode_is_open() -> None:
    assert config().parks_draft and config(device="cuda").parks_draft
    assert not config(device="cuda", draft_device="cuda:1").parks_draft
    assert not config(mode="ssd").parks_draft and not config(mode="ar").parks_draft


def test_on_a_gpu_the_largest_static_shape_has_its_room(cards: list[Gpu]) -> None:
    """Of the target all shapes leave their logits: for rows of 9 tokens, up to 8 of them, these are of 465 tokens, 128
    in the largest. Of the draft's, with 256 chains, the largest is of 256."""
    width, inner, vocabulary, numbers = 576, 1536, 49152, device_bytes(inspect(Path(TARGET)), 4)
    once = 4 * 256 * (6 * width + 2 * inner) + (16 + 4) * 72 * vocabulary
    shapes = 4 * 128 * (6 * width + 2 * inner) + (16 * 128 + 4 * 465) * vocabulary
    texts = memory.ADJUSTED * (8 + 1) * vocabulary
    room = int(0.9 * 16 * GIB) - numbers - once - shapes - texts - GIB
    assert config(device="cuda", max_model_len=2048).num_pages == room // (4 * PAGE_BYTES)
    cards[1] = Gpu(GIB, GIB)
    shapes = 4 * 256 * (6 * width + 2 * inner) + (16 + 4) * 256 * vocabulary
    once += (16 + 4) * 256 * vocabulary
    branches = 4 * PAGE_BYTES // 16 * 256 * 17
    to_work_in = (once + shapes + branches + GIB) / GIB
    with pytest.raises(UsageError, match=f"the draft has no room on cuda:1: .* {to_work_in:.1f} GiB to work in"):
        config(device="cuda", draft_device="cuda:1", draft=(TARGET,), max_model_len=2048)


def test_a_cache_in_8_bits_has_more_pages(cards: list[Gpu]) -> None:
    pages = {
        kind: config(
            device="cuda", dtype="bfloat16", mode="ar", kv_cache_dtype=kind, gpu_memory_utilization=0.4
        ).num_pages
        for kind in ("auto", "fp8")
    }
    assert pages["fp8"] in (2 * pages["auto"], 2 * pages["auto"] + 1)
    given = {"device": "cuda", "dtype": "bfloat16", "mode": "ar", "kv_cache_memory_bytes": GIB}
    assert config(**given, kv_cache_dtype="fp8").num_pages == GIB // (PAGE_BYTES * 1)
    with pytest.raises(UsageError, match="--kv-cache-dtype fp8 needs a target on a GPU"):
        config(kv_cache_dtype="fp8")
    with pytest.raises(UsageError, match="--kv-cache-dtype int8 needs a target on a CPU"):
        config(device="cuda", kv_cache_dtype="int8")
    with pytest.raises(UsageError, match="--kv-cache-dtype int8 works in float32, not in bfloat16"):
        config(dtype="bfloat16", kv_cache_dtype="int8")


def test_a_cache_in_int8_has_more_pages_on_a_cpu() -> None:
    sizes = ModelSizes.of(inspect(Path(TARGET)))
    token = sizes.kv_values_per_token * (sizes.head_dim + 4) // sizes.head_dim
    pages = {kind: config(kv_cache_memory_bytes=GIB, kv_cache_dtype=kind).num_pages for kind in ("auto", "int8")}
    assert pages["int8"] == GIB // (16 * token) and 3.7 < pages["int8"] / pages["auto"] < 3.8


def test_ranks_share_the_weights_and_the_cache(cards: list[Gpu]) -> None:
    cards[1] = cards[0]
    one, two = (config(device="cuda", mode="ar", tensor_parallel_size=size).num_pages for size in (1, 2))
    assert two > 2 * one


def test_draft_probs_that_lie_on_the_gpu_take_room_there(cards: list[Gpu]) -> None:
    def pages(**asked: Any) -> int:
        return config(device="cuda", gpu_memory_utilization=0.5, num_speculative_tokens=8, **asked).num_pages

    probs = draft_probs_layout(8, Speculation("ssd", 8, (), "jit", sampler="rejection"), 49152).size_bytes
    expected = pages(draft_device="cuda:1") - probs // (4 * PAGE_BYTES)
    assert abs(pages(draft_device="cuda:1", sampler="rejection") - expected) <= 1
    assert pages(draft_device="cpu", sampler="rejection") == pages(draft_device="cpu")


def test_where_nobody_tells_of_gpus_the_cache_has_to_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpus, "present", lambda: None)
    with pytest.raises(UsageError, match=r"^--device cuda: no GPU is found here.* give --kv-cache-memory-bytes"):
        config(device="cuda")
    assert config(device="cuda:9", kv_cache_memory_bytes=GIB).num_pages == GIB // (4 * PAGE_BYTES)
    assert config(draft_device="cuda").draft_num_pages == 8 * (8192 // 16 + 1)
    assert config(mode="ar", draft_device="cuda").draft is None


ONE_GPU: dict[str, Any] = {"device": "cuda", "draft_device": "cuda", "mode": "sd", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("asked", "cause"),
    [
        ({}, None),
        ({"draft_device": "cuda:0", "dtype": "bfloat16"}, None),
        ({"mode": "ssd"}, "mode ssd drafts ahead"),
        ({"num_speculative_tokens": 0}, None),
        ({"sampler": "rejection"}, "the sampler rejection needs"),
        ({"device": "cpu", "draft_device": "cpu"}, "the target is on cpu"),
        ({"draft_device": "cuda:1"}, "the draft on cuda:1; both must be on one GPU"),
        ({"draft_device": "cpu"}, "both must be on one GPU"),
        ({"tensor_parallel_size": 2}, "the target has several ranks"),
        ({"draft": (str(MODEL), "smollm2-draft")}, "there must be one draft on this machine"),
        ({"mps": True}, "--mps is for two processes"),
    ],
    ids=str,
)
def test_a_draft_is_in_the_targets_process_where_it_can_be(
    asked: dict[str, Any], cause: str | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told then that two processes share the GPU."""
    monkeypatch.setattr(mps, "state", lambda: "stopped")
    found = config(**ONE_GPU | asked)
    assert found.inline_draft == (cause is None) and ("draft" in roles(found)) == (cause is not None)
    if cause is None:
        assert config(**ONE_GPU | asked, inline_draft="on").inline_draft and "take turns" not in caplog.text
        assert not config(**ONE_GPU | asked, inline_draft="off").inline_draft and "take turns" in caplog.text
    else:
        with pytest.raises(UsageError, match=f"^--inline-draft on: .*{cause}"):
            config(**ONE_GPU | asked, inline_draft="on")


def test_in_auto_a_second_draft_on_the_host_drafts_ahead(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a type of CPUs, not in the target's."""
    monkeypatch.setattr(mps, "state", lambda: "stopped")
    asked = ONE_GPU | {"mode": "auto", "dtype": "bfloat16", "max_model_len": 512}
    found = config(**asked)
    assert found.inline_draft and found.drafts_apart and "draft" in roles(found) and "take turns" not in caplog.text
    assert found.draft_device == "cpu" and found.parks_draft and found.draft_formats == config().draft_formats
    assert [one.dtype for one in found.draft_formats] == ["float32"]
    assert config(**asked, draft_dtype="bfloat16").draft_formats[0].dtype == "bfloat16"
    host = config(**asked | {"draft_device": "cpu"})
    assert not host.inline_draft and host.drafts_apart and host.draft_formats == found.draft_formats
    assert host.num_pages > found.num_pages, "a draft's weights and cache on the GPU count"
    alone = config(**asked | {"mode": "sd"})
    assert (alone.num_pages, alone.draft_num_pages) == (found.num_pages, found.inline_num_pages)
    apart = config(**asked, inline_draft="off")
    assert not apart.inline_draft and apart.draft_device == "cuda" and "take turns" in caplog.text
    room = memory.CONTEXT // (2 * PAGE_BYTES)
    assert apart.num_pages < found.num_pages - room, "a process has a context, and chains"
    assert [one.dtype for one in apart.draft_formats] == ["bfloat16"]


@pytest.mark.usefixtures("no_weights")
def test_a_host_without_room_for_a_second_draft_limits_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    asked = ONE_GPU | {"mode": "auto", "dtype": "bfloat16"}
    for room, apart in [(GIB, True), (50 * MIB, False), (0, False)]:
        monkeypatch.setattr(cgroups, "available_bytes", lambda room=room: room)
        found = config(**asked)
        assert (found.inline_draft, found.drafts_apart, "draft" in roles(found)) == (True, apart, apart)
        assert found.max_model_len == 8192 and (found.inline_num_pages or found.draft_num_pages) == 8 * (8192 // 16 + 1)
        assert found.draft_num_pages >= 8192 // 16 + 1
    assert caplog.text.count("mode ssd is not served: the host has no room for a draft") == 2


def test_who_shares_a_gpu_is_told_how_to(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    config(device="cuda", draft_device="cuda:1")
    config(device="cuda", draft_device="cuda")
    config(device="cuda", draft_device="cuda", mode="ar")
    assert not caplog.records
    monkeypatch.setattr(mps, "state", lambda: "stopped")
    config(device="cuda", draft_device="cuda:1")
    config(device="cuda", draft_device="cuda", mode="ar")
    assert not caplog.records
    config(device="cuda", draft_device="cuda:0")
    assert not caplog.records, "none that is in the target's process takes turns"
    config(device="cuda", draft_device="cuda:0", mps=True)
    assert not caplog.records
    with pytest.raises(UsageError, match="--mps is for a target and a draft on the same GPU"):
        config(device="cuda", draft_device="cuda:1", mps=True)
    config(device="cuda", draft_device="cuda:0", mode="ssd")
    assert "take turns on cuda:0" in caplog.text and "nvidia-cuda-mps-control -d" in caplog.text


LARGE, SMALL = (
    {"max_num_seqs": 64, "max_num_batched_tokens": 8192},
    {"max_num_seqs": 32, "max_num_batched_tokens": 2048},
)
A100, T4 = Gpu(80 * GIB, 79 * GIB, (8, 0)), Gpu(16 * GIB, 15 * GIB, (7, 5))


@pytest.mark.parametrize(
    ("there", "asked", "expected"),
    [
        ([A100], {}, OF_CPU),
        ([A100], {"device": "cuda"}, {"dtype": "bfloat16", "inline_draft": True, "draft_device": "cpu", **LARGE}),
        ([A100], {"device": "cuda", "mode": "ssd"}, {"draft_device": "cuda:0", "inline_draft": False}),
        ([A100, A100], {"device": "cuda"}, {"draft_device": "cuda:1"}),
        ([A100, A100], {"device": "cuda:1"}, {"draft_device": "cuda:0"}),
        ([A100, A100], {"device": "cuda", "tensor_parallel_size": 2}, {"draft_device": "cuda:0"}),
        ([T4], {"device": "cuda:0"}, {"dtype": "float16", "inline_draft": True, **SMALL}),
        ([T4, A100], {"device": "cuda:1"}, {"dtype": "bfloat16", "draft_device": "cuda:0", **LARGE}),
        ([A100], {"device": "cuda", **OF_CPU}, OF_CPU),
        ([A100], {"device": "cuda", "max_num_seqs": 3}, {"max_num_seqs": 3, "max_num_batched_tokens": 8192}),
        ([A100], {"draft_device": "cuda"}, OF_CPU | {"draft_device": "cuda"}),
    ],
    ids=str,
)
def test_what_nobody_asked_for_depends_on_the_device(
    there: list[Gpu], asked: dict[str, Any], expected: dict[str, Any], cards: list[Gpu]
) -> None:
    cards[:] = there
    found = resolve(EngineOptions(target=TARGET, draft=(str(MODEL),), max_model_len=2048, **asked))
    assert {name: getattr(found, name) for name in expected} == expected


def test_prompts_go_through_flash_attn_where_it_is_installed_and_serves(
    cards: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards[:] = [A100]

    def backend(**asked: Any) -> tuple[str, int]:
        asked = {"target": TARGET, "draft": (str(MODEL),), "max_model_len": 2048, "device": "cuda", **asked}
        found = resolve(EngineOptions(**asked))
        return found.attention, found.page_size

    assert backend() == ("auto", 16)
    monkeypatch.setattr("ssd.launch.options.find_spec", lambda name: name)
    assert backend() == ("flash-attn", 256)
    for other in ({"dtype": "float32"}, {"deterministic": True}, {"device": "cpu"}):
        assert backend(**other) == ("auto", 16)
    assert backend(attention="triton") == ("triton", 16)


def test_a_draft_without_room_on_the_gpu_runs_on_the_cpu_unless_it_was_told_where(
    cards: list[Gpu], caplog: pytest.LogCaptureFixture
) -> None:
    cards[:] = [Gpu(2300 * MIB, 2300 * MIB)]
    asked: dict[str, Any] = {"target": TARGET, "draft": (TARGET,), "device": "cuda", "max_model_len": 2048}
    found = resolve(EngineOptions(**asked))
    assert (found.device, found.draft_device, found.inline_draft) == ("cuda", "cpu", False)
    assert "the draft runs on the CPU: the draft has no room on cuda:0" in caplog.text
    with pytest.raises(UsageError, match="the draft has no room on cuda:0"):
        resolve(EngineOptions(**asked, draft_device="cuda"))
    cards[:] = [Gpu(GIB, GIB)]
    with pytest.raises(UsageError, match="the target has no room on cuda:0"):
        resolve(EngineOptions(**asked))


@pytest.mark.parametrize(
    ("target", "draft", "expected"),
    [
        ("smollm2", (), ("smollm2-draft",)),
        ("qwen2.5-coder:1.5b", (), ("qwen2.5-coder",)),
        ("qwen2.5-coder:1.5b", ("smollm2-draft",), ("smollm2-draft",)),
        ("qwen2.5-coder:1.5b", ("none",), ()),
        ("qwen2.5-coder", (), ()),
        ("/a/folder", (), ()),
    ],
)
def test_a_built_in_target_has_its_own_draft(target: str, draft: tuple[str, ...], expected: tuple[str, ...]) -> None:
    assert EngineOptions(target=target, draft=draft).drafts == expected


@pytest.mark.parametrize(
    ("asked", "activations"),
    [
        ({}, "int8"),
        ({"activations": "int16"}, "int16"),
        ({"activations": "float32"}, "float32"),
        ({"dtype": "bfloat16"}, "int16"),
        ({"device": "cuda", "dtype": "float32"}, "int16"),
        ({"load_format": "dummy"}, "int16"),
    ],
    ids=str,
)
def test_a_gguf_on_a_cpu_has_inputs_of_8_bits(asked: dict[str, Any], activations: str) -> None:
    assert config(**asked).activations == activations


def test_weights_in_floats_have_inputs_of_16_bits(tmp_path: Path) -> None:
    target = tiny.tokenizer(tiny.llama(tmp_path / "target", vocab_size=300))
    assert resolve(EngineOptions(target=str(target))).activations == "int16"


@pytest.mark.parametrize(
    ("asked", "target", "draft"),
    [
        ({}, "float32", "float32"),  # its own form has 4 bits
        ({"draft_weights": "as-is"}, "float32", "float32"),
        ({"draft_weights": "int8"}, "float32", "int8"),
        ({"draft_dtype": "float32"}, "float32", "float32"),
        ({"draft_dtype": "bfloat16"}, "float32", "bfloat16"),
        ({"draft_device": "cuda"}, "float32", "float32"),
        ({"deterministic": True}, "float32", "float32"),
        ({"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        ({"dtype": "float16"}, "float16", "float16"),
        ({"dtype": "bfloat16", "draft_weights": "int8"}, "bfloat16", "int8"),
        ({"quantize": "int8"}, "int8", "int8"),
        ({"quantize": "int8", "deterministic": True}, "int8", "int8"),
        ({"quantize": "int8", "draft_weights": "as-is"}, "int8", "float32"),
        ({"quantize": "int8", "draft_dtype": "bfloat16"}, "int8", "bfloat16"),
        ({"quantize": "int8", "draft_device": "cuda"}, "int8", "float32"),
    ],
    ids=str,
)
def test_a_draft_may_have_the_format_that_was_asked_for_or_any_that_only_rounds_it(
    asked: dict[str, Any], target: str, draft: str
) -> None:
    found = config(**asked)
    assert str(WeightFormat(found.dtype, found.quantize)) == target
    assert " ".join(map(str, found.draft_formats)) == draft


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"quantize": "int8", "dtype": "bfloat16"}, "--quantize int8 works in float32 on a CPU, not in bfloat16"),
        ({"quantize": "int8", "device": "cuda"}, "--quantize int8 .* not in float32 on device cuda"),
        ({"draft_weights": "int8", "draft_dtype": "bfloat16"}, "--draft-weights int8 .* not in bfloat16"),
        ({"draft_weights": "int8", "draft_device": "cuda:1"}, "--draft-weights int8 .* on device cuda:1"),
        ({"quantize": "int4"}, "quantize 'int4': there are int8, none"),
    ],
    ids=str,
)
def test_what_cannot_be_quantised_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**asked)


def test_target_and_draft_get_cores_of_their_own(cores: set[int]) -> None:
    assert (config().target_cpus, config().draft_cpus) == ((0, 1, 2, 3, 4, 5), (6, 7))
    assert (config(mode="ar").target_cpus, config(mode="ar").draft_cpus) == (tuple(range(8)), ())
    on_gpu = config(device="cuda")
    assert (on_gpu.target_cpus, on_gpu.draft_cpus) == ((0, 1), (2, 3, 4, 5, 6, 7))
    cores -= {0, 1, 3, 4, 6, 7}
    assert (config().target_cpus, config().draft_cpus) == ((2,), (5,))
    cores -= {2}
    assert (config().target_cpus, config().draft_cpus) == ((), ())


def test_either_model_borrows_the_others_cores_while_it_rests(cores: set[int]) -> None:
    """Its own come first. Who names cores, or splits the target, wants just these."""
    found = config()
    assert found.elastic_cores
    assert found.cpus_of("target") == (0, 1, 2, 3, 4, 5, 6, 7) and found.core_counts("target") == (6, 8)
    assert found.cpus_of("draft") == (6, 7, 0, 1, 2, 3, 4, 5) and found.core_counts("draft") == (2, 8)
    for options in ({"target_cpus": "0-3"}, {"draft_cpus": "7"}, {"tensor_parallel_size": 2}, {"mode": "ar"}):
        assert not config(**options).elastic_cores
    ranks = config(tensor_parallel_size=3)
    assert [ranks.cpus_of("target", rank) for rank in range(3)] == [(0, 1), (2, 3), (4, 5)]
    assert ranks.cpus_of("draft") == (6, 7)


def test_cores_that_are_given_leave_the_others_to_the_other(cores: set[int]) -> None:
    found = config(target_cpus="0-1, 5")
    assert (found.target_cpus, found.draft_cpus) == ((0, 1, 5), (2, 3, 4, 6, 7))
    found = config(draft_cpus="7")
    assert (found.target_cpus, found.draft_cpus) == (tuple(range(7)), (7,))
    found = config(target_cpus="0", draft_cpus="0")
    assert (found.target_cpus, found.draft_cpus) == ((0,), (0,))


def test_every_rank_of_a_target_gets_a_core(cores: set[int], monkeypatch: pytest.MonkeyPatch) -> None:
    found = config(tensor_parallel_size=4)
    assert (found.target_cpus, found.draft_cpus) == ((0, 1, 2, 3, 4, 5), (6, 7))
    found = config(tensor_parallel_size=7)
    assert (found.target_cpus, found.draft_cpus) == (tuple(range(7)), (7,))
    found = config(tensor_parallel_size=8)
    assert (found.target_cpus, found.draft_cpus) == (tuple(range(8)), (7,))
    with pytest.raises(UsageError, match="--tensor-parallel-size 9 needs as many cores; this process may use 8"):
        config(tensor_parallel_size=9)
    with pytest.raises(UsageError, match="size 3 needs as many cores for the target, which may use 2"):
        config(tensor_parallel_size=3, target_cpus="0-1")
    names = registered.names
    other = {registered.LOAD_FORMATS: ["scripted"]}
    monkeypatch.setattr(registered, "names", lambda group: names(group) + other.get(group, []))
    with pytest.raises(UsageError, match="neither an engine without weights nor"):
        config(tensor_parallel_size=2, load_format="scripted")


@pytest.mark.parametrize("text", ["8", "0-8", "", "a", "1-", "3-1", "-1", "0;1"])
def test_cores_that_do_not_exist_are_refused(cores: set[int], text: str) -> None:
    with pytest.raises(UsageError, match="--target-cpus"):
        config(target_cpus=text)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mode": "fast"}, "mode"),
        ({"max_num_seqs": 0}, "max_num_seqs"),
        ({"max_num_seqs": 1025}, "max_num_seqs"),
        ({"num_speculative_tokens": 17}, "num_speculative_tokens"),
        ({"max_model_len": 1}, "at least 2"),
        ({"num_speculative_tokens": 8, "max_model_len": 8}, "does not fit into a context of 8"),
        ({"num_speculative_tokens": 4, "fan_out": (1, 2)}, "fan-out lists 2"),
        ({"fan_out": (1, 2)}, "give -k a number"),
        ({"fan_out": (99,)}, "fan_out"),
        ({"shutdown_timeout": float("nan")}, "shutdown_timeout"),
        ({"device": "cuda:x"}, "cuda:x"),
        ({"revision": "main"}, "revision"),
        ({"draft_revision": ("main",)}, "is not a hub model, so it has no revision 'main'"),
        ({"draft_revision": ("main", "other")}, "2 given for 1 drafts"),
    ],
)
def test_what_cannot_work_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        config(**options)


@pytest.mark.parametrize(
    "asked", [{"draft_bind": "tcp://127.0.0.1:5556"}, {"draft_keys": "x"}, {"draft_prompts": "own"}]
)
def test_a_draft_on_another_machine_needs_its_plugin(asked: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registered, "names", lambda group: [])
    with pytest.raises(UsageError, match=r"drafts on other machines .* need a plugin"):
        resolve(EngineOptions(target=TARGET), ServerOptions(http=False, **asked))
