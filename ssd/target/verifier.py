"""From the logits of a step to outcomes: the target's own samples decide everything."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Items

import torch
from torch import Tensor

from ssd.ipc.messages import TokenLogprob
from ssd.kernels import cpu
from ssd.speculation.acceptance import rejection
from ssd.speculation.adjustment import Written, adjusted
from ssd.speculation.noise import NoiseCache, Place, Stream, stream_seed, uniform
from ssd.speculation.sampling import Law, argmax, perturbed, probabilities, warmth
from ssd.target.scheduler import Scheduled


class Verifier:
    """Samples for every output of a batch; keeps the noise vectors that neighbouring rounds share."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size, self._device = vocab_size, device
        self._noise = NoiseCache(vocab_size, device)

    @torch.inference_mode()
    def samples(self, logits: Tensor, batch: Items[Scheduled], own: list[int] | None = None) -> list[list[int]]:
        """The target's own tokens for the sampled outputs of each row, from logits [sum of outputs, V]; -1 stands where
        the logits were not numbers, and for a prefill chunk the token has no other meaning.

        Under the ratio rule they are the tokens that verification emits, the accepted ones first. `own` are the tokens
        where the runner has drawn them, under `unfiltered` laws.
        """
        rows: list[Tensor] = []
        if own is None:
            own, rows = self._drawn(logits, batch)
        samples, offset = [], 0
        for part in batch:
            samples.append(own[offset : offset + part.sampled])
            offset += part.sampled
        for index, part in enumerate(batch):
            if part.drafted and part.sequence.ratio_rule:
                samples[index] = self._by_ratio(rows[index], part, samples[index])
        return samples

    def _drawn(self, logits: Tensor, batch: Items[Scheduled]) -> tuple[list[int], list[Tensor]]:
        """The samples one after the other, and the adjusted logits that they are of, if anything is adjusted."""
        laws = unfiltered(batch)
        if laws is not None and cpu.serve(logits):
            return self._at_once(logits, batch, laws), []
        if all(_greedy(part) and part.row.outputs == part.sampled for part in batch):
            return argmax(logits), []
        self._noise.prepare(_places(batch))
        rows = [self._adjusted(mine, part) for mine, part in zip(_sampled(logits, batch), batch, strict=True)]
        return argmax(torch.cat([self._scores(mine, part) for mine, part in zip(rows, batch, strict=True)])), rows

    def _at_once(self, logits: Tensor, batch: Items[Scheduled], laws: Items[Law]) -> list[int]:
        """`argmax` of what `perturbed` makes of the logits, bit by bit, without making it."""
        self._noise.prepare(_places(batch))
        rows = zip(batch, laws, strict=True)
        return cpu.draw(logits, [w for part, law in rows for w in warmth(law, part.predicted, self._noise)])

    def _adjusted(self, logits: Tensor, part: Scheduled) -> Tensor:
        """The rows of a part as its request adjusts them; the very same where it does not."""
        sequence = part.sequence
        if sequence.adjustment is None or not part.complete:
            return logits
        if sequence.written is None:
            sequence.written = Written(sequence.tokens[: sequence.prompt_length], self._vocab_size, self._device)
        written = sequence.written
        written.extend(sequence.tokens[sequence.prompt_length + written.length :])
        return adjusted(logits, sequence.adjustment, written, part.draft)

    def _scores(self, logits: Tensor, part: Scheduled) -> Tensor:
        law = part.sequence.law
        if not part.complete:
            return logits.float()
        if part.sequence.ratio_rule:  # the token after all accepted ones, and every token without a draft
            law = law._replace(seed=stream_seed(law.seed, Stream.BONUS))
        return perturbed(logits, law, part.predicted, self._noise)

    def _by_ratio(self, logits: Tensor, part: Scheduled, own: list[int]) -> list[int]:
        """What the ratio rule emits of a row whose own samples are `own`."""
        if -1 in own:
            return own
        sequence, positions = part.sequence, part.predicted
        seed, drafted = sequence.law.seed, part.draft
        accept, again = (stream_seed(seed, stream) for stream in (Stream.ACCEPT, Stream.RESIDUAL))

        def sample(index: int, weights: Tensor) -> int:
            return argmax((weights.log() + self._noise(again, positions[index]))[None])[0]

        q = None if sequence.laws is None else sequence.laws[: part.drafted].to(logits.device)
        uniforms = [uniform(accept, position) for position in positions]
        cut = rejection(drafted, q, probabilities(logits, sequence.law), uniforms, sample)
        return [*drafted, own[-1]] if cut is None else cut

    @torch.inference_mode()
    def logprobs(
        self, logits: Tensor, batch: Items[Scheduled], tokens: Items[Items[int]]
    ) -> list[list[TokenLogprob] | None]:
        """For each row that asked: the log-probabilities of its emitted `tokens` and of the likeliest alternatives
        under the target's unmodified distribution."""
        wanted: list[list[TokenLogprob] | None] = [None] * len(batch)
        if all(part.sequence.params.logprobs is None for part in batch):
            return wanted
        for index, (rows, part, emitted) in enumerate(zip(_sampled(logits, batch), batch, tokens, strict=True)):
            count = part.sequence.params.logprobs
            if count is not None and emitted:
                wanted[index] = _entries(rows, emitted, count)
        return wanted

    @torch.inference_mode()
    def collect_prompt_logprobs(self, logits: Tensor, batch: Items[Scheduled]) -> None:
        """Give sequences that want it what the first outputs of their rows say of the tokens of their prompts."""
        if not any(part.prompt_outputs for part in batch):
            return
        for rows, part in zip(_split(logits, batch), batch, strict=True):
            count = part.sequence.params.prompt_logprobs
            if count is not None and part.prompt_outputs:
                start = part.row.predicted.start
                tokens = part.sequence.tokens[start : start + part.prompt_outputs]
                part.sequence.prompt_logprobs += _entries(rows, tokens, count)


def _entries(logits: Tensor, tokens: Items[int], count: int) -> list[TokenLogprob]:
    """The log-probabilities of `tokens` and of the `count` likeliest ones under the first rows of logits [n, V]."""
    table = torch.log_softmax(logits[: len(tokens)].float(), dim=-1)
    chosen = table.gather(1, torch.tensor(tokens, device=table.device)[:, None])[:, 0].tolist()
    best = torch.topk(table, min(count, table.shape[-1]))
    rows = zip(tokens, chosen, best.indices.tolist(), best.values.tolist(), strict=True)
    # -inf is not a number the protocol carries.
    return [
        TokenLogprob(token, max(-1e18, value), [(i, max(-1e18, v)) for i, v in zip(ids, values, strict=True)])
        for token, value, ids, values in rows
    ]


def _places(batch: Items[Scheduled]) -> Iterator[Place]:
    """Those of the noise that decides the samples of a batch, where it is shared with the draft."""
    for part in batch:
        if part.complete and part.sequence.law.temperature > 0 and not part.sequence.ratio_rule:
            yield from ((part.sequence.law.seed, position) for position in part.predicted)


def unfiltered(batch: Items[Scheduled]) -> list[Law] | None:
    """The law of each row where the largest of its logits, divided by a temperature and shifted by noise, is all that
    is asked of any row; else None: then all the logits are needed together."""
    laws = []
    for part in batch:
        sequence, params = part.sequence, part.sequence.params
        if part.row.outputs != part.sampled or params.logprobs is not None:
            return None
        if not part.complete:
            laws.append(Law())
        elif sequence.adjustment is not None or sequence.ratio_rule or sequence.law.filters:
            return None
        else:
            laws.append(sequence.law)
    return laws


def _greedy(part: Scheduled) -> bool:
    """Whether the largest logit decides, as it is."""
    return part.sequence.law.temperature == 0.0 and part.sequence.adjustment is None


def _sampled(logits: Tensor, batch: Items[Scheduled]) -> list[Tensor]:
    """The rows of `logits` that are sampled, part by part."""
    return [rows[-part.sampled :] for rows, part in zip(_split(logits, batch), batch, strict=True)]


def _split(logits: Tensor, batch: Items[Scheduled]) -> tuple[Tensor, ...]:
    return logits.split([part.row.outputs for part in batch])
