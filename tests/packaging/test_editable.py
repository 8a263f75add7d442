"""The package as `make` installs it for these tests: found from any folder, by programs and by type checkers."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Type checkers read sys.path and the .pth files of site-packages. They run no import hooks.
_SCRIPTS = {
    "a program": "from ssd import LLM; print(LLM.__module__)",
    "a type checker": "import importlib.machinery as m; print(m.PathFinder.find_spec('ssd').name + '.llm')",
}


@pytest.mark.parametrize("reader", _SCRIPTS)
def test_a_folder_named_ssd_beside_a_script_hides_nothing(reader: str, tmp_path: Path) -> None:
    """A clone is such a folder: `ssd/` without an `__init__.py`."""
    (tmp_path / "ssd" / "docs").mkdir(parents=True)
    script = tmp_path / "script.py"
    script.write_text(_SCRIPTS[reader] + "\nimport sys, ssd; assert ssd.__file__ and sys.path[0] == sys.argv[1]\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == "ssd.llm\n", done.stderr
