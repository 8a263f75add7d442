"""The requests of a session: the messages to its draft, and the draft's speculations."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from msgspec.structs import replace

from ssd.config.params import MAX_CHAINS, Speculation
from ssd.ipc.board import BoardWriter
from ssd.ipc.messages import Admit, Launch, Launched, Outcomes, Rejoin, Release, Retune, Verified
from ssd.ipc.public import Message
from ssd.plugins.remote.link import Entry, Trunk, chain_length, trunk_length
from ssd.plugins.remote.receiver.request import ReceivedRequest
from ssd.tuning.estimates import Mean

log = logging.getLogger("ssd.receiver")

# Means over rounds: smoothing, the number of rounds that the first guess counts for, and the longest round in seconds.
_SMOOTHING, _SAMPLES, _PAUSE_S = 0.05, 4, 0.5
# A draft's debt grows by this for each row whose draft tokens were verified, and falls by 1 for each accepted token
# (`ssd.verifier.breaker`).
_VERIFIED = 0.125
MOST_DEBT = 3.0
"""A draft with this debt is of no use."""
LATE = " of an earlier round"


class Requests:
    """Follows the target's messages, and writes entries of `epoch` on `board`."""

    def __init__(self, board: BoardWriter, epoch: int, vocab_size: int) -> None:
        self._board, self._epoch, self._vocab_size = board, epoch, vocab_size
        self._known: dict[int, ReceivedRequest] = {}
        self._round_s, self._round_tokens = Mean(0.02, _SMOOTHING, _SAMPLES), Mean(2.0, _SMOOTHING, _SAMPLES)
        self._outcomes_at = 0.0
        self._rtt = 0.0
        self.tokens = 0  # committed with a draft
        self.debt = 0.0

    # -- the target's messages --------------------------------------------------------------------------------------

    def told(self, message: Message, rtt: float) -> list[Message]:
        """Return the messages to send in place of a target's. `rtt`: mean round trip plus deviation, in s."""
        self._rtt = rtt
        if isinstance(message, Admit):
            self._known[message.request] = ReceivedRequest(message, self._epoch)
            self._board.clear(message.slot)
            return [replace(message, speculation=self._deeper(message.speculation))]
        if isinstance(message, Retune):
            return [Retune([(request, self._deeper(speculation)) for request, speculation in message.rows])]
        if isinstance(message, Outcomes):
            return self._outcomes(message.rows)
        if isinstance(message, Launched):
            return [Launched([self._launch(row.request) for row in message.rows if self._launched(row)])]
        if isinstance(message, Release):
            for request in message.requests:
                self._known.pop(request, None)
        elif isinstance(message, Rejoin):
            self._known.clear()
        return [message]

    @property
    def ahead(self) -> int:
        """Return the number of tokens that are committed while a speculation travels."""
        return round(self._rtt / self._round_s.value * self._round_tokens.value)

    def _deeper(self, speculation: Speculation) -> Speculation:
        if speculation.mode != "ssd":
            return speculation
        longest = chain_length(speculation.num_speculative_tokens, self.ahead)
        budget = min(MAX_CHAINS, speculation.budget + 2 * self.ahead)
        return replace(speculation, num_speculative_tokens=longest, budget=budget)

    def _outcomes(self, rows: Sequence[Verified]) -> list[Message]:
        now = time.monotonic()
        if now - self._outcomes_at < _PAUSE_S:
            self._round_s.note(now - self._outcomes_at)
            self._round_tokens.note(1 + sum(row.accepted for row in rows) / max(1, len(rows)))
        self._outcomes_at = now
        followed = [row for row in rows if self._outcome(row)]
        self.tokens += sum(1 + row.accepted for row in followed)
        lost = [row.request for row in rows if row.request not in self._known]
        launches = [self._launch(row.request) for row in followed if row.in_flight is not None]
        told = [replace(row, in_flight=None) for row in followed]
        messages: list[Message] = [Outcomes(told)] if told else []
        return messages + ([Launched(launches)] if launches else []) + ([Release(lost)] if lost else [])

    def _outcome(self, row: Verified) -> bool:
        """Note an outcome, show entries for the next round; return False if the outcome does not follow."""
        request = self._known.get(row.request)
        if request is None:
            return False
        self.debt = max(0.0, self.debt + _VERIFIED * bool(request.flight) - row.accepted)
        if not request.outcome(row):
            log.warning("request %d goes on without a draft: %r does not follow", row.request, row)
            del self._known[row.request]
            return False
        self._board.clear(request.slot)
        self._board.publish(request.slot, request.useful())
        return True

    def _launched(self, row: Launch) -> bool:
        request = self._known.get(row.request)
        if request is None or not request.launched(row):
            return False
        self._board.publish(request.slot, request.useful())
        return True

    def _launch(self, number: int) -> Launch:
        request = self._known[number]
        flight = request.flight or []
        return Launch(number, request.round, trunk_length(len(flight), self.ahead), flight)

    # -- the draft's messages ---------------------------------------------------------------------------------------

    def publish(self, entry: Entry) -> str:
        """Show an entry of the draft if it passes the checks; return its description for the log."""
        request = self._known.get(entry.request)
        if request is None:
            return "entries of no request"
        if max(entry.token, *entry.ids, 0) >= self._vocab_size:
            return "entries outside the vocabulary"
        shown = request.heard(entry)
        if shown is None:
            return "entries of no use"
        late = "" if entry.round == request.round else LATE
        self._board.publish(request.slot, shown)
        return ("entries" if shown else "entries that bring nothing") + late

    def expect(self, trunk: Trunk) -> str:
        """Note the draft's trunk of a request; return its description for the log."""
        request = self._known.get(trunk.request)
        if request is None or max(trunk.ids, default=0) >= self._vocab_size:
            return "trunks of no use"
        shown = request.expects(trunk)
        if shown is None:
            return "trunks of no use"
        self._board.publish(request.slot, shown)
        return "trunks"
