"""The address by which a watcher finds its engine."""

from __future__ import annotations

import pytest

from ssd.errors import UsageError
from ssd.plugins.monitor.subscriber import only_engine


def test_an_address_is_that_of_an_engine_on_this_machine() -> None:
    assert only_engine("ipc:///x/client.sock") == "ipc:///x/client.sock"
    with pytest.raises(UsageError, match="on this machine"):
        only_engine("tcp://127.0.0.1:5")
