"""The mock engine for tests with the marker `mock`, which run where its plugin is."""

from __future__ import annotations

from typing import Any

ROUND_VARIABLE = "SSD_MOCK_ROUND_MS"
MOCK = ("--load-format", "mock")


def oracle(*request: Any) -> Any:
    """The `ssd.plugins.mock.oracle.ScriptedAnswer` to a request."""
    from ssd.plugins.mock.oracle import ScriptedAnswer

    return ScriptedAnswer(*request)
