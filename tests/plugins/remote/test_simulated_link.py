"""A simulated draft on another machine against the simulator, closed forms and limits."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from ssd.speculation.theory import LinearCost
from ssd.tuning.estimates import Measurements
from tests.tools.test_simulate import invoke
from tools.simulate.cascade import Level
from tools.simulate.link import over_link
from tools.simulate.paper import FITTED
from tools.simulate.remote import capacities, most_clients
from tools.simulate.run import simulate
from tools.simulate.setup import Devices, Setup
from tools.simulate.statistics import AcceptanceLaw, Statistics

MS = 1e-3
LLAMA = Measurements(*FITTED)
SURE = Measurements(LinearCost(20 * MS, 0.0), LinearCost(1 * MS, 0.0), (1.0,), (0.0, 1.0))
PLAIN = 1 / LLAMA.alone_s(1)


def test_beside_the_target_it_is_the_simulators() -> None:
    devices = Devices(LinearCost(18.2 * MS, 64e-6), (Level(LinearCost(2.04 * MS, 4.5e-6)),), overhead=1 * MS)
    law = AcceptanceLaw(LLAMA.acceptance)
    setup = Setup(devices, Statistics.alike(law, LLAMA.misses), engine="anytime", backup="auto")
    found = over_link(LLAMA, 0.0, 7, (3,))
    assert found.speed == pytest.approx(simulate(setup).tokens_per_second, rel=0.1)
    assert found.ahead == 0


def test_a_draft_that_is_always_right_hides_a_round_trip() -> None:
    """K + 1 tokens a round as if it were here, while a round trip takes four rounds. Then the trunk cannot reach."""
    near, far, beyond = (over_link(SURE, rtt * MS, 4, (1,)).speed for rtt in (0, 80, 1000))
    assert near == pytest.approx(5 / (20 * MS), rel=0.02)
    assert far == pytest.approx(near, rel=0.03)
    assert beyond < near / 2


def test_a_draft_that_is_always_wrong_is_plain_decoding() -> None:
    never = replace(SURE, acceptance=(0.0,), misses=(1.0, 0.0))
    for rtt in (5, 80):
        found = over_link(never, rtt * MS, 4, (2,))
        assert found.tokens == 1.0 and found.speed == pytest.approx(50.0, rel=0.01)


def test_a_longer_link_is_slower_and_never_slower_than_no_draft() -> None:
    found = [over_link(LLAMA, rtt * MS, 7, (3,)) for rtt in (0, 5, 20, 80, 150, 5000)]
    speeds = [one.speed for one in found]
    assert speeds == sorted(speeds, reverse=True)
    assert [one.ahead for one in found] == sorted(one.ahead for one in found)
    assert speeds[-1] == pytest.approx(PLAIN, rel=0.1)  # a round with a draft has an overhead
    assert over_link(LLAMA, 20 * MS, 7, (3,)) == found[2]


def test_more_clients_are_slower_each_and_the_most_at_a_speed_are_found() -> None:
    assert most_clients(lambda clients: 100 / clients, 20) == 5
    assert most_clients(lambda clients: 100 / clients, 101) == 0
    assert most_clients(lambda clients: 100.0, 20) == 256
    found = {one.place: one for one in capacities(LLAMA, 130.0, 4, 3, (0.02,), LLAMA.step)}
    edge, cloud = found["ssd, 20 ms away"], found["sd, in the cloud"]
    assert edge.clients > cloud.clients > 0 == found["no draft"].clients
    assert found["no draft"].alone == pytest.approx(PLAIN)


def test_remote_and_capacity_print_a_line_for_each_distance() -> None:
    links = json.loads(invoke("remote", "--rtt", "5ms", "--rtt", "0.1s", "--verify", "15ms", "--json").stdout)
    assert links["ar"] == pytest.approx(1 / 0.015)
    assert [link["rtt"] for link in links["links"]] == [0.005, 0.1]
    assert "5" in invoke("remote", "--rtt", "5ms").output
    asked = ("--speed", "200", "--rtt", "5ms", "--edge-step", "4ms")
    places = json.loads(invoke("capacity", *asked, "--json").stdout)["places"]
    assert [place["place"] for place in places][-1] == "ssd, 5 ms away" and len(places) == 4
    assert "ssd, 5 ms away" in invoke("capacity", *asked).output
