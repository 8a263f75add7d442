"""A chat's state: what was said, how the next answer is sampled, what the answers took. Free of input and output."""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec
from msgspec.structs import replace

from ssd.errors import UsageError
from ssd.ipc.messages import ChatMessage, Metrics
from ssd.params import SamplingParams

_PARAMETERS = SamplingParams.__struct_fields__
_WORDS = {"none": None, "true": True, "false": False}


class Conversation:
    """`system` is told to the model before everything else."""

    def __init__(self, params: SamplingParams, system: str | None = None) -> None:
        self.params = params
        self.answers = self.tokens = 0
        self.metrics = Metrics()
        self._beginning = [] if system is None else [ChatMessage("system", system)]
        self.messages = list(self._beginning)

    def question(self, text: str) -> list[ChatMessage]:
        """What to ask the engine when the user says `text`; remembered only by `keep`."""
        return [*self.messages, ChatMessage("user", text)]

    def keep(self, text: str, answer: str) -> None:
        """Remember an exchange as it was said, also where the answer was stopped. Without any answer there was none."""
        if answer:
            self.messages = [*self.question(text), ChatMessage("assistant", answer)]

    def count(self, tokens: int, metrics: Metrics) -> None:
        """Add the figures of an answer to the session's."""
        self.answers += 1
        self.tokens += tokens
        self.metrics = _merged(self.metrics, metrics)

    def clear(self) -> None:
        """Forget what was said; parameters and figures stay."""
        self.messages = list(self._beginning)

    def set(self, argument: str) -> str:
        """Set a sampling parameter ("temperature 0.7", values as in JSON, texts also bare); returns how it stands. Only
        a name: how that stands. Nothing: how all do. Raises UsageError that names the parameter and its bounds."""
        name, *value = re.split(r"[\s=]+", argument.strip(), maxsplit=1)
        if not name:
            return "\n".join(map(self._shown, _PARAMETERS))
        if name not in _PARAMETERS:
            raise UsageError(f"no parameter {name!r}; there are {', '.join(_PARAMETERS)}")
        if value and value[0]:
            self.params = _changed(self.params, name, value[0])
        return self._shown(name)

    def _shown(self, name: str) -> str:
        return f"{name} {msgspec.json.encode(getattr(self.params, name)).decode()}"

    def as_json(self, model: str) -> str:
        document = {"model": model, "params": self.params, "messages": self.messages}
        return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"

    def as_markdown(self, model: str) -> str:
        parts = [f"**{message.role}**\n\n{message.content}" for message in self.messages]
        return "\n\n".join([f"# A conversation with {model}", *parts]) + "\n"


def _changed(params: SamplingParams, name: str, text: str) -> SamplingParams:
    """`params` with one parameter as typed."""
    value = _typed(text)
    if isinstance(getattr(SamplingParams(), name), tuple) and not isinstance(value, list):
        value = [] if value is None else [value]
    try:
        # By way of JSON, whose decoder knows the bounds and takes text for the keys of logit_bias.
        decoded = msgspec.json.decode(msgspec.json.encode({name: value}), type=SamplingParams)
    except msgspec.MsgspecError as error:
        raise UsageError(f"{name} {text}: {str(error).split(' - at ')[0]}") from None
    changed = replace(params, **{name: getattr(decoded, name)})
    changed.check()
    return changed


def _typed(text: str) -> Any:
    """A value as a person types it: JSON, or else a text."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _merged(a: Metrics, b: Metrics) -> Metrics:
    """The figures of two lots of requests as one: sums, and means weighted by what they are means over."""
    rounds = max(1, a.rounds + b.rounds)
    seconds = a.generation_time_ms + b.generation_time_ms
    decoded = a.tokens_per_second * a.generation_time_ms + b.tokens_per_second * b.generation_time_ms
    hits, misses, accepted = a.hits + b.hits, a.misses + b.misses, a.accepted_tokens + b.accepted_tokens

    def mean(name: str) -> float:
        each: float = getattr(a, name) * a.rounds + getattr(b, name) * b.rounds
        return each / rounds

    return Metrics(
        mode=b.mode,
        rounds=a.rounds + b.rounds,
        accepted_tokens=accepted,
        hits=hits,
        misses=misses,
        mean_acceptance_length=1 + accepted / rounds,
        hit_rate=hits / max(1, hits + misses),
        tokens_per_second=decoded / seconds if seconds else 0.0,
        generation_time_ms=seconds,
        verify_ms=mean("verify_ms"),
        draft_wait_ms=mean("draft_wait_ms"),
        round_overhead_ms=mean("round_overhead_ms"),
    )
