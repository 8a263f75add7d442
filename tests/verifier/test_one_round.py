"""One decoding round: the files in which it runs, and what the target does not wait for."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch

import ssd
from ssd.config.params import Speculation
from ssd.ipc.messages import Submit
from ssd.tuning.tuner import Tuning
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny
from tools.budget import path_files

PAGES, ROUNDS = 300, 36
# The forward, the configuration, the frame of messages; the process shell: traces of what a process does, failpoints.
LEFT_OUT = ("models/", "layers/", "kernels/", "execution/", "config/", "ipc/public.py", "ipc/trace_ring.py", "system/")


@pytest.mark.parametrize(
    "speculation",
    [Speculation("ssd", 4, (3,), backup="jit"), Speculation("ssd", 0, (), backup="auto")],
    ids=["plain", "tuning and backups"],
)
def test_the_page_lists_the_files_of_a_round(tmp_path: Path, speculation: Speculation) -> None:
    """From the submission of requests to their tokens, in the target and in the draft."""
    root, crossed = f"{Path(ssd.__file__).parent}/", set[str]()

    def note(frame: FrameType, event: str, _: Any) -> None:
        name = frame.f_code.co_filename.removeprefix(root)
        if event == "call" and name != frame.f_code.co_filename and not name.startswith(LEFT_OUT):
            crossed.add(name)

    target = tiny.llama(tmp_path / "target", seed=3)
    draft = tiny.noisy_copy(target, tmp_path / "draft", noise=0.03)
    settings = config(speculation, num_pages=PAGES)
    runners = [tiny.runner(folder, torch.float32, pages=PAGES) for folder in (target, draft)]
    pair = Pair(settings, runners[0], Draft(settings, runners[1]))
    sys.setprofile(note)
    try:
        for request, sampling in enumerate([*params(2, 180), *params(1, 180, 0.8)]):
            pair.engine.submit(Submit(request, tiny.token_ids(10 + request, request), sampling))
        for _ in range(ROUNDS):
            pair.engine.step()
    finally:
        sys.setprofile(None)
    assert len(pair.engine.scheduler.running) == 3 and pair.proposer.state == "up"
    listed = {str(file).removeprefix(root) for file in path_files()}
    assert crossed <= listed
    if speculation.backup == "jit":  # what the tuner takes depends on time
        own = {name for name in listed if not name.startswith("tuning/")} | {"tuning/estimates.py"}
        assert own <= crossed, "no file is listed for nothing"


@pytest.mark.parametrize("overlaps", [True, False], ids=["device", "cores"])
def test_plans_are_judged_while_a_device_computes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, overlaps: bool
) -> None:
    """It takes milliseconds. On cores nothing computes beside the host, but the draft is at work after an outcome."""
    said = list[str]()

    def noted(owner: Any, name: str) -> None:
        method = getattr(owner, name)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            said.append(name)
            return method(*args, **kwargs)

        monkeypatch.setattr(owner, name, wrapped)

    target = tiny.llama(tmp_path / "target", seed=3)
    settings = config(Speculation("ssd", 0, (), backup="auto"), num_pages=PAGES)
    runners = [tiny.runner(target, torch.float32, pages=PAGES) for _ in range(2)]
    runners[0].overlaps = overlaps
    pair = Pair(settings, runners[0], Draft(settings, runners[1]))
    for owner, name in ((runners[0].model, "logits"), (pair.proposer, "outcomes"), (Tuning, "judge")):
        noted(owner, name)
    pair.run([tiny.token_ids(10, 0)], params(1, 200))
    before = {first for first, word in pairwise(said) if word == "judge"}
    assert pair.proposer.tuning.windows > 1
    # On cores it is called before the forward once more, when nothing is left to judge.
    assert before == ({"logits"} if overlaps else {"outcomes", "judge"})
