"""Runs the target over whole conversations: logits along their answers, hidden states along all tokens."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.launch.resolve import rounds_to_8_bits
from ssd.layers.linear import Activations
from ssd.models import hub, registry
from ssd.models.checkpoint import inspect
from ssd.models.head import with_list
from ssd.models.pairs import borrowed
from tools.distill.shards import Conversation

PAGE = 16


def load_runner(
    model: str,
    dtype: torch.dtype,
    device: torch.device,
    tokens: int,
    lender: str | None = None,
    copies: int = 2,
    activations: Activations | None = None,
    rows: int = 0,
    layers: Collection[int] = (),
) -> Runner:
    """Load a model with room for `copies` times `tokens` tokens; a draft may share tensors of `lender`.

    `activations` says how inputs are rounded where weights have few bits; with None, as the engine does by default.

    With `rows`, forwards of one token of each of up to so many texts have graph shapes, captured on a GPU. They show
    hidden states after `layers` alone."""
    checkpoint = inspect(hub.resolve(model))
    if lender is not None:
        checkpoint = with_list(borrowed(checkpoint, inspect(hub.resolve(lender))))
    few = rounds_to_8_bits(checkpoint, device.type, str(dtype).removeprefix("torch."))
    inputs = activations or ("int8" if few else "int16")
    loaded = registry.load(checkpoint, dtype, device, tokens, activations=inputs)
    pages = copies * -(-tokens // PAGE)
    if not rows:
        return Runner(loaded, pages, PAGE)
    runner = StaticRunner(loaded, pages, PAGE, most_rows=rows, longest=1, layers=layers)
    runner.warm_up(1)
    return runner


def score(runner: Runner, batch: Sequence[Conversation]) -> Tensor:
    """Return the logits [sum of answers, V] of each answer's tokens, each given all before it."""
    return runner.forward(_rows(batch, [text.answer for text in batch]))


def hidden(runner: Runner, batch: Sequence[Conversation], layers: Sequence[int]) -> list[Tensor]:
    """Return each conversation's hidden states after `layers`, side by side [tokens - 1, sum of widths].

    Its last token has none."""
    rows = _rows(batch, [0] * len(batch))
    context = runner.context(rows, layers)
    with torch.autocast(runner.model.device.type, enabled=False):  # the engine's layers keep their type
        runner.forward(rows, context)
    if missing := set(layers) - context.hidden.keys():
        raise UsageError(f"the target's family does not show hidden states after {min(missing)} layers")
    states = torch.cat([context.hidden[layer] for layer in layers], dim=-1)
    return list(states.split([len(row.token_ids) for row in rows]))


def _rows(batch: Sequence[Conversation], outputs: Sequence[int]) -> list[Row]:
    """Return rows with all tokens of every conversation but its last."""
    rows, page = [], 0
    for conversation, wanted in zip(batch, outputs, strict=True):
        ids = conversation.token_ids[:-1]
        pages = range(page, page + -(-len(ids) // PAGE))
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
