"""One verification: the forward of a batch, and the tokens that the target itself samples."""

from __future__ import annotations

import time
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, pairwise
from typing import Protocol

import torch
from torch import Tensor

from ssd.errors import RequestError
from ssd.execution.batch import FINAL, BaseContext
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.ipc.board import Cached
from ssd.ipc.features import FeatureArena, FeaturePart, extend_tags
from ssd.ipc.public import TokenLogprob
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.kernels import cpu
from ssd.law import Law
from ssd.speculation.acceptance import Outcome, coupled
from ssd.speculation.adjustment import Text, Written, adjusted
from ssd.speculation.noise import NoiseCache
from ssd.speculation.rules import VerifiedRow
from ssd.speculation.sampling import SampledRows, argmax, scores_of
from ssd.verifier import logprobs
from ssd.verifier.proposer import Result
from ssd.verifier.scheduler import Scheduled

NO_LOGITS = torch.empty(0)


@dataclass(frozen=True)
class VerifiedBatch:
    """A batch, and the results of its forward from `began` to `ended` (seconds of `time.perf_counter`).

    `samples` are the target's own tokens: -1 where logits were not numbers, `UNKNOWN` outside of the vocabulary; a
    prefill chunk's is read for this alone. `logits` [sum of outputs, V] is empty where the runner drew the samples.
    `in_flight`: draft tokens of each row in the next verification, if that runs already."""

    batch: list[Scheduled]
    samples: list[list[int]]
    outcomes: list[Outcome]
    logits: Tensor
    began: float
    ended: float
    in_flight: Items[Cached] = ()

    def spoiled(self) -> list[bool]:
        """Return for each row True if draft tokens may have caused a sample that is no token.

        NaN in keys and values of a token reaches tokens before it through the mask: 0 x NaN is NaN."""
        return [part.drafted > 0 and min(own) < 0 for part, own in zip(self.batch, self.samples, strict=True)]

    def logprobs(self, tokens: Items[Items[int]]) -> list[list[TokenLogprob] | None]:
        """Return each row's log-probabilities of emitted `tokens` and alternatives, or None.

        They are under the target's unmodified distribution."""
        counts = [part.sequence.params.logprobs for part in self.batch]
        if all(count is None for count in counts):
            return [None] * len(counts)
        return logprobs.emitted(_sampled(self.logits, self.batch), tokens, counts)

    def collect_prompt_logprobs(self) -> None:
        """Add log-probabilities of prompt tokens to sequences that want them."""
        if any(part.prompt_outputs for part in self.batch):
            logprobs.collect(_split(self.logits, self.batch), self.batch)


class Verification(Protocol):
    """Runs the batches of a `TargetEngine`; it commits no token."""

    def running(self) -> list[Scheduled]:
        """Return the batch that the device runs already, without ended requests."""

    def verify(self, batch: list[Scheduled], running: int, host_work: Task = nothing) -> VerifiedBatch:
        """Run a new batch or that of `running()`. If draft tokens spoil it, run it without them.

        `running`: number of running sequences. `host_work` is done while the device computes, or before."""

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        """Note the outcomes of a batch; None for prefill chunks."""


class PlainVerification:
    """Launches a batch and waits for it; `features` exports hidden states."""

    def __init__(self, runner: Runner, trace: TraceRing = NO_TRACE, features: FeatureExport | None = None) -> None:
        self.runner, self.trace = runner, trace
        self._features = features
        self._sampler = Sampler(runner.model.shape.vocab_size, runner.model.device)

    def running(self) -> list[Scheduled]:
        return []

    def verify(self, batch: list[Scheduled], running: int, host_work: Task = nothing) -> VerifiedBatch:
        if not self.runner.overlaps:
            host_work()
        return self.retried(self._run(batch, host_work))

    def retried(self, verified: VerifiedBatch) -> VerifiedBatch:
        """Return the batch, spoiled rows run again without draft tokens; collect prompts' log-probabilities."""
        spoiled = [number for number, bad in enumerate(verified.spoiled()) if bad]
        if spoiled:
            verified = self._again(verified, spoiled)
        verified.collect_prompt_logprobs()
        self.trace.enter(State.OTHER)
        return verified

    def _again(self, verified: VerifiedBatch, numbers: Items[int]) -> VerifiedBatch:
        """Run the rows with these numbers again; other rows have left their states already."""
        again = self._run([verified.batch[number].without_draft() for number in numbers], nothing)
        batch, samples, outcomes = list(verified.batch), list(verified.samples), list(verified.outcomes)
        logits = list(_split(verified.logits, batch)) if len(verified.logits) else []
        new = _split(again.logits, again.batch) if len(again.logits) else ()
        for place, number in enumerate(numbers):
            batch[number], samples[number] = again.batch[place], again.samples[place]
            outcomes[number] = again.outcomes[place]
            if logits:  # where the runner drew the samples, nobody reads the row's logits
                logits[number] = new[place] if new else logits[number][: batch[number].row.outputs]
        all_logits = torch.cat(logits) if logits else NO_LOGITS
        return VerifiedBatch(batch, samples, outcomes, all_logits, verified.began, again.ended)

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        pass

    def announce(self, batch: Items[Scheduled]) -> None:
        decodes = any(part.sequence.round > 0 for part in batch)
        tokens = sum(len(part.row.token_ids) for part in batch)
        self.trace.enter(State.VERIFY if decodes else State.PREFILL, tokens)

    def _run(self, batch: list[Scheduled], host_work: Task) -> VerifiedBatch:
        began = time.perf_counter()
        self.announce(batch)
        rows, laws = [part.row for part in batch], laws_of(batch)
        if any(part.sequence.grammar is not None for part in batch):
            host_work = partial(_work_out_masks, batch, host_work)
        pools = any(part.sequence.params.pooling for part in batch)
        layers = () if self._features is None else self._features.layers
        context = self.runner.prepare(rows, (*layers, FINAL) if pools else layers)
        own = None if laws is None else self.runner.sample(rows, laws, context, host_work, texts_of(batch))
        logits = self.runner.forward(rows, context, host_work) if own is None else NO_LOGITS
        if self._features is not None:
            self._features.write(batch, context)
        if pools:
            _pool(batch, context.hidden[FINAL])
        self.trace.enter(State.SAMPLE)
        ended = time.perf_counter()
        if own is None:
            samples, outcomes = self._sampler.samples(logits, batch)
        else:
            samples = by_row(batch, own)
            outcomes = outcomes_of(batch, samples)
        return VerifiedBatch(batch, samples, outcomes, logits, began, ended)


@torch.inference_mode()
def _pool(batch: Items[Scheduled], states: Tensor) -> None:
    """Add hidden states [tokens, width] of a batch to the sequences that wait for an embedding."""
    for rows, part in zip(states.split([len(part.row.token_ids) for part in batch]), batch, strict=True):
        if part.sequence.params.pooling is not None:
            part.sequence.pool(rows)


class FeatureExport:
    """Writes hidden states after `layers`, of every token, where a draft reads them.

    States of rejected tokens are written too, but never found."""

    def __init__(self, arena: FeatureArena, layers: tuple[int, ...]) -> None:
        self._arena, self.layers = arena, layers

    def write(self, batch: Items[Scheduled], context: BaseContext) -> None:
        parts = []
        for sequence, row in ((part.sequence, part.row) for part in batch):
            tags = sequence.tags
            del tags[row.start :]
            extend_tags(tags, sequence.tokens[len(tags) : row.start])
            extend_tags(tags, row.token_ids)
            parts.append(FeaturePart(sequence.slot, row.pages, row.start, tags[row.start :]))
        self._arena.write(parts, torch.cat([context.hidden[layer] for layer in self.layers], dim=-1))


class Sampler:
    """Samples every output of a batch, lets rules decide, and keeps noise for the next rounds."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = NoiseCache(vocab_size, device)

    @torch.inference_mode()
    def samples(self, logits: Tensor, batch: Items[Scheduled]) -> tuple[list[list[int]], list[Outcome]]:
        """Return `samples` and `outcomes` of a `VerifiedBatch`, from logits [sum of outputs, V]."""
        if cpu.serve(logits) and all(_plain(part) and part.sequence.law.temperature == 0.0 for part in batch):
            samples = by_row(batch, cpu.draw(logits))
            return samples, outcomes_of(batch, samples)
        asked = [SampledRows(_law(part), part.predicted, self._noise) for part in batch]
        self._noise.prepare((law.seed, place) for law, places, _ in asked if law.temperature for place in places)
        if all(_plain(part) for part in batch):
            rows, tokens = list(_split(logits, batch)), argmax(*scores_of(logits, asked))
        else:
            rows = [self._adjusted(mine, part) for mine, part in zip(_sampled(logits, batch), batch, strict=True)]
            # Joined only where one call waits for a device: on a CPU the copy wakes torch's threads, beside kernels'.
            alone = [(mine, [own]) for mine, own in zip(rows, asked, strict=True)]
            calls = alone if cpu.serve(logits) else [(torch.cat(rows), asked)]
            tokens = [token for mine, own in calls for token in argmax(*scores_of(mine, own))]
        samples = by_row(batch, tokens)
        return samples, [self._outcome(*each) for each in zip(batch, samples, rows, strict=True)]

    def _outcome(self, part: Scheduled, own: list[int], logits: Tensor) -> Outcome:
        sequence = part.sequence
        if sequence.rule.emits_samples or not part.drafted or min(own) < 0:
            return coupled(part.draft, own)
        row = VerifiedRow(logits, sequence.law, part.predicted, sequence.draft_probs, self._noise)
        return sequence.rule.outcome(part.draft, own, row)

    def _adjusted(self, logits: Tensor, part: Scheduled) -> Tensor:
        """Return the logits of a part as its request adjusts them, or the same tensor."""
        sequence = part.sequence
        if sequence.text is None or not part.complete:
            return logits
        wish = sequence.text.adjustment
        written = sequence.written = sequence.written or Written(sequence.tokens[: sequence.prompt_length])
        written.extend(sequence.tokens[sequence.prompt_length + written.length :])
        try:
            possible = _possible(part)
        except RequestError as error:
            sequence.failure = str(error)
            return torch.full_like(logits, torch.nan)
        on_device = None if possible is None else possible.to(logits.device)
        rows = adjusted(logits, wish, written, part.draft, on_device)
        if on_device is not None and wish.allowed is not None and bool(rows[0].isneginf().all()):
            sequence.failure = "no token is possible: structured output and allowed_token_ids exclude each other"
        return rows


def outcomes_of(batch: Items[Scheduled], samples: Items[list[int]]) -> list[Outcome]:
    """Return the outcomes of rows whose rules emit the target's samples."""
    return [coupled(part.draft, own) for part, own in zip(batch, samples, strict=True)]


def _plain(part: Scheduled) -> bool:
    return part.sequence.text is None and not part.sequence.law.filters and part.row.outputs == part.sampled


def _law(part: Scheduled) -> Law:
    return part.sequence.sampled_by if part.complete else Law()


def laws_of(batch: Items[Scheduled]) -> list[Law] | None:
    """Return each row's law if the runner may draw every sample, by laws and texts alone; else None."""
    for part in batch:
        if part.row.outputs != part.sampled or part.sequence.params.logprobs is not None:
            return None
        if part.complete and not part.sequence.drawn_on_device:
            return None
    return [_law(part) for part in batch]


def texts_of(batch: Items[Scheduled]) -> list[Text | None]:
    """Return the text of each row whose logits a device adjusts, or None; empty if there are none."""
    found = [part.sequence.text if part.complete else None for part in batch]
    return found if any(found) else []


def by_row(batch: Items[Scheduled], tokens: list[int]) -> list[list[int]]:
    stops = list(accumulate((part.sampled for part in batch), initial=0))
    return [tokens[start:stop] for start, stop in pairwise(stops)]


def _work_out_masks(batch: Items[Scheduled], host_work: Task) -> None:
    host_work()
    for part in batch:
        with suppress(RequestError):  # the sampler gets the same error
            _possible(part)


def _possible(part: Scheduled) -> Tensor | None:
    """Return the mask of tokens that the grammar allows, [n, V] on the CPU, or None.

    Asking again costs nothing. Raises RequestError where the grammar has become too complex."""
    sequence = part.sequence
    if sequence.grammar is None or not part.complete:
        return None
    return torch.from_numpy(sequence.grammar.masks(sequence.tokens[sequence.prompt_length :], part.draft))


def _sampled(logits: Tensor, batch: Items[Scheduled]) -> list[Tensor]:
    return [rows[-part.sampled :] for rows, part in zip(_split(logits, batch), batch, strict=True)]


def _split(logits: Tensor, batch: Items[Scheduled]) -> tuple[Tensor, ...]:
    return logits.split([part.row.outputs for part in batch])
