"""Log-probabilities of tokens under the target's unmodified distribution, where a request wants them."""

from __future__ import annotations

from collections.abc import Sequence as Items
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.ipc.public import TokenLogprob
from ssd.verifier.scheduler import Scheduled


def emitted(
    logits: Items[Tensor], tokens: Items[Items[int]], counts: Items[int | None]
) -> list[list[TokenLogprob] | None]:
    """Return the log-probabilities of each row's emitted `tokens` and of `counts` alternatives; None: not wanted."""
    rows = zip(logits, tokens, counts, strict=True)
    asked = [AskedLogprobs(row[: len(mine)], mine, count) for row, mine, count in rows if count is not None and mine]
    found = iter(entries(asked))
    return [next(found) if count is not None and mine else None for mine, count in zip(tokens, counts, strict=True)]


def collect(logits: Items[Tensor], batch: Items[Scheduled]) -> None:
    """Add log-probabilities of prompt tokens to sequences that want them."""
    for rows, part in zip(logits, batch, strict=True):
        count = part.sequence.params.prompt_logprobs
        if count is not None and part.prompt_outputs:
            start, stop = part.row.predicted.start, part.prompt_outputs
            tokens = part.sequence.tokens[start : start + stop]
            (found,) = entries([AskedLogprobs(rows[:stop], tokens, count)])
            part.sequence.prompt_logprobs += found


class AskedLogprobs(NamedTuple):
    """Logits [n, V] whose log-probabilities are wanted: of `tokens`, one a row, and of `alternatives`."""

    logits: Tensor
    tokens: Items[int]
    alternatives: int


@torch.inference_mode()
def entries(asked: Items[AskedLogprobs]) -> list[list[TokenLogprob]]:
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
