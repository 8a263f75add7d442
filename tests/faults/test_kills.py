"""Hundreds of drafts die at every step of the protocol, and nobody can tell from the answers (contract C1)."""

from __future__ import annotations

import pytest

from tools.soak.kills import POINTS, kills

COUNT = 250


@pytest.mark.thorough
@pytest.mark.timeout(1800)  # 20 s where there is a core to spare
def test_hundreds_of_deaths_cost_no_token() -> None:
    report = kills(COUNT, seed=0)
    assert (report["altered"], report["lost"], report["duplicated"], report["failed"]) == (0, 0, 0, 0)
    assert report["crashed"] == 0, "every draft died as it should"
    assert report["kills"] == sum(report["deaths"].values()) == COUNT
    assert set(report["deaths"]) == set(POINTS) and min(report["deaths"].values()) > COUNT / len(POINTS) / 4
    assert (report["pages_left"], report["shared_memory_left"]) == (0, [])
    assert report["descriptors_left"] <= 0, "fewer are somebody else's, which have been collected meanwhile"
    assert report["requests"] > COUNT / 4 and report["accepted"] > COUNT / 50, "drafts were of use before they died"
