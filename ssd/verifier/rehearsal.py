"""Measures forwards of target and draft, in turn and together, before the first request."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from statistics import median

from ssd.config.engine import EngineConfig
from ssd.execution.batch import Row
from ssd.execution.core_team import CoreTeam
from ssd.execution.pages import OutOfPages, PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.board import BoardReader
from ssd.ipc.messages import Rehearse
from ssd.ipc.public import Message
from ssd.kernels import build
from ssd.law import Law
from ssd.speculation.sampling import argmax
from ssd.tuning.costs import FAR, NEAR, ROW, Costs, CostTable, Situation
from ssd.tuning.estimates import DraftTelemetry
from ssd.tuning.knowledge import PRIOR_FILE, Knowledge, file_of, read, write
from ssd.tuning.tuner import Tuning

_ALONE = (1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 24, 32, 48, 64)
_BESIDE = (1, 2, 3, 4, 5, 6, 8, 12, 16, 32)
_CHAINS = (1, 2, 4, 8, 16)
_READING, _READING_CHAINS = (1, 2, 4, 8), (1, 4, 16)  # sizes that show what text costs
_USUAL_CHAINS = 4
_LOOKS = 2  # passes over all sizes; the lesser time of each size counts
# Seconds of a pass over the sizes after which no larger one is measured: the last two sizes give the slope.
_PASS_S = 0.8
# Tree steps that are counted, and seconds that they may take before the measurement is given up.
_STEPS, _PATIENCE_S = 3, 0.5
_POLL_S = 1e-4
_SAVE_EVERY_S = 10.0
_ATTEMPTS = 2  # to measure a draft that does not answer


class Experience:
    """Owns what is known of this pair: read at the start, measured if missing, written when idle."""

    def __init__(self, config: EngineConfig) -> None:
        self._config, self._file = config, file_of(config, str(build.library()))
        known = read(self._file, Knowledge)
        prior = None if config.draft is None else read(Path(config.draft) / PRIOR_FILE, Knowledge)
        # Where nothing was measured yet, plans are tried out.
        tried = known is not None and (known.tables or known.errors)
        self.tuning = Tuning(None if tried else Random())
        self.tuning.recall(known or Knowledge(), prior)
        self._left = _ATTEMPTS if self._unknown else 0  # if later rounds disagree, the next process measures again
        self._written, self._due = -1 if self.wanting else 0, 0.0

    @property
    def wanting(self) -> bool:
        """Return True if forwards must be measured first."""
        return self._left > 0 and self._config.has_draft and self._config.speculation.auto and self._unknown

    @property
    def _unknown(self) -> bool:
        costs = self.tuning.estimates.costs
        texts = bool(costs.text) or longest_text(self._config) < FAR
        return costs.disturbed or not (texts and all(table.known for table in costs.tables.values()))

    def measured(self) -> None:
        """End an attempt to measure; if it was disturbed, the next process tries again."""
        self._written, self._due = -1, 0.0
        ended = self.tuning.estimates.costs.disturbed or not self._unknown
        self._left = 0 if ended else self._left - 1

    def save(self) -> None:
        """Write what is known, if there is more, now and then. Called while nothing runs."""
        now = time.monotonic()
        if self.tuning.estimates.rounds > self._written and now >= self._due:
            write(self._file, self.tuning.knowledge())
            self._written, self._due = self.tuning.estimates.rounds, now + _SAVE_EVERY_S


def longest_text(config: EngineConfig) -> int:
    """Return the most tokens before a measured row of the target, and of a local draft."""
    pages = config.num_pages if config.draft is None else min(config.num_pages, config.draft_num_pages)
    return max(1, min(config.max_model_len, pages * config.page_size) - ROW)


class TargetRehearsal:
    """Runs verifications of made-up tokens on `runner`, over unused pages of `pool`."""

    def __init__(self, config: EngineConfig, runner: Runner, pool: PagePool) -> None:
        self._runner, self._table = runner, PageTable(pool)
        self._most = config.max_num_seqs * ROW
        self._longest = longest_text(config)

    def sizes(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(size for size in sizes if size <= self._most)

    def room(self, text: int) -> bool:
        return text <= self._longest

    def begin(self) -> None:
        """Take pages for the longest text. Raises OutOfPages."""
        self._table.grow(min(FAR, self._longest) + ROW)
        self._runner.cache.blank(self._table.pages)

    def end(self) -> None:
        self._table.free()

    def verify(self, tokens: int, text: int = NEAR) -> float:
        """Return the seconds of verifying `tokens` tokens behind a text."""
        counts = [min(ROW, tokens - done) for done in range(0, tokens, ROW)]
        begun, pages = min(text, self._longest), self._table.pages
        rows = [Row([0] * n, begun, pages, n, slot) for slot, n in enumerate(counts)]
        began = time.perf_counter()
        context = self._runner.prepare(rows)
        if self._runner.sample(rows, [Law()] * len(rows), context) is None:
            argmax(self._runner.forward(rows, context))
        return time.perf_counter() - began


class PairRehearsal:
    """Measures verifications of `target`, and tree steps of the draft that `tell` posts to (None: there is none)."""

    def __init__(
        self,
        target: TargetRehearsal,
        tell: Callable[[Message], object] | None,
        board: BoardReader,
        team: CoreTeam | None,
    ) -> None:
        self._target, self._tell, self._board, self._team = target, tell, board, team

    def fill(self, costs: Costs) -> Iterator[None]:
        """Fill `costs`, yielding after each measurement: the caller may do other work then, or stop.

        A draft that does not answer leaves its tables empty. `costs` are disturbed unless two passes over all sizes
        agree."""
        looks = [Costs() for _ in range(_LOOKS)]
        costs.disturbed = True
        try:
            self._target.begin()
            for look in looks:
                yield from self._look(look)
            if self._tell is not None and self._target.room(FAR):
                self._rest()
                yield from self._reading(looks, costs)
            costs.disturbed = not looks[0].agrees(looks[1])
        except OutOfPages:
            pass
        finally:
            for situation, table in costs.tables.items():
                for look in looks:
                    for size, seconds in look.tables[situation].seconds.items():
                        table.set(size, seconds)
                table.smooth()
            self._target.end()
            self._rest()

    def _look(self, look: Costs) -> Iterator[None]:
        self._rest()
        yield from self._verifications(_ALONE, look.tables["verify"])
        if self._tell is not None:
            yield from self._in_turn(look.tables["step"])
            yield from self._together(look)

    def _rest(self) -> None:
        self._ask(Rehearse(0))
        if self._team is not None:
            self._team.use(all_cores=True)

    def _ask(self, message: Rehearse) -> None:
        if self._tell is not None:
            self._tell(message)

    def _verifications(self, sizes: tuple[int, ...], table: CostTable, text: int = NEAR) -> Iterator[None]:
        passed = 0.0
        for size in self._target.sizes(sizes):
            table.set(size, taken := self._target.verify(size, text))
            yield
            if (passed := passed + taken) > _PASS_S:
                break

    def _in_turn(self, table: CostTable, sizes: tuple[int, ...] = _CHAINS, text: int = NEAR) -> Iterator[None]:
        for rows in sizes:
            self._ask(Rehearse(rows, in_turn=True, text=text))
            steps = _Steps(self._board)
            while not steps.enough:
                time.sleep(_POLL_S)
                yield
            steps.note(table)

    def _together(self, costs: Costs) -> Iterator[None]:
        for rows in _CHAINS:
            self._ask(Rehearse(rows))
            if self._team is not None:
                self._team.use(all_cores=False)
            steps = _Steps(self._board)
            if rows == _USUAL_CHAINS:
                yield from self._verifications(_BESIDE, costs.tables["verify_beside"])
            while not steps.enough:
                self._target.verify(1)
                yield
            steps.note(costs.tables["step_beside"])

    def _reading(self, looks: Sequence[Costs], costs: Costs) -> Iterator[None]:
        """Fill `costs.text`: what forwards behind a long text take beyond those in `looks`."""
        far: dict[Situation, CostTable] = {"verify": CostTable(), "step": CostTable()}
        for _ in looks:
            yield from self._verifications(_READING, far["verify"], FAR)
            yield from self._in_turn(far["step"], _READING_CHAINS, FAR)
        for situation, table in far.items():
            near = [look.tables[situation].seconds for look in looks]
            both = [size for size in table.seconds if all(size in seconds for seconds in near)]
            if both:
                gains = [table.seconds[size] / min(seconds[size] for seconds in near) - 1 for size in both]
                costs.learn_text(situation, median(gains) / (FAR - NEAR))


class _Steps:
    """Counts the draft's tree steps, without the first, which may have begun before."""

    def __init__(self, board: BoardReader) -> None:
        self._board, self._deadline = board, time.perf_counter() + _PATIENCE_S
        self._first = board.telemetry().steps + 1
        self._begun: DraftTelemetry | None = None

    @property
    def enough(self) -> bool:
        """Return True if enough steps were seen, or time is over."""
        now = self._board.telemetry()
        if self._begun is None and now.steps >= self._first:
            self._begun = now
        seen = 0 if self._begun is None else now.steps - self._begun.steps
        return seen >= _STEPS or time.perf_counter() > self._deadline

    def note(self, table: CostTable) -> None:
        now, before = self._board.telemetry(), self._begun
        if before is not None and now.steps > before.steps:
            steps = now.steps - before.steps
            rows = max(1, round((now.grown - before.grown) / steps))
            table.set(rows, (now.step_seconds - before.step_seconds) / steps)
