"""A plan, and the plans that a request leaves open. Plans are kept for classes of batches and texts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from ssd.config.params import AUTO_LOOKAHEAD, DRAFTED, Mode, Speculation

_MODES: tuple[Mode, ...] = ("ngram", *DRAFTED)
_LOOKAHEADS = tuple(range(1, AUTO_LOOKAHEAD + 1))


@dataclass(frozen=True)
class Plan:
    """A mode, K (0 without a draft) and the number of chains: plans are equal if these are.

    `fan_out` is F_0..F_K, `speed` the predicted tokens per second. Both change with what is measured."""

    mode: Mode
    lookahead: int = 0
    chains: int = 0
    fan_out: tuple[int, ...] = field(default=(), compare=False)
    speed: float = field(default=0.0, compare=False)

    @classmethod
    def of(cls, followed: Speculation) -> Plan:
        """Return the plan of a request whose speculation the tuner has filled in."""
        if followed.mode not in DRAFTED:
            return cls(followed.mode)
        return cls(followed.mode, followed.num_speculative_tokens, sum(followed.fan_out) or followed.budget)

    def words(self, cores: tuple[int, int] | None = None) -> str:
        """Describe the plan; `cores`: the target's own, and all."""
        own, all_cores = (_counted(count, "core") for count in cores or (0, 0))
        if self.mode not in DRAFTED:
            return "plain decoding with prompt lookup" + (f" on {all_cores}" if cores else "")
        if self.mode == "sd":
            return f"sd, K {self.lookahead}" + (f", in turn on {all_cores}" if cores else "")
        said = f"ssd, K {self.lookahead}, {_counted(self.chains, 'chain')}"
        return said + (f", target on {own}, draft on {_counted(cores[1] - cores[0], 'core')}" if cores else "")


class Choices(NamedTuple):
    """The plans that a request leaves open: `modes`, K among `lookaheads`, and fan-outs.

    Without a fixed `fan_out` a sequence may have at most `chains` chains."""

    modes: tuple[Mode, ...]
    lookaheads: tuple[int, ...]
    fan_out: tuple[int, ...] = ()
    chains: int = 32

    @classmethod
    def of(cls, asked: Speculation) -> Choices:
        lookahead, most = asked.num_speculative_tokens, 1 if asked.allocation == "pearl" else asked.budget
        modes = _MODES if asked.mode == "auto" else (asked.mode,)
        return cls(modes, (lookahead,) if lookahead else _LOOKAHEADS, asked.fan_out, most)

    @property
    def lookahead(self) -> int:
        """Return the K that is given; 0 if it is open."""
        return self.lookaheads[0] if len(self.lookaheads) == 1 else 0


def batch_class(batch: int) -> int:
    """Return the batch size whose plans serve `batch`: 1, 2, 3, 4, 6, 8, 12, 16, 24, ..."""
    if batch <= 4:
        return batch
    power = 1 << (batch.bit_length() - 1)
    return power if batch < 1.25 * power else power * 3 // 2 if batch < 1.75 * power else 2 * power


def text_class(tokens: float) -> int:
    """Return the class of texts that share plans: 0 below 512 tokens, 1 below 1,024, ..."""
    return int(tokens // 512).bit_length()


def _counted(count: int, name: str) -> str:
    return f"{count} {name}" + "s" * (count != 1)
