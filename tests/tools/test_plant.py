"""Planted faults: every patch fits, its tests exist, and a fault that no test finds is told."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

import tools.plant.__main__ as plant
from tests.test_docs import is_removed
from tools.plant.__main__ import Fault, apply, faults, main
from tools.processes import ROOT

SEES, SEES_NOT = "test_deaths_in_a_row_count_however_long_each_start_takes", "test_a_start_that_is_due_is_told_once"
PATCH = """A process may die more often.

Found by: tests/launch/test_restarts.py::{test}
--- a/ssd/launch/restarts.py
+++ b/ssd/launch/restarts.py
@@ -20,3 +20,3 @@

-    def __init__(self, per_minute: float = {before}, longest: float = 30.0) -> None:
+    def __init__(self, per_minute: float = 50, longest: float = 30.0) -> None:
         self.due: float | None = None
"""


# A plugin that was removed leaves its faults here, and takes along the tests that find them.
FAULTS = [fault for fault in faults() if not any(map(is_removed, fault.tests))]


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_patch_fits_and_its_tests_exist(fault: Fault) -> None:
    assert fault.wrong.endswith(".")
    assert apply(fault.patch, ROOT, "--check")
    for test in fault.tests:
        file, _, name = test.partition("::")
        assert f"def {name}(" in (ROOT / file).read_text()


def test_what_no_test_finds_and_what_fits_no_more_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plant, "FAULTS", tmp_path)
    for name, test, before in (("seen", SEES, 5), ("unseen", SEES_NOT, 5), ("old", SEES, 4)):
        (tmp_path / f"{name}.patch").write_text(PATCH.format(test=test, before=before))
    source = (ROOT / "ssd/launch/restarts.py").read_bytes()
    told = CliRunner().invoke(main, [])
    assert told.exit_code == 1
    for name, outcome in (("seen", "found"), ("unseen", "SURVIVES"), ("old", "no longer applies")):
        assert re.search(rf"│ {name} +│ {outcome} ", told.output)
    assert (ROOT / "ssd/launch/restarts.py").read_bytes() == source


def test_a_fault_that_there_is_not_is_named() -> None:
    told = CliRunner().invoke(main, ["page-freed-thrice"])
    assert told.exit_code == 2 and "there is no page-freed-thrice" in told.output
