"""Attacks on one engine while innocent clients use it: nobody but the attacker notices, and nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.attacks.corpus import ATTACKS
from tests.attacks.engine import AttackedEngine, attacked_engine
from tests.attacks.registry import Attack

pytestmark = pytest.mark.mock

# Seconds that the frontend computes without a token for an innocent: usually some tens of milliseconds. Without its
# limits it stands still for ten to twenty seconds.
_LONGEST_STALL_S = 8.0
_PEAK_MIB = 250.0  # of the frontend during an attack; its budgets for messages are part of it
_LEFT_MIB = 160.0  # after all of them, what allocators keep
_LEFT_FILES = 12  # what libraries open once


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AttackedEngine]:
    with attacked_engine(tmp_path_factory.mktemp("attacked")) as engine:
        engine.innocents.seen()
        yield engine


@pytest.fixture(scope="module")
def before(engine: AttackedEngine) -> tuple[float, int]:
    """Resident MiB and open files of the frontend before the first attack."""
    return engine.resident_mib, engine.descriptors


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.name)
def test_an_attack_costs_nobody_else(engine: AttackedEngine, before: tuple[float, int], attack: Attack) -> None:
    engine.innocents.seen()
    engine.forget_peak()
    pids, files, memory = engine.pids, engine.descriptors, engine.resident_mib
    outcome = attack.run(engine.site)
    seen = engine.innocents.seen()
    problems = outcome.problems[:5]
    problems += [f"the {role} was replaced" for role in pids if engine.pids.get(role) != pids[role]]
    for name, innocent in seen.items():
        problems += [f"innocent {name}: {problem}" for problem in innocent.problems[:3]]
        if innocent.stall_s > _LONGEST_STALL_S:
            problems.append(f"innocent {name} heard nothing while the frontend computed {innocent.stall_s:.1f} s")
    if not problems:
        if (grown := engine.peak_mib - memory) > _PEAK_MIB:
            problems.append(f"the frontend grew by {grown:.0f} MiB")
        if (left := engine.settled_descriptors(files + _LEFT_FILES)) > files + _LEFT_FILES:
            problems.append(f"{left} files are open, {files} were")
    assert not problems, (dict(outcome.codes), problems)


def test_nothing_stays_behind(engine: AttackedEngine, before: tuple[float, int]) -> None:
    memory, files = before
    assert engine.settled_descriptors(files + _LEFT_FILES) <= files + _LEFT_FILES
    assert engine.settled_mib(memory + _LEFT_MIB) <= memory + _LEFT_MIB
    log = engine.log.read_text()
    assert "Traceback" not in log and "never retrieved" not in log, log[-3000:]
