"""Every family as a draft: what a chain computes is what transformers computes for its text alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ssd.config.params import Speculation
from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.draft.tree_attention import TreeContext
from ssd.execution.batch import Row
from ssd.execution.runner import Runner, attention_backend
from ssd.layers.paged import PagedAttention
from tests.draft.pair import PAGE_SIZE, Draft, Pair, config, params
from tests.models import tiny
from tests.models.knobs import FAMILIES

PAGES = 16  # of 4 tokens
FORKS, DEPTH = (0, 0, 1, 3), 4  # four chains, one of them at the end of a trunk of three tokens
TRUNK = 3


@pytest.mark.parametrize("family", FAMILIES)
def test_chains_are_texts(family: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES[family], tmp_path)


@pytest.mark.parametrize("family", ["llama", "mistral window"])
@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_chains_read_their_path_through_any_backend(family: str, backend: str, tmp_path: Path) -> None:
    check_chains(*FAMILIES[family], tmp_path, attention_backend(backend, tiny.CPU, 4))


def check_chains(kind: str, knobs: dict[str, Any], folder: Path, attention: PagedAttention | None = None) -> None:
    """A short sequence, and a longer one in scattered pages, grown one depth per forward beside a row of a path."""
    directory = tiny.model(kind, folder, **knobs)
    runner, oracle = tiny.runner(directory, pages=4 * PAGES), tiny.oracle(directory)
    chain_cache = ChainCache.new(runner.model.shape, 2 * len(FORKS), DEPTH, torch.float32, tiny.CPU)
    tables = [range(PAGES), [PAGES + (7 * page + 3) % PAGES for page in range(PAGES)]]
    paths = [tiny.token_ids(base + TRUNK, index) for index, base in enumerate((2, 35))]
    chains = {(s, c): tiny.token_ids(DEPTH, 10 * s + c + 5) for s in range(2) for c in range(len(FORKS))}
    runner.forward([Row(path, 0, pages, 0) for path, pages in zip(paths, tables, strict=True)])
    expected = {
        (s, c): tiny.oracle_logits(oracle, [*paths[s][: len(paths[s]) - TRUNK + FORKS[c]], *chain])[-DEPTH:]
        for (s, c), chain in chains.items()
    }
    for depth in range(DEPTH):
        found = [ChainTokens(tables[s], len(paths[s]) - TRUNK) for s in range(2)]
        for (s, c), chain in chains.items():
            found[s].add(FORKS[c], s * len(FORKS) + c, depth, chain[depth : depth + 1])
        row = Row(paths[0][-1:], len(paths[0]) - 1, tables[0])
        context = TreeContext(runner.context([row]), found, runner.cache, chain_cache, attention)
        tokens = [*row.token_ids, *(token for branches in found for token in branches.tokens)]
        logits = runner.run(tokens, context, range(1, len(tokens)))
        wanted = torch.stack([expected[key][depth] for key in chains])
        assert (logits - wanted).abs().max() <= 1e-4


@pytest.mark.parametrize("family", ["mistral window", "qwen2", "qwen3_moe"])
def test_a_draft_that_is_the_target_is_always_right(family: str, tmp_path: Path) -> None:
    check_always_right(*FAMILIES[family], tmp_path)


def check_always_right(kind: str, knobs: dict[str, Any], folder: Path) -> None:
    """Keys and values stay right from round to round: every draft token is accepted, every outcome prepared."""
    target = tiny.runner(tiny.model(kind, folder, **knobs), torch.float64, pages=400, page_size=PAGE_SIZE)
    settings = config(Speculation("ssd", 4, (2,), "jit"))
    draft = Draft(settings, Runner(target.model, 400, PAGE_SIZE))
    prompts = [tiny.token_ids(n, n) for n in (3, 16, 41)]
    texts = Pair(settings, target, draft).run(prompts, params(3, 1 + 6 * 5))
    assert [(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics] == [(6, 24, 5, 0)] * 3
    assert texts.ids == Pair(config(Speculation("ar")), target).run(prompts, params(3, 1 + 6 * 5)).ids
    draft.assert_empty()


@pytest.mark.parametrize("family", ["mistral window", "qwen2"])
def test_a_draft_with_keys_and_values_in_8_bits_is_right_if_it_is_the_target(family: str, tmp_path: Path) -> None:
    check_right_in_8_bits(*FAMILIES[family], tmp_path)


def check_right_in_8_bits(kind: str, knobs: dict[str, Any], folder: Path) -> None:
    """Chains keep theirs as pages do, or what a winning chain leaves in pages would be something else."""
    model = tiny.runner(tiny.model(kind, folder, **knobs), torch.float32).model
    target, drafts = (Runner(model, 400, PAGE_SIZE, cache_dtype="int8") for _ in range(2))
    settings = config(Speculation("ssd", 4, (2,), "jit"))
    prompts = [tiny.token_ids(n, n) for n in (3, 16, 41)]
    texts = Pair(settings, target, Draft(settings, drafts)).run(prompts, params(3, 1 + 6 * 5))
    assert [(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics] == [(6, 24, 5, 0)] * 3
    assert texts.ids == Pair(config(Speculation("ar")), target).run(prompts, params(3, 1 + 6 * 5)).ids
