"""The imports of ssd/ are those that the code map of docs/design.md allows, and no files import each other."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from tools.budget import sizes

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DESIGN = (ROOT / "docs" / "design.md").read_text()
GROUND, PLUGINS, CORE = "ground", "plugins", "core"


@cache
def code_map() -> dict[str, set[str]]:
    """Package (or loose module) -> what its row of the code map lets it import, in the order of the rows."""
    section = DESIGN.split("\n## Code map\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \|.*\| ([\w ]+) \|$", section, re.MULTILINE)
    return {package: set(allowed.split()) for package, allowed in rows}


@cache
def modules() -> dict[str, ast.Module]:
    """Every module of ssd/ by its full name."""
    found = {}
    for path in (ROOT / "ssd").rglob("*.py"):
        name = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        found[name] = ast.parse(path.read_text(), str(path))
    return found


@cache
def imports(module: str) -> frozenset[str]:
    """The modules that one names in an import, wherever it stands: in a function or for types alone as well."""
    found = set()
    for node in ast.walk(modules()[module]):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module and not node.level, f"{module} imports relatively"
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            inner = names & modules().keys()
            found |= inner | ({node.module} if names - inner else set())
    return frozenset(found)


def package(module: str) -> str:
    """The row of the code map that a module of ssd/ belongs to; "" for ssd/__init__.py."""
    return module.split(".")[1] if "." in module else ""


def plugin(module: str) -> str:
    """The folder of ssd/plugins that a module belongs to; "" for the package of all."""
    return module.split(".")[2] if module.count(".") > 1 else ""


def arrows() -> Iterator[tuple[str, str]]:
    """(importing, imported) modules of ssd/. The root, for the version, is no one's neighbour."""
    for module in modules():
        for other in imports(module) & modules().keys():
            if package(module) and package(other):
                yield module, other


def test_the_map_has_a_row_for_everything() -> None:
    assert code_map().keys() == {package(module) for module in modules()} - {""}
    assert all(len(line) <= 120 for line in DESIGN.splitlines())


def test_no_row_allows_what_stands_above_it() -> None:
    rows = list(code_map())
    for index, (name, allowed) in enumerate(code_map().items()):
        assert allowed - {GROUND, CORE} <= set(rows[index + 1 :]), f"`{name}` may import upwards"


def test_imports_are_those_of_the_map() -> None:
    ground = {name for name, allowed in code_map().items() if allowed == {GROUND}}
    wrong = [
        f"{module} imports {other}"
        for module, other in arrows()
        if package(module) not in (package(other), PLUGINS)
        and package(other) not in code_map()[package(module)] | ground
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_a_plugin_is_imported_by_itself_alone() -> None:
    wrong = [
        f"{module} imports {other}"
        for module, other in arrows()
        if package(other) == PLUGINS and (package(module), plugin(module)) != (PLUGINS, plugin(other))
    ]
    assert not wrong, "\n".join(sorted(wrong))


def test_a_plugin_has_an_entry_point_and_tests() -> None:
    folders = {path.parent.name for path in (ROOT / "ssd" / PLUGINS).glob("*/__init__.py")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    values = [value for group in project["entry-points"].values() for value in group.values()]
    reached = {value.split(":")[0].split(".")[2] for value in values if value.startswith(f"ssd.{PLUGINS}.")}
    assert folders <= reached
    assert folders <= {path.parent.name for path in (ROOT / "tests" / PLUGINS).glob("*/test_*.py")}


def test_the_map_allows_nothing_that_nobody_needs() -> None:
    used = {(package(module), package(other)) for module, other in arrows()}
    unused = [
        f"`{name}` imports nothing of `{other}`"
        for name, allowed in code_map().items()
        for other in sorted(allowed - {GROUND, CORE})
        if (name, other) not in used
    ]
    assert not unused, "\n".join(unused)


@cache
def budget() -> dict[str, tuple[int, int]]:
    """Row of the budget -> its lines and words; 0 where it has none."""
    section = DESIGN.split("\n## Budget\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `([^`]+)` \| ([\d,]*) \| ([\d,]*) \|$", section, re.MULTILINE)
    number = {name: [int(text.replace(",", "") or 0) for text in texts] for name, *texts in rows}
    return {name: (lines, words) for name, (lines, words) in number.items()}


def test_nothing_is_larger_than_its_budget() -> None:
    found = sizes()
    assert found.keys() == budget().keys()
    wrong = [
        f"{name} has {size.lines} lines and {size.words} words; its budget is {budget()[name]}"
        for name, size in found.items()
        if size.lines > budget()[name][0] or size.words > budget()[name][1]
    ]
    assert not wrong, "\n".join(wrong)


def test_the_readme_says_how_long_the_decoding_path_is() -> None:
    assert f"decoding path of target and draft has {budget()['path'][0]:,} lines" in " ".join(README.split())


def test_no_files_import_each_other() -> None:
    graph: dict[str, set[str]] = {}
    for module, other in arrows():
        graph.setdefault(module, set()).add(other)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" -> ".join(error.args[1])) from None


def test_the_paper_needs_torch_numpy_and_the_standard_library_alone() -> None:
    others = {
        name.split(".")[0] for module in modules() if package(module) == "speculation" for name in imports(module)
    }
    assert others - sys.stdlib_module_names <= {"ssd", "torch", "numpy"}


def test_nobody_imports_pickle() -> None:
    unsafe = {"pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    wrong = [module for module in modules() if unsafe & {name.split(".")[0] for name in imports(module)}]
    assert not wrong and not [p for p in (ROOT / "ssd").rglob("*.py") if "torch.load(" in p.read_text()]


def test_who_may_not_load_torch_does_not() -> None:
    (sentence,) = re.findall(r"^- Importing (.*?)\s+does\s+not load torch", DESIGN, re.MULTILINE | re.DOTALL)
    light = tuple(f"ssd.{name}." for name in re.findall(r"`([\w.]+)`", sentence))
    names = sorted(name for name in modules() if f"{name}.".startswith(light) and not name.endswith("__main__"))
    code = [
        "import importlib, sys",
        "for name in sys.argv[1:]:",
        "    try:",
        "        importlib.import_module(name)",
        "    except ModuleNotFoundError as error:",  # the development tools bring no Ray
        "        assert error.name == 'ray', error",
        "    assert 'torch' not in sys.modules, name",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(code), *names], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
