"""One running request as the target sees it: what is committed, and beside it what is only proposed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor

from ssd.execution.pages import PageTable
from ssd.ipc.messages import Metrics, Submit, TokenLogprob
from ssd.params import SamplingParams, Speculation
from ssd.speculation.acceptance import Outcome
from ssd.speculation.adjustment import Adjustment, Written
from ssd.speculation.sampling import Law

# Logits divided by less than this overflow; nothing but the argmax has any probability left by then.
_GREEDY_BELOW = 1e-5

# What the speculation cache had for a round: nothing is said where that question does not arise.
Cache = Literal["", "hit", "k_not_covered", "token_not_covered", "first_round", "late", "draft_down"]


@dataclass
class Timing:
    """Monotonic seconds of a request's life, and sums over its rounds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    verify: float = 0.0
    wait: float = 0.0
    overhead: float = 0.0


@dataclass
class Counts:
    """Sums over rounds. A round is a verification after the prefill; the first of them has no hit or miss.
    `histogram[a]` rounds accepted `a` draft tokens."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: list[int] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    tokens_on_hit: int = 0
    tokens_on_miss: int = 0


@dataclass
class Sequence:
    """`tokens` are committed, `computed` of them have keys and values (I1), `proposal` are guesses to verify next,
    drawn from `laws` [n, V] if the ratio rule decides about them (None: not drawn).

    `speculation` is what was `asked` for, or what the tuner makes of that at present. `round` numbers outcomes: 0 is
    the prefill's. `cache` says what the speculation cache had for the next one. A token of `ends` ends the text.
    `adjustment` is None where logits are taken as they are; `written` is what it has been told of the text.
    `prompt_logprobs` are those of the first prompt tokens after the very first, as far as they are computed. `tags`
    name the texts whose features were shown to the draft (`ssd.ipc.features`).
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
    ends: frozenset[int]
    adjustment: Adjustment | None
    written: Written | None = None
    slot: int = -1
    computed: int = 0
    cached: int = 0
    round: int = 0
    proposal: list[int] = field(default_factory=list)
    laws: Tensor | None = None
    cache: Cache = ""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    tags: list[int] = field(default_factory=list)
    counts: Counts = field(default_factory=Counts)

    @classmethod
    def from_submit(
        cls,
        submit: Submit,
        default: Speculation,
        max_model_len: int,
        table: PageTable,
        now: float,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> Sequence:
        """`params.seed` must be filled in; `default` is used where the request does not say how to speculate.
        `stop_token_ids` are the model's end-of-sequence ids."""
        params = submit.params
        ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else stop_token_ids)
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
            ends=ends,
            adjustment=None if params.plain else _adjustment(params, ends),
        )

    @property
    def ratio_rule(self) -> bool:
        """See `Speculation.ratio_rule`."""
        return self.speculation.ratio_rule(self.law.temperature)

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """How many committed tokens have no keys and values yet: one while it decodes, more while it is read."""
        return len(self.tokens) - self.computed

    @property
    def collects(self) -> bool:
        """Whether log-probabilities of its prompt are wanted and have not been delivered."""
        return self.params.prompt_logprobs is not None and self.round == 0

    @property
    def adoptable(self) -> int:
        """How many of its tokens may come from the prefix cache: a logit that is wanted must be computed here."""
        return len(self.prompt_logprobs) if self.collects else len(self.tokens) - 1

    def uncollected(self, stop: int) -> int:
        """How many of the tokens 1..stop of the prompt a row up to `stop` can still give log-probabilities of."""
        if not self.collects:
            return 0
        return max(0, min(stop, self.prompt_length - 1) - max(self.computed, len(self.prompt_logprobs)))

    def adopt(self) -> None:
        """Take over the pages of its text that can be found, its own or another's, behind those it has."""
        computed = self.table.adopt_prefix(self.tokens, self.computed, self.adoptable)
        if self.round == 0:
            self.cached += computed - self.computed
        self.computed = computed

    def lose_pages(self) -> None:
        """Give its pages back: what was computed, and what was proposed on top of it, is no more."""
        self.table.free()
        self.computed, self.cache = 0, ""
        self.proposal, self.laws = [], None
        if self.round == 0:
            self.cached = 0

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
            histogram = self.counts.histogram
            histogram += [0] * (outcome.accepted + 1 - len(histogram))
            histogram[outcome.accepted] += 1
            if self.cache == "hit":
                self.counts.hits += 1
                self.counts.tokens_on_hit += outcome.accepted + 1
            elif self.cache not in ("", "first_round"):
                self.counts.misses += 1
                self.counts.tokens_on_miss += outcome.accepted + 1
        self.round += 1
        self.cache = ""

    def metrics(self, draft_step_s: float, cache_report: bool) -> Metrics:
        """The request's figures; see `ssd.ipc.messages.Metrics`. Without `cache_report` nothing was cached."""
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
            acceptance_histogram=list(counts.histogram),
            queue_time_ms=max(0.0, timing.admitted - timing.arrived) * 1e3,
            time_to_first_token_ms=max(0.0, timing.first_token - timing.arrived) * 1e3,
            generation_time_ms=max(0.0, generation) * 1e3,
            verify_ms=timing.verify / rounds * 1e3,
            draft_wait_ms=timing.wait / rounds * 1e3,
            round_overhead_ms=max(0.0, timing.overhead) / rounds * 1e3,
            draft_step_ms=draft_step_s * 1e3,
            cached_tokens=self.cached if cache_report else 0,
        )


def _adjustment(params: SamplingParams, ends: frozenset[int]) -> Adjustment:
    return Adjustment(
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=params.logit_bias,
        min_tokens=params.min_tokens,
        ends=ends,
    )
