"""Whether transformers is here, which the fallback needs. Loads neither it nor torch."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

_OLDEST = 5  # version of transformers
HOW_TO_INSTALL = f"`pip install 'transformers>={_OLDEST}'`"


def installed() -> str | None:
    """The version of transformers, None without one that is new enough."""
    try:
        found = version("transformers")
    except PackageNotFoundError:
        return None
    return found if int(found.split(".")[0]) >= _OLDEST else None
