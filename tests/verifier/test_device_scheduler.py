"""What the device makes of an outcome and of the board is what the host would have written."""

from __future__ import annotations

import os
from collections.abc import Sequence
from random import Random

import pytest
import torch

from ssd.execution.batch import Row
from ssd.execution.static import StaticRunner, draws_of
from ssd.execution.tables import BatchTensors, Draw
from ssd.ipc.board import IDS, BoardReader, BoardWriter, Cached, Key, size_bytes
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.process import memory_file
from ssd.kernels.rounds import build, decide, note_outcomes
from ssd.law import Law
from ssd.speculation.acceptance import coupled
from ssd.speculation.sampling import UNKNOWN, Drawing
from ssd.verifier.overlap import DeviceScheduler, FollowedRow
from tests.boards import prepared
from tests.verifier.scripted import CPU, VOCAB, tiny_llama

pytestmark = pytest.mark.usefixtures("replayed")

FILTERED = Law(1.1, top_k=9, top_p=0.8, min_p=0.01)
PAGE, PAGES, ROWS, K = 4, 60, 5, 5


@pytest.fixture(params=[False, True], ids=["torch", "triton"], autouse=True)
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The device's work in torch's operations, and in kernels of ours (by Triton's interpreter)."""
    if request.param:
        for function in (build, decide, note_outcomes):
            monkeypatch.setattr(function, "serves", lambda _: True)


class World:
    """A device scheduler over a board that the test writes."""

    def __init__(self, deterministic: bool = False, broken: int | None = None) -> None:
        sizes = {"most_rows": ROWS, "longest": 1 + K}
        self.runner = StaticRunner(tiny_llama(broken=broken), PAGES, PAGE, deterministic, **sizes)
        self.runner.cache.keys.fill_(0.0)
        self.runner.cache.values.fill_(0.0)
        descriptor = memory_file("board", size_bytes(ROWS))
        self.writer = BoardWriter(descriptor, ROWS)
        self.device = DeviceScheduler(self.runner, DeviceBoard(BoardReader(descriptor, ROWS, VOCAB), CPU))
        os.close(descriptor)


def fields(batch: BatchTensors, tokens: int) -> list[list[float]]:
    """What a forward reads of the first tokens: which rows they are in, too."""
    names = "ids", "positions", "slots", "starts", "sequences"
    ids, positions, slots, starts, sequences = (batch.fields[name] for name in names)
    draws = batch.draws(Drawing.FILTERED)
    assert draws is not None and draws.filtered
    inverse = draws.inverse
    row = torch.searchsorted(starts, torch.arange(batch.tokens), right=True) - 1
    place = torch.arange(batch.tokens) - starts[row]
    assert starts[0] == 0 and starts[-1] == batch.tokens and (starts.diff() >= 0).all()
    assert starts.diff().max() <= batch.longest
    hot = torch.where(inverse[:, None] > 0, torch.cat((draws.keys.T, draws.laws[1:])).T, 0)
    columns = [ids, positions, slots, inverse, sequences[row], place, *hot.T]
    return [column.tolist()[: tokens if column is place else None] for column in columns]


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_the_next_batch_is_the_one_the_host_would_fill(seed: int, deterministic: bool) -> None:
    dice, world = Random(seed), World(deterministic)
    count = dice.randint(1, 2 if deterministic else ROWS)
    slots, pages = dice.sample(range(ROWS), count), dice.sample(range(PAGES), PAGES)
    laws = [dice.choice((Law(), FILTERED, Law(0.8))).with_seed(dice.randrange(2**63)) for _ in range(count)]
    rows, links, first = [], [], 0
    for slot, law in zip(slots, laws, strict=True):
        drafts = [dice.randrange(VOCAB) for _ in range(dice.randint(0, K))]
        row = Row([dice.randrange(VOCAB), *drafts], dice.randint(0, 25), pages[slot * 12 :][:12], 1 + len(drafts), slot)
        left = dice.choice((len(drafts), len(drafts) + 2, 20))
        links.append(FollowedRow(row, law, first, (3, 70 + slot, 5), dice.randint(0, K), left))
        rows.append(row)
        first += len(row.token_ids)
    own = world.runner.sample(rows, laws)
    assert own is not None
    for link in links:
        likely = own[link.first :][: 1 + link.drafted] if dice.random() < 0.5 else link.row.token_ids[1:]
        link.row.token_ids[1:] = likely[: link.drafted]  # some are right
    own = world.runner.sample(rows, laws)
    assert own is not None
    expected, following = [], []
    for link in links:
        row, mine = link.row, own[link.first :][: 1 + link.drafted]
        outcome = coupled(row.token_ids[1:], mine)
        found = [dice.randrange(VOCAB) for _ in range(dice.randint(0, K + 2))]
        hit, entry = dice.random() < 0.7, dice.randrange(64)
        key = Key(*link.round_key, row.start + 1, *outcome)
        world.writer.publish(row.slot, prepared([entry], [key if hit else key._replace(round=4)], [found]))
        depth = max(0, min(link.most, link.left - outcome.accepted - 1)) if hit else 0
        expected.append(Cached(entry if hit else -1, found[:depth]))
        taken = [outcome.token, *found[:depth]]
        following.append(Row(taken, row.start + 1 + outcome.accepted, row.pages, len(taken), row.slot))
        assert following[-1].stop <= link.stop
    assert world.device.launch(rows, laws)
    shape = world.device.shape([1 + link.most for link in links])
    assert shape is not None
    step, run = world.runner.steps[shape], list[list[list[float]]]()
    tokens = sum(len(row.token_ids) for row in following)
    forward = step.run
    step.run = lambda: (run.append(fields(step.batch, tokens)), forward())[1]  # type: ignore[func-returns-value]
    world.device.launch_next(links, shape)
    step.run = forward
    told, drafts = world.device.report(count)
    assert told[: len(own)] == own and drafts == expected
    filled = BatchTensors(step.batch.tokens, step.batch.rows, step.batch.longest, CPU)
    drawing = draws(following, laws)
    tables = world.runner.tables
    filled.fill(following, [r.slot for r in following], world.runner.cache, tables.dummy, tables.dummy_page, drawing)
    assert run == [fields(filled, tokens)]
    assert world.device.samples()[:tokens] == world.runner.sample(following, laws)


def draws(rows: Sequence[Row], laws: Sequence[Law]) -> list[Draw]:
    return [draw for row, law in zip(rows, laws, strict=True) for draw in draws_of(row, law)]


@pytest.mark.parametrize("changed", [False, True], ids=["an id beyond the vocabulary", "an id that was changed"])
def test_entries_that_are_not_sound_are_counted(changed: bool) -> None:
    world = World()
    row = Row([3], 0, range(12), 1, 2)
    own = world.runner.sample([row], [Law()])
    assert own is not None
    world.writer.publish(2, prepared([7], [Key(1, 9, 4, 1, 0, own[0])], [[5, 6 if changed else VOCAB]]))
    world.writer.slots[2, 7, IDS] += changed
    link = FollowedRow(row, Law(), 0, (1, 9, 4), K, 30)
    assert world.device.launch([row], [Law()])
    shape = world.device.shape([1 + K])
    assert shape is not None
    world.device.launch_next([link], shape)
    assert world.device.report(1)[1] == [Cached(-1, [])]
    assert world.device._board.reader.rejected == 1


@pytest.mark.parametrize("wrong", [-1, -7, VOCAB, 2**40])
def test_a_sample_that_is_no_token_is_followed_by_a_token_that_there_is(wrong: int) -> None:
    world = World(broken=7)
    tokens = world.runner.tokens
    world.runner.tokens = lambda *given: tokens(*given).masked_fill(tokens(*given) == -1, wrong)  # type: ignore
    row = Row([7], 0, range(12), 1, 2)
    assert world.device.launch([row], [Law()])
    shape = world.device.shape([1 + K])
    assert shape is not None
    world.device.launch_next([FollowedRow(row, Law(), 0, (1, 9, 4), K, 30)], shape)
    told, taken = world.device.report(1)
    assert told[0] == (-1 if wrong == -1 else UNKNOWN) and taken == [Cached(-1, [])]
    ids = world.runner.steps[shape].batch.ids
    assert 0 <= int(ids.min()) <= int(ids.max()) < VOCAB
