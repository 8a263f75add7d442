"""`ssd launch` as a whole: what it makes of flags, environment and file, and what listens when it is ready."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import stat
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from ssd import SamplingParams
from ssd.cli.main import main
from ssd.client import Client
from ssd.errors import EngineDeadError, SsdError
from ssd.ipc import keys
from ssd.models.pull import BUILTIN
from tests.cli.launched import SMALL_MODEL, running
from tests.scripted_engine import PATIENCE_S

TARGET = str(BUILTIN["smollm2"].directory)
POST = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"


def launch(*arguments: str | Path, **environment: str) -> Result:
    return CliRunner(env=environment).invoke(main, ["launch", *SMALL_MODEL[:-2], *map(str, arguments)])


def resolved(*arguments: str | Path, **environment: str) -> dict[str, Any]:
    result = launch("--dry-run", *arguments, **environment)
    assert result.exit_code == 0, result.output
    config: dict[str, Any] = json.loads(result.stdout)
    return config


# -- without starting anything --------------------------------------------------------------------------------------


def test_keys_of_the_environment_and_of_flags_are_counted_and_not_shown() -> None:
    for arguments, environment, count in (
        ((), {"SSD_API_KEY": "sesame,open"}, 2),
        (("--api-key", "sesame"), {}, 1),
        ((), {"SSD_API_KEY": ""}, 0),
    ):
        found = resolved("--host", "0.0.0.0", "--insecure", *arguments, **environment)
        assert found["server"]["api_keys"] == ["..."] * count
        assert "sesame" not in json.dumps(found)


def test_serve_takes_the_model_as_its_argument() -> None:
    dry = ["serve", "--dry-run", "--no-http"]
    for arguments in ([TARGET], ["-m", TARGET], ["--target", TARGET]):
        result = CliRunner().invoke(main, [*dry, *arguments])
        assert json.loads(result.stdout)["target"] == TARGET, result.output


def test_a_flag_counts_more_than_the_environment_and_that_more_than_the_file(tmp_path: Path) -> None:
    file = tmp_path / "ssd.toml"
    file.write_text(
        'port = 1111\nmax-num-seqs = 3\nhost = "::1"\nserved-model-name = ["a", "b"]\n'
        "fan-out = [3, 2, 1]\nnum-speculative-tokens = 2"
    )
    config = resolved("--config", file, "--port", "3333", SSD_PORT="2222", SSD_MAX_NUM_SEQS="5")
    assert config["server"]["port"] == 3333
    assert config["max_num_seqs"] == 5
    assert config["server"]["host"] == "::1"
    assert config["server"]["names"] == ["a", "b"]
    assert config["speculation"]["fan_out"] == [3, 2, 1]


def test_the_configuration_that_is_printed_holds_no_key(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("sesame-of-the-test\n")
    file.chmod(0o600)
    assert "sesame" not in json.dumps(resolved("--host", "0.0.0.0", "--api-key-file", file))


def test_speculation_in_one_object_counts_less_than_flags() -> None:
    given = '{"num_speculative_tokens": 3, "fan_out": [4, 3, 2, 1], "backup": "jit"}'
    config = resolved("--speculative-config", given, "--backup", "ngram")
    assert config["speculation"]["num_speculative_tokens"] == 3
    assert config["speculation"]["fan_out"] == [4, 3, 2, 1]
    assert config["speculation"]["backup"] == "ngram"


@pytest.mark.parametrize("name", ["theorem", "pearl"])
def test_an_allocation_is_asked_for_by_name(name: str) -> None:
    for given in (("-f", name), ("--speculative-config", f'{{"fan_out": "{name}"}}')):
        speculation = resolved(*given, "--budget", "20")["speculation"]
        assert (speculation["fan_out"], speculation["allocation"], speculation["budget"]) == ([], name, 20)
    assert resolved()["speculation"]["allocation"] == "joint"


def test_speculation_in_one_object_of_the_file_counts_less_than_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "ssd.toml"
    file.write_text('backup = "none"\n[speculative-config]\nnum_speculative_tokens = 3\nbackup = "jit"\nbudget = 7')
    config = resolved("--config", file, SSD_BUDGET="9")
    assert config["speculation"]["num_speculative_tokens"] == 3
    assert config["speculation"]["backup"] == "none"
    assert config["speculation"]["budget"] == 9
    assert resolved(SSD_CONFIG=str(file))["speculation"]["budget"] == 7


def test_several_names_come_from_anywhere(tmp_path: Path) -> None:
    file = tmp_path / "ssd.toml"
    file.write_text('served-model-name = "alone"')
    assert resolved("--config", file)["server"]["names"] == ["alone"]
    assert resolved(SSD_SERVED_MODEL_NAME="a b,c")["server"]["names"] == ["a b", "c"]
    hosts = resolved("--allowed-host", "a.example", "--allowed-host", "[::2]")["server"]["allowed_hosts"]
    assert hosts == ["a.example", "[::2]"]


def test_the_configuration_may_come_through_a_pipe() -> None:
    read, write = os.pipe()
    os.write(write, b"port = 1234")
    os.close(write)
    assert resolved("--config", f"/dev/fd/{read}")["server"]["port"] == 1234
    os.close(read)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--host", "0.0.0.0", "--insecure"],
        ["--host", "0.0.0.0", "--no-http"],
        ["--host", "0.0.0.0", "--uds", "/tmp/ssd-test.sock"],
        ["--zmq-bind", "tcp://0.0.0.0:5555", "--insecure"],
        ["--zmq-bind", "tcp://127.0.0.1:5555"],
    ],
)
def test_what_lets_nobody_else_in_or_is_meant_is_allowed(arguments: list[str]) -> None:
    resolved(*arguments)


def test_an_engine_that_cannot_be_prepared_leaves_no_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> Path:
        raise SsdError("no room")

    monkeypatch.setattr("ssd.launch.resources.run_directory", refuse)
    result = launch("--uds", tmp_path / "http.sock")
    assert (result.exit_code, result.stderr) == (1, "error: no room\n")
    assert not (tmp_path / "http.sock").exists()


# -- the real processes, with a small model ---------------------------------------------------------------------------


class UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path) -> None:
        super().__init__("localhost", timeout=PATIENCE_S)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(PATIENCE_S)
        self.sock.connect(str(self._path))


def test_a_unix_socket_serves_every_name_and_is_gone_afterwards(tmp_path: Path) -> None:
    path = tmp_path / "http.sock"
    names = ["--served-model-name", "first", "--served-model-name", "second"]
    with running("--uds", path, *names) as (process, said):
        assert str(path) in said["http"]
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0
        connection = UnixConnection(path)
        connection.request("GET", "/v1/models")
        assert [model["id"] for model in json.loads(connection.getresponse().read())["data"]] == ["first", "second"]
        for name in ("first", "second"):
            body = json.dumps({"model": name, "prompt": "x", "max_tokens": 2})
            connection.request("POST", "/v1/completions", body, {"content-type": "application/json"})
            answer = json.loads(connection.getresponse().read())
            assert (answer["model"], answer["usage"]["completion_tokens"]) == (name, 2)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not path.exists()


@pytest.mark.parametrize(
    ("begun", "sign", "rest"),
    [
        (POST + b"content-length: 9\r\nexpect: 100-continue\r\n\r\n", b"100", b"{"),
        (b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\nGET /he", b"200", b""),
    ],
    ids=["body", "head"],
)
def test_a_request_that_has_not_come_whole_ends_with_the_engine(begun: bytes, sign: bytes, rest: bytes) -> None:
    """With an answer, and without a word in the log."""
    with running("--port", "0") as (process, said):
        client = socket.create_connection(("127.0.0.1", int(said["http"].rpartition(":")[2])), PATIENCE_S)
        client.sendall(begun)
        assert client.recv(65536).split()[1] == sign, "it reads"
        client.sendall(rest)
        process.send_signal(signal.SIGTERM)
        answer = b""
        while part := client.recv(65536):
            answer += part
        client.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.split()[1] == b"503" and json.loads(body)["error"]["code"] == "shutting_down"
        assert process.wait(PATIENCE_S) == 0 and process.stderr is not None
        assert "Traceback" not in process.stderr.read()


def test_a_client_of_another_machine_needs_a_key_that_is_known(tmp_path: Path) -> None:
    keys.new_server(tmp_path / "keys")
    known = keys.new_client(tmp_path / "keys", "known")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with running("--no-http", "--zmq-bind", address, "--zmq-keys", tmp_path / "keys") as (_, said):
        assert "http" not in said and said["zmq"] == address
        with Client(address, keys=known) as client:
            assert len(client.generate("x", SamplingParams(max_tokens=3)).token_ids) == 3
        with pytest.raises(EngineDeadError), Client(address, timeout=2.0) as client:
            client.describe()
