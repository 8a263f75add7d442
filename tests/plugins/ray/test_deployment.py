"""`ssd serve-ray`, as far as that needs no Ray: `tests/conformance/test_ray.py` has the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from ssd.cli.main import main
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.server import ServerOptions
from ssd.plugins.ray.deployment import ReplicaOptions, cause_of, checked, desired_replicas, replica_bundles
from ssd.plugins.ray.ingress import prompt_of


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [{"CPU": 4}]),
        ({"device": "cuda"}, [{"CPU": 4, "GPU": 1}]),
        ({"device": "cuda", "draft_device": "cuda:1"}, [{"CPU": 4, "GPU": 2}]),
        ({"device": "cuda", "draft_device": "cuda:0", "tensor_parallel_size": 2}, [{"CPU": 4, "GPU": 2}]),
        ({"tensor_parallel_size": 2, "executor": "ray"}, [{"CPU": 4}, {"CPU": 4}]),
        (
            {"device": "cuda", "tensor_parallel_size": 3, "executor": "ray"},
            [{"CPU": 4, "GPU": 1}, {"CPU": 1, "GPU": 1}, {"CPU": 1, "GPU": 1}],
        ),
    ],
    ids=str,
)
def test_what_a_replica_needs(options: dict[str, Any], expected: list[dict[str, float]]) -> None:
    assert replica_bundles(EngineOptions(**options), cpus=4) == expected


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b'{"model": "m", "prompt": "Once"}', "Once"),
        (b'{"prompt": ["a", "b"]}', '["a","b"]'),
        (b'{"messages": [{"role": "user", "content": "Hi"}], "system": "Be brief."}', "Be brief.\n[{"),
        (b'{"input": "Once", "instructions": "Be brief."}', "Be brief.\nOnce"),
        (b'{"model": "m"}', ""),
        (b"[1]", ""),
        (b"\xff", ""),
        (b"", ""),
    ],
)
def test_what_a_router_compares(body: bytes, expected: str) -> None:
    found = prompt_of(body)
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_replicas_are_counted_by_open_requests() -> None:
    def context(**open_requests: float) -> Any:
        metrics = {"open_requests": open_requests} if open_requests else {}
        return SimpleNamespace(
            aggregated_metrics=metrics, config=SimpleNamespace(get_target_ongoing_requests=lambda: 8.0)
        )

    assert [desired_replicas(c)[0] for c in (context(), context(a=6.0), context(a=6.0, b=14.0))] == [0, 0.75, 2.5]


@pytest.mark.parametrize(
    ("server", "table", "message"),
    [
        ({"uds": "/tmp/s"}, {}, "--uds is for one engine, not for replicas"),
        ({"http": False}, {}, "--no-http is for one engine"),
        ({"zmq_bind": "tcp://127.0.0.1:5555"}, {}, "--zmq-bind is for one engine"),
        ({"port": 0}, {}, "--port 0: replicas need a port that is known"),
        ({"host": "0.0.0.0"}, {}, "--host 0.0.0.0 lets other machines in"),
        ({}, {"min": 3, "max": 2}, r"\[replicas\]: max 2 is less than min 3"),
        ({}, {"most": 2}, r"\[replicas\]: .*`most`"),
        ({}, {"load": 0}, r"\[replicas\]: .*load"),
        ({}, 7, r"\[replicas\]: "),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused(server: dict[str, Any], table: Any, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        checked(EngineOptions(), ServerOptions(**server), table)


def test_one_file_is_for_launch_and_for_replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ssd.toml"
    file.write_text('load-format = "dummy"\nport = 8123\n[replicas]\nmin = 2\nmax = 4\nload = 16\ncpus = 3\n')
    asked: list[Any] = []
    monkeypatch.setattr("ssd.plugins.ray.deployment.deploy", lambda *given: asked.append(given) or "http://here")
    done = CliRunner().invoke(main, ["serve-ray", str(file), "--max-num-seqs", "5"])
    assert (done.exit_code, done.output) == (0, "http: http://here\n")
    engine, server, table = asked[0]
    assert (engine.load_format, engine.max_num_seqs, server.port) == ("dummy", 5, 8123)
    assert checked(engine, server, table) == ReplicaOptions(min=2, max=4, load=16.0, cpus=3)
    done = CliRunner().invoke(main, ["launch", "--config", str(file), "--dry-run"])
    assert done.exit_code == 0 and '"load_format": "dummy"' in done.output


def test_without_ray_the_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    file = tmp_path / "ssd.toml"
    file.write_text('load-format = "dummy"\n')
    for more in ([], ["--stop"]):
        done = CliRunner().invoke(main, ["serve-ray", str(file), *more])
        assert done.exit_code == 2 and "install ssd-engine[ray]" in done.output


def test_what_an_engine_said_is_the_cause() -> None:
    def status(*messages: str) -> Any:
        deployments = {str(index): SimpleNamespace(message=message) for index, message in enumerate(messages)}
        return SimpleNamespace(applications={"ssd": SimpleNamespace(deployments=deployments)})

    trace = "It failed.\n  File x\n    raise UsageError(\nssd.errors.UsageError: no model 'm': what is it?"
    assert cause_of(status("", trace)) == "no model 'm': what is it?"
    assert cause_of(status("", "It failed: KeyError: 'x'")) == ""
    assert cause_of(SimpleNamespace(applications={})) == ""
