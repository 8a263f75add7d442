"""Audit verifications against single steps: teacher-forced, position by position."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch
from torch import Tensor

from ssd.execution.batch import Row as Tokens
from ssd.execution.runner import Runner
from ssd.frontend.tokenization import Tokenizer
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models import hub
from ssd.verifier.loading import load
from tools.gpu_report.job import Job, Row, config_folder
from tools.inflate.sizes import LIKE

# A near-tie: best tokens that are no further apart than so many times the usual difference of a logit. And how large
# that may be, as a share of the logits' own size.
MOST_APART, MOST_NOISE = 8.0, 1 / 64
_LOOKAHEADS = (1, 4, 7)
_MOST_PROMPT = 256


class Difference(NamedTuple):
    """The difference of logits [n, V] that were computed in two ways.

    `noise` and `size`: means over the vocabulary of the squares of the difference and of the logits, summed over
    positions. `apart`: the difference of the two best tokens' scores in single steps, where those tokens differ."""

    positions: int
    noise: float
    size: float
    apart: tuple[float, ...]

    def __add__(self, other: Difference) -> Difference:  # type: ignore[override]
        return Difference(*(mine + theirs for mine, theirs in zip(self, other, strict=True)))


NOTHING = Difference(0, 0.0, 0.0, ())


def rows(job: Job, *, model: str | None = None, texts: int = 100) -> Iterator[Row]:
    """Yield a row for each K. Single steps write `texts` greedily; rows of K + 1 tokens read them again.

    Both use the engine's runner in its default mode. `model`: of these sizes and random weights, in place of the
    target."""
    with tempfile.TemporaryDirectory() as folder:
        if model is not None and not job.tiny:
            made = config_folder(Path(folder), model, LIKE[model].config(2048))
            job = msgspec.structs.replace(job, target=made, made=True)
        yield from _audited(job, texts)


def _audited(job: Job, texts: int) -> Iterator[Row]:
    count, tokens = (3, 24) if job.tiny else (texts, 64)
    options = EngineOptions(
        target=job.target,
        load_format=job.load_format,
        mode="ar",
        device=job.device,
        dtype="bfloat16",
        num_speculative_tokens=max(_LOOKAHEADS),
        max_num_seqs=2,
        max_model_len=(128 if job.tiny else _MOST_PROMPT + tokens + 64),
    )
    config = resolve(options)
    runner, _ = load(config)
    tokenizer = None if job.made else Tokenizer(hub.ensure(job.target))
    found = dict.fromkeys(_LOOKAHEADS, NOTHING)
    half = config.num_pages // 2
    pages = range(half), range(half, 2 * half)
    for prompt in job.asked(count):
        ids = (tokenizer.encode(prompt) if tokenizer and isinstance(prompt, str) else list(prompt))[:_MOST_PROMPT]
        text, logits = written(runner, ids, tokens, pages[0])
        for lookahead in _LOOKAHEADS:
            found[lookahead] += difference(logits, reread(runner, text, len(ids), lookahead, pages[1]))
            yield row_of(lookahead, found[lookahead])
        if job.left() < 0:
            return


def row_of(lookahead: int, found: Difference) -> Row:
    noise = math.sqrt(found.noise / found.size) if found.size else math.inf  # logits of 0 are no model's
    usual = math.sqrt(found.noise / (found.positions or 1))
    worst = max(found.apart, default=0.0)
    return {
        "name": f"K = {lookahead}",
        "positions": found.positions,
        "exceptions": len(found.apart),
        "agreement": 1 - len(found.apart) / found.positions,
        "noise": noise,
        "worst": worst / usual if usual else worst,
        "ok": noise <= MOST_NOISE and worst <= MOST_APART * usual,
    }


def written(runner: Runner, prompt: Sequence[int], count: int, pages: Sequence[int]) -> tuple[list[int], Tensor]:
    """Write a greedy text by single steps.

    Returns it with its prompt, and the logits [count, V] that decided each new token."""
    text = list(prompt)
    # Copies: the next forward overwrites the logits of a graph.
    logits = [runner.forward([Tokens(text, 0, pages)]).clone()]
    text.append(int(logits[-1][0].argmax()))
    for _ in range(count - 1):
        logits.append(runner.forward([Tokens(text[-1:], len(text) - 1, pages)]).clone())
        text.append(int(logits[-1][0].argmax()))
    return text, torch.cat(logits)


def reread(runner: Runner, text: Sequence[int], prompt: int, lookahead: int, pages: Sequence[int]) -> Tensor:
    """Return the logits of the same positions, from rows of `lookahead` + 1 tokens, as if every draft were right."""
    logits = [runner.forward([Tokens(text[:prompt], 0, pages)]).clone()]
    for start in range(prompt, len(text) - 1, lookahead + 1):
        row = text[start : min(start + lookahead + 1, len(text) - 1)]
        logits.append(runner.forward([Tokens(row, start, pages, len(row))]).clone())
    return torch.cat(logits)


def difference(plain: Tensor, other: Tensor) -> Difference:
    """Compare two tensors of logits [n, V], `plain` those of single steps. Noise and size are means over the
    vocabulary, summed over positions."""
    one, two = plain.double(), other.double()
    ours, theirs = plain.argmax(-1), other.argmax(-1)
    parted = (ours != theirs).nonzero()[:, 0]
    apart = one[parted, ours[parted]] - one[parted, theirs[parted]]
    noise, size = ((part.square().mean(-1).sum()) for part in (one - two, one - one.mean(-1, keepdim=True)))
    return Difference(len(plain), float(noise), float(size), tuple(apart.tolist()))
