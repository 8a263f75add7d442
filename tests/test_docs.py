"""Pages: links lead somewhere, tests that they name exist, lines fit a screen. Docstrings: each reads once."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PROJECT = (ROOT / "pyproject.toml").read_text()
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "tools").glob("*/*.md")])


def is_removed(file: str) -> bool:
    """True for a file of a plugin whose folder was removed."""
    found = re.match(r"\w+/plugins/(\w+)", file)
    folder = f"ssd/plugins/{found[1]}" if found else "ssd"
    return not (ROOT / folder).exists() and f'"{folder.replace("/", ".")}' in PROJECT


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
        if is_removed(file):
            continue
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


def test_every_known_failure_names_tests_that_exist() -> None:
    """Each row of the tables leads to a section, each section has a row, and names a test function of a test file."""
    page = (ROOT / "docs/known-failures.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\(#([\w-]+)\) \| .*\S \| .*\S \|$", page, re.MULTILINE)
    sections = dict(re.findall(r"^## (.+)\n((?:(?!## ).*\n)+)", page, re.MULTILINE))
    names = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in sections]
    assert len(rows) > 12 and sorted(rows) == sorted(names)
    for heading, text in sections.items():
        tests = re.findall(r"^- `(tests/[\w/]+/test_\w+\.py)::(test_\w+)`$", text, re.MULTILINE)
        assert tests and len(tests) == text.count("::"), heading
        for file, test in tests:
            if is_removed(file):
                continue
            assert re.search(rf"^def {test}\(", (ROOT / file).read_text(), re.MULTILINE), f"{heading}: {file}::{test}"


ROOMS = sorted({path.relative_to(ROOT / "ssd").parts[0] for path in (ROOT / "ssd").rglob("*.py")})
OPENING = re.compile(r"(What|Whatever|Whether|Those|That|The same|So many|Of|How|In which|As)\b")
TURN = re.compile(r"\b(what is no|so many|by what is|that of what|as ever|which nobody)\b", re.IGNORECASE)
NO_VERB = {
    "A",
    "An",
    "The",
    "It",
    "This",
    "These",
    "True",
    "False",
    "None",
    "See",
    "If",
    "Where",
    "Which",
    "Who",
    "Why",
}
VERBS_IN_S = {"Pass", "Process", "Guess", "Compress", "Address", "Press", "Express", "Access"}


def texts(source: str) -> Iterator[tuple[int, str, bool]]:
    """(line, text, of a function) of each docstring, string under a name, and comment of a file."""
    for node in ast.walk(ast.parse(source)):
        is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if not (is_function or isinstance(node, ast.ClassDef | ast.Module)):
            continue
        for index, statement in enumerate(node.body):
            if isinstance(statement, ast.Expr) and isinstance(text := getattr(statement.value, "value", None), str):
                yield statement.lineno, text.strip(), is_function and index == 0
    previous = -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != previous + 1:
                yield token.start[0], token.string.lstrip("# "), False
            previous = token.start[0]


def wrong(text: str, is_function: bool) -> str:
    """Why a docstring or a comment has to be read twice; empty if it does not."""
    first, one_line = text.split(maxsplit=1)[0].rstrip(".,:;") if text else "", " ".join(text.split())
    if OPENING.match(text):
        return "begins with a clause"
    if found := TURN.search(one_line):
        return f"says {found[0]!r}"
    if is_function and (first in NO_VERB or (first.endswith("s") and first not in VERBS_IN_S)):
        return "does not begin with an imperative"
    return ""


@pytest.mark.parametrize("room", ROOMS)
def test_docstrings_and_comments_read_once(room: str) -> None:
    place = ROOT / "ssd" / room
    files = [place] if place.is_file() else sorted(place.rglob("*.py"))
    found = [
        f"{path.relative_to(ROOT)}:{line}: {why}: {text.splitlines()[0]}"
        for path in files
        for line, text, is_function in texts(path.read_text())
        if (why := wrong(text, is_function))
    ]
    assert not found, "\n" + "\n".join(found)
