"""Stage teacher: the target's top-k probabilities (soft labels) along every answer, a file a shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
from rich.progress import track
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import hub, registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from tools.distill.shards import Conversation, conversations, is_done, save, shard_path

_PAGE = 16


def load_runner(model: str, dtype: torch.dtype, device: torch.device, tokens: int, lender: str | None = None) -> Runner:
    """Load a model with room for batches of `tokens` tokens; a draft may share tensors of `lender`."""
    checkpoint = inspect(hub.resolve(model))
    if lender is not None:
        checkpoint = borrowed(checkpoint, inspect(hub.resolve(lender)))
    loaded = registry.load(checkpoint, dtype, device, tokens, dummy=False)
    return Runner(loaded, 2 * -(-tokens // _PAGE), _PAGE)


def score(runner: Runner, batch: Sequence[Conversation]) -> Tensor:
    """Return the logits [sum of answers, V] of each answer's tokens, each given all before it."""
    return runner.forward(_rows(batch, [text.answer for text in batch]))


def hidden(runner: Runner, batch: Sequence[Conversation], layers: Sequence[int]) -> list[Tensor]:
    """Return each conversation's hidden states after `layers`, side by side [tokens - 1, sum of widths].

    Its last token has none."""
    rows = _rows(batch, [0] * len(batch))
    context = runner.context(rows, layers)
    with torch.autocast(runner.model.device.type, enabled=False):  # the engine's layers have a type of their own
        runner.forward(rows, context)
    if missing := set(layers) - context.hidden.keys():
        raise UsageError(f"the target's family does not show what its first {min(missing)} layers made")
    states = torch.cat([context.hidden[layer] for layer in layers], dim=-1)
    return list(states.split([len(row.token_ids) for row in rows]))


def _rows(batch: Sequence[Conversation], outputs: Sequence[int]) -> list[Row]:
    """Return rows with all tokens of every conversation but its last."""
    rows, page = [], 0
    for conversation, wanted in zip(batch, outputs, strict=True):
        ids = conversation.token_ids[:-1]
        pages = range(page, page + -(-len(ids) // _PAGE))
        rows.append(Row(ids, 0, pages, wanted))
        page = pages.stop
    return rows


def batches(texts: Sequence[Conversation], tokens: int) -> Iterator[list[Conversation]]:
    """Yield neighbouring conversations in batches of at most `tokens` tokens, or one conversation."""
    batch: list[Conversation] = []
    size = 0
    for text in texts:
        if batch and size + len(text.token_ids) > tokens:
            yield batch
            batch, size = [], 0
        batch.append(text)
        size += len(text.token_ids)
    if batch:
        yield batch


def write_soft_labels(
    target: str, directory: Path, shards: Sequence[int], top: int, tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """Write, for every token of every answer, the likeliest `ids` int32 [n, top] and `logprobs` float16 [n, top]."""
    missing = [index for index in shards if not is_done(directory, "teacher", index)]
    if not missing:
        return
    runner = load_runner(target, dtype, device, tokens)
    for index in track(missing, "teacher"):
        texts = conversations(shard_path(directory, "corpus", index))
        if not texts:
            continue
        labels = [_top(score(runner, batch), top) for batch in batches(texts, tokens)]
        ids, logprobs = (torch.cat(part) for part in zip(*labels, strict=True))
        save(shard_path(directory, "teacher", index), {"ids": ids, "logprobs": logprobs})


@torch.inference_mode()
def _top(logits: Tensor, top: int) -> tuple[Tensor, Tensor]:
    values, ids = torch.topk(logits, min(top, logits.shape[-1]))
    total = torch.logsumexp(logits.float(), dim=-1, keepdim=True)
    return ids.int().cpu(), (values.float() - total).half().cpu()
