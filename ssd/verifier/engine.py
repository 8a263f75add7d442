"""One step of the target: settle, schedule, verify, commit, look up. No process, socket or board."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from typing import NamedTuple

from ssd.config.engine import EngineConfig
from ssd.execution.meanwhile import Once, Task, nothing
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.board import Cached
from ssd.ipc.messages import Emission, Load, Submit
from ssd.ipc.public import FinishReason, TokenLogprob
from ssd.verifier.core_choice import CoreChoice
from ssd.verifier.grammars import GrammarQueue
from ssd.verifier.proposer import Proposer, Result
from ssd.verifier.scheduler import Scheduled, Scheduler
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import Verification, VerifiedBatch


class _Committed(NamedTuple):
    """A row's outcome (None for a prefill chunk), its new `tokens`, and why its request ended."""

    result: Result | None
    tokens: list[int]
    reason: FinishReason | None


class TargetEngine:
    """Owns the committed tokens of all requests; the target process calls it step by step.

    `stop_token_ids`: the model's end-of-sequence ids. `state_slots`: the runner's."""

    def __init__(
        self,
        config: EngineConfig,
        verification: Verification,
        proposer: Proposer,
        stop_token_ids: frozenset[int] = frozenset(),
        cores: CoreChoice | None = None,
        state_slots: Items[int] | None = None,
    ) -> None:
        salt = f"{config.digest}/{config.dtype}/{config.quantize}/{config.activations}"
        self.pool = PagePool(config.num_pages, config.page_size, salt, state_slots)
        self.scheduler = Scheduler(self.pool, config.max_num_seqs, config.max_num_batched_tokens)
        self.proposer = proposer
        self._compiling = GrammarQueue(config, stop_token_ids)
        self._config, self._verification, self._stop_token_ids = config, verification, stop_token_ids
        self._cores = cores
        self._forward_ended = 0.0
        self._preemptions = self._late_compiles = 0
        self._took = (0, 0.0, 0.0)  # the last step's tokens, seconds of verification, seconds of waiting

    def prepare(self) -> None:
        """Load what the first grammar would need, before there are requests."""
        self._compiling.prepare()

    def submit(self, submit: Submit) -> None:
        table = PageTable(self.pool, submit.params.cache_salt)
        default, longest = self._config.speculation, self._config.max_model_len
        now = time.perf_counter()
        sequence = Sequence(submit, default, longest, table, now, self._stop_token_ids)
        if submit.params.structured is None:
            self.scheduler.add(sequence)
        else:
            self._compiling.add(sequence, submit.params.structured)

    def abort(self, request: int) -> None:
        """Forget a request; called between steps, so that no step can touch its pages."""
        self._compiling.discard(request)
        sequence = self.scheduler.find(request)
        if sequence is not None:
            self._forget([sequence])

    def abort_all(self) -> None:
        """Forget every request; called between steps."""
        self._compiling.discard()
        self._forget([*self.scheduler.running, *self.scheduler.waiting])

    @property
    def busy(self) -> bool:
        return bool(self.scheduler.running or self.scheduler.waiting or self._compiling.waiting)

    def note_compile(self) -> None:
        self._late_compiles += 1

    def load(self) -> Load:
        tokens, verify, waited = self._took
        counters = self.proposer.counters
        return Load(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting) + len(self._compiling.waiting),
            kv_cache_usage=self.pool.live / self.pool.count,
            draft_state=self.proposer.state,
            rejected_speculations=counters.rejected,
            batched_tokens=tokens,
            verify_seconds=verify,
            wait_seconds=waited,
            draft_steps=counters.steps,
            draft_step_seconds=counters.step_seconds,
            stale_speculations=counters.stale,
            preemptions=self._preemptions,
            late_compiles=self._late_compiles,
            draft_late_compiles=counters.compiles,
            plan=self.proposer.plan,
            link=counters.link,
        )

    def step(self, host_work: Task = nothing) -> list[Emission]:
        """Advance every sequence that the batch has room for, and return what clients must be told.

        Call `host_work` exactly once: during a wait for draft or device, or before the forward."""
        refused = self._admit()
        host_work = Once(host_work)
        waited = self.proposer.settle(self.scheduler.running, host_work)
        batch = self._schedule()
        if not batch:
            host_work()
            self._took = (0, 0.0, 0.0)
            return refused
        if self._cores is not None:
            self._cores.begin(sum(len(part.row.token_ids) for part in batch))
        verified = self._verification.verify(batch, len(self.scheduler.running), Once(host_work, self.proposer.replan))
        self._account(verified, waited)
        committed = self._commit(verified)
        self.proposer.outcomes([row.result for row in committed if row.result is not None and row.reason is None])
        self._verification.learn(verified, [row.result for row in committed])
        return refused + self._emissions(verified, committed)

    def _admit(self) -> list[Emission]:
        """Admit requests that can begin, and return the errors of grammars that cannot be compiled."""
        refused = []
        idle = not self.scheduler.running and not self.scheduler.waiting
        for sequence in self._compiling.take(wait=idle) if self._compiling.waiting else ():
            if sequence.grammar is not None:
                self.scheduler.add(sequence)
            else:
                refused.append(Emission(sequence.request, [], finish_reason="error", error=sequence.failure))
        for sequence in self.scheduler.admit():
            sequence.timing.admitted = sequence.timing.admitted or time.perf_counter()
            self.proposer.admit(sequence)
        return refused

    def _schedule(self) -> list[Scheduled]:
        if batch := self._verification.running():
            return batch
        batch, preempted = self.scheduler.schedule()
        if preempted:
            self._preemptions += len(preempted)
            self.proposer.release(preempted)
        return batch

    def _account(self, verified: VerifiedBatch, waited: float) -> None:
        """Add up where the time went: verification, waiting for the draft, overhead."""
        verify, between = verified.ended - verified.began, verified.began - self._forward_ended - waited
        self._took = (sum(len(part.row.token_ids) for part in verified.batch), verify, waited)
        if self._cores is not None:
            self._cores.end(verify)
        for sequence in (part.sequence for part in verified.batch):
            if sequence.round > 0:
                sequence.timing.verify += verify
                sequence.timing.wait += waited
                sequence.timing.overhead += between
        self._forward_ended = verified.ended

    def _commit(self, verified: VerifiedBatch) -> list[_Committed]:
        """Append each row's tokens to its sequence, up to the request's end.

        Pages of a prefill chunk can be found in the prefix cache at once: others may wait for them."""
        committed = []
        in_flight: Items[Cached | None] = verified.in_flight or [None] * len(verified.batch)
        rows = zip(verified.batch, verified.samples, verified.outcomes, in_flight, strict=True)
        for part, own, outcome, drafts in rows:
            sequence = part.sequence
            known = len(part.row.token_ids) - part.drafted
            if part.row.state is not None:
                sequence.table.state_computed(part.row.state.written)
            source = sequence.source
            sequence.proposal, sequence.source, sequence.draft_probs = [], "draft", None
            if not part.complete and own[0] >= 0:
                sequence.computed += known
                sequence.table.share_computed(sequence.tokens, sequence.computed)
                committed.append(_Committed(None, [], None))
                continue
            base = len(sequence.tokens)
            result = Result(sequence, sequence.round, base, part.drafted, outcome, sequence.cache, drafts, source)
            sequence.computed += known + outcome.accepted
            sequence.count_round(outcome, part.drafted, source)
            sequence.tokens += [*part.draft[: outcome.accepted], outcome.token]
            committed.append(_Committed(result, *sequence.cut(base)))
        return committed

    def _emissions(self, verified: VerifiedBatch, committed: Items[_Committed]) -> list[Emission]:
        """Return what clients are told, and forget ended requests after sharing their pages."""
        logprobs = verified.logprobs([row.tokens for row in committed])
        now = time.perf_counter()
        emissions, over = [], []
        for row, probabilities in zip(committed, logprobs, strict=True):
            if row.result is None:
                continue
            sequence = row.result.sequence
            sequence.timing.first_token = sequence.timing.first_token or now
            sequence.timing.last_token = now
            if row.reason is not None:
                over.append(sequence)
            if row.reason != "error":
                sequence.table.share_computed(sequence.tokens, sequence.computed)
            emissions.append(self._emission(row.result, row.tokens, row.reason, probabilities))
        self._forget(over)
        return emissions

    def _emission(
        self, result: Result, tokens: list[int], reason: FinishReason | None, logprobs: list[TokenLogprob] | None
    ) -> Emission:
        sequence, prompt_logprobs, metrics, embedding = result.sequence, None, None, None
        if sequence.params.prompt_logprobs is not None and result.round == 0 and reason != "error":
            prompt_logprobs, sequence.prompt_logprobs = sequence.prompt_logprobs, []
        if sequence.params.pooling is not None and reason != "error":
            tokens, reason, embedding = [], "stop", sequence.embedding
        # A stop string ends a request in the frontend: then these are the last figures it has.
        if reason is not None or sequence.params.stop:
            step_s = self.proposer.counters.mean_step_seconds
            metrics = sequence.metrics(step_s, self.proposer.plan if sequence.tuned else "")
        return Emission(
            request=sequence.request,
            token_ids=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            finish_reason=reason,
            metrics=metrics,
            error=(sequence.failure or "the model produced values that are not numbers") if reason == "error" else "",
            drafted=result.drafted,
            accepted=result.outcome.accepted,
            cache=result.cache,
            source=result.source if result.drafted else "",
            embedding=embedding,
        )

    def _forget(self, sequences: Items[Sequence]) -> None:
        for sequence in sequences:
            self.scheduler.remove(sequence)
        if sequences:
            self.proposer.release(sequences)
