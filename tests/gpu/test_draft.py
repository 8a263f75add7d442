"""The draft's steps in CUDA graphs, against the same steps launched one kernel after the other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.law import Law
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache
from tests.draft.pair import config
from tests.draft.steps import FORKS, assert_alike, deepened, grown, trees_of

VOCABULARY = 300
SETTINGS = config(Speculation("ssd", 4, (3,), "jit"), vocab_size=VOCABULARY)
LAWS = Law(), Law(0.8, seed=7), Law(1.3, seed=2**63 - 1), Law(), Law(0.7, seed=4)
LENGTHS = 9, 1, 13, 6, 12


def load(pair: tuple[Path, Path], dtype: torch.dtype, device: torch.device) -> Model:
    return registry.load(inspect(pair[1]), dtype, device, 256)


def captured(model: Model, attention: str = "auto", capture: bool = True) -> TreeRunner:
    """Its pages held NaN before the graphs were made."""
    runner = TreeRunner(model, SETTINGS, attention, capture=capture)
    pages = (SETTINGS.draft_num_pages + 1) * SETTINGS.page_size
    for kind in (runner.cache.keys, runner.cache.values):
        kind[:, :pages] = torch.nan
    runner.warm_up(16)
    return runner


@pytest.mark.parametrize(
    "laws", [(Law(),) * 5, LAWS, (*LAWS[:4], Law(0.9, top_k=20, seed=3))], ids=["greedy", "mixed", "filtered"]
)
def test_guesses_are_those_of_plain_launches(
    laws: tuple[Law, ...], device: torch.device, pair: tuple[Path, Path]
) -> None:
    """In double precision, where nothing is near to a tie; one sequence, or several, and again with the same graphs."""
    model, noise = load(pair, torch.float64, device), NoiseCache(VOCABULARY, device)
    static = captured(model, "torch")
    for count in (5, 1, 3, 5):
        plain = Drafter(SETTINGS, Runner(model, 400, SETTINGS.page_size, attention="torch"), noise, VOCABULARY)
        fixed = StaticDrafter(SETTINGS, static, noise, VOCABULARY)
        given = laws[-count:], LENGTHS[-count:], SETTINGS.speculation
        assert_alike(grown(fixed, trees_of(fixed, *given)), grown(plain, trees_of(plain, *given)))


def test_several_tokens_of_a_step_are_those_of_so_many_steps(device: torch.device, pair: tuple[Path, Path]) -> None:
    """The host reads nothing in between."""
    static, noise = captured(load(pair, torch.float64, device), "torch"), NoiseCache(VOCABULARY, device)
    found = []
    for at_once in (False, True, True):
        found.append(deepened(StaticDrafter(SETTINGS, static, noise, VOCABULARY), LAWS[:3], LENGTHS[:3], at_once))
    assert_alike(found[0], found[1])
    assert found[1] == found[2]


@pytest.mark.parametrize(("dtype", "most"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_logits_are_those_of_plain_launches(
    dtype: torch.dtype, most: float, device: torch.device, pair: tuple[Path, Path]
) -> None:
    """Of the kernels that there are for this device."""
    model = load(pair, dtype, device)
    found = [chain_logits(captured(model, capture=capture)) for capture in (True, False)]
    for recorded_ones, plain in zip(*found, strict=True):
        assert plain.isfinite().all()
        assert (recorded_ones - plain).norm() <= most * plain.norm()


def chain_logits(runner: TreeRunner) -> Sequence[Tensor]:
    """Of chains of three sequences, depth by depth."""
    drafter = StaticDrafter(SETTINGS, runner, NoiseCache(VOCABULARY, runner.model.device), VOCABULARY)
    trees = trees_of(drafter, LAWS[:3], LENGTHS[:3], SETTINGS.speculation)
    drafter.forward([PathRow(tree, Row(tree.path, 0, tree.table.pages)) for tree in trees], [])
    found = []
    for depth in range(4):
        chains = [ChainRows(tree, ChainTokens(tree.table.pages, tree.base)) for tree in trees]
        for index, (_, tokens) in enumerate(chains):
            for place, fork in enumerate(FORKS):
                tokens.add(fork, len(FORKS) * index + place, depth, [7 * place + depth])
        found.append(runner.logits(runner.rows([], chains))[0].double().cpu())
    return found
