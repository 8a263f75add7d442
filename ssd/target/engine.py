"""One step of the target: schedule, verify, commit, look up. No process, socket or board in here."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from ssd.config import EngineConfig
from ssd.execution.meanwhile import Once, Task, nothing
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.ipc.board import Cached
from ssd.ipc.messages import Emission, FinishReason, Load, Submit, TokenLogprob
from ssd.monitor.lanes import SILENT, Lane, State
from ssd.speculation.acceptance import coupled
from ssd.target.ahead import Ahead
from ssd.target.features import FeatureExport
from ssd.target.proposer import Proposer, Result
from ssd.target.scheduler import Scheduled, Scheduler
from ssd.target.sequence import Sequence
from ssd.target.verifier import Verifier, unfiltered

_NO_LOGITS = torch.empty(0)


class TargetEngine:
    """Truth and the loop over it. `stop_token_ids` are the model's end-of-sequence ids, `lane` is told what it does,
    `features` shows hidden states to the draft, and `ahead` launches verifications before outcomes are known."""

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        proposer: Proposer,
        stop_token_ids: frozenset[int] = frozenset(),
        lane: Lane = SILENT,
        features: FeatureExport | None = None,
        ahead: Ahead | None = None,
    ) -> None:
        salt = f"{config.digest}/{config.dtype}/{config.quantize}"
        self.pool = PagePool(config.num_pages, config.page_size, salt)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens)
        self.proposer = proposer
        self._config, self._runner, self._stop_token_ids = config, runner, stop_token_ids
        self._verifier = Verifier(runner.model.shape.vocab_size, runner.model.device)
        self._lane, self._features, self._ahead = lane, features, ahead
        self._forward_ended = 0.0
        self._took = (0, 0.0, 0.0)  # the last step's tokens, seconds of verification, seconds of waiting

    def submit(self, submit: Submit) -> None:
        table = PageTable(self.pool, submit.params.cache_salt)
        default, longest = self._config.speculation, self._config.max_model_len
        now = time.perf_counter()
        self.scheduler.add(Sequence.from_submit(submit, default, longest, table, now, self._stop_token_ids))

    def abort(self, request: int) -> None:
        """Forget a request; called between steps, so that no step in flight can touch its pages."""
        sequence = self.scheduler.find(request)
        if sequence is not None:
            self._forget([sequence])

    def abort_all(self) -> None:
        """Forget every request, as the frontend that asked for them is gone; called between steps."""
        self._forget([*self.scheduler.running, *self.scheduler.waiting])

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting)

    def load(self) -> Load:
        """How busy it is now, and what the last step took."""
        tokens, verify, waited = self._took
        counters = self.proposer.counters
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            kv_cache_usage=self.pool.live / self.pool.count,
            draft_state=self.proposer.state,
            rejected_speculations=self.proposer.rejected,
            batched_tokens=tokens,
            verify_seconds=verify,
            wait_seconds=waited,
            draft_steps=counters.steps,
            draft_step_seconds=counters.step_seconds,
            stale_speculations=counters.stale,
        )

    def step(self, meanwhile: Task = nothing) -> list[Emission]:
        """Advance every sequence that the batch has room for; returns what clients must be told.

        `meanwhile` is done once: while the draft or a device is waited for, or else before the forward.
        """
        self._admit()
        meanwhile = Once(meanwhile)
        waited = self.proposer.settle(self.scheduler.running, meanwhile)
        batch, preempted = self._ahead.batch() if self._ahead else [], list[Sequence]()
        runs = bool(batch)
        if not runs:
            batch, preempted = self.scheduler.schedule()
        if preempted:
            self.proposer.release(preempted)
        if not batch or not self._runner.overlaps:
            meanwhile()
        if not batch:
            self._took = (0, 0.0, 0.0)
            return []
        # What runs already does so since the one before has ended.
        began = self._forward_ended if runs else time.perf_counter()
        logits, own = self._forward(batch, meanwhile)
        ended = time.perf_counter()
        samples = self._verifier.samples(logits, batch, own)
        if any(_spoiled(part, own) for part, own in zip(batch, samples, strict=True)):
            batch = [
                part.without_draft() if _spoiled(part, own) else part for part, own in zip(batch, samples, strict=True)
            ]
            if self._ahead is not None:
                self._ahead.drop()
            logits, own = self._forward(batch)
            ended = time.perf_counter()
            samples = self._verifier.samples(logits, batch, own)
        self._lane.enter(State.OTHER)
        between = began - self._forward_ended
        self._account(batch, waited, began, ended)
        self._verifier.collect_prompt_logprobs(logits, batch)
        results = self._commit(batch, samples)
        if self._ahead is not None:
            self._ahead.learn(results, ended - began, between)
        return self._finish(batch, results, logits)

    def _forward(self, batch: Items[Scheduled], meanwhile: Task = nothing) -> tuple[Tensor, list[int] | None]:
        """The logits of a batch; or none of them, but what the runner has drawn from them."""
        decodes = any(part.sequence.round > 0 for part in batch)
        tokens = sum(len(part.row.token_ids) for part in batch)
        self._lane.enter(State.VERIFY if decodes else State.PREFILL, tokens)
        rows, runner = [part.row for part in batch], self._runner
        if self._ahead is not None:
            own = self._ahead.sample(batch, len(self.scheduler.running), meanwhile)
            if own is not None:
                self._lane.enter(State.SAMPLE)
                return _NO_LOGITS, own
        plan = runner.prepare(rows, () if self._features is None else self._features.layers)
        own = None
        if (laws := unfiltered(batch)) is not None:
            own = runner.sample(rows, laws, plan, meanwhile)
        logits = runner.forward(rows, plan, meanwhile) if own is None else _NO_LOGITS
        if self._features is not None:
            self._features.write(batch, plan)
        self._lane.enter(State.SAMPLE)
        return logits, own

    def _admit(self) -> None:
        for sequence in self.scheduler.admit():
            sequence.timing.admitted = sequence.timing.admitted or time.perf_counter()
            self.proposer.admit(sequence)

    def _account(self, batch: Items[Scheduled], waited: float, began: float, ended: float) -> None:
        """Every second of a round is verification, waiting for the draft, or overhead (contract C10)."""
        between = began - self._forward_ended - waited
        self._took = (sum(len(part.row.token_ids) for part in batch), ended - began, waited)
        for part in batch:
            sequence = part.sequence
            if sequence.round > 0:
                sequence.timing.verify += ended - began
                sequence.timing.wait += waited
                sequence.timing.overhead += between
        self._forward_ended = ended

    def _commit(self, batch: Items[Scheduled], samples: Items[list[int]]) -> list[Result | None]:
        """Append what the samples allow and move the computed length (I1); None for prefill chunks, whose pages can be
        found at once: others may wait for them."""
        results: list[Result | None] = []
        taken: Items[Cached | None] = (self._ahead.taken if self._ahead else []) or [None] * len(batch)
        for part, own, next_ in zip(batch, samples, taken, strict=True):
            sequence, drafted = part.sequence, part.drafted
            known = len(part.row.token_ids) - drafted
            sequence.proposal, sequence.laws = [], None
            if not part.complete and own[0] >= 0:
                sequence.computed += known
                sequence.table.share_computed(sequence.tokens, sequence.computed)
                results.append(None)
                continue
            outcome = coupled(part.draft, own)
            result = Result(sequence, sequence.round, len(sequence.tokens), drafted, outcome, sequence.cache, next_)
            sequence.computed += known + outcome.accepted
            sequence.count_round(outcome, drafted)
            sequence.tokens += own[: outcome.accepted + 1]
            results.append(result)
        return results

    def _finish(self, batch: Items[Scheduled], results: Items[Result | None], logits: Tensor) -> list[Emission]:
        """Ends, the next proposals, emissions, the prefix cache. The draft hears first: it has most to do."""
        ends = [self._cut(result) for result in results]
        found = list(zip(results, ends, strict=True))
        alive = [result for result, (_, reason) in found if result is not None and reason is None]
        self.proposer.outcomes(alive)
        logprobs = self._verifier.logprobs(logits, batch, [tokens for tokens, _ in ends])
        now = time.perf_counter()
        emissions, over = [], []
        for (result, (tokens, reason)), probabilities in zip(found, logprobs, strict=True):
            if result is None:
                continue
            sequence = result.sequence
            sequence.timing.first_token = sequence.timing.first_token or now
            sequence.timing.last_token = now
            if reason is not None:
                over.append(sequence)
            if reason != "error":
                sequence.table.share_computed(sequence.tokens, sequence.computed)
            emissions.append(self._emission(result, tokens, probabilities, reason))
        self._forget(over)
        return emissions

    def _emission(
        self, result: Result, tokens: list[int], logprobs: list[TokenLogprob] | None, reason: FinishReason | None
    ) -> Emission:
        sequence, prompt_logprobs = result.sequence, None
        if sequence.params.prompt_logprobs is not None and result.round == 0 and reason != "error":
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        # A stop string ends a request in the frontend: then these are the last figures it has.
        known = reason is not None or bool(sequence.params.stop)
        step, report = self.proposer.counters.mean_step_seconds, self._config.server.cache_report
        metrics = sequence.metrics(step, report) if known else None
        error = "the model produced values that are not numbers" if reason == "error" else ""
        return Emission(
            request=sequence.request,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            metrics=metrics,
            error=error,
            drafted=result.drafted,
            accepted=result.outcome.accepted,
            cache=result.cache,
        )

    def _cut(self, result: Result | None) -> tuple[list[int], FinishReason | None]:
        """The new tokens of a result, cut where the request ends, and why it ends."""
        if result is None:
            return [], None
        sequence = result.sequence
        tokens = sequence.tokens[result.base :]
        for index, token in enumerate(tokens):
            reason = self._reason(sequence, token, result.base + index + 1)
            if reason is not None:
                kept = tokens[: index + (reason != "error")]
                sequence.tokens[result.base :] = kept
                sequence.computed = min(sequence.computed, len(sequence.tokens))
                return kept, reason
        return tokens, None

    def _reason(self, sequence: Sequence, token: int, length: int) -> FinishReason | None:
        """Why a sequence ends with `token` as its last of `length`, or None."""
        params = sequence.params
        if token < 0:
            return "error"
        if token in sequence.ends:
            return "stop"
        if length - sequence.prompt_length >= params.max_tokens or length >= sequence.max_model_len:
            return "length"
        return None

    def _forget(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.remove(sequence)
        if sequences:
            self.proposer.release(sequences)


def _spoiled(part: Scheduled, own: list[int]) -> bool:
    """Whether draft tokens may be to blame for a sample that is not a number: a token that the target cannot compute
    has keys and values of NaN, and masking does not hide those from the tokens before it, as 0 x NaN is NaN."""
    return part.drafted > 0 and -1 in own
