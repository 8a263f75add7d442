"""The link to a draft on another machine: its messages, and its board, which is sent (docs/remote.md)."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import msgspec
from msgspec import Meta
from msgspec.structs import replace

from ssd.config.params import MAX_IN_FLIGHT, MAX_LOOKAHEAD, Speculation, TokenId
from ssd.errors import RequestError
from ssd.ipc.board import ENTRIES, DraftBoard, Prepared
from ssd.ipc.messages import Admit, Launched, Outcomes, Rejoin, Release, Retune, Told
from ssd.ipc.public import MAX_PROMPT_TOKENS, Count, Direction, Message, Name, RequestId

LINK_VERSION = 202
"""Counts from 192. Raise it with every change of a message that crosses the link, the target's included."""

MOST_EXPECTED = MAX_IN_FLIGHT + MAX_LOOKAHEAD
"""Longest trunk of a draft: the tokens being verified, and those expected to follow them."""
MOST_CHAINS = 1024
"""Most chains of a sequence until an outcome differs from the trunk. They need no entry on a board."""

ABSORBED = 4
"""A chain with this many computed tokens is worth appending to the trunk."""
_REACH = 2

_MOST_REQUESTS = 4  # per sequence that the engine runs at once: a request may begin before an old one ends

LINK_BYTES = 64 * 2**10
"""Bytes of a draft's largest frame."""

BEAT_S = 0.25
SILENT_MS = 1000
"""A transport counts as lost after this time without data; a quarter of it lies between two heartbeats."""


def chain_length(lookahead: int, ahead: int) -> int:
    """Return the length of chains for K = `lookahead` if a round trip commits `ahead` tokens."""
    return min(MAX_LOOKAHEAD, lookahead + ahead)


def trunk_length(verified: int, ahead: int) -> int:
    """Return the most tokens of the trunk while its first `verified` ones are verified."""
    return min(MAX_IN_FLIGHT, verified + _REACH * ahead)


_Delta = Annotated[int, Meta(ge=0, le=2**40)]
_Rank = Annotated[int, Meta(ge=0, le=2**16)]


class LinkMessage(Message, frozen=True):
    """Base of the messages that exist only on the link."""

    version: ClassVar[int] = LINK_VERSION


# -- draft -> receiver ------------------------------------------------------------------------------------------------


class Offer(LinkMessage, frozen=True):
    """First message of a draft. `vocabulary`: fingerprint of its tokenizer's vocabulary, or ""."""

    name: Name
    vocabulary: Name
    vocab_size: Count


class Joined(LinkMessage, frozen=True):
    """The draft is ready for requests."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The speculation for an outcome: an entry of the board (`ssd.ipc.board`).

    `accepted` counts tokens of the last `Trunk` of this request and round."""

    request: RequestId
    round: Count
    base: Count
    accepted: Annotated[int, Meta(ge=0, le=MOST_EXPECTED)]
    token: TokenId
    rank: _Rank
    fan_out: _Rank
    ids: Annotated[list[TokenId], Meta(max_length=MAX_LOOKAHEAD)]


class Trunk(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """The tokens that the draft expects after the first `base` ones, from verification `round` on."""

    request: RequestId
    round: Count
    base: Count
    ids: Annotated[list[TokenId], Meta(max_length=MOST_EXPECTED)]


class Published(LinkMessage, frozen=True):
    """The draft's results since the last one: trunks, entries that fork from them, growth of its counters.

    `echo`: stamp of the last `Beat`, which came `held` nanoseconds ago."""

    entries: Annotated[list[Entry], Meta(max_length=ENTRIES)] = msgspec.field(default_factory=list)
    progress: _Delta = 0
    steps: _Delta = 0
    nanoseconds: _Delta = 0
    grown: _Delta = 0
    echo: Count = 0
    held: Count = 0
    trunks: Annotated[list[Trunk], Meta(max_length=64)] = msgspec.field(default_factory=list)


# -- receiver -> draft ------------------------------------------------------------------------------------------------


class Terms(LinkMessage, frozen=True):
    """Accept an `Offer`, with the facts about the engine that the draft needs."""

    target: Name
    vocab_size: Annotated[int, Meta(ge=1, le=2**20)]
    max_num_seqs: Annotated[int, Meta(ge=1, le=1024)]
    max_model_len: Annotated[int, Meta(ge=1, le=MAX_PROMPT_TOKENS)]
    speculation: Speculation


class TargetVocabulary(LinkMessage, frozen=True):
    """Answer an `Offer` in another vocabulary with the target's. A new offer may follow."""

    tokens: dict[str, TokenId]


class NotAccepted(LinkMessage, frozen=True):
    """Refuse an `Offer`, or end a session; `again`: another may be accepted. Equal in all versions."""

    message: Name
    again: bool = False


class Beat(LinkMessage, frozen=True):
    """Show that the receiver is there; `stamp` is its clock, in nanoseconds."""

    stamp: Count


DRAFT_TO_RECEIVER = Direction(LINK_VERSION, msgspec.msgpack.Decoder(Offer | Joined | Published))
RECEIVER_TO_DRAFT = Direction(
    LINK_VERSION, msgspec.msgpack.Decoder(Terms | TargetVocabulary | NotAccepted | Beat | Told)
)


# -- vocabularies -----------------------------------------------------------------------------------------------------


def fingerprint(vocabulary: Mapping[str, int] | None) -> str:
    """Return a hash of a vocabulary, equal on all machines; empty without one."""
    if vocabulary is None:
        return ""
    return hashlib.sha256(json.dumps(sorted(vocabulary.items())).encode()).hexdigest()


# -- checks of what an engine sends, beyond types and bounds ----------------------------------------------------------


class NotOfAnEngine(ValueError):
    """A message that no engine of ours sends. The text says why."""


def check_terms(terms: Terms, vocabulary: Mapping[str, int] | None) -> None:
    """Raise `NotOfAnEngine` for terms that contradict themselves or the shared `vocabulary`."""
    _check_speculation(terms.speculation)
    if vocabulary and max(vocabulary.values()) >= terms.vocab_size:
        raise NotOfAnEngine(f"a vocabulary of {terms.vocab_size} tokens, fewer than its tokenizer has")


class MessageCheck:
    """Checks the messages of one session against its terms."""

    def __init__(self, terms: Terms) -> None:
        self._terms = terms
        self._requests: set[int] = set()

    def check(self, message: Any) -> None:
        if isinstance(message, Admit):
            self._admit(message)
        elif isinstance(message, Outcomes):
            self._check_ids(row.token for row in message.rows)
        elif isinstance(message, Launched):
            self._check_ids(itertools.chain.from_iterable(row.tokens for row in message.rows))
        elif isinstance(message, Retune):
            for _, speculation in message.rows:
                _check_speculation(speculation)
        elif isinstance(message, Release):
            self._requests.difference_update(message.requests)
        elif isinstance(message, Rejoin):
            self._requests.clear()

    def _admit(self, admit: Admit) -> None:
        terms = self._terms
        if not 0 < len(admit.token_ids) <= terms.max_model_len:
            raise NotOfAnEngine(f"a text of {len(admit.token_ids)} tokens, where 1 to {terms.max_model_len} may be")
        self._check_ids(admit.token_ids)
        _check_speculation(admit.speculation)
        self._requests.add(admit.request)
        if len(self._requests) > _MOST_REQUESTS * terms.max_num_seqs:
            raise NotOfAnEngine(f"{len(self._requests)} requests at once, where it runs {terms.max_num_seqs}")

    def _check_ids(self, ids: Iterable[int]) -> None:
        if (largest := max(ids, default=0)) >= self._terms.vocab_size:
            raise NotOfAnEngine(f"the token {largest}, where ids are below {self._terms.vocab_size}")


def _check_speculation(speculation: Speculation) -> None:
    try:
        speculation.check()
    except RequestError as error:
        raise NotOfAnEngine(str(error)) from None


# -- the draft's board ------------------------------------------------------------------------------------------------


class LinkBoard(DraftBoard):
    """A draft's board that is sent. `clear` sends nothing: the receiver knows outcomes first."""

    def __init__(self, send: Callable[[Published], None]) -> None:
        super().__init__()
        self._send = send
        self._entries: list[Entry] = []
        self._counted: Counter[str] = Counter()

    def publish(self, slot: int, prepared: Sequence[Prepared]) -> None:
        self._entries += [Entry(*key[1:], *place, list(ids)) for _, key, ids, place in prepared]

    def expect(self, trunk: Trunk) -> None:
        if self._entries:
            self.flush()
        self._send(Published(trunks=[trunk]))

    def count(self, progress: int, steps: int = 0, nanoseconds: int = 0, grown: int = 0) -> None:
        self._counted.update(progress=progress, steps=steps, nanoseconds=nanoseconds, grown=grown)

    def flush(self) -> None:
        """Send the entries and counts since the last call, if there are any."""
        entries, counted, self._entries, self._counted = self._entries, self._counted, [], Counter()
        for start in range(0, len(entries), ENTRIES):
            self._send(Published(entries[start : start + ENTRIES]))
        if counted:
            self._send(replace(Published(), **counted))
