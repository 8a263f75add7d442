"""`ssd demo` with its part on emulated devices, as a shell sees it."""

from __future__ import annotations

from pathlib import Path

import pytest

from ssd.plugins.emulation.demo import PAPER_PAIR
from tests.cli.test_generate import run
from tests.plugins.demo.test_demo import check, interrupted, without_a_draft

__all__ = ["without_a_draft"]
_PART = ("70B, emulated", "EMULATED: no GPU is used", [(mode, "emulated") for mode in ("ar", "sd", "ssd")])


@pytest.mark.parametrize("built_in", [True, pytest.param(False, marks=pytest.mark.thorough)])
def test_the_demo_shows_three_gains_and_compares_all_ids(built_in: bool, without_a_draft: Path) -> None:
    target = "smollm2" if built_in else without_a_draft
    done = run("demo", "--max-tokens", "8", "--target", str(target))
    assert done.returncode == 0, done.stderr
    assert "with speculation, three times:" in done.stdout
    check(done.stdout, target, [_PART])


@pytest.mark.thorough
def test_ctrl_c_ends_the_part_and_leaves_nothing(without_a_draft: Path, tmp_path: Path) -> None:
    interrupted("ssd target: emulated", without_a_draft, tmp_path)


def test_the_page_has_the_words_of_the_part() -> None:
    page = (Path(__file__).parents[3] / "docs" / "demo.md").read_text()
    assert PAPER_PAIR.about in page and f"{PAPER_PAIR.last}\nNext:" in page
