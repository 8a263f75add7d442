"""One running request as the target sees it: what is committed, and beside it what is only proposed."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from ssd.execution.pages import PageTable
from ssd.ipc.messages import Metrics, Submit
from ssd.params import SamplingParams, Speculation
from ssd.speculation.acceptance import Outcome
from ssd.speculation.sampling import Law

# Logits divided by less than this overflow; nothing but the argmax has any probability left by then.
_GREEDY_BELOW = 1e-5


@dataclass
class Timing:
    """Monotonic seconds of a request's life, and sums over its rounds."""

    arrived: float
    first_token: float = 0.0
    last_token: float = 0.0
    verify: float = 0.0
    wait: float = 0.0
    overhead: float = 0.0


@dataclass
class Counts:
    """Sums over rounds. A round is a verification after the prefill; the first of them has no hit or miss."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    hits: int = 0
    misses: int = 0
    tokens_on_hit: int = 0
    tokens_on_miss: int = 0


@dataclass
class Sequence:
    """`tokens` are committed, `computed` of them have keys and values (I1), `proposal` are guesses to verify next,
    drawn from `laws` [n, V] if the ratio rule decides about them (None: not drawn).

    `speculation` is what was `asked` for, or what the tuner makes of that at present. `round` numbers outcomes: 0 is
    the prefill's. `hit` says whether the proposal came from the speculation cache, None where that question does not
    arise.
    """

    request: int
    tokens: list[int]
    prompt_length: int
    params: SamplingParams
    asked: Speculation
    speculation: Speculation
    law: Law
    max_model_len: int
    table: PageTable
    timing: Timing
    slot: int = -1
    computed: int = 0
    cached: int = 0
    round: int = 0
    proposal: list[int] = field(default_factory=list)
    laws: Tensor | None = None
    hit: bool | None = None
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def from_submit(
        cls, submit: Submit, default: Speculation, max_model_len: int, table: PageTable, now: float
    ) -> Sequence:
        """`params.seed` must be filled in; `default` is used where the request does not say how to speculate."""
        params = submit.params
        temperature = params.temperature if params.temperature >= _GREEDY_BELOW else 0.0
        law = Law(temperature, params.top_k, params.top_p, params.min_p, params.seed or 0)
        return cls(
            request=submit.request,
            tokens=list(submit.token_ids),
            prompt_length=len(submit.token_ids),
            params=params,
            asked=params.speculation or default,
            speculation=params.speculation or default,
            law=law,
            max_model_len=max_model_len,
            table=table,
            timing=Timing(arrived=now),
        )

    @property
    def ratio_rule(self) -> bool:
        """See `Speculation.ratio_rule`."""
        return self.speculation.ratio_rule(self.law.temperature)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def room(self) -> int:
        """How many draft tokens could still be accepted: the bonus token needs a place too."""
        left = min(self.params.max_tokens - self.generated, self.max_model_len - len(self.tokens))
        return max(0, left - 1)

    @property
    def lookahead(self) -> int:
        """K of the next round."""
        return min(self.speculation.num_speculative_tokens, self.room)

    def count_round(self, outcome: Outcome, drafted: int) -> None:
        """Note the outcome of a verification of `drafted` draft tokens."""
        if self.round > 0:
            self.counts.rounds += 1
            self.counts.drafted += drafted
            self.counts.accepted += outcome.accepted
            if self.hit is True:
                self.counts.hits += 1
                self.counts.tokens_on_hit += outcome.accepted + 1
            elif self.hit is False:
                self.counts.misses += 1
                self.counts.tokens_on_miss += outcome.accepted + 1
        self.round += 1
        self.hit = None

    def metrics(self, draft_step_s: float) -> Metrics:
        """The request's figures; see `ssd.ipc.messages.Metrics`."""
        counts, timing, rounds = self.counts, self.timing, max(1, self.counts.rounds)
        generation = timing.last_token - timing.first_token
        return Metrics(
            mode=self.asked.mode,
            rounds=counts.rounds,
            drafted_tokens=counts.drafted,
            accepted_tokens=counts.accepted,
            hits=counts.hits,
            misses=counts.misses,
            mean_acceptance_length=1 + counts.accepted / rounds,
            mean_acceptance_length_on_hit=counts.tokens_on_hit / max(1, counts.hits),
            mean_acceptance_length_on_miss=counts.tokens_on_miss / max(1, counts.misses),
            hit_rate=counts.hits / max(1, counts.hits + counts.misses),
            tokens_per_second=(self.generated - 1) / generation if generation > 0 else 0.0,
            time_to_first_token_ms=max(0.0, timing.first_token - timing.arrived) * 1e3,
            generation_time_ms=max(0.0, generation) * 1e3,
            verify_ms=timing.verify / rounds * 1e3,
            draft_wait_ms=timing.wait / rounds * 1e3,
            round_overhead_ms=max(0.0, timing.overhead) / rounds * 1e3,
            draft_step_ms=draft_step_s * 1e3,
            cached_tokens=self.cached,
        )
