"""Audits verifications against single steps: teacher-forced, position by position."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.execution.batch import Row as Tokens
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import hub
from ssd.target.loading import load
from tools.gpu_report.job import Job, Row

WANTED, MOST_ULP = 0.999, 2.0
_LOOKAHEADS = (1, 4, 7)
_MOST_PROMPT = 256


class Disagreement(NamedTuple):
    """A position where the best tokens differ, and how far apart single steps score them.

    `ulp` is in units of the last place of the better score."""

    position: int
    ulp: float


def rows(job: Job) -> Iterator[Row]:
    """Yield a row for each K. Single steps write texts greedily; rows of K + 1 tokens read them again.

    Both use the engine's runner in its default mode."""
    count, tokens = (3, 24) if job.tiny else (100, 64)
    options = EngineOptions(
        target=job.target,
        mode="ar",
        device=job.device,
        dtype="bfloat16",
        num_speculative_tokens=max(_LOOKAHEADS),
        max_num_seqs=2,
        max_model_len=(128 if job.tiny else _MOST_PROMPT + tokens + 64),
    )
    config = resolve(options)
    runner, _ = load(config)
    tokenizer = Tokenizer(hub.ensure(job.target))
    seen: dict[int, int] = dict.fromkeys(_LOOKAHEADS, 0)
    found: dict[int, list[Disagreement]] = {lookahead: [] for lookahead in _LOOKAHEADS}
    half = config.num_pages // 2
    pages = range(half), range(half, 2 * half)
    for prompt in job.asked(count):
        ids = (tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt))[:_MOST_PROMPT]
        text, logits = written(runner, ids, tokens, pages[0])
        for lookahead in _LOOKAHEADS:
            found[lookahead] += exceptions(logits, reread(runner, text, len(ids), lookahead, pages[1]))
            seen[lookahead] += len(logits)
            yield _row(lookahead, seen[lookahead], found[lookahead])
        if job.left() < 0:
            return


def _row(lookahead: int, positions: int, found: Sequence[Disagreement]) -> Row:
    agreement = 1 - len(found) / positions
    worst = max((each.ulp for each in found), default=0.0)
    return {
        "name": f"K = {lookahead}",
        "positions": positions,
        "exceptions": len(found),
        "agreement": agreement,
        "worst_ulp": worst,
        "ok": agreement >= WANTED and worst <= MOST_ULP,
    }


def written(runner: Runner, prompt: Sequence[int], count: int, pages: Sequence[int]) -> tuple[list[int], Tensor]:
    """Write a greedy text by single steps.

    Returns it with its prompt, and the logits [count, V] that decided each new token."""
    text = list(prompt)
    logits = [runner.forward([Tokens(text, 0, pages)])]
    text.append(int(logits[-1][0].argmax()))
    for _ in range(count - 1):
        logits.append(runner.forward([Tokens(text[-1:], len(text) - 1, pages)]))
        text.append(int(logits[-1][0].argmax()))
    return text, torch.cat(logits)


def reread(runner: Runner, text: Sequence[int], prompt: int, lookahead: int, pages: Sequence[int]) -> Tensor:
    """Return the logits of the same positions, from rows of `lookahead` + 1 tokens, as if every draft were right."""
    logits = [runner.forward([Tokens(text[:prompt], 0, pages)])]
    for start in range(prompt, len(text) - 1, lookahead + 1):
        row = text[start : min(start + lookahead + 1, len(text) - 1)]
        logits.append(runner.forward([Tokens(row, start, pages, len(row))]))
    return torch.cat(logits)


def exceptions(plain: Tensor, other: Tensor) -> list[Disagreement]:
    """Return the positions where the best tokens of two tensors of logits [n, V] differ."""
    ours, theirs = plain.argmax(-1), other.argmax(-1)
    found = []
    for position in (ours != theirs).nonzero()[:, 0].tolist():
        best, second = (float(plain[position, int(ids[position])]) for ids in (ours, theirs))
        found.append(Disagreement(position, abs(best - second) / last_place(best, plain.dtype)))
    return found


def last_place(value: float, dtype: torch.dtype) -> float:
    """Return the distance from `value` to the next number of its type."""
    exponent = math.floor(math.log2(max(abs(value), torch.finfo(dtype).tiny)))
    return float(torch.finfo(dtype).eps * 2.0**exponent)
