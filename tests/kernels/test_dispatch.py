"""Each Triton kernel of the table replaces a torch function of the same name and parameters."""

from __future__ import annotations

import inspect

import pytest
import torch

from ssd.execution.adjustments import adjust
from ssd.kernels.gpu import KERNELS, fused
from ssd.kernels.rounds import begin_draft, build, decide, go_on_drafting, note_outcomes
from ssd.speculation.noise import gumbels_of
from ssd.speculation.sampling import drawn, lowest, warmed

FUNCTIONS: dict[str, fused[..., object]] = {
    function.reference.__name__: function
    for function in (
        *(adjust, begin_draft, build, decide, drawn, go_on_drafting, gumbels_of, lowest, note_outcomes, warmed),
    )
}


def test_the_table_has_them_all() -> None:
    assert FUNCTIONS.keys() == KERNELS.keys()


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_takes_what_its_reference_takes(name: str) -> None:
    function = FUNCTIONS[name]
    kernel, reference = (inspect.signature(each).parameters.values() for each in (function.kernel, function.reference))
    assert [(own.name, own.default) for own in kernel] == [(own.name, own.default) for own in reference]


def test_the_device_decides_which_one_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, asked = torch.tensor([[1.0, 3.0, 2.0]]), list[torch.device]()
    monkeypatch.setattr(drawn, "kernel", lambda logits: "kernel")
    monkeypatch.setattr(drawn, "serves", lambda device: asked.append(device) or len(asked) > 1)
    assert drawn(logits).tolist() == [1] and drawn(logits) == "kernel"
    assert asked == [logits.device] * 2
