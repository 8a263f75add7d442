"""Writes texts with a model, many at a time, and records soft labels and hidden states of every token."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ssd.errors import SsdError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.law import Law
from ssd.speculation.noise import halves
from ssd.speculation.sampling import Draws, drawn, numbers_of
from tools.distill.teacher import PAGE

# Prompts are run when so many slots are free: one in _SHARE.
_SHARE = 8


@dataclass(frozen=True)
class Request:
    """A text to continue: token ids, the temperature (0: greedy), the most tokens to write, and a seed."""

    prompt: Sequence[int]
    temperature: float
    max_tokens: int
    seed: int


@dataclass(eq=False)
class Text:
    """A text, its first `prompt` tokens given. `ended`: the model wrote a stop token, which is the last one.

    With a record: `ids` int32 and `logprobs` float16 [written, top], the likeliest tokens at each written place, and
    `features` bfloat16 [tokens - 1, widths], the hidden states of all tokens but the last."""

    token_ids: list[int]
    prompt: int
    ended: bool = False
    ids: list[Tensor] = field(default_factory=list)
    logprobs: list[Tensor] = field(default_factory=list)
    features: list[Tensor] = field(default_factory=list)


@dataclass(eq=False)
class _Slot:
    """A text being written, over pages of its own."""

    text: Text
    request: Request
    number: int
    pages: range

    def row(self) -> Row:
        start = 0 if len(self.text.token_ids) == self.text.prompt else len(self.text.token_ids) - 1
        return Row(self.text.token_ids[start:], start, self.pages, slot=self.number)


class Writer:
    """A model that writes up to `slots` texts of at most `longest` tokens at a time, until `stop` of time.monotonic().

    `runner` has a page for every PAGE tokens of each. `layers`: after how many layers hidden states are recorded;
    `top`: how many of the likeliest tokens."""

    def __init__(
        self,
        runner: Runner,
        stop_ids: frozenset[int],
        slots: int,
        longest: int,
        layers: Sequence[int],
        top: int,
        stop: float = math.inf,
    ) -> None:
        self.runner, self._stop_ids, self.longest, self._layers, self._top = (
            runner,
            stop_ids,
            longest,
            tuple(layers),
            top,
        )
        self._stop = stop
        pages = -(-longest // PAGE)
        self._free = [(slot, range(slot * pages, (slot + 1) * pages)) for slot in range(slots)]
        # A prompt among the rows would keep them out of the graph shapes, so some wait for each other.
        self._together = max(1, slots // _SHARE) if isinstance(runner, StaticRunner) else 0
        if isinstance(runner, StaticRunner):
            runner.tables.tell(self._free)  # now, as each one told later waits for the device

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self._stop

    @torch.inference_mode()
    def write(self, requests: Sequence[Request], record: bool = False) -> list[Text]:
        """Return the texts of all requests, in order. One whose prompt leaves no room stays as it is.

        At the end of the time they are returned as they are then."""
        texts = [Text(list(request.prompt), len(request.prompt)) for request in requests]
        pairs = zip(texts, requests, strict=True)
        waiting, active = [pair for pair in pairs if pair[0].prompt < self.longest][::-1], list[_Slot]()
        while (waiting or active) and not self.is_over:
            begun = self._begin(waiting, bool(active))
            for part in (begun, active) if self._together else (active + begun,):
                if part:
                    self._write_token(part, record)
            active += begun
            ended = {slot.number for slot in active if self._is_done(slot)}
            self._free += [(slot.number, slot.pages) for slot in active if slot.number in ended]
            active = [slot for slot in active if slot.number not in ended]
        self._free += [(slot.number, slot.pages) for slot in active]
        return texts

    def _begin(self, waiting: list[tuple[Text, Request]], writing: bool) -> list[_Slot]:
        """Take texts from the end of `waiting` while there are free slots; enough of them, if texts are being
        written."""
        count = min(len(waiting), len(self._free))
        if writing and count < min(len(waiting), self._together):
            return []
        return [_Slot(*waiting.pop(), *self._free.pop()) for _ in range(count)]

    def _write_token(self, slots: Sequence[_Slot], record: bool) -> None:
        rows = [slot.row() for slot in slots]
        context = self.runner.prepare(rows, self._layers if record else ())
        logits = self.runner.forward(rows, context).float()
        if record:
            self._record(slots, rows, logits, [context.hidden[layer] for layer in self._layers])
        for slot, token in zip(slots, _sample(logits, slots), strict=True):
            if not 0 <= token < logits.shape[-1]:
                raise SsdError(f"token id {token} of {logits.shape[-1]}: the device computes wrong numbers")
            slot.text.token_ids.append(token)
            slot.text.ended = token in self._stop_ids

    def _is_done(self, slot: _Slot) -> bool:
        text = slot.text
        written = len(text.token_ids) - text.prompt
        return text.ended or written >= slot.request.max_tokens or len(text.token_ids) >= self.longest

    def _record(self, active: Sequence[_Slot], rows: Sequence[Row], logits: Tensor, hidden: Sequence[Tensor]) -> None:
        values, ids = torch.topk(logits, min(self._top, logits.shape[-1]))
        logprobs = values - torch.logsumexp(logits, dim=-1, keepdim=True)
        for slot, *own in zip(active, ids.int().cpu(), logprobs.half().cpu(), strict=True):
            slot.text.ids.append(own[0])
            slot.text.logprobs.append(own[1])
        if hidden:
            features = torch.cat([states.bfloat16().cpu() for states in hidden], dim=-1)
            for slot, part in zip(active, features.split([len(row.token_ids) for row in rows]), strict=True):
                slot.text.features.append(part)


def _sample(logits: Tensor, active: Sequence[_Slot]) -> list[int]:
    """Return a token for each row of `logits` [n, V], by the temperature and the seed of its request."""
    if all(slot.request.temperature == 0 for slot in active):
        greedy: list[int] = drawn(logits).tolist()
        return greedy
    keys = [halves((slot.request.seed, len(slot.text.token_ids))) for slot in active]
    laws = torch.tensor([numbers_of(Law(slot.request.temperature)) for slot in active], device=logits.device).T
    draws = Draws(torch.tensor(keys, dtype=torch.int32, device=logits.device), laws)
    chosen: list[int] = drawn(logits, draws).tolist()
    return chosen
