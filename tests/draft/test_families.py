"""Every family as a draft: what a branch of the tree computes is what its text alone gives to transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ssd.draft.arena import Arena, Branches, TreePlan
from ssd.execution.batch import Row
from tests.models import tiny
from tests.models.knobs import FAMILIES

PAGES = 16  # of 4 tokens
FORKS, DEPTH = (0, 0, 1, 3), 4  # four chains, one of them at the end of a line of three tokens
LINE = 3


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("base", [2, 30])
def test_branches_are_texts(family: str, base: int, tmp_path: Path) -> None:
    """Two sequences at once, one of them in scattered pages, grown a depth per forward beside a row of their paths."""
    kind, knobs = FAMILIES[family]
    directory = tiny.model(kind, tmp_path, **knobs)
    runner, oracle = tiny.runner(directory, pages=4 * PAGES), tiny.oracle(directory)
    arena = Arena(runner.model.shape, 2 * len(FORKS), DEPTH, torch.float32, tiny.CPU)
    tables = [range(PAGES), [PAGES + (7 * page + 3) % PAGES for page in range(PAGES)]]
    paths = [tiny.token_ids(base + 5 * index + LINE, index) for index in range(2)]
    chains = {(s, c): tiny.token_ids(DEPTH, 10 * s + c + 5) for s in range(2) for c in range(len(FORKS))}
    runner.forward([Row(path, 0, pages, 0) for path, pages in zip(paths, tables, strict=True)])
    expected = {
        (s, c): tiny.oracle_logits(oracle, [*paths[s][: len(paths[s]) - LINE + FORKS[c]], *chain])[-DEPTH:]
        for (s, c), chain in chains.items()
    }
    for depth in range(DEPTH):
        found = [Branches(tables[s], len(paths[s]) - LINE) for s in range(2)]
        for (s, c), chain in chains.items():
            found[s].add(FORKS[c], s * len(FORKS) + c, depth, chain[depth : depth + 1])
        row = Row(paths[0][-1:], len(paths[0]) - 1, tables[0])
        plan = TreePlan(runner.plan([row]), found, runner.cache, arena)
        tokens = [*row.token_ids, *(token for branches in found for token in branches.tokens)]
        logits = runner.run(tokens, plan, range(1, len(tokens)))
        wanted = torch.stack([expected[key][depth] for key in chains])
        assert (logits - wanted).abs().max() <= 1e-4
