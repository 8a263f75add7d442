"""Count the lines and words that docs/design.md has a budget for: `python -m tools.budget` prints its table."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
_CORE, _PLUGINS = "ssd", "ssd/plugins"


class Size(NamedTuple):
    """Lines of Python, and words: of docstrings where there are lines, else of prose."""

    lines: int
    words: int

    def __add__(self, other: tuple[int, ...]) -> Size:
        return Size(self.lines + other[0], self.words + other[1])


def sizes() -> dict[str, Size]:
    """Return the size of each row of the budget, by its name there."""
    found = {folder: _python(folder) for folder in sorted(_folders())}
    plugins = found[_PLUGINS]
    core = sum(found.values(), Size(0, 0))
    loose = _python_of((ROOT / "ssd").glob("*.py"))
    return {
        **found,
        "ssd/*.py": loose,
        "core": Size(core.lines - plugins.lines + loose.lines, core.words - plugins.words + loose.words),
        "ssd, all": core + loose,
        "path": Size(sum(file.read_text().count("\n") for file in path_files()), 0),
        "tests": Size(_python("tests").lines, 0),
        "tools": Size(_python("tools").lines, 0),
        "docs": Size(0, sum(len(page.read_text().split()) for page in _pages())),
    }


def path_files() -> list[Path]:
    """Return the files that docs/life-of-a-round.md lists as the decoding path."""
    section = (ROOT / "docs" / "life-of-a-round.md").read_text().split("\n## The files of the path\n")[1]
    rows = re.findall(r"^\| `([\w.]+)/`.*? \| (`.*`) \|$", section, re.MULTILINE)
    return [ROOT / "ssd" / folder / f"{name}.py" for folder, names in rows for name in re.findall(r"`(\w+)`", names)]


def _folders() -> Iterator[str]:
    for path in (ROOT / "ssd").iterdir():
        if path.is_dir() and any(path.rglob("*.py")):
            yield f"ssd/{path.name}"


def _pages() -> list[Path]:
    return [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "ssd").rglob("*.md")]


def _python(folder: str) -> Size:
    return _python_of(path for path in (ROOT / folder).rglob("*.py") if "node_modules" not in path.parts)


def _python_of(files: Iterator[Path]) -> Size:
    total = Size(0, 0)
    for file in files:
        text = file.read_text()
        total += Size(text.count("\n"), sum(len(docstring.split()) for docstring in _docstrings(ast.parse(text))))
    return total


def _docstrings(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


if __name__ == "__main__":
    for name, (lines, words) in sizes().items():
        print(f"| `{name}` | {lines or ''} | {words or ''} |")
