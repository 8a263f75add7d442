"""What is said where no CUDA graph can be made: why, of which model, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ssd.config.engine import EngineConfig
from ssd.config.params import Speculation
from ssd.draft import process as draft
from ssd.errors import UsageError
from ssd.execution.graphs import cause_of
from ssd.execution.runner import Runner
from ssd.verifier import loading as target
from tests.draft.pair import config
from tests.models import tiny

FIRST = "CUDA error: operation not permitted when stream is capturing"
SECOND = "CUDA error: operation failed due to a previous error during capture"


def failed(*errors: Exception) -> Exception:
    """The last of errors each of which was raised while the one before was handled."""
    found: Exception | None = None
    for error in errors:
        error.__context__, found = found, error
    assert found is not None
    return found


def test_the_cause_is_what_ended_the_capture_and_not_that_it_has_ended() -> None:
    details = "\nSearch for `cudaErrorStreamCaptureUnsupported'"
    for errors in ((FIRST + details,), (FIRST + details, SECOND + details)):
        error = failed(*(RuntimeError(each) for each in errors))
        assert isinstance(error, RuntimeError) and cause_of(error) == FIRST
    assert cause_of(RuntimeError()) == "RuntimeError"


@pytest.mark.parametrize(("role", "load"), [("target", target.load), ("draft", draft.load)])
def test_the_model_that_is_to_blame_is_named(
    role: str, load: Callable[[EngineConfig], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any) -> None:
        raise UsageError("no CUDA graph can be made")

    monkeypatch.setattr(Runner, "warm_up", refuse)
    models = {name: str(tiny.llama(tmp_path / name)) for name in ("target", "draft")}
    with pytest.raises(UsageError, match=f"^the {role} {models[role]}: no CUDA graph can be made$"):
        load(config(Speculation("ssd", 4, (3,), "jit"), **models))
