"""Verifications that a device launches one behind the other, with a draft in the same process and without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config.params import SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.device_board import page_locked
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.interface import Model
from ssd.verifier.inline_draft import InlineRunner
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny
from tests.verifier.test_inline_draft import Inline

PAGE, PAGES, ROWS, LONGEST = 16, 200, 4, 256
KEPT: list[Draft] = []  # what is page-locked stays where it is
PROMPTS = [tiny.token_ids(length, length) for length in (3, 40, 17)]
SIZES = {"max_num_seqs": ROWS, "num_pages": PAGES, "draft_num_pages": PAGES, "page_size": PAGE, "vocab_size": 300}


def loaded(device: torch.device, pair: tuple[Path, Path], capture: bool) -> tuple[StaticRunner, Model]:
    """A deterministic target, warmed up, and its draft's model."""
    target, draft = (registry.load(inspect(path), torch.float32, device, LONGEST) for path in pair)
    runner = StaticRunner(target, PAGES, PAGE, True, most_rows=ROWS, longest=5, capture=capture)
    runner.warm_up(5)
    return runner, draft


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize(
    "asked",
    [{}, {"temperature": 0.8}, {"temperature": 0.8, "repetition_penalty": 1.3, "frequency_penalty": 0.4}],
    ids=str,
)
def test_ids_and_hits_are_those_of_the_host(
    device: torch.device, pair: tuple[Path, Path], asked: dict[str, Any], capture: bool
) -> None:
    runner, draft = loaded(device, pair, capture)
    settings = config(Speculation("ssd", 4, (3,), backup="none"), deterministic=True, **SIZES)
    laws = params(len(PROMPTS), 60, ignore_eos=True, **asked)
    found = [Pair(settings, runner).run(PROMPTS, laws)]
    for overlap in (False, True):
        beside = Draft(settings, Runner(draft, PAGES, PAGE))
        KEPT.append(beside)
        assert device.type == "cpu" or page_locked(beside.board)
        found.append(Pair(settings, runner, beside, overlap).run(PROMPTS, laws))
    assert found[0].ids == found[1].ids == found[2].ids
    assert [(m.rounds, m.hits) for m in found[1].metrics] == [(m.rounds, m.hits) for m in found[2].metrics]
    assert sum(m.hits for m in found[2].metrics) > 5


@pytest.mark.parametrize("deterministic", [True, False])
@pytest.mark.parametrize("capture", [True, False])
def test_plain_decoding_has_the_same_ids(
    device: torch.device, pair: tuple[Path, Path], capture: bool, deterministic: bool
) -> None:
    """Greedy, drawn and adjusted requests, some of which end early; both runs use the same graphs."""
    target = registry.load(inspect(pair[0]), torch.float32, device, LONGEST)
    runner = StaticRunner(target, PAGES, PAGE, deterministic, most_rows=ROWS, longest=1, capture=capture)
    runner.warm_up(1)
    sizes = {"max_num_seqs": ROWS, "num_pages": PAGES, "page_size": PAGE, "vocab_size": 300, "draft": None}
    settings = config(Speculation("ar"), deterministic=deterministic, **sizes)
    laws = [
        SamplingParams(seed=1, max_tokens=60, ignore_eos=True),
        SamplingParams(0.8, seed=2, max_tokens=60, stop_token_ids=tuple(range(0, 300, 25))),
        SamplingParams(0.8, seed=3, max_tokens=60, repetition_penalty=1.3, frequency_penalty=0.4, ignore_eos=True),
        SamplingParams(0.8, seed=4, max_tokens=60, top_k=20, top_p=0.9, ignore_eos=True),
    ]
    prompts = [*PROMPTS, tiny.token_ids(9, 9)]
    plain, overlapped = (Pair(settings, runner, overlap=overlap) for overlap in (False, True))
    assert overlapped.overlapped is not None
    behind = list[int]()
    scheduler, launch_next = overlapped.overlapped._device, overlapped.overlapped._device.launch_next

    def noted(rows: Any, shape: Any) -> None:
        behind.append(len(rows))
        launch_next(rows, shape)

    scheduler.launch_next = noted  # type: ignore[method-assign]
    assert overlapped.run(prompts, laws).ids == plain.run(prompts, laws).ids
    assert len(behind) > 50 and max(behind) == 4


@pytest.mark.parametrize("capture", [True, False])
@pytest.mark.parametrize("asked", [{}, {"temperature": 0.8}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9}], ids=str)
def test_a_draft_in_the_targets_process_changes_no_id(
    device: torch.device, pair: tuple[Path, Path], asked: dict[str, Any], capture: bool
) -> None:
    runner, draft = loaded(device, pair, capture)
    settings = config(Speculation("sd", 4), deterministic=True, enforce_eager=not capture, **SIZES)
    beside = InlineRunner(draft, settings)
    beside.warm_up(1)
    laws = params(len(PROMPTS), 60, ignore_eos=True, **asked)
    found = [Inline(settings, runner, beside, overlap).run(PROMPTS, laws) for overlap in (False, True)]
    assert Pair(settings, runner).run(PROMPTS, laws).ids == found[0].ids == found[1].ids
    assert [m.acceptance_histogram for m in found[0].metrics] == [m.acceptance_histogram for m in found[1].metrics]
    assert sum(m.accepted_tokens for m in found[1].metrics) > 5
