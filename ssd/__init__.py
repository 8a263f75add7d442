"""ssd: an inference engine for speculative speculative decoding."""

from __future__ import annotations

TYPE_CHECKING = False  # `typing` takes time to import, and Ctrl-C meanwhile would print a traceback
if TYPE_CHECKING:
    from typing import Any

    from ssd.client import Completion
    from ssd.config.params import SamplingParams
    from ssd.errors import RequestError
    from ssd.llm import LLM

__version__ = "0.1.0"
__all__ = ["LLM", "Completion", "RequestError", "SamplingParams", "__version__"]

_HOMES = {
    "LLM": "ssd.llm",
    "Completion": "ssd.client",
    "RequestError": "ssd.errors",
    "SamplingParams": "ssd.config.params",
}


def __getattr__(name: str) -> Any:
    """Import a name when it is first used, so that `import ssd` costs nothing."""
    if name not in _HOMES:
        raise AttributeError(f"module 'ssd' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module(_HOMES[name]), name)
