"""Draft steps in static shapes: the guesses are those of the ragged steps, whatever the padding holds."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import Mode, Speculation
from ssd.draft.chain_cache import ChainTokens
from ssd.draft.chain_scheduler import ChainScheduler
from ssd.draft.depth_policy import DepthPolicy
from ssd.draft.drafter import ChainRows, Drafter, PathRow
from ssd.draft.static_shapes import StaticDrafter, TreeRunner
from ssd.draft.tree_tensors import TreeRow
from ssd.errors import SsdError
from ssd.execution.batch import Row
from ssd.execution.graph_shapes import GraphShape
from ssd.execution.runner import Runner
from ssd.ipc.messages import Rehearse
from ssd.law import Law
from ssd.models.interface import Model
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Drawing, highest
from ssd.tuning.estimates import Mean
from tests.draft.audit import GREEDY, SAMPLED, Auditor, World, plainly, play
from tests.draft.pair import VOCABULARY, Draft, Pair, ScriptedTarget, config, params
from tests.draft.steps import DEPTH, MORE, TRUNK, assert_alike, deepened, grown, trees_of
from tests.models import tiny
from tests.models.knobs import FAMILIES

pytestmark = pytest.mark.usefixtures("replayed")

WARM = Law(temperature=0.8, seed=77)


class Counting(TreeRunner):
    """Counts the steps that had a static shape, and keeps the shapes."""

    def __init__(self, *args: Any, **fields: Any) -> None:
        super().__init__(*args, **fields)
        self.taken: list[GraphShape] = []

    def _run(self, rows: Sequence[TreeRow], shape: GraphShape, *how: Any) -> Any:
        self.taken.append(shape)
        return super()._run(rows, shape, *how)


def static(model: Model, configuration: EngineConfig, attention: str = "torch") -> Counting:
    """A runner whose memory is NaN at first, but for the dummies: what is read before it is written shows."""
    runner = Counting(model, configuration, attention)
    for kind in chain.from_iterable(runner.cache.blocks):
        kind[:, : -(runner.tree_cache.depth + configuration.page_size)] = torch.nan
    return runner


def drafters(model: Model, configuration: EngineConfig, attention: str = "torch") -> tuple[Drafter, StaticDrafter]:
    noise, runner = NoiseCache(VOCABULARY), static(model, configuration, attention)
    plain = Runner(model, configuration.draft_num_pages, configuration.page_size)
    return (
        Drafter(configuration, plain, noise, VOCABULARY),
        StaticDrafter(configuration, runner, noise, VOCABULARY),
    )


def check(model: Model, configuration: EngineConfig, laws: Sequence[Law], lengths: Sequence[int], **how: Any) -> None:
    results = []
    ragged, fixed = drafters(model, configuration, **how)
    for drafter in (ragged, fixed):
        results.append(grown(drafter, trees_of(drafter, laws, lengths, configuration.speculation)))
    assert_alike(*results)
    assert isinstance(fixed.runner, Counting)
    assert len(fixed.runner.taken) == DEPTH + 2


@pytest.mark.parametrize("laws", [(GREEDY,), (WARM,), (GREEDY, WARM, SAMPLED)], ids=["greedy", "warm", "filtered"])
@pytest.mark.parametrize("sequences", [1, 2, 3, 5, 8])
def test_guesses_are_those_of_the_same_steps_as_they_are(world: World, sequences: int, laws: tuple[Law, ...]) -> None:
    """Each sequence has its own results, however many there are beside it."""
    lengths = [(9, 1, 13, 6, 12, 2, 5, 7)[index] for index in range(sequences)]
    wanted = [(laws * 8)[index].with_seed(index) for index in range(sequences)]
    check(world.draft.model, config(Speculation("ssd", 4, (3,), "jit")), wanted, lengths)


@pytest.mark.parametrize("page_size", [1, 3, 16, 48])
def test_of_pages_of_any_size(world: World, page_size: int) -> None:
    settings = config(Speculation("ssd", 4, (3,), "jit"), page_size=page_size, draft_num_pages=400)
    check(world.draft.model, settings, [GREEDY, WARM, WARM.with_seed(3)], [30, 2, 11])


@pytest.mark.parametrize("family", ["llama", "mistral window", "qwen3"])
@pytest.mark.parametrize("length", [2, 30])
def test_of_any_family(family: str, length: int, tmp_path: Path) -> None:
    check_family(*FAMILIES[family], length, tmp_path)


def check_family(kind: str, knobs: dict[str, Any], length: int, folder: Path) -> None:
    """Windows that end within a path and within a chain, shared key heads, caps."""
    runner = tiny.runner(tiny.model(kind, folder, **knobs), torch.float64)
    check(runner.model, config(Speculation("ssd", 4, (3,), "jit")), [GREEDY, WARM], [length, length + 3])


def test_of_a_single_layer(tmp_path: Path) -> None:
    """A winning chain is copied within one tensor, in which its cell and the path's pages are dense."""
    runner = tiny.runner(tiny.llama(tmp_path, num_hidden_layers=1), torch.float64)
    check(runner.model, config(Speculation("ssd", 4, (3,), "jit")), [GREEDY, WARM], [9, 5])


def test_through_the_kernels_of_gpus(tmp_path: Path) -> None:
    kind, knobs = FAMILIES["mistral window"]
    model = tiny.runner(tiny.model(kind, tmp_path, **knobs), torch.float32).model
    check(model, config(Speculation("ssd", 4, (3,), "jit")), [GREEDY, WARM], [5, 11], attention="triton")


def test_more_chains_than_a_row_holds(world: World) -> None:
    """Twenty chains of a sequence, and one alone."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    results = []
    for drafter in drafters(world.draft.model, settings):
        trees = trees_of(drafter, [WARM] * 2, [5, 9], settings.speculation)
        found = grown(drafter, trees, copies=5)
        alone = ChainRows(trees[0], ChainTokens(trees[0].table.pages, trees[0].base))
        alone.tokens.add(1, 100, 0, [7])
        results.append([*found, list(drafter.forward([], [alone]))])
    assert_alike(*results)
    assert isinstance(drafter.runner, Counting) and len(drafter.runner.taken) == DEPTH + 3


def test_an_id_that_is_not_in_the_vocabulary_ends_the_draft(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a word about it: a kernel is wrong. The target goes on without a draft."""

    def wrong(scores: Tensor, count: int) -> tuple[Tensor, Tensor]:
        ids, values = highest(scores, count)
        return ids + VOCABULARY, values

    monkeypatch.setattr("ssd.draft.static_shapes.highest", wrong)
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    _, drafter = drafters(world.draft.model, settings)
    with pytest.raises(SsdError, match=f"not in the vocabulary of {VOCABULARY}"):
        grown(drafter, trees_of(drafter, [WARM], [5], settings.speculation))


@pytest.mark.parametrize("law", [GREEDY, WARM], ids=["greedy", "warm"])
def test_what_fits_no_shape_runs_in_several(world: World, law: Law) -> None:
    """384 chains, and then 768 tokens of them, where the largest shape has 256."""
    settings = config(Speculation("ssd", 4, (12,), "jit"))
    results = []
    for drafter in drafters(world.draft.model, settings):
        results.append(grown(drafter, trees_of(drafter, [law] * 8, [5] * 8, settings.speculation), copies=12))
    assert isinstance(drafter.runner, Counting)
    assert [shape.tokens for shape in drafter.runner.taken] == [64, *[256] * 9, 16, 8]
    assert_alike(*results)


def test_several_tokens_of_more_chains_than_a_shape_holds(world: World) -> None:
    """The first batch ends before the second: each token has its own number of followers."""
    settings = config(Speculation("ssd", 8, (12,), "jit"))
    results = []
    for at_once in (False, True):
        _, drafter = drafters(world.draft.model, settings)
        trees = trees_of(drafter, [GREEDY] * 2, [5, 9], settings.speculation)
        drafter.forward([PathRow(tree, Row(tree.path, 0, tree.table.pages, 1)) for tree in trees], [])
        found, tokens = [], [[7 + cell % 50] for cell in range(300)]
        depths = [1 + cell // 150 for cell in range(300)]  # of the first sequence's chains, and of the second's
        for depth in range(1 if at_once else 3):
            rows = [ChainRows(tree, ChainTokens(tree.table.pages, tree.base)) for tree in trees]
            growing = [cell for cell in range(300) if depth <= depths[cell]]
            for cell in growing:
                rows[cell // 150].tokens.add(1, cell, depth, tokens[cell][-1:])
            if at_once:
                found = drafter.several([], rows, depths) or []
                break
            for cell, guess in zip(
                growing, drafter.forward([], [own for own in rows if own.tokens.tokens]), strict=True
            ):
                tokens[cell].append(guess.token)
                found += [[]] * (depth == 0)
                found[cell] = [*found[cell], guess]
        results.append(found)
    assert [len(guesses) for guesses in results[1]] == [1 + depth for depth in depths]
    assert_alike(*results)


def test_a_prompt_runs_in_shapes(tmp_path: Path) -> None:
    check_prompt(*FAMILIES["mistral window"], tmp_path)


def check_prompt(kind: str, knobs: dict[str, Any], folder: Path) -> None:
    """Of any length, beside others: it is cut into rows of 16 tokens."""
    model = tiny.runner(tiny.model(kind, folder, **knobs), torch.float64).model
    for length in (16, 17, 100):
        check(model, config(Speculation("ssd", 4, (3,), "jit")), [GREEDY, WARM], [length - TRUNK, 9])


def test_what_fills_a_shape_changes_no_bit_and_lands_on_its_own_page(world: World) -> None:
    """Whatever the dummy page holds."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    results = []
    for filler in (0.0, 1e30, torch.nan):
        _, drafter = drafters(world.draft.model, settings)
        runner, size = drafter.runner, settings.page_size
        dummy = range(400 * size, 401 * size)
        for kind in (runner.cache.keys, runner.cache.values):
            kind[:, dummy.start : dummy.stop] = filler
        trees = trees_of(drafter, [GREEDY, WARM, GREEDY], [9, 6, 4], settings.speculation)
        paths = [PathRow(tree, Row(tree.path, 0, tree.table.pages, 1)) for tree in trees]
        kept = runner.cache.keys.clone()
        drafter.forward(paths, [])
        written = {slot for tree, row in paths for slot in runner.cache.slots(row.pages, 0, row.stop)}
        assert touched(kept, runner.cache.keys) <= written | {dummy.start}
        tokens = ChainTokens(trees[0].table.pages, trees[0].base)
        for cell in (4, 9, 2):
            tokens.add(1, cell, 0, [7])
        kept = runner.cache.keys.clone()
        results.append(runner.logits(runner.rows([], [ChainRows(trees[0], tokens)]))[0])
        assert isinstance(runner, Counting) and runner.taken[-1] == GraphShape(1, 4, 4)
        cells = {401 * size + 17 * cell for cell in tokens.cells}
        assert cells <= touched(kept, runner.cache.keys) <= cells | {dummy.start}
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert results[0].isfinite().all()


def touched(before: torch.Tensor, after: torch.Tensor) -> set[int]:
    changed = ~torch.isclose(before, after, 0, 0, equal_nan=True).all(-1).all(-1).all(0)
    return set(changed.nonzero()[:, 0].tolist())


# -- several tokens in a step ------------------------------------------------------------------------------------------


SOME_LAWS = pytest.mark.parametrize(
    "laws", [(GREEDY,), (WARM,), (GREEDY, WARM, SAMPLED)], ids=["greedy", "warm", "filtered"]
)


@SOME_LAWS
@pytest.mark.parametrize("family", ["llama", "mistral window"])
def test_several_tokens_of_a_step_are_those_of_so_many_steps(
    family: str, laws: tuple[Law, ...], tmp_path: Path
) -> None:
    check_several(*FAMILIES[family], laws, tmp_path)


def check_several(kind: str, knobs: dict[str, Any], laws: tuple[Law, ...], folder: Path) -> None:
    """Chains that end at several depths, beside a path; windows that move on, pages that begin."""
    model = tiny.runner(tiny.model(kind, folder, **knobs), torch.float64).model
    results = []
    for at_once in (False, True):
        _, drafter = drafters(model, config(Speculation("ssd", 8, (3,), "jit")))
        results.append(deepened(drafter, laws, [9, 2, 30][: len(laws)], at_once))
        assert isinstance(drafter.runner, Counting)
        assert len(drafter.runner.taken) == (3 if at_once else 6)
    assert_alike(*results)
    assert [len(guesses) for guesses in results[0][:-2]] == [1 + more for more in MORE] * len(laws)


@pytest.mark.parametrize("laws", [(GREEDY,), (GREEDY, WARM, SAMPLED)], ids=["greedy", "filtered"])
@pytest.mark.parametrize("family", ["llama", "mistral window"])
def test_a_trunk_for_which_the_target_waits_is_two_graphs(family: str, laws: tuple[Law, ...], tmp_path: Path) -> None:
    """The first token, and all that follow it: the host launches nothing between two of them."""
    kind, knobs = FAMILIES[family]
    model = tiny.runner(tiny.model(kind, tmp_path, **knobs), torch.float64).model
    speculation, results, launched = Speculation("sd", 5), [], list[str]()
    for at_once in (False, True):
        _, drafter = drafters(model, config(speculation))
        for ranked in (ranked for steps in drafter.runner._steps.values() for ranked in steps.ranked):
            ranked.run, ranked.more = noting(launched, "run", ranked.run), noting(launched, "more", ranked.more)
        trees = trees_of(drafter, laws, [9, 2, 30][: len(laws)], speculation)
        drafter.forward([PathRow(tree, Row(tree.path[:-2], 0, tree.table.pages, 0)) for tree in trees], [])
        rows = [PathRow(tree, Row(tree.path[-2:], len(tree.path) - 2, tree.table.pages, 1)) for tree in trees]
        launched.clear()
        if at_once:
            results.append(drafter.several(rows, [], [4] * len(rows)))
            assert launched == ["run", "more"]
            continue
        found = [[guess] for guess in drafter.forward(rows, [])]
        for _ in range(4):
            rows = [
                PathRow(tree, Row([own[-1].token], row.stop, row.pages, 1))
                for (tree, row), own in zip(rows, found, strict=True)
            ]
            for own, guess in zip(found, drafter.forward(rows, []), strict=True):
                own.append(guess)
        assert launched == ["run"] * 5
        results.append(found)
    assert_alike(*results)


def noting(launched: list[str], name: str, run: Callable[[], None]) -> Callable[[], None]:
    def noted() -> None:
        launched.append(name)
        run()

    return noted


@pytest.mark.thorough
def test_several_tokens_through_the_kernels_of_gpus(tmp_path: Path) -> None:
    kind, knobs = FAMILIES["mistral window"]
    model = tiny.runner(tiny.model(kind, tmp_path, **knobs), torch.float32).model
    settings = config(Speculation("ssd", 8, (3,), "jit"))
    found = [deepened(drafters(model, settings, "triton")[1], [WARM], [5], at_once) for at_once in (False, True)]
    assert_alike(*found)


def policy(*rounds: float, depth_s: float = 1.0, ends: bool = False) -> DepthPolicy:
    """One that has seen rounds of so many seconds, the last of which ended at time 0."""
    found, now = DepthPolicy(ends), -sum(rounds)
    found.note_outcome(now)
    for seconds in rounds:
        now += seconds
        found.note_outcome(now)
    found.note_step(4 * depth_s, 4)
    return found


class Waiting:
    """A tree whose target waits for its trunk."""

    answers, speculation = object(), Speculation("ssd", 4, (3,), "jit")


def test_a_depth_takes_what_it_takes_beside_a_verification() -> None:
    found = policy(10.0, depth_s=2.0)
    assert found.depths([Waiting()], 0.0) == 1  # type: ignore[list-item]
    found.note_step(0.1, 1)
    assert found.depths([], 0.0) == 5
    found.note_step(2.0, 1)
    assert found.depths([], 0.0) == 5


def test_a_step_ends_before_the_next_outcome() -> None:
    assert [policy(10.0, 6.5, 9.0).depths([], now) for now in (0.0, 1.0, 4.4, 5.6, 7.0)] == [6, 5, 2, 1, 1]
    assert policy(2.0, *[9.0] * 8).depths([], 0.0) == 9, "the last eight rounds"
    assert policy(1.0, depth_s=0.0).depths([], 0.0) == 16, "a clock that does not move"
    assert DepthPolicy(False).depths([], 0.0) == policy().depths([], 0.0) == 1, "as long as nothing is known"


def test_a_target_that_waits_gets_whole_trunks_in_sd_and_otherwise_token_by_token(world: World) -> None:
    waiting, verifying = (
        trees_of(
            drafters(world.draft.model, config(Speculation(mode, 4, (3,), "jit")))[1],
            [GREEDY],
            [5],
            Speculation(mode, 4, (3,), "jit"),
        )
        for mode in ("sd", "ssd")
    )
    for tree in (*waiting, *verifying):
        tree.answers = tree.key(0, 7)
    found = policy(9.0)
    assert found.depths(waiting, 0.0) == 1, "a depth may take long"
    found.note_step(0.001, 1)
    assert found.depths(waiting, 0.0) == 16
    assert found.depths(verifying, 0.0) == found.depths([*waiting, *verifying], 0.0) == 1


def test_a_draft_of_slow_forwards_is_heard_of_between_two(world: World) -> None:
    """A trunk of 16 tokens that take 40 ms each comes in parts."""
    (tree,) = trees_of(
        drafters(world.draft.model, config(Speculation("sd", 16, (3,), "jit")))[1],
        [GREEDY],
        [5],
        Speculation("sd", 16, (3,), "jit"),
    )[:1]
    tree.answers = tree.key(0, 7)
    found = policy(9.0)
    found.depths([tree], 0.0)
    found.note_step(0.04, 1)
    assert found.depths([tree], 0.0) == 2


def test_a_trunk_that_may_end_comes_in_parts_that_are_probably_right(world: World) -> None:
    """A step in graphs cannot end by itself, our kernels can."""
    speculation = Speculation("sd", 7, (1,) * 8)
    (tree,) = trees_of(drafters(world.draft.model, config(speculation))[1], [GREEDY], [5], speculation)[:1]
    tree.answers, found = tree.key(0, 7), []
    for rate, least in ((0.5, 0.2), (0.9, 0.2), (0.9, 0.95), (1.0, 0.0)):
        tree.acceptance, tree.least = Mean(rate), least
        for ends in (False, True):
            known = policy(9.0, ends=ends)
            known.depths([tree], 0.0)
            known.note_step(0.001, 1)
            found.append(known.depths([tree], 0.0))
    assert found == [2, 16, 15, 16, 1, 16, 16, 16]


def test_rows_without_a_token_change_nothing_in_any_shape(world: World) -> None:
    """A step of one path and one chain in every shape that a GPU captures: the other rows are empty. Whatever the
    dummy page holds, both have the same bits, and nothing is written but their own slots: not the dummy cell either,
    which tokens of paths read with no weight."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    _, drafter = drafters(world.draft.model, settings)
    runner, size = drafter.runner, settings.page_size
    trees = trees_of(drafter, [GREEDY, WARM], [9, 6], settings.speculation)
    drafter.forward([PathRow(tree, Row(tree.path, 0, tree.table.pages, 1)) for tree in trees], [])
    tokens = ChainTokens(trees[1].table.pages, trees[1].base)
    tokens.add(1, 3, 0, [7])
    path = PathRow(trees[0], Row(trees[0].path[-1:], len(trees[0].path) - 1, trees[0].table.pages, 1))
    rows = runner.rows([path], [ChainRows(trees[1], tokens)])
    own = {slot for row in rows for slot in row.slots}
    blocks = [kind for block in runner.cache.blocks for kind in block]
    wanted, without = dict[int, Tensor](), 0
    for shape in runner._steps:
        taken, results = rows[: shape.rows] if shape.tokens > 1 else rows[:1], []
        for filler in (0.0, 1e30, torch.nan):
            for kind in blocks:
                kind[:, 400 * size : 401 * size] = filler
            kept = [kind.clone() for kind in blocks]
            _, count, _ = runner._run(taken, shape, Drawing.GREEDY)
            results.append(runner._kept[:count].clone())
            without += int((runner._steps[shape].batch.fields["starts"].diff() == 0).sum())
            for old, new in zip(kept, blocks, strict=True):
                assert touched(old, new) <= own | {400 * size}
        assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
        first = wanted.setdefault(len(taken), results[0])
        assert (results[0] - first).abs().max() <= 1e-10
    assert len(wanted) == 2 and without > len(runner._steps) > 20


# -- whole runs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("speculation", "levels", "depths"),
    [
        (Speculation("ssd", 4, (3,), "jit"), 2, 1),
        (Speculation("ssd", 8, (1,), "jit"), 1, 3),
        (Speculation("ssd", 4, (), "jit", budget=12), 1, 16),
        (Speculation("sd", 4, (3,), "jit"), 2, 3),
        pytest.param(Speculation("ssd", 4, (3,), "jit"), 2, 16, marks=pytest.mark.thorough),
        pytest.param(Speculation("ssd", 4, (), "jit", budget=12), 1, 1, marks=pytest.mark.thorough),
    ],
    ids=lambda s: f"{s.mode} {s.num_speculative_tokens} {s.fan_out}" if isinstance(s, Speculation) else str(s),
)
def test_in_every_state_the_draft_is_what_a_fresh_one_would_be(
    world: World, speculation: Speculation, levels: int, depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random outcomes of three sequences with different laws, interrupted at random depths; each step computes
    `depths` of them."""
    monkeypatch.setattr(DepthPolicy, "depths", lambda self, trees, now: depths)
    monkeypatch.setattr(ChainScheduler, "note_step", lambda self, chains, seconds: None)
    # A smaller draft guesses however long that takes: a capture is part of a first step here.
    dice, settings = random.Random(1), config(speculation)
    monkeypatch.setattr("ssd.draft.cascade.best_length", lambda *given: dice.randint(0, given[-1]))
    runners = [static(world.draft.model, settings) for _ in range(levels)]
    draft = Draft(settings, *runners)
    audit = Auditor(world, draft)
    *_, targets = play(draft, speculation, random.Random(f"{speculation} {levels}"), rounds=25)
    assert len(audit.trunks) > (2 if depths == 1 else 0)
    assert all(runner.taken for runner in runners)
    for target in targets:
        target.release()
    draft.assert_empty()


@pytest.mark.parametrize(
    ("mode", "temperature", "depths"), [("sd", 0.8, 1), ("sd", 0.8, 16), ("ssd", 0.8, 1), ("ssd", 0.0, 16)]
)
def test_a_target_says_the_same_and_hits_as_often(
    world: World, mode: Mode, temperature: float, depths: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts in chunks and shared ones; arrivals; accepted, rejected and promoted tokens as they come. Nobody waits
    for the draft, as how long that pays is a matter of time."""
    monkeypatch.setattr(DepthPolicy, "depths", lambda self, trees, now: depths)
    settings = config(Speculation(mode, 4, (3,), "none"))
    prompts = [tiny.token_ids(n, n) for n in (5, 150, 30, 2, 9)] + [tiny.token_ids(30, 30)[:20]]
    runner = static(world.draft.model, settings)
    numbers = []
    for each in (world.draft, runner):
        draft = Draft(settings, each)
        texts = Pair(settings, world.target, draft).run(prompts, params(len(prompts), 24, temperature))
        assert texts.ids == plainly(world, prompts, temperature, 24).ids
        numbers.append([(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics])
        draft.assert_empty()
    assert numbers[0] == numbers[1]
    assert sum(accepted for _, accepted, _, _ in numbers[0])
    assert len(runner.taken) > draft.forwards / 2


def test_a_step_takes_no_more_chains_than_its_shape_has_left(world: World) -> None:
    """Eight sequences have 320 chains, and prompts come between: each step is one graph."""
    settings = config(Speculation("ssd", 4, (8,), "jit"))
    runner = static(world.draft.model, settings)
    draft, seen = Draft(settings, runner), list[int]()
    draft.watch = lambda engine: seen.append(sum(tree.chains.entries for tree in engine.trees.values()))
    prompts = [tiny.token_ids(n, n) for n in (5, 120, 30, 2, 9, 60, 7, 8)]
    texts = Pair(settings, world.target, draft).run(prompts, params(8, 12))
    assert texts.ids == plainly(world, prompts, 0.0, 12).ids
    assert max(seen) > runner.largest.tokens == 256
    assert len(runner.taken) == draft.forwards
    draft.assert_empty()


def test_a_draft_that_is_the_target_is_always_right(world: World) -> None:
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    draft = Draft(settings, static(world.target.model, settings))
    prompts = [tiny.token_ids(n, n) for n in (3, 16, 41)]
    for temperature in (0.0, 0.8):
        texts = Pair(settings, world.target, draft).run(prompts, params(3, 1 + 6 * 5, temperature))
        assert [(m.rounds, m.accepted_tokens, m.hits, m.misses) for m in texts.metrics] == [(6, 24, 5, 0)] * 3
    draft.assert_empty()


def test_a_draft_that_begins_anew_has_all_of_its_places(world: World) -> None:
    """The memory that graphs read stays; the sequences that used it are forgotten."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    draft = Draft(settings, static(world.draft.model, settings))
    Auditor(world, draft)
    target = ScriptedTarget(draft, 0, tiny.token_ids(9, 1), WARM, settings.speculation)
    assert list(draft.engine.trees[0].chains) and len(draft.cells) == 15 * 8
    before = draft.engine.drafter.chain_cache.blocks[0][0].data_ptr()
    draft.restart()
    assert len(draft.cells) == 15 * 8 and draft.engine.drafter.chain_cache.blocks[0][0].data_ptr() == before
    again = ScriptedTarget(draft, 0, target.tokens[:7], GREEDY, settings.speculation)
    assert again.outcome(0, next(iter(draft.engine.trees[0].chains)).tokens[0], 4)
    again.release()
    draft.assert_empty()


def test_warming_up_runs_every_shape_and_leaves_no_trace(world: World) -> None:
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    ragged, fixed = drafters(world.draft.model, settings)
    fixed.runner.warm_up(4)
    rankings = [ranking for step in fixed.runner._steps.values() for ranking in step.ranked]
    assert len(rankings) > 40 and all(ranking.ids.shape[-1] == 17 for ranking in rankings)
    results = [grown(drafter, trees_of(drafter, [WARM], [9], settings.speculation)) for drafter in (ragged, fixed)]
    assert_alike(*results)


def test_rehearsed_steps_are_those_of_a_real_tree(world: World) -> None:
    """What the target measures before the first request; nothing of it stays."""
    settings = config(Speculation("ssd", 4, (3,), "jit"))
    for each in (world.draft, static(world.draft.model, settings)):
        draft = Draft(settings, each)
        for rows in (1, 4, 16):
            before = draft.board.telemetry()
            draft.engine.handle(Rehearse(rows))
            assert [draft.engine.step() for _ in range(3)] == [True] * 3
            after = draft.board.telemetry()
            assert (after.steps - before.steps, after.grown - before.grown) == (3, 3 * rows)
            assert after.step_seconds > before.step_seconds
        draft.engine.handle(Rehearse(0))
        assert not draft.engine.step()
        draft.assert_empty()
        texts = Pair(settings, world.target, draft).run([tiny.token_ids(30, 3)], params(1, 24))
        assert texts.ids == plainly(world, [tiny.token_ids(30, 3)], 0.0, 24).ids
