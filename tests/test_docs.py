"""The pages in docs/ and the README: links lead somewhere, tests that they name exist, lines fit a screen."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])


def anchors(page: Path) -> set[str]:
    """What GitHub makes of the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if re.match(r"https?:", target):
            continue
        file, _, anchor = target.partition("#")
        found = page.parent / file if file else page
        assert found.exists(), f"{page.name} links {target}"
        assert not anchor or anchor in anchors(found), f"{page.name} links {target}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_and_tests_exist(page: Path) -> None:
    for name in re.findall(r"`((?:ssd|tests|tools|examples|docs|deploy)/[\w/.-]*(?:::\w+)?)`", page.read_text()):
        file, _, test = name.partition("::")
        assert (ROOT / file).exists(), f"{page.name} names {file}"
        assert not test or re.search(rf"^(def|class) {test}\b|^{test} = ", (ROOT / file).read_text(), re.MULTILINE), (
            name
        )


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_without_their_folder_exist_somewhere(page: Path) -> None:
    known = {file.name for folder in ("ssd", "tests", "tools", "examples") for file in (ROOT / folder).rglob("*.*")}
    named = set(re.findall(r"`(\w+/)?(\w+\.(?:py|c))`", page.read_text()))
    assert {name for _, name in named} <= known, f"{page.name} names files that are gone"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_lines_fit_and_stay_inside_the_repository(page: Path) -> None:
    for number, line in enumerate(page.read_text().splitlines(), 1):
        assert len(line) <= 120, f"{page.name}:{number} has {len(line)} columns"
        assert "../shared" not in line, f"{page.name}:{number}"
