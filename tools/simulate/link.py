"""Simulates `ssd` with a draft a round trip away (docs/remote.md): its tokens and messages.

First a random text is drawn: at each position the draft's first choice is right, another candidate is, or none is.
Then target and draft work by their own clocks; each message takes half a round trip."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from ssd.config.params import MAX_IN_FLIGHT
from ssd.plugins.remote.link import ABSORBED, chain_length, trunk_length
from ssd.speculation.fan_out import fan_out_at, hit_rate
from ssd.speculation.theory import acceptance_rate, expected_tokens_by_position
from ssd.tuning.estimates import Measurements

_TOKENS, _SEED = 8192, 20260303
_EPOCHS = 32  # latest states of the draft that the receiver keeps


class LinkForecast(NamedTuple):
    """The forecast with the draft a round trip of `rtt` seconds away.

    `speed`: tok/s of a sequence. `hits`: hit rate. `tokens`: those of a round. `ahead`: those of a round trip."""

    rtt: float
    speed: float
    hits: float
    tokens: float
    ahead: int


def over_link(
    pair: Measurements, rtt: float, lookahead: int, fan_out: Sequence[int], batch: int = 1, tokens: int = _TOKENS
) -> LinkForecast:
    """Return the forecast with K = `lookahead`; each of `batch` sequences has its own draft.

    `fan_out`: one number, or F_0..F_K. `tokens`: the length of the simulated texts. The breaker is not simulated; in
    the engine it stops using a draft that is slower than none."""
    texts = [_Text(pair, lookahead, fan_out, tokens, _SEED + row) for row in range(batch)]
    ahead = 0
    for _ in range(2):  # the speed decides how far ahead the draft must look, which changes the speed
        ahead = round(rtt * _Target(pair, texts, rtt, lookahead, ahead).run(tokens // 4).speed)
    return _Target(pair, texts, rtt, lookahead, ahead).run(tokens)


class _Text:
    """A random text: where the draft's first choice is wrong, and where another candidate is right then."""

    def __init__(self, pair: Measurements, lookahead: int, fan_out: Sequence[int], tokens: int, seed: int) -> None:
        lists = [fan_out_at(accepted, lookahead, fan_out) for accepted in range(lookahead + 1)]
        self.fan_out = max(1, round(sum(lists) / len(lists)))
        random, since = Random(seed), 0
        prepared = _prepared(pair, lookahead, fan_out)
        self._covered: dict[int, bool] = {}
        self._next = [0] * (tokens + MAX_IN_FLIGHT + 256)
        for position in range(len(self._next)):
            rate = pair.acceptance[min(since, len(pair.acceptance) - 1)]
            since = since + 1 if random.random() < rate else 0
            if not since:
                self._covered[position] = random.random() < prepared
        following = len(self._next)
        for position in reversed(range(len(self._next))):
            following = position if position in self._covered else following
            self._next[position] = following

    def break_from(self, position: int) -> int:
        """Return the first position from here on where the draft is wrong."""
        return self._next[position] if position < len(self._next) else position + 256

    def covered(self, position: int) -> bool:
        return self._covered.get(position, False)


def _prepared(pair: Measurements, lookahead: int, fan_out: Sequence[int]) -> float:
    """Return the chance that another candidate is right where the first one is wrong.

    A share c F^-r of all rounds misses. A round that accepts all K tokens can miss only if the draft's next token is
    wrong, too."""
    rate = acceptance_rate(pair.acceptance, lookahead)
    accepted = rate**lookahead
    misses = 1 - hit_rate(rate, [fan_out_at(k, lookahead, fan_out) for k in range(lookahead + 1)], pair.misses)
    return max(0.0, 1 - misses / max(1e-9, 1 - accepted + accepted * (1 - rate)))


@dataclass
class _State:
    """The tokens that a draft has after its latest outcome.

    A line of tokens goes up to `line`; the token at `broken` is wrong. If the outcome there was prepared, a chain goes
    on behind it up to `chain`; `again` is the next position where the draft is wrong."""

    broken: int
    again: int
    line: int
    chain: int = 0

    def reach(self, length: int) -> int:
        """Return the end of the known tokens that follow the first `length` ones, 0 if there are none."""
        if length <= self.broken:
            return self.line
        return self.chain if length <= self.again else 0


class _Outcome(NamedTuple):
    """A message to the draft: its arrival, the text's length, and the tokens in flight (-1: the target waits)."""

    at: float
    length: int
    flight: int


@dataclass
class _Draft:
    """The simulated draft of one text, step by step.

    `published` has (arrival, number of the state, line, chain) of each step."""

    pair: Measurements
    text: _Text
    delay: float
    longest: int
    ahead: int
    clock: float = 0.0
    inbox: list[_Outcome] = field(default_factory=list)
    published: list[tuple[float, int, int, int]] = field(default_factory=list)
    states: list[_State] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._steps, self._length, self._end = 0, 0, 0  # the trunk is the text from `length` to `end`
        self._started: dict[int, int] = {}  # length of the text -> step at which chains after it began
        self._reach = 0
        self._begin(0, 0)

    def until(self, time: float) -> None:
        """Work up to `time`."""
        while self.clock <= time:
            while self.inbox and self.inbox[0].at <= self.clock:
                self._hear(self.inbox.pop(0))
            growing = self._growing()
            if growing:
                self.clock += self.pair.step.at(growing)
                self._steps += 1
                self._grow()
            elif self.inbox:
                self.clock = max(self.clock, self.inbox[0].at)
            else:
                self.clock = time + 1e-9

    def _begin(self, length: int, line: int) -> None:
        """Begin a new state at `length`, with a line up to `line` that is there already."""
        broken = self.text.break_from(length)
        self.states.append(_State(broken, self.text.break_from(broken + 1), max(line, length)))
        self._length, self._end, self._started = length, length, {}

    def _hear(self, outcome: _Outcome) -> None:
        state, length = self.states[-1], outcome.length
        if length > state.broken or length > self._end:
            self._begin(length, state.reach(length))
            state = self.states[-1]
        self._length = length
        self._reach = 0 if outcome.flight < 0 else trunk_length(outcome.flight, self.ahead)
        if outcome.flight >= 0:
            self._fork(min(state.line, length + self._reach))
        self._publish()

    def _fork(self, end: int) -> None:
        """Extend the trunk to `end`, and start chains after each of its tokens.

        Chains at the end of the line start a step later."""
        self._end = max(self._end, end)
        for place in range(self._length, self._end + 1):
            self._started.setdefault(place, self._steps + (place == self.states[-1].line))

    def _growing(self) -> int:
        """Return how many chains a step makes longer."""
        if self._reach == 0 and not self._started:
            return int(self.states[-1].line < self._length + self.longest)  # the target waits for the trunk
        places = (self._started.get(place, self._steps) for place in range(self._length, self._end + 1))
        return self.text.fan_out * sum(self._steps - began <= self.longest for began in places)

    def _grow(self) -> None:
        state = self.states[-1]
        if not self._started:
            state.line += 1
        else:
            grown = self._steps - self._started[self._end]
            state.line = max(state.line, self._end + min(self.longest, grown) + (grown >= 0))
            if self._end < self._length + self._reach and grown >= ABSORBED:
                self._fork(self._end + grown)
        self._publish()

    def _publish(self) -> None:
        state = self.states[-1]
        began = self._started.get(state.broken)
        if began is not None and self.text.covered(state.broken) and self._steps >= began:
            state.chain = state.broken + 1 + min(self.longest, self._steps - began)
        self.published.append((self.clock + self.delay, len(self.states) - 1, state.line, state.chain))


class _Row:
    """A sequence at the target: its `length`, the tokens in `flight`, and the draft's states that have arrived."""

    def __init__(self, text: _Text, draft: _Draft, lookahead: int) -> None:
        self.length = self.flight = 0
        self._text, self._draft, self._lookahead = text, draft, lookahead
        self._seen: dict[int, _State] = {}
        self._read = 0

    def verified(self) -> None:
        """Commit the tokens in flight up to the first wrong one, and one token more."""
        self.length += min(self.flight, self._text.break_from(self.length) - self.length) + 1

    def look_up(self, now: float) -> int:
        """Return how many tokens can be verified next."""
        draft = self._draft
        draft.until(now - draft.delay)
        while self._read < len(draft.published) and draft.published[self._read][0] <= now:
            _, number, line, chain = draft.published[self._read]
            state = draft.states[number]
            self._seen[number] = _State(state.broken, state.again, line, chain)
            self._seen.pop(number - _EPOCHS, None)
            self._read += 1
        found = max((state.reach(self.length) for state in self._seen.values()), default=0)
        return max(0, min(self._lookahead, found - self.length))

    def tell(self, now: float, flight: int) -> None:
        """Tell the draft the length of the text, and how many tokens are verified next."""
        self._draft.inbox.append(_Outcome(now + self._draft.delay, self.length, flight))


class _Target:
    """The simulated target: verifies all rows at once, with the draft tokens that have arrived."""

    def __init__(self, pair: Measurements, texts: Sequence[_Text], rtt: float, lookahead: int, ahead: int) -> None:
        self._pair, self._rtt, self._lookahead, self._ahead = pair, rtt, lookahead, ahead
        longest = chain_length(lookahead, ahead)
        self._rows = [_Row(text, _Draft(pair, text, rtt / 2, longest, ahead), lookahead) for text in texts]

    def run(self, tokens: int) -> LinkForecast:
        """Run until the slowest row has `tokens` tokens, and return the forecast."""
        now, rounds, hits, rows = 0.0, 0, 0, self._rows
        while min(row.length for row in rows) < tokens:
            now += self._pair.verify.at(len(rows) + sum(row.flight for row in rows)) + self._pair.overhead
            rounds += len(rows)
            for row in rows:
                row.verified()
                row.flight = row.look_up(now)
                hits += row.flight > 0
            wait = self._worth_waiting(rows[0].length / now) if len(rows) == 1 and not rows[0].flight else 0
            for row in rows:
                row.tell(now, -1 if wait else row.flight)
            if wait:
                now, rows[0].flight = self._waited(now, rows[0], wait)
                rows[0].tell(now, rows[0].flight)
        total = sum(row.length for row in rows)
        return LinkForecast(self._rtt, total / len(rows) / now, hits / rounds, total / rounds, self._ahead)

    def _worth_waiting(self, speed: float) -> int:
        """Return how many fresh tokens to wait for: the number that gains most over `speed` tokens a second."""

        def worth(depth: int) -> float:
            seconds = self._rtt + depth * self._pair.step.at(1) if depth else 0.0
            return expected_tokens_by_position(self._pair.acceptance, depth) - speed * seconds

        return max(range(self._lookahead + 1), key=worth)

    def _waited(self, now: float, row: _Row, wait: int) -> tuple[float, int]:
        """Wait for `wait` fresh tokens, and return the time then and how many there are, at most `wait`."""
        most = now + self._rtt + (wait + 2) * self._pair.step.at(1)
        while (found := row.look_up(now)) < wait and now < most:
            now += max(1e-5, self._pair.step.at(1) / 4)
        return now, min(found, wait)
