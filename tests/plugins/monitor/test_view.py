"""What of the figures is drawn, where a picture alone would not tell."""

from __future__ import annotations

import pytest
from msgspec.structs import replace
from rich.console import Console

from ssd.ipc.messages import LinkLoad
from ssd.plugins.monitor.history import History
from ssd.plugins.monitor.pipeline import legend
from ssd.plugins.monitor.recording import Recording
from ssd.plugins.monitor.screen import Look, line, screen
from ssd.plugins.monitor.stalls import Pipeline
from ssd.plugins.monitor.statistics import Figures, figures


def test_depths_are_told_in_their_order() -> None:
    shares = {f"depth {depth}": 0.1 for depth in (1, 10, 11, 2, 9)} | {"promote": 0.5}
    (line,) = legend(Pipeline(10.0, {"draft": shares}))
    assert " ".join(line.plain.split()) == "draft p promote 50% depth 1 10% 2 10% 9 10% 10 10% 11 10%"


@pytest.fixture(scope="module")
def of_demo() -> Figures:
    history, recording = History(), Recording()
    while (snapshot := recording.receive(0.0)) is not None:
        history.add(snapshot)
    plan = "ssd, K 5, 24 chains: predicted 228 tok/s, 141 with sd, K 3"
    return replace(figures(history, 60), model="smollm2", draft="smollm2-draft", plan=plan)


def drawn(found: Figures, width: int, height: int, note: str = "", page: str = "1") -> list[str]:
    """The lines of a picture."""
    console = Console(width=width, height=height, color_system=None)
    lines = console.render_lines(screen(found, [], Look(page, note=note), width, height), console.options)
    return ["".join(segment.text for segment in line) for line in lines]


@pytest.mark.parametrize("width", [200, 120, 80, 40, 20])
def test_what_the_tuner_chose_has_a_line_of_its_own(of_demo: Figures, width: int) -> None:
    """It takes nothing from the notes, which are above it, and is cut where the terminal ends."""
    lines = drawn(of_demo, width, 24, "paused")
    assert lines[1].startswith("now: ssd, K 5, 24 c") and {len(text) for text in lines} == {width}
    assert len(lines) == 24 and ("paused" in lines[0]) == (width >= 80)
    assert ("141 with sd" in lines[1]) == (width >= 80)
    assert "auto" in lines[0] or width < 40
    without = drawn(replace(of_demo, plan=""), width, 24, "paused")
    assert not any("now:" in text for text in without) and without[0] == lines[0]


def test_one_line_has_what_was_chosen_without_the_reasons(of_demo: Figures) -> None:
    assert ", plan: ssd, K 5, 24 chains" in line(of_demo) and "expected" not in line(of_demo)
    assert "plan" not in line(replace(of_demo, plan=""))


def test_one_line_has_the_processes_that_are_not_up(of_demo: Figures) -> None:
    parked = [replace(each, state="PARKED" if each.role == "draft" else "UP") for each in of_demo.processes]
    assert ", draft PARKED" in line(replace(of_demo, processes=parked)) and "draft PARKED" not in line(of_demo)


@pytest.mark.parametrize("width", [120, 80])
def test_the_speculation_panel_ends_with_accepted_tokens_by_source(of_demo: Figures, width: int) -> None:
    """They take no line of their own, but stand in the panel's lower edge."""
    without = replace(of_demo, speculating=replace(of_demo.speculating, accepted_by_source={}))
    known = replace(of_demo.speculating, rounds=200, accepted_by_source={"draft": 410, "lookup": 25})
    lines = drawn(replace(of_demo, speculating=known), width, 40)
    (edge,) = [number for number, text in enumerate(lines) if "accepted a round: draft 2.05, lookup 0.12" in text]
    before = drawn(without, width, 40)
    assert before[edge].startswith("╰──") and "accepted a round" not in before[edge]


def test_the_link_to_a_draft_on_another_machine_has_a_line(of_demo: Figures) -> None:
    far = replace(of_demo, link=LinkLoad(0.0203, 0.0011, 400, 100, 9000, 30, 5))
    said = "link: round trip 20.3 ms, give or take 1.1, 25% of speculations late, 300 bytes a token, the draft 5 tokens"
    assert said in line(far) and drawn(far, 140, 40)[2].startswith(said)
    assert not any("link:" in text for text in drawn(of_demo, 140, 40))


def test_the_pipeline_page_ends_with_the_last_decisions(of_demo: Figures) -> None:
    assert of_demo.decisions and of_demo.decisions == sorted(of_demo.decisions, key=lambda decision: decision[0])
    lines = drawn(replace(of_demo, decisions=[(0.25, "request 3 missed"), (2.0, "a plan")]), 100, 40, page="2")
    (first,) = [number for number, text in enumerate(lines) if "0.2 s  request 3 missed" in text]
    assert "misses, waits and plans" in lines[first - 1] and "2.0 s  a plan" in lines[first + 1]
    assert any("none" in text for text in drawn(replace(of_demo, decisions=[]), 100, 40, page="2"))
