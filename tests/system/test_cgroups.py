"""Cores and memory in a container: what its limits leave, by files as the kernel writes them."""

from __future__ import annotations

import os
import socket
from pathlib import Path

import pytest

from ssd.config import cores
from ssd.system import cgroups

GIB = 2**30
NO_LIMIT = "9223372036854771712\n"  # what version 1 says


def machine(root: Path, groups: str, files: dict[str, str]) -> Path:
    """A root folder: the groups of this process, and files of /sys/fs/cgroup."""
    written = {"proc/self/cgroup": groups, **{f"sys/fs/cgroup/{name}": text for name, text in files.items()}}
    for name, text in written.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_a_container_of_version_2(tmp_path: Path) -> None:
    files = {
        "cpu.max": "250000 100000\n",
        "memory.max": f"{4 * GIB}\n",
        "memory.current": f"{3 * GIB}\n",
        "memory.stat": f"anon {GIB}\nfile {2 * GIB}\ninactive_file {GIB}\nactive_file {GIB}\n",
    }
    root = machine(tmp_path, "0::/\n", files)
    assert cgroups.cpu_quota(root) == 2.5
    assert cgroups.memory_left(root) == 2 * GIB


def test_the_narrowest_of_the_groups_around_a_service_counts(tmp_path: Path) -> None:
    files = {
        "system.slice/cpu.max": "100000 100000\n",
        "system.slice/ssd.service/cpu.max": "max 100000\n",
        "system.slice/memory.max": "max\n",
        "system.slice/memory.current": f"{GIB}\n",
        "system.slice/ssd.service/memory.max": f"{2 * GIB}\n",
        "system.slice/ssd.service/memory.current": f"{3 * GIB}\n",
    }
    root = machine(tmp_path, "0::/system.slice/ssd.service\n", files)
    assert cgroups.cpu_quota(root) == 1
    assert cgroups.memory_left(root) == 0


def test_a_container_of_version_1_that_is_told_the_path_of_its_host(tmp_path: Path) -> None:
    files = {
        "cpu/cpu.cfs_quota_us": "150000\n",
        "cpu/cpu.cfs_period_us": "100000\n",
        "memory/memory.limit_in_bytes": f"{GIB}\n",
        "memory/memory.usage_in_bytes": f"{GIB // 2}\n",
        "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {GIB // 4}\n",
    }
    root = machine(tmp_path, "4:memory:/docker/1a2b\n3:cpu,cpuacct:/docker/1a2b\n0::/\n", files)
    assert cgroups.cpu_quota(root) == 1.5
    assert cgroups.memory_left(root) == GIB * 3 // 4


@pytest.mark.parametrize(
    "files",
    [
        {},
        {"cpu.max": "max 100000\n", "memory.max": "max\n", "memory.current": "5\n"},
        {
            "cpu/cpu.cfs_quota_us": "-1\n",
            "cpu/cpu.cfs_period_us": "100000\n",
            "memory/memory.limit_in_bytes": NO_LIMIT,
            "memory/memory.usage_in_bytes": "5\n",
        },
    ],
)
def test_without_a_limit_there_is_none(files: dict[str, str], tmp_path: Path) -> None:
    root = machine(tmp_path, "2:memory:/\n1:cpu:/\n0::/\n", files)
    assert cgroups.cpu_quota(root) is None and cgroups.memory_left(root) is None
    assert cgroups.cpu_quota(tmp_path / "no-proc") is None


@pytest.mark.parametrize(
    ("groups", "files", "killed"),
    [
        ("0::/ssd.service\n", {"ssd.service/memory.events": "low 0\nmax 7\noom 3\noom_kill 2\n"}, 2),
        ("4:memory:/docker/1a2b\n0::/\n", {"memory/memory.oom_control": "oom_kill_disable 0\noom_kill 3\n"}, 3),
        ("0::/\n", {}, 9),
    ],
    ids=["version 2", "version 1", "no group"],
)
def test_kernel_killed_processes_are_counted(groups: str, files: dict[str, str], killed: int, tmp_path: Path) -> None:
    root = machine(tmp_path, groups, files)
    (root / "proc/vmstat").write_text("pgfault 12\noom_kill 9\n")
    assert cgroups.oom_kills(root) == killed


def test_target_and_draft_get_as_many_cores_as_the_container_may_keep_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(64)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 4.5)
    places = set()
    for name in ("ssd-1", "ssd-2", "ssd-3"):
        monkeypatch.setattr(socket, "gethostname", lambda name=name: name)
        target, draft = cores.placement(None, None, 1, True, False)
        assert (len(target), len(draft)) == (3, 1) and not {*target} & {*draft}
        places.add(target)
    assert len(places) > 1, "the containers of a machine are not all on its first cores"
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 0.5)
    target, draft = cores.placement(None, None, 1, True, False)
    assert target == draft and len(target) == 1
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: 100)
    assert len(cores.placement(None, None, 1, False, False)[0]) == 64


@pytest.mark.parametrize(
    ("count", "ranks", "target"), [(16, 1, 2), (16, 4, 8), (16, 8, 8), (8, 6, 6), (4, 1, 2), (3, 1, 1), (2, 1, 1)]
)
def test_beside_gpus_a_rank_has_two_cores_if_the_draft_keeps_half(
    count: int, ranks: int, target: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(count)))
    monkeypatch.setattr(cgroups, "cpu_quota", lambda: None)
    found = cores.placement(None, None, ranks, True, True)
    assert found == (tuple(range(target)), tuple(range(target, count)))


def test_the_memory_of_a_container_is_what_its_limit_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgroups, "memory_left", lambda: None)
    host = cgroups.available_bytes()
    monkeypatch.setattr(cgroups, "memory_left", lambda: 5)
    assert cgroups.available_bytes() == 5 < host
