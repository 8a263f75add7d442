"""Captured code that is right when it is called again and wrong when it is replayed: planted, and found.

Each check compares what a replay gives with what the same rows give without one. With `once`, which calls again, every
check passes all faults."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from msgspec.structs import replace
from torch import Tensor

from ssd.config.params import Speculation
from ssd.draft.drafter import Drafter
from ssd.draft.static_shapes import StaticDrafter, TreeRunner, _RankedStep
from ssd.draft.tree_tensors import TreeTensors
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticContext, StaticForward, StaticRunner
from ssd.execution.tables import BatchTensors, Tables, Upload
from ssd.law import Law
from ssd.speculation.adjustment import Adjustment, Text, Written, adjusted
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import Drawing, Draws, argmax, perturbed
from ssd.verifier.overlap import DeviceScheduler
from tests.draft.audit import World
from tests.draft.pair import PAGE_SIZE, VOCABULARY, Draft, Pair, config, params
from tests.draft.steps import assert_alike, grown, trees_of
from tests.models import tiny

WARM, FILTERED = Law(0.8, seed=5), Law(1.3, top_k=9, top_p=0.9, seed=9)
LAWS = {
    "greedy": (Law(), Law()),
    "warm": (WARM, Law(1.3, seed=7)),
    "mixed": (WARM, Law()),
    "filtered": (FILTERED, replace(FILTERED, min_p=0.05, seed=2)),
    "mixed with filters": (Law(), FILTERED),
}


# -- checks -----------------------------------------------------------------------------------------------------------


def static(world: World) -> StaticRunner:
    runner = StaticRunner(world.target.model, 60, PAGE_SIZE, most_rows=2, longest=4)
    runner.warm_up(4)
    return runner


def batches() -> list[list[Row]]:
    """Prompts in verifications of several shapes, in pages and slots that change."""
    lengths = [(4, 2), (1, 3), (4, 4), (2,), (3, 1)]
    return [
        [
            Row(tiny.token_ids(length, 7 * n + slot), 0, range(8 * slot + n, 8 * slot + n + 4), length, (slot + n) % 2)
            for slot, length in enumerate(own)
        ]
        for n, own in enumerate(lengths)
    ]


def eager(logits: Tensor, rows: list[Row], laws: tuple[Law, ...], texts: list[Text | None] | None = None) -> list[int]:
    """Return the tokens of these rows of logits, drawn by the functions of an engine without static shapes."""
    noise, scores = NoiseCache(VOCABULARY), []
    parts = logits.split([row.outputs for row in rows])
    for part, row, law, text in zip(parts, rows, laws, texts or [None] * len(rows), strict=False):
        if text is not None:
            written = Written(text.tokens[: text.prompt])
            written.extend(text.tokens[text.prompt :])
            part = adjusted(part, text.adjustment, written, row.token_ids[1:])
        scores.append(perturbed(part, law, row.predicted, noise))
    return argmax(torch.cat(scores))


def check_samples(world: World) -> None:
    """Draw by all laws in all shapes by turns, so that each graph runs after each other one."""
    runner = static(world)
    for rows in batches():
        logits = world.target.forward(rows).clone()
        for laws in LAWS.values():
            expected = eager(logits, rows, laws)
            assert runner.sample(rows, laws[: len(rows)]) == expected
            launched = runner.launch(rows, laws[: len(rows)])
            assert launched is not None and launched[: len(expected)].tolist() == expected
        torch.testing.assert_close(runner.forward(rows), logits)


def check_adjusted_samples(world: World) -> None:
    """Beside a request that asks for nothing, and after laws that adjust nothing."""
    runner = static(world)
    wishes = Adjustment(1.4, 0.5, 0.3), Adjustment(bias={5: 3.0, 9: -2.0}, min_tokens=40, ends=(3, 8)), None
    for rows in batches():
        logits = world.target.forward(rows).clone()
        for wish, other in pairwise(wishes):
            texts = [
                None if each is None else Text([*tiny.token_ids(9, 3), row.token_ids[0]], 4, each)
                for row, each in zip(rows, (wish, other), strict=False)
            ]
            for laws in LAWS.values():
                own = laws[: len(rows)]
                assert runner.sample(rows, own, texts=texts) == eager(logits, rows, own, texts)
                assert runner.sample(rows, own) == eager(logits, rows, own)


def check_trees(world: World) -> None:
    settings, noise = config(Speculation("ssd", 4, (3,), "jit")), NoiseCache(VOCABULARY)
    ragged = Drafter(settings, Runner(world.draft.model, 400, PAGE_SIZE), noise, VOCABULARY)
    fixed = StaticDrafter(settings, TreeRunner(world.draft.model, settings), noise, VOCABULARY)
    for laws, lengths in zip(LAWS.values(), ((5, 9), (3, 8), (9, 2), (6, 7), (2, 5)), strict=True):
        found = [grown(each, trees_of(each, laws, lengths, settings.speculation)) for each in (ragged, fixed)]
        assert_alike(*found)


def check_overlap(world: World) -> None:
    """Two requests whose verifications follow each other on the device, against plain decoding."""
    sizes: dict[str, Any] = {"max_num_seqs": 3, "num_pages": 100, "draft_num_pages": 100}
    settings = config(Speculation("ssd", 4, (3,), backup="none"), **sizes)
    prompts, laws = [tiny.token_ids(n, n) for n in (3, 6)], [*params(1, 24), *params(1, 24, 0.8)]
    target = StaticRunner(world.target.model, 100, PAGE_SIZE, most_rows=3, longest=9)
    target.cache.keys.fill_(torch.nan)
    target.cache.values.fill_(torch.nan)
    found = Pair(settings, target, Draft(settings, world.draft), overlap=True).run(prompts, laws)
    assert found.ids == Pair(config(Speculation("ar"), **sizes), world.target).run(prompts, laws).ids
    assert sum(metrics.hits for metrics in found.metrics) > 3


Check = Callable[[World], None]
CHECKS = check_samples, check_adjusted_samples, check_trees, check_overlap


@pytest.mark.usefixtures("replayed")
@pytest.mark.parametrize("check", CHECKS)
def test_replays_give_what_eager_operations_give(world: World, check: Check) -> None:
    check(world)


@pytest.mark.usefixtures("replayed")
def test_results_of_a_shape_outlive_the_graphs_of_other_shapes(world: World) -> None:
    """Until the same shape runs again, or the same step draws again."""
    runner = static(world)
    kept: dict[int, tuple[Tensor, Tensor]] = {}
    for rows, laws in zip((batches()[0], batches()[1], batches()[3]), ("greedy", "warm", "filtered"), strict=True):
        runner.sample(rows, LAWS[laws][: len(rows)])
        context = runner.prepare(rows)
        assert isinstance(context, StaticContext)
        ((step, _),) = context.parts
        kept |= {result.data_ptr(): (result, result.clone()) for result in (step.logits, step.greedy, step.drawn)}
    assert len(kept) == 9, "three shapes"
    assert all(torch.equal(result, before) for result, before in kept.values())


# -- faults -----------------------------------------------------------------------------------------------------------


def result_in_a_new_tensor(patch: pytest.MonkeyPatch) -> None:
    """Each draw sets an attribute: a step returns the tensor of the draw that was captured last."""

    right = StaticForward._draw

    def draw(self: StaticForward, drawing: Drawing) -> None:
        self.drawn = torch.zeros_like(self.drawn)
        right(self, drawing)

    patch.setattr(StaticForward, "_draw", draw)


def result_of_all_shapes_in_one_attribute(patch: pytest.MonkeyPatch) -> None:
    """The runner has the ids of the step that was captured last."""
    patch.setattr(_RankedStep, "ids", property(lambda self: self._runner.found, _leave_ids), raising=False)


def _leave_ids(step: Any, ids: Tensor) -> None:
    step._runner.found = ids


def number_of_python(patch: pytest.MonkeyPatch) -> None:
    """The temperature is a number of Python."""
    fill, draws = BatchTensors.fill, BatchTensors.draws

    def note(self: Any, rows: Any, *more: Any) -> None:
        fill(self, rows, *more)
        given = [*more[4:], ()][0]
        self.warmest = max((draw.numbers[0] for draw in given), default=0.0)

    def read(self: Any, drawing: Drawing) -> Draws | None:
        found = draws(self, drawing)
        if found is None:
            return None
        inverse = torch.where(found.inverse > 0, self.warmest, 0.0) * _share(found)
        return found._replace(laws=torch.cat((inverse[None], found.laws[1:])))

    def _share(found: Draws) -> Tensor:
        return found.inverse / found.inverse.max().clamp(min=1e-9)

    patch.setattr(BatchTensors, "fill", note)
    patch.setattr(BatchTensors, "draws", read)


def number_of_live_rows(patch: pytest.MonkeyPatch) -> None:
    """The next batch is made of as many rows as the host has sent."""
    fill, make = DeviceScheduler._fill, DeviceScheduler._make_batch

    def note(self: Any, rows: Any) -> None:
        self.live = len(rows)
        fill(self, rows)

    def read(self: Any, step: Any) -> None:
        most, self._most_rows = self._most_rows, getattr(self, "live", 1)
        make(self, step)
        self._most_rows = most

    patch.setattr(DeviceScheduler, "_fill", note)
    patch.setattr(DeviceScheduler, "_make_batch", read)


def input_replaced(patch: pytest.MonkeyPatch) -> None:
    """Page tables that have changed are another tensor."""

    def tell(self: Any, found: Any) -> None:
        told(self, found)
        self._upload.device = self._upload.device.clone()

    told = Tables.tell
    patch.setattr(Tables, "tell", tell)


def samples_replaced(patch: pytest.MonkeyPatch) -> None:
    """The samples to decide about are those of the last verification, and not copied."""
    launch_next = DeviceScheduler.launch_next

    def replaced(self: Any, rows: Any, shape: Any) -> None:
        self._tokens = torch.nn.functional.pad(self._running, (0, len(self._tokens) - len(self._running)))
        launch_next(self, rows, shape)

    patch.setattr(DeviceScheduler, "launch_next", replaced)


def tokens_replaced(patch: pytest.MonkeyPatch) -> None:
    """The tokens of a step are another tensor each time."""
    fill = TreeTensors.fill_rows

    def replaced(self: Any, *given: Any, **more: Any) -> None:
        fill(self, *given, **more)
        self._device["ids"] = self._upload.device[: self.tokens].clone()

    patch.setattr(TreeTensors, "fill_rows", replaced)


def tensor_of_the_first_run(patch: pytest.MonkeyPatch) -> None:
    """The number of keys that each token sees is worked out when the host sends other rows, and kept."""
    send, context = Upload.send, BatchTensors.context

    def forget(self: Any, *part: Any) -> None:
        send(self, *part)
        self.kept = None

    def keep(self: Any, table: Tensor, cache: Any, attention: Any, layers: Any = ()) -> Any:
        if getattr(self._upload, "kept", None) is None:
            self._upload.kept = self._device["positions"].clone()
        whole, self._device = self._device, {**self._device, "positions": self._upload.kept}
        made = context(self, table, cache, attention, layers)
        self._device = whole
        return made

    patch.setattr(Upload, "send", forget)
    patch.setattr(BatchTensors, "context", keep)


class Planted(NamedTuple):
    fault: Callable[[pytest.MonkeyPatch], None]
    checks: tuple[Check, ...]


PLANTED = [
    Planted(result_in_a_new_tensor, (check_samples, check_adjusted_samples)),
    Planted(number_of_python, (check_samples,)),
    Planted(input_replaced, (check_samples, check_trees, check_overlap)),
    Planted(tensor_of_the_first_run, (check_samples,)),
    Planted(result_of_all_shapes_in_one_attribute, (check_trees,)),
    Planted(tokens_replaced, (check_trees,)),
    Planted(number_of_live_rows, (check_overlap,)),
    Planted(samples_replaced, (check_overlap,)),
]


@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.fault.__name__)
def test_a_planted_fault_is_found_by_replays_alone(
    world: World, planted: Planted, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    planted.fault(monkeypatch)
    for check in planted.checks:
        check(world)
    request.getfixturevalue("replayed")
    for check in planted.checks:
        with pytest.raises((AssertionError, RuntimeError, IndexError)):
            check(world)
