"""How a tool starts a part of itself in a process of its own."""

from __future__ import annotations

import os
from pathlib import Path

from ssd.system import interpreter

ROOT = Path(__file__).parents[1]


def command(module: str, *arguments: str) -> list[str]:
    """The command that runs a module, such as "tools.soak.host"; start it with `environment`."""
    return interpreter.command("-m", module, *arguments)


def environment() -> dict[str, str]:
    """This process's environment, with the clone first on the path of modules."""
    safe = interpreter.environment()
    return safe | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), safe["PYTHONPATH"])))}
