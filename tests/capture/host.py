"""What the host does in a tree step, in ms for each depth: `python -m tests.capture.host`

A whole draft engine over graphs that do nothing: schedule, send, read, publish. One thread."""

from __future__ import annotations

import tempfile
import time
from itertools import product
from pathlib import Path
from statistics import median

import torch

from ssd.config.params import Speculation
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.static_shapes import TreeRunner
from ssd.law import Law
from ssd.models.interface import Model
from tests.draft.pair import Draft, ScriptedTarget, config
from tests.models import tiny

ROUNDS, WARM_UP = 60, 10
SPECULATION = Speculation("ssd", 6, (), "jit", budget=16)
LAWS = {"greedy": Law(), "T = 0.8": Law(temperature=0.8, seed=3)}


def stub(model: Model) -> TreeRunner:
    """A runner whose steps say what was made up before, as a device that takes no time."""
    runner = TreeRunner(model, config(SPECULATION))
    runner.overlaps = True
    for steps in runner._steps.values():
        for step in steps.ranked:
            step.ids = torch.randint(5, 100, (steps.batch.tokens, 17))
            step.scores = torch.randn(steps.batch.tokens, 17).sort(-1, descending=True).values
            step.run = step.more = lambda: None
    return runner


def milliseconds(model: Model, sequences: int, law: Law, depths: int) -> float:
    """The median of a step's time by the depths that it brought, over all rounds."""
    DepthPolicy.depths = lambda self, trees, now: depths  # type: ignore[method-assign]
    draft, found = Draft(config(SPECULATION), stub(model), steps=0), []
    targets = [ScriptedTarget(draft, i, tiny.token_ids(9, i), law, SPECULATION) for i in range(sequences)]
    for number in range(ROUNDS):
        for target in targets:
            accepted = len(target.in_flight)
            chains = [chain for chain in draft.engine.trees[target.request].chains if chain.fork == accepted]
            if not target.outcome(accepted, chains[0].tokens[0] if chains else 7, 6):
                draft.work(6)
                target.launch(6)
        while True:
            before, began = draft.board.telemetry().steps, time.thread_time()
            if not draft.engine.step():
                break
            seconds = time.thread_time() - began
            if number >= WARM_UP:
                found.append(1e3 * seconds / max(1, draft.board.telemetry().steps - before))
    return median(found)


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        model = tiny.runner(tiny.llama(Path(folder), seed=3)).model
    for sequences, law, depths in product((1, 4), LAWS, (1, 2, 6)):
        print(f"{sequences} sequences, {law}, {depths} depths: {milliseconds(model, sequences, LAWS[law], depths):.3f}")


if __name__ == "__main__":
    main()
