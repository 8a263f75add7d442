"""One request as the target sees it: its committed tokens, and apart from them its proposal."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor

from ssd.config.params import SamplingParams, Speculation
from ssd.execution.pages import PageTable
from ssd.grammar.matcher import GrammarState
from ssd.ipc.messages import Submit
from ssd.ipc.public import FinishReason, Metrics, Source, TokenLogprob
from ssd.law import DRAWN, Law
from ssd.speculation.acceptance import Outcome
from ssd.speculation.adjustment import Adjustment, Text, Written
from ssd.speculation.sampling import UNKNOWN
from ssd.tuning.estimates import kind_of

# Logits divided by less than this overflow; nothing but the argmax has any probability left by then.
_GREEDY_BELOW = 1e-5

# Result of the look-up in the speculation cache for a round; "" where nothing was looked up.
Cache = Literal["", "hit", "k_not_covered", "token_not_covered", "first_round", "late", "draft_down"]


@dataclass
class Timing:
    """Times of a request's progress, and sums over its rounds, in monotonic seconds."""

    arrived: float
    admitted: float = 0.0
    first_token: float = 0.0
    last_token: float = 0.0
    verify: float = 0.0
    wait: float = 0.0
    overhead: float = 0.0


@dataclass
class Counts:
    """Sums over rounds after the prefill, of which the first has no hit or miss.

    `histogram[a]` rounds accepted `a` draft tokens."""

    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_by_source: Counter[Source] = field(default_factory=Counter)
    histogram: list[int] = field(default_factory=list)
    hits: int = 0
    misses: int = 0
    tokens_on_hit: int = 0
    tokens_on_miss: int = 0


class Sequence:
    """One request: `tokens` are committed, and `computed` of them have keys and values.

    `params.seed` must be filled in. Only the engine changes a sequence; the proposer may set `proposal`, `source`,
    `draft_probs`, `cache` and `speculation`."""

    def __init__(
        self,
        submit: Submit,
        default: Speculation,
        max_model_len: int,
        table: PageTable,
        now: float,
        stop_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.request, self.params, self.max_model_len, self.table = submit.request, submit.params, max_model_len, table
        self.owner = submit.owner  # the client's key or its name
        self.tokens, self.prompt_length = list(submit.token_ids), len(submit.token_ids)
        params, self.law = submit.params, _law_of(submit.params)
        # A token of `ends` ends the text.
        endless = params.ignore_eos and params.structured is None  # a complete structure must end
        self.ends = frozenset(params.stop_token_ids) | (frozenset() if endless else stop_token_ids)
        # None where logits are taken as they are; `written` is what has been read of the text to adjust them.
        wish = None if params.plain else _adjustment(params, self.ends)
        self.text = None if wish is None else Text(self.tokens, self.prompt_length, wish)
        self.written: Written | None = None
        # `grammar`: the required structure, once compiled. `failure`: why the request cannot go on, if that is known.
        self.grammar: GrammarState | None = None
        self.failure = ""
        # `asked` by the request, and the tuner's present `speculation`. Only K, fan-out and mode may differ.
        self.asked = self.speculation = params.speculation or default
        self.tuned = self.asked.auto  # True if the tuner chooses anything
        self.kind = kind_of(self.law.temperature)  # of its law: the tuner learns for each kind
        self.rule = self.asked.rule(self.law.temperature)
        self.sampled_by = self.rule.sampled_by(self.law)
        # True if a device may draw each token of the output, after `ssd.execution.adjustments.adjust`.
        one_sided = not (params.allowed_token_ids and params.min_tokens) and params.structured is None
        self.drawn_on_device = self.rule.emits_samples and one_sided
        self.slot = -1  # -1 while it waits
        self.computed = self.cached = 0  # `cached`: tokens of the prompt that came from the prefix cache
        self.round = 0  # numbers outcomes; 0 is the prefill's
        # Draft tokens to verify next, and the distributions [n, V] that drew them: None if none did, or no rule asks.
        self.proposal: list[int] = []
        self.draft_probs: Tensor | None = None
        self.source: Source = "draft"  # who made the proposal
        self.cache: Cache = ""  # result of the look-up for the next round
        self.prompt_logprobs: list[TokenLogprob] = []  # of the prompt's tokens after the first, as far as computed
        self.pooled: Tensor | None = None  # float64 [width] on the CPU: the hidden states that its embedding is made of
        self.tags: list[int] = []  # of the texts whose features were shown to the draft (`ssd.ipc.features`)
        self.timing, self.counts = Timing(arrived=now), Counts()

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def pending(self) -> int:
        """Return the committed tokens without keys and values: 1 in decoding, more in prefill."""
        return len(self.tokens) - self.computed

    @property
    def collects(self) -> bool:
        """Return True if log-probabilities of its prompt are still wanted."""
        return self.params.prompt_logprobs is not None and self.round == 0

    @property
    def adoptable(self) -> int:
        """Return how many tokens may come from the prefix cache; a wanted logit must be computed."""
        if self.params.pooling == "mean":
            return 0
        return len(self.prompt_logprobs) if self.collects else len(self.tokens) - 1

    def pool(self, states: Tensor) -> None:
        """Add the hidden states [n, width] of its next tokens to its embedding.

        One by one: no bit depends on the chunks of the prompt."""
        self.pooled = self.pooled if self.pooled is not None else torch.zeros(states.shape[1], dtype=torch.float64)
        if self.params.pooling == "last":
            self.pooled.copy_(states[-1])
        else:
            for state in states.cpu():
                self.pooled += state

    @property
    def embedding(self) -> bytes:
        """Return the embedding of its prompt, float32 [width]."""
        assert self.pooled is not None
        count = self.prompt_length if self.params.pooling == "mean" else 1
        return (self.pooled / count).float().numpy().tobytes()

    def uncollected(self, stop: int) -> int:
        """Return how many prompt tokens still get log-probabilities from a row up to `stop`."""
        if not self.collects:
            return 0
        return max(0, min(stop, self.prompt_length - 1) - max(self.computed, len(self.prompt_logprobs)))

    def adopt(self) -> None:
        """Take the next pages of its text from the prefix cache."""
        computed = self.table.adopt_prefix(self.tokens, self.computed, self.adoptable)
        if self.round == 0:
            self.cached += computed - self.computed
        self.computed = computed

    def lose_pages(self) -> None:
        """Give its pages back, and forget what was computed."""
        self.table.free()
        self.computed, self.cache = 0, ""
        self.proposal, self.source, self.draft_probs = [], "draft", None
        self.pooled = None
        if self.round == 0:
            self.cached = 0

    @property
    def acceptable(self) -> int:
        """Return how many draft tokens can be accepted; the bonus token needs a place too."""
        left = min(self.params.max_tokens - self.generated, self.max_model_len - len(self.tokens))
        return max(0, left - 1)

    @property
    def lookahead(self) -> int:
        return min(self.speculation.num_speculative_tokens, self.acceptable)

    def count_round(self, outcome: Outcome, drafted: int, source: Source) -> None:
        if self.round > 0:
            self.counts.rounds += 1
            self.counts.drafted += drafted
            self.counts.accepted += outcome.accepted
            if outcome.accepted:
                self.counts.accepted_by_source[source] += outcome.accepted
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

    def cut(self, base: int) -> tuple[list[int], FinishReason | None]:
        """Drop tokens behind the request's end; return those from `base` on, and the reason if it ends."""
        for length in range(base + 1, len(self.tokens) + 1):
            reason = self._reason(length)
            if reason is not None:
                if self.tokens[length - 1] == UNKNOWN:
                    self.failure = "the target's device sampled a token id that is not in the vocabulary"
                del self.tokens[length - (reason == "error") :]
                self.computed = min(self.computed, len(self.tokens))
                return self.tokens[base:], reason
        return self.tokens[base:], None

    def _reason(self, length: int) -> FinishReason | None:
        if self.tokens[length - 1] < 0:
            return "error"
        if self.tokens[length - 1] in self.ends:
            return "stop"
        if length - self.prompt_length >= self.params.max_tokens or length >= self.max_model_len:
            return "length"
        return None

    def metrics(self, draft_step_s: float, plan: str = "") -> Metrics:
        """Return the request's figures."""
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
            accepted_by_source=dict(counts.accepted_by_source),
            queue_time_ms=max(0.0, timing.admitted - timing.arrived) * 1e3,
            time_to_first_token_ms=max(0.0, timing.first_token - timing.arrived) * 1e3,
            generation_time_ms=max(0.0, generation) * 1e3,
            verify_ms=timing.verify / rounds * 1e3,
            draft_wait_ms=timing.wait / rounds * 1e3,
            round_overhead_ms=max(0.0, timing.overhead) / rounds * 1e3,
            draft_step_ms=draft_step_s * 1e3,
            cached_tokens=self.cached,
            plan=plan,
        )


def _law_of(params: SamplingParams) -> Law:
    temperature = params.temperature if params.temperature >= _GREEDY_BELOW else 0.0
    drawn = {name: getattr(params, name) for name in DRAWN}
    return Law(**drawn | {"temperature": temperature, "seed": params.seed or 0})


def _adjustment(params: SamplingParams, ends: frozenset[int]) -> Adjustment:
    return Adjustment(
        repetition=params.repetition_penalty,
        presence=params.presence_penalty,
        frequency=params.frequency_penalty,
        bias=params.logit_bias,
        min_tokens=params.min_tokens,
        ends=ends,
        allowed=torch.tensor(params.allowed_token_ids) if params.allowed_token_ids else None,
    )
