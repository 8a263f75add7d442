"""The soak: what it takes for lost, doubled and altered, what it counts, and a short one on the real engine."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

import tools.soak.__main__ as soak
from ssd.client import AsyncClient, Client
from ssd.config.params import Speculation
from ssd.errors import EngineDeadError
from ssd.ipc.public import Chunk, Done, Failed, Metrics, Usage
from ssd.launch.supervisor import Engine
from tests.faults.engine import running_engine
from tools.soak.answers import Answer, Heard, judge
from tools.soak.asking import Fates, Request, pool, shuffled
from tools.soak.attacked import MAY_BE_TOLD, common_slope, life_figures
from tools.soak.disturbing import Memory
from tools.soak.driver import DISCONNECTED, Driver, Tally
from tools.soak.growth import Growth, GrowthSoak, named, private_mib
from tools.soak.processes import children, descriptors, memory_mib, running, shared_memory
from tools.soak.report import figures, memory_figures, slope
from tools.soak.siege import Deaths, Life, small_disk
from tools.soak.watching import WatchedClient, WatchedInboxes

AR = Speculation("ar")
EXPECTED = Answer([1, 2, 3, 4, 5], "abcde", "length")
WHOLE = [[1], [2, 3], [4, 5]]


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("chunks", "answer", "verdict"),
    [
        (WHOLE, EXPECTED, "right"),
        ([[1, 2, 3, 4, 5]], EXPECTED, "right"),
        (WHOLE, EXPECTED._replace(text="abcd"), "altered"),
        (WHOLE, EXPECTED._replace(finish_reason="stop"), "altered"),
        ([[1], [2, 9], [4, 5]], EXPECTED._replace(ids=[1, 2, 9, 4, 5]), "altered"),
        ([[1], [4, 5]], EXPECTED._replace(ids=[1, 4, 5]), "altered"),
        ([[1], [2, 3], [2, 3], [4, 5]], EXPECTED, "duplicated"),
        ([[1], [2, 3], [4, 5], [1]], EXPECTED._replace(ids=[1, 2, 3, 4, 5, 1]), "duplicated"),
        (WHOLE[:2], None, "right"),
        ([], None, "right"),
        ([[1], [2, 9]], None, "altered"),
        ([[2]], None, "altered"),
        ([[1], [1], [2]], None, "duplicated"),
    ],
)
def test_an_answer_is_compared_token_by_token(chunks: list[list[int]], answer: Answer | None, verdict: str) -> None:
    heard = Heard(0.0)
    for chunk in chunks:
        heard.take(chunk, 1.0)
    heard.answer = answer
    assert judge(heard, EXPECTED) == verdict


def test_ends_are_counted_though_nobody_waits_for_them() -> None:
    inboxes = WatchedInboxes(lambda name: None)
    for name in range(4):
        inboxes.open(name)
    done = Done(0, "length", "", [1], Usage(1, 1), Metrics())
    inboxes.put(done)
    inboxes.put(Chunk(0, "", []))  # says nothing
    inboxes.put(Failed(1, "engine_error", ""))
    inboxes.put(replace(done, id=1))
    inboxes.close(2)
    inboxes.put(Chunk(2, "a", [1]))
    assert (inboxes.ends, inboxes.late) == ({0: 1, 1: 2, 2: 0, 3: 0}, 0)
    inboxes.put(Chunk(0, "a", [1]))
    assert inboxes.late == 1

    async def counts() -> tuple[int, int]:
        client = WatchedClient("ipc:///nowhere")
        client.seen.ends, client.seen.late = inboxes.ends, inboxes.late
        await client.close()
        return client.without_end, client.with_more

    assert asyncio.run(counts()) == (2, 2)


# -- figures ----------------------------------------------------------------------------------------------------------


def test_the_gap_before_a_chunk_is_shared_by_its_tokens() -> None:
    tally, heard = Tally(), Heard(10.0)
    for ids, now in (([1, 2], 10.5), ([3], 10.7), ([], 10.8), ([4, 5], 11.1)):
        heard.take(ids, now)
    tally.time(heard)
    tally.time(Heard(3.0))
    assert tally.first_token == pytest.approx([0.5])
    assert tally.chunk_gaps == pytest.approx([0.2, 0.4])
    assert tally.token_gaps == pytest.approx([0.2, 0.2, 0.2])
    assert tally.tokens == 5


def test_a_phase_is_compared_with_plain_decoding() -> None:
    ar = figures("ar", Tally(seconds=2.0, tokens=10, token_gaps=[0.1] * 5))
    tally = Tally(seconds=2.0, finished=3, lost=1, altered=2, tokens=20, rounds=10, accepted=5, token_gaps=[0.05, 0.25])
    tally.errors["engine_error"] += 4
    row = figures("killed", tally, ar)
    assert (ar["p99_itl_ms"], "p99_itl_over_ar" in ar) == (pytest.approx(100.0), False)
    assert (row["output_throughput"], row["acceptance_length"], row["failed"]) == (10.0, 1.5, 4)
    assert row["p50_itl_ms"] == pytest.approx(150.0) and row["p99_itl_ms"] == pytest.approx(248.0)
    assert row["p99_itl_over_ar"] == pytest.approx(2.48)
    assert tally.wrong == 7


def test_the_slope_is_that_of_a_line_per_hour() -> None:
    seconds = [1000.0 + n for n in range(100)]
    assert slope(seconds, [5 + 2 * (now - 1000) / 3600 for now in seconds]) == pytest.approx(2.0)
    assert slope(seconds, [7.0] * 100) == pytest.approx(0.0, abs=1e-6)
    assert slope([1.0], [3.0]) == slope([], []) == 0.0
    found = memory_figures({"target": Memory(1, [0.0, 900.0, 1800.0, 2700.0], [1.0, 2.0, 2.0, 2.0])})
    assert found["target"]["mib_per_hour"] == pytest.approx(1.2)
    assert found["target"]["mib_per_hour_second_half"] == pytest.approx(0.0, abs=1e-9)


def test_processes_that_are_replaced_have_one_slope() -> None:
    climbing = ([0.0, 1800.0, 3600.0], [10.0, 11.0, 12.0])
    later = ([9000.0, 9900.0], [500.0, 500.5])
    assert common_slope([climbing, later]) == pytest.approx(2.0)
    assert common_slope([([5.0], [1.0]), ([], [])]) == 0.0
    life = Life([100.0 + n for n in range(60)], [50.0 + min(n, 20) for n in range(60)], [7] * 60)
    assert common_slope([life.settled]) == pytest.approx(0.0)
    figures = life_figures({1: life, 2: Life([200.0], [44.0], [9])})
    assert (figures["processes"], figures["most_mib"], figures["last_mib"], figures["most_files"]) == (2, 70, 44, 9)


def test_no_role_dies_more_often_than_an_engine_has_to_bear() -> None:
    deaths = Deaths()
    assert [deaths.may_die("target", 10.0 + n) for n in range(6)] == [True] * 4 + [False] * 2
    assert deaths.may_die("frontend", 16.0) and not deaths.may_die("target", 69.0)
    assert deaths.may_die("target", 70.5)
    assert all(deaths.may_die("draft", 10.0) for _ in range(50))


def test_where_nothing_may_be_mounted_there_is_no_small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mount").write_text("#!/bin/sh\nexit 32\n")
    (tmp_path / "mount").chmod(0o700)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    with small_disk() as disk:
        assert disk is None


# -- requests ---------------------------------------------------------------------------------------------------------


def test_requests_differ_and_are_the_same_every_time() -> None:
    requests = pool(40, 30, seed=1)
    assert requests == pool(40, 30, seed=1) != pool(40, 30, seed=2)
    assert len({request.messages[0].content for request in requests}) == 40
    assert {request.params.temperature for request in requests} == {0.0, 0.8}
    lengths = {request.params.max_tokens for request in requests}
    assert min(lengths) >= 8 and max(lengths) <= 30 and len(lengths) > 5
    order = [request.number for request in itertools.islice(shuffled(requests, 3), 80)]
    assert sorted(order[:40]) == sorted(order[40:]) == list(range(40)) and order[:40] != order[40:]


def test_some_clients_leave() -> None:
    (request,) = pool(1, 20, seed=0)
    fates = Fates(aborted=0.1, disconnected=0.2, seed=0)
    drawn = [fates.draw(request) for _ in range(2000)]
    names = [fate for fate, _ in drawn]
    assert 100 < names.count("abort") < 300 < names.count("disconnect") < 500
    assert {leave for _, leave in drawn} == set(range(1, request.params.max_tokens + 1))
    assert {Fates(0, 0, 1).draw(request)[0] for _ in range(50)} == {"whole"}


# -- with the mock, which answers as its oracle does ------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with running_engine(load_format="mock", max_num_seqs=4) as engine:
        yield engine


@pytest.mark.mock
def test_every_request_has_one_end_however_its_client_leaves(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[WatchedClient] = []

    async def close(client: WatchedClient) -> None:
        left.append(client)
        await AsyncClient.close(client)

    monkeypatch.setattr(WatchedClient, "close", close)

    async def load() -> list[Tally]:
        driver = Driver(engine.address, shuffled(pool(6, 40, 0), 0), concurrency=5)
        nobody = Fates(0, 0, 0)
        first = await driver.run(0.0, AR, nobody, at_least=6)
        return [first, await driver.run(0.0, AR, Fates(0.3, 0.3, 0), at_least=60)]

    first, second = asyncio.run(load())
    assert first.finished >= 6 and (first.wrong, first.aborted, first.disconnected) == (0, 0, 0)
    assert second.wrong == 0
    assert min(second.finished, second.aborted, second.disconnected) > 0
    assert second.finished + second.aborted + second.disconnected >= 60
    assert len(left) - 2 >= second.disconnected, "cut, not cancelled; the two are those that the others share"
    assert len(second.first_token) == second.finished + second.aborted + second.disconnected


@pytest.mark.mock
def test_an_answer_that_is_not_the_first_one_is_found(engine: Engine) -> None:
    (request,) = pool(1, 40, 0)
    other = replace(request.params, seed=1)
    stream: Iterator[Request] = iter([request, request, request._replace(params=other)])

    async def load() -> Tally:
        return await Driver(engine.address, stream, concurrency=1).run(0.0, AR, Fates(0, 0, 0), at_least=3)

    tally = asyncio.run(load())
    assert (tally.finished, tally.altered, tally.wrong) == (3, 1, 1)


@pytest.mark.mock
def test_a_request_that_fails_is_counted_by_its_code(engine: Engine) -> None:
    (request,) = pool(1, 40, 0)
    bad = request._replace(params=replace(request.params, min_tokens=1000))

    async def load() -> Tally:
        return await Driver(engine.address, iter([bad]), concurrency=1).run(0.0, AR, Fates(0, 0, 0), at_least=1)

    assert asyncio.run(load()).errors == {"invalid_request": 1}


@pytest.mark.mock
def test_a_frontend_that_dies_is_told_and_what_came_before_is_right(engine: Engine) -> None:
    async def load(expected: tuple[str, ...]) -> Tally:
        driver = Driver(engine.address, shuffled(pool(4, 2000, 0), 0), concurrency=4)
        reference = await driver.run(0.0, AR, Fates(0, 0, 0), at_least=4)
        assert reference.wrong == 0
        running = asyncio.create_task(driver.run(1.0, AR, Fates(0, 0, 0), expected=expected))
        await asyncio.sleep(0.05)
        os.kill(engine.pids["frontend"], signal.SIGKILL)
        return await running

    tally = asyncio.run(load(MAY_BE_TOLD))
    assert tally.told[DISCONNECTED] > 0 < tally.finished
    assert tally.wrong == 0
    with pytest.raises(EngineDeadError):
        asyncio.run(load(()))
    Client(engine.address, timeout=30.0).close()  # for those who come next, there is another one


@pytest.mark.mock
def test_processes_are_found_with_what_they_hold(engine: Engine) -> None:
    pids = set(engine.pids.values())
    assert pids <= set(children(os.getpid()))
    assert running(pids) == pids and running({2**22 + 1}) == set()
    for pid in pids:
        assert memory_mib(pid) > 1 and descriptors(pid) > 3
    assert isinstance(shared_memory(), set)


@pytest.mark.mock
def test_memory_is_read_of_every_process_by_name(engine: Engine) -> None:
    Client(engine.address, timeout=30.0).close()
    found = named(engine.pids)
    assert set(engine.pids) | {"text server"} <= set(found)
    assert len(set(found.values())) == len(found) > len(engine.pids) + 1
    assert all(private_mib(pid) > 1 for pid in found.values())


def test_a_process_that_grows_after_the_warm_up_is_found() -> None:
    minutes = [60.0 * minute for minute in range(61)]
    warm = [100 + 10 * min(minute, 10) for minute in range(61)]
    rows = {
        "draft": Growth(minutes, [100.0 + 2 * minute / 60 for minute in range(61)], 102.0),
        "target": Growth(minutes, [float(mib) for mib in warm], 200.0),
    }
    for limit, grown in ((1.0, ["draft"]), (3.0, [])):
        soak = GrowthSoak(None, 600.0, limit, 150.0, seed=0)  # type: ignore[arg-type]
        found = {name: soak.figures(of, 600.0) for name, of in rows.items()}
        assert [name for name, row in found.items() if soak.grows(name, row)] == grown
    soak = GrowthSoak(None, 600.0, 3.0, 1.0, seed=0)  # type: ignore[arg-type]
    assert soak.grows("draft", soak.figures(rows["draft"], 600.0))


# -- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.thorough
def test_a_short_soak_of_the_real_engine(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    small = {"minutes": 0.06, "undisturbed": 0, "requests": 3, "longest": 12, "concurrency": 3}
    disturbed = {"kill-every": 0.4, "aborted": 0.2, "disconnected": 0.2, "json": out}
    arguments = [f"--{name}={value}" for name, value in {**small, **disturbed}.items()]
    result = CliRunner().invoke(soak.main, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(out.read_text())
    assert [row["phase"] for row in report["phases"]] == ["ar", "ssd", "ssd, drafts killed"]
    assert report["kills"]["working"] + report["kills"]["starting"] > 0
    assert all(row["finished"] > 0 and row["tokens"] > 0 for row in report["phases"][::2])
    assert (report["exit_status"], report["left_behind"]["processes"], report["kv_cache_usage"]["after"]) == (0, 0, 0)
    assert set(report["memory"]) == {"supervisor", "target", "frontend"}
    assert report["restarted"] == []
    assert "drafts killed" in result.output


@pytest.mark.mock
@pytest.mark.thorough
def test_a_short_soak_under_attack(tmp_path: Path) -> None:
    out = tmp_path / "soak.json"
    small = {"minutes": 0.1, "undisturbed": 0, "requests": 3, "longest": 12, "concurrency": 3, "kill-every": 1}
    arguments = ["--attacks", "--mock", f"--json={out}", *(f"--{name}={value}" for name, value in small.items())]
    result = CliRunner().invoke(soak.main, arguments)
    assert result.exit_code == 0, (result.output, result.exception)
    report = json.loads(out.read_text())
    assert [row["phase"] for row in report["phases"]] == ["ar", "attacked"]
    attacked = report["phases"][1]
    assert attacked["finished"] > 0 < report["http"]["finished"]
    assert (attacked["lost"], attacked["hung"], attacked["altered"], report["http"]["altered"]) == (0, 0, 0, 0)
    assert set(attacked["told"]) <= set(MAY_BE_TOLD)
    assert sum(report["attacks"]["kinds"].values()) > 0 < sum(report["deaths"].values())
    assert set(report["lives"]) == {"supervisor", "mock", "frontend"}
    assert report["lives"]["supervisor"]["processes"] == 1
    assert (report["exit_status"], report["left_behind"]["processes"]) == (0, 0)
    assert "innocents over" in result.output


def test_the_mock_is_for_attacks() -> None:
    result = CliRunner().invoke(soak.main, ["--mock"])
    assert result.exit_code == 2 and "--mock is for --attacks" in result.output


@pytest.mark.parametrize("kind", ["lost", "duplicated", "altered", "failed"])
def test_what_is_wrong_fails_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: str) -> None:
    row = figures("ar", Tally(seconds=1.0)) | {kind: 3}
    parts = ("files_before", "files_after", "memory", "kills", "kv_cache_usage", "left_behind", "restarted")
    report = {"phases": [row], "exit_status": 0, "environment": {}} | {part: {} for part in parts}
    monkeypatch.setattr(soak._Soak, "run", lambda *arguments: report)
    out = tmp_path / "soak.json"
    result = CliRunner().invoke(soak.main, ["--json", str(out)])
    assert result.exit_code == 1 and f"3 {kind}" in result.output
    assert json.loads(out.read_text())["phases"][0][kind] == 3, "the report is written all the same"
