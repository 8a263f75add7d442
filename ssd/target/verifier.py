"""From the logits of a step to outcomes: the target's own samples decide everything."""

from __future__ import annotations

from collections.abc import Sequence as Items

import torch
from torch import Tensor

from ssd.ipc.messages import TokenLogprob
from ssd.speculation.acceptance import rejection
from ssd.speculation.noise import NoiseCache, Stream, stream_seed, uniform
from ssd.speculation.sampling import argmax, perturbed, probabilities
from ssd.target.scheduler import Scheduled


class Verifier:
    """Samples for every output of a batch; keeps the noise vectors that neighbouring rounds share."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._noise = NoiseCache(vocab_size, device)

    @torch.inference_mode()
    def samples(self, logits: Tensor, batch: Items[Scheduled]) -> list[list[int]]:
        """The target's own tokens for the outputs of each row (none for a prefill chunk), from logits
        [sum of outputs, V]; -1 stands where the logits were not numbers.

        Under the ratio rule they are the tokens that verification emits, the accepted ones first.
        """
        if all(part.sequence.law.temperature == 0.0 for part in batch):
            own = argmax(logits)
        else:
            own = argmax(
                torch.cat([self._scores(rows, part) for rows, part in zip(_split(logits, batch), batch, strict=True)])
            )
        samples, offset = [], 0
        for part in batch:
            samples.append(own[offset : offset + part.row.outputs])
            offset += part.row.outputs
        if any(part.drafted and part.sequence.ratio_rule for part in batch):
            for index, (rows, part) in enumerate(zip(_split(logits, batch), batch, strict=True)):
                if part.drafted and part.sequence.ratio_rule:
                    samples[index] = self._by_ratio(rows, part, samples[index])
        return samples

    def _scores(self, logits: Tensor, part: Scheduled) -> Tensor:
        law = part.sequence.law
        if part.sequence.ratio_rule:  # the token after all accepted ones, and every token without a draft
            law = law._replace(seed=stream_seed(law.seed, Stream.BONUS))
        return perturbed(logits, law, part.row.predicted, self._noise)

    def _by_ratio(self, logits: Tensor, part: Scheduled, own: list[int]) -> list[int]:
        """What the ratio rule emits of a row whose own samples are `own`."""
        if -1 in own:
            return own
        sequence, positions = part.sequence, part.row.predicted
        seed, drafted = sequence.law.seed, part.row.token_ids[-part.drafted :]
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
        wanted: list[list[TokenLogprob] | None] = []
        for rows, part, emitted in zip(_split(logits, batch), batch, tokens, strict=True):
            count = part.sequence.params.logprobs
            if count is None or not emitted:
                wanted.append(None)
                continue
            table = torch.log_softmax(rows[: len(emitted)].float(), dim=-1)
            best = torch.topk(table, min(count, table.shape[-1])) if count else None
            wanted.append([_entry(table, best, index, token) for index, token in enumerate(emitted)])
        return wanted


def _entry(table: Tensor, best: torch.return_types.topk | None, index: int, token: int) -> TokenLogprob:
    top = [] if best is None else list(zip(best.indices[index].tolist(), best.values[index].tolist(), strict=True))
    # -inf is not a number the protocol carries.
    return TokenLogprob(token, max(-1e18, table[index, token].item()), [(i, max(-1e18, value)) for i, value in top])


def _split(logits: Tensor, batch: Items[Scheduled]) -> tuple[Tensor, ...]:
    return logits.split([part.row.outputs for part in batch])
