"""Ranks that Ray places, as far as that needs no Ray: `tests/conformance/test_ray.py` has the rest."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest
from msgspec.structs import replace

from ssd.config.engine import EngineConfig
from ssd.errors import UsageError
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.plugins.ray.ranks import Follower, bundles
from tests.models import tiny


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    target = tiny.tokenizer(tiny.llama(tmp_path_factory.mktemp("target"), vocab_size=300))
    return resolve(EngineOptions(target=str(target), mode="ar", tensor_parallel_size=2, executor="ray"))


def run(config: bytes) -> tuple[str, int]:
    return Follower().run(config, 1, 7, "127.0.0.1:1")


def test_a_rank_runs_the_same_files_and_the_same_version_only(config: EngineConfig, tmp_path: Path) -> None:
    other = tiny.tokenizer(tiny.llama(tmp_path, vocab_size=301))
    cause, code = run(msgspec.json.encode(replace(config, target=str(other))))
    assert cause == f"{other} differs from the files there on the supervisor's machine" and code == UsageError.exit_code
    cause, code = run(msgspec.json.encode(replace(config, target="/nowhere/at/all")))
    assert "/nowhere/at/all" in cause and code == UsageError.exit_code
    cause, code = run(b'{"target": "m", "later": 1}')
    assert cause.startswith("the supervisor runs another version of ssd: ") and code == UsageError.exit_code


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"target_cpus": (0, 1, 2)}, [{"CPU": 3}, {"CPU": 3}]),
        ({"target_cpus": (0, 1), "draft": "d", "draft_cpus": (2,)}, [{"CPU": 3}, {"CPU": 2}]),
        ({"target_cpus": (), "tensor_parallel_size": 3}, [{"CPU": 1}] * 3),
        ({"device": "cuda", "target_cpus": (0,)}, [{"CPU": 1, "GPU": 1}] * 2),
        ({"device": "cuda", "draft_device": "cuda:0", "draft": "d", "target_cpus": ()}, [{"CPU": 1, "GPU": 1}] * 2),
        (
            {"device": "cuda", "draft_device": "cuda:1", "draft": "d", "target_cpus": (0,), "draft_cpus": (1,)},
            [{"CPU": 1, "GPU": 2}, {"CPU": 1, "GPU": 1}],
        ),
        (  # eight ranks fit on a machine of 32 cores and eight GPUs
            {
                "device": "cuda",
                "draft_device": "cuda:0",
                "draft": "d",
                "target_cpus": tuple(range(24)),
                "draft_cpus": tuple(range(24, 32)),
            },
            [{"CPU": 1, "GPU": 1}] * 2,
        ),
    ],
    ids=str,
)
def test_what_a_rank_needs(config: EngineConfig, changes: dict, expected: list) -> None:  # type: ignore[type-arg]
    assert bundles(replace(config, **changes)) == expected


def test_what_cannot_be_is_refused(config: EngineConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="--executor ray places the ranks of a target"):
        replace(config, tensor_parallel_size=1)
    with pytest.raises(UsageError, match=r"--device cuda:1, .*: with --executor ray the GPUs are those that Ray gives"):
        replace(config, device="cuda:1")
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=r"install ssd-engine\[ray\]"):
        Engine(config).start()
