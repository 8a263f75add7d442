"""One decoding round of the target: how many files a reader crosses to follow it, and what it does not wait for."""

from __future__ import annotations

import sys
from itertools import pairwise
from pathlib import Path
from statistics import median
from types import FrameType
from typing import Any

import pytest
import torch

import ssd
from ssd.config.params import Speculation
from ssd.ipc.messages import Submit
from ssd.ipc.public import Message
from ssd.tuning.tuner import Tuning
from tests.draft.pair import Draft, Pair, config, params
from tests.models import tiny

PAGES, WARM, ROUNDS = 300, 6, 30
# The model's forward and what executes it; the process shell: traces of what a process does, failpoints.
LEFT_OUT = ("models/", "layers/", "kernels/", "execution/", "ipc/trace_ring.py", "failpoints.py")


class Crossed:
    """Collects the files of ssd/ in which a Python function runs, but for what the draft does."""

    def __init__(self, pair: Pair) -> None:
        self.files: set[str] = set()
        self._pair, self._root = pair, f"{Path(ssd.__file__).parent}/"
        pair.post = self._unseen

    def step(self) -> None:
        self.files = set()
        sys.setprofile(self._note)
        try:
            self._pair.engine.step()
        finally:
            sys.setprofile(None)

    def _unseen(self, message: Message) -> bool:
        sys.setprofile(None)
        self._pair.deliver(message)
        sys.setprofile(self._note)
        return True

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        name = path.removeprefix(self._root)
        if event == "call" and name != path and not name.startswith(LEFT_OUT):
            self.files.add(name)


@pytest.mark.parametrize(
    ("speculation", "most"),
    [(Speculation("ssd", 4, (3,), backup="none"), 9), (Speculation("ssd", 0, (), backup="auto"), 15)],
    ids=["plain", "tuning and backups"],
)
def test_a_round_crosses_few_files(tmp_path: Path, speculation: Speculation, most: int) -> None:
    target = tiny.llama(tmp_path / "target", seed=3)
    draft = tiny.noisy_copy(target, tmp_path / "draft", noise=0.03)
    settings = config(speculation, num_pages=PAGES)
    runners = [tiny.runner(folder, torch.float32, pages=PAGES) for folder in (target, draft)]
    pair = Pair(settings, runners[0], Draft(settings, runners[1]))
    for request, sampling in enumerate(params(3, 180)):
        pair.engine.submit(Submit(request, tiny.token_ids(10 + request, request), sampling))
    crossed, rounds = Crossed(pair), list[set[str]]()
    for _ in range(WARM + ROUNDS):
        crossed.step()
        rounds.append(crossed.files)
    rounds = rounds[WARM:]
    assert len(pair.engine.scheduler.running) == 3 and pair.proposer.state == "up"
    print(len(max(rounds, key=len)), *sorted(max(rounds, key=len)), sep="\n")
    assert median(map(len, rounds)) <= most
    # Now and then the tuner plans anew, by the theorems of the paper.
    assert (
        max(len(files - {"tuning/choice.py", "tuning/tuner.py", "speculation/fan_out.py"}) for files in rounds) <= most
    )


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
