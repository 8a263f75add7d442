"""Commands for Python processes that import no code from the working directory.

`python -m`, or an empty entry of PYTHONPATH, puts the working directory first on the path, where the author of a
downloaded model could replace any module. This file, run as a program, runs a module of its own `ssd`."""

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
from pathlib import Path

_PACKAGE = Path(__file__).parents[1]


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", *arguments]


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command of a process that runs `module` of this copy of `ssd`, wherever it was imported from."""
    return command(__file__, module, *arguments)


def environment() -> dict[str, str]:
    entries = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    return {**os.environ, "PYTHONPATH": os.pathsep.join(entries)}


def _main() -> None:
    # The parent may have found this package only in its working directory: import it from its own location, whose
    # folder comes last on the path, where it hides nothing.
    sys.path.append(str(_PACKAGE.parent))
    spec = importlib.util.spec_from_file_location("ssd", _PACKAGE / "__init__.py")
    assert spec is not None and spec.loader is not None
    sys.modules["ssd"] = package = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(package)
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
