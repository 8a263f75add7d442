"""One verification: the forward of a batch, and the tokens that the target itself samples from it.

`PlainVerification` is here. `ssd.verifier.overlap` has the other one, which launches the next verification before the
host has read this one."""

from __future__ import annotations

import time
from collections.abc import Iterator
from collections.abc import Sequence as Items
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, islice, pairwise
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ssd.errors import RequestError
from ssd.execution.batch import BaseContext
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.ipc.board import Cached
from ssd.ipc.features import FeatureArena, Part, extend_tags
from ssd.ipc.public import TokenLogprob
from ssd.ipc.trace_ring import NO_TRACE, State, TraceRing
from ssd.kernels import cpu
from ssd.speculation.acceptance import rejection
from ssd.speculation.adjustment import Text, Written, adjusted
from ssd.speculation.noise import NoiseCache, Place, Stream, stream_seed, uniform
from ssd.speculation.sampling import Law, argmax, perturbed, probabilities, warmth
from ssd.verifier.proposer import Result
from ssd.verifier.scheduler import Scheduled
from ssd.verifier.sequence import Sequence

NO_LOGITS = torch.empty(0)


@dataclass(frozen=True)
class VerifiedBatch:
    """A batch, and the results of its forward from `began` to `ended` (seconds of `time.perf_counter`).

    `samples` are the target's own tokens for the sampled outputs of each row. -1 stands for a sample whose logits were
    not numbers, `UNKNOWN` for one that is not in the vocabulary; a prefill chunk's sample is read for this alone. Under
    the ratio rule they are the tokens to emit, the accepted ones first. `logits` [sum of outputs, V] is empty where the
    runner has drawn the samples. If the next verification runs already, `in_flight` has the draft tokens of each row in
    it; else it is empty."""

    batch: list[Scheduled]
    samples: list[list[int]]
    logits: Tensor
    began: float
    ended: float
    in_flight: Items[Cached] = ()

    def spoiled(self) -> list[bool]:
        """Return for each row True if draft tokens may have caused a sample that is no token.

        A token that the target cannot compute has keys and values of NaN. Masking does not hide them from the tokens
        before it, as 0 x NaN is NaN."""
        return [part.drafted > 0 and min(own) < 0 for part, own in zip(self.batch, self.samples, strict=True)]

    def logprobs(self, tokens: Items[Items[int]]) -> list[list[TokenLogprob] | None]:
        """Return for each row the log-probabilities of its emitted `tokens` and of the likeliest alternatives.

        They are under the target's unmodified distribution; None for a row that did not ask or emitted nothing."""
        counts = [part.sequence.params.logprobs for part in self.batch]
        if all(count is None for count in counts):
            return [None] * len(counts)
        rows = zip(_sampled(self.logits, self.batch), tokens, counts, strict=True)
        asked = [_Asked(row[: len(mine)], mine, count) for row, mine, count in rows if count is not None and mine]
        entries = iter(_entries(asked))
        return [
            next(entries) if count is not None and mine else None for mine, count in zip(tokens, counts, strict=True)
        ]

    def collect_prompt_logprobs(self) -> None:
        """Add log-probabilities of prompt tokens, from the first outputs of a row, to each sequence that wants them."""
        if not any(part.prompt_outputs for part in self.batch):
            return
        for rows, part in zip(_split(self.logits, self.batch), self.batch, strict=True):
            count = part.sequence.params.prompt_logprobs
            if count is not None and part.prompt_outputs:
                start, stop = part.row.predicted.start, part.prompt_outputs
                tokens = part.sequence.tokens[start : start + stop]
                (found,) = _entries([_Asked(rows[:stop], tokens, count)])
                part.sequence.prompt_logprobs += found


class Verification(Protocol):
    """Runs the batches of a `TargetEngine`, and nothing else: it commits no token."""

    def running(self) -> list[Scheduled]:
        """Return the batch that the device runs already, without rows of ended requests; empty if none runs."""

    def verify(self, batch: list[Scheduled], running: int, host_work: Task = nothing) -> VerifiedBatch:
        """Run a new batch or the one that `running()` returned. If draft tokens spoil it, run it without them.

        `running`: number of all running sequences. `host_work` is done while the device computes, or before."""

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        """Note the outcomes of the rows of a batch; None for prefill chunks."""


class PlainVerification:
    """Launches a batch and waits for it. `trace` is told what the target does, `features` exports hidden states."""

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
        """Return the batch, run again without the draft tokens of rows that they may have spoiled.

        Also collect the log-probabilities of prompts."""
        spoiled = verified.spoiled()
        if any(spoiled):
            parts = zip(verified.batch, spoiled, strict=True)
            again = self._run([part.without_draft() if bad else part for part, bad in parts], nothing)
            verified = replace(again, began=verified.began)
        verified.collect_prompt_logprobs()
        self.trace.enter(State.OTHER)
        return verified

    def learn(self, verified: VerifiedBatch, results: Items[Result | None]) -> None:
        pass

    def announce(self, batch: Items[Scheduled]) -> None:
        """Tell the trace that a batch runs."""
        decodes = any(part.sequence.round > 0 for part in batch)
        tokens = sum(len(part.row.token_ids) for part in batch)
        self.trace.enter(State.VERIFY if decodes else State.PREFILL, tokens)

    def _run(self, batch: list[Scheduled], host_work: Task) -> VerifiedBatch:
        began = time.perf_counter()
        self.announce(batch)
        rows, laws = [part.row for part in batch], laws_of(batch, adjusted=True)
        if any(part.sequence.grammar is not None for part in batch):
            host_work = partial(_work_out_masks, batch, host_work)
        context = self.runner.prepare(rows, () if self._features is None else self._features.layers)
        own = None if laws is None else self.runner.sample(rows, laws, context, host_work, texts_of(batch))
        logits = self.runner.forward(rows, context, host_work) if own is None else NO_LOGITS
        if self._features is not None:
            self._features.write(batch, context)
        self.trace.enter(State.SAMPLE)
        ended = time.perf_counter()
        samples = self._sampler.samples(logits, batch, laws_of(batch)) if own is None else by_row(batch, own)
        return VerifiedBatch(batch, samples, logits, began, ended)


class FeatureExport:
    """Writes the hidden states after `layers`, of every token of every step, where an EAGLE-3 head reads them.

    The states of rejected tokens are written too, but never found."""

    def __init__(self, arena: FeatureArena, layers: tuple[int, ...]) -> None:
        self._arena, self.layers = arena, layers

    def write(self, batch: Items[Scheduled], context: BaseContext) -> None:
        """Write the hidden states of a batch, whose `context` was asked to keep `layers`."""
        parts = []
        for sequence, row in ((part.sequence, part.row) for part in batch):
            tags = sequence.tags
            del tags[row.start :]
            extend_tags(tags, sequence.tokens[len(tags) : row.start])
            extend_tags(tags, row.token_ids)
            parts.append(Part(sequence.slot, row.pages, row.start, tags[row.start :]))
        self._arena.write(parts, torch.cat([context.hidden[layer] for layer in self.layers], dim=-1))


class Sampler:
    """Samples every output of a batch; keeps the noise vectors that neighbouring rounds share."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = NoiseCache(vocab_size, device)

    @torch.inference_mode()
    def samples(self, logits: Tensor, batch: Items[Scheduled], laws: Items[Law] | None) -> list[list[int]]:
        """Return the `samples` of a `VerifiedBatch`, from logits [sum of outputs, V] and the result of `laws_of`."""
        # The kernel returns the argmax of `perturbed`, bit for bit, without storing that tensor.
        if laws is not None and not any(part.sequence.filters for part in batch) and cpu.serve(logits):
            if all(law.temperature == 0.0 for law in laws):
                return by_row(batch, cpu.draw(logits))
            self._noise.prepare(_places(batch))
            rules = [w for part, law in zip(batch, laws, strict=True) for w in warmth(law, part.predicted, self._noise)]
            return by_row(batch, cpu.draw(logits, rules))
        if all(_greedy(part) and part.row.outputs == part.sampled for part in batch):
            return by_row(batch, argmax(logits))
        self._noise.prepare(_places(batch))
        rows = [self._adjusted(mine, part) for mine, part in zip(_sampled(logits, batch), batch, strict=True)]
        scores = [self._scores(mine, part) for mine, part in zip(rows, batch, strict=True)]
        # Joined only where one call waits for a device: on a CPU the copy wakes torch's threads, beside the kernels'.
        joined = scores if cpu.serve(logits) else [torch.cat(scores)]
        samples = by_row(batch, [token for each in joined for token in argmax(each)])
        for index, part in enumerate(batch):
            if part.drafted and part.sequence.ratio_rule:
                samples[index] = self._by_ratio(rows[index], part, samples[index])
        return samples

    def _adjusted(self, logits: Tensor, part: Scheduled) -> Tensor:
        """Return the logits of a part as its request adjusts them; the same tensor where it does not."""
        sequence = part.sequence
        if sequence.adjustment is None or not part.complete:
            return logits
        if sequence.written is None:
            sequence.written = Written(sequence.tokens[: sequence.prompt_length])
        written = sequence.written
        written.extend(sequence.tokens[sequence.prompt_length + written.length :])
        try:
            possible = _possible(part)
        except RequestError as error:
            sequence.failure = str(error)
            return torch.full_like(logits, torch.nan)
        on_device = None if possible is None else possible.to(logits.device)
        rows = adjusted(logits, sequence.adjustment, written, part.draft, on_device)
        if on_device is not None and sequence.adjustment.allowed is not None and bool(rows[0].isneginf().all()):
            sequence.failure = "no token is possible: structured output and allowed_token_ids exclude each other"
        return rows

    def _scores(self, logits: Tensor, part: Scheduled) -> Tensor:
        law = part.sequence.law
        if not part.complete:
            return logits.float()
        if part.sequence.ratio_rule:  # the token after all accepted ones, and every token without a draft
            law = law._replace(seed=stream_seed(law.seed, Stream.BONUS))
        return perturbed(logits, law, part.predicted, self._noise)

    def _by_ratio(self, logits: Tensor, part: Scheduled, own: list[int]) -> list[int]:
        """Return the tokens that the ratio rule emits for a row whose own samples are `own`."""
        if min(own) < 0:
            return own
        sequence, positions = part.sequence, part.predicted
        seed, drafted = sequence.law.seed, part.draft
        accept, again = (stream_seed(seed, stream) for stream in (Stream.ACCEPT, Stream.RESIDUAL))

        def sample(index: int, weights: Tensor) -> int:
            return argmax((weights.log() + self._noise(again, positions[index]))[None])[0]

        q = None if sequence.draft_probs is None else sequence.draft_probs[: part.drafted].to(logits.device)
        uniforms = [uniform(accept, position) for position in positions]
        cut = rejection(drafted, q, probabilities(logits, sequence.law), uniforms, sample)
        return [*drafted, own[-1]] if cut is None else cut


def laws_of(batch: Items[Scheduled], adjusted: bool = False) -> list[Law] | None:
    """Return the law of each row if laws alone draw every sample from its logits; else None.

    `adjusted`: logits that a device adjusts first count too. With laws the runner may draw the samples, as nothing
    else needs the logits."""
    for part in batch:
        if part.row.outputs != part.sampled or part.sequence.params.logprobs is not None:
            return None
        if part.complete and not (part.sequence.drawn_by_law or (adjusted and part.sequence.adjusted_on_device)):
            return None
    return [part.sequence.law if part.complete else Law() for part in batch]


def texts_of(batch: Items[Scheduled]) -> list[Text | None]:
    """Return the text of each row whose logits a device adjusts, None for others; empty if there are none."""
    found = [_text(part.sequence) if part.complete else None for part in batch]
    return found if any(found) else []


def _text(sequence: Sequence) -> Text | None:
    wish = sequence.adjustment
    return None if wish is None else Text(sequence.tokens, sequence.prompt_length, wish)


def by_row(batch: Items[Scheduled], tokens: list[int]) -> list[list[int]]:
    """Cut the samples of a batch into those of each row."""
    stops = list(accumulate((part.sampled for part in batch), initial=0))
    return [tokens[start:stop] for start, stop in pairwise(stops)]


def _greedy(part: Scheduled) -> bool:
    """Return True if the sample is the argmax of the unadjusted logits."""
    return part.sequence.law.temperature == 0.0 and part.sequence.adjustment is None


def _work_out_masks(batch: Items[Scheduled], host_work: Task) -> None:
    """Do `host_work`, then compute the masks that the sampler will ask the grammars of a batch for."""
    host_work()
    for part in batch:
        with suppress(RequestError):  # the sampler gets the same error
            _possible(part)


def _possible(part: Scheduled) -> Tensor | None:
    """Return the mask of tokens that the request's grammar allows, [n, V] on the CPU; None if it has none.

    Asking again costs nothing. Raises RequestError where the grammar has become too complex."""
    sequence = part.sequence
    if sequence.grammar is None or not part.complete:
        return None
    return torch.from_numpy(sequence.grammar.masks(sequence.tokens[sequence.prompt_length :], part.draft))


def _places(batch: Items[Scheduled]) -> Iterator[Place]:
    """Yield the places of the noise that decides a batch's samples, where it is shared with the draft."""
    for part in batch:
        if part.complete and part.sequence.law.temperature > 0 and not part.sequence.ratio_rule:
            yield from ((part.sequence.law.seed, position) for position in part.predicted)


def _sampled(logits: Tensor, batch: Items[Scheduled]) -> list[Tensor]:
    """Return the rows of `logits` that are sampled, part by part."""
    return [rows[-part.sampled :] for rows, part in zip(_split(logits, batch), batch, strict=True)]


def _split(logits: Tensor, batch: Items[Scheduled]) -> tuple[Tensor, ...]:
    return logits.split([part.row.outputs for part in batch])


class _Asked(NamedTuple):
    """Logits [n, V] whose log-probabilities are wanted: of `tokens`, one a row, and of the best `alternatives` ones."""

    logits: Tensor
    tokens: Items[int]
    alternatives: int


@torch.inference_mode()
def _entries(asked: Items[_Asked]) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of all that is asked for, copied from the device together."""
    if not asked:
        return []
    table = torch.log_softmax(torch.cat([each.logits for each in asked]).float(), dim=-1)
    tokens = [token for each in asked for token in each.tokens]
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])
    values, ids = torch.topk(table, min(max(each.alternatives for each in asked), table.shape[-1]))
    # -inf is not a number the protocol carries.
    numbers = torch.cat((chosen, values), dim=1).clamp(min=-1e18).tolist()
    rows = zip(tokens, numbers, ids.tolist(), strict=True)
    return [
        [
            TokenLogprob(token, own, list(zip(best[: each.alternatives], likely, strict=False)))
            for token, (own, *likely), best in islice(rows, len(each.tokens))
        ]
        for each in asked
    ]
