from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_OLDEST = 5  # version of transformers
HOW_TO_INSTALL = f"`pip install 'transformers>={_OLDEST}'`"


def installed_transformers() -> str | None:
    """Return the version of transformers without loading it; None if it is missing or too old."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if int(found.split(".")[0]) >= _OLDEST else None
