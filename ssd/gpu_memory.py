"""How many pages of keys and values fit on GPUs beside everything else: sums of bytes, of no device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ssd.errors import UsageError
from ssd.gpus import Gpu

# What a process takes before its first tensor: CUDA's context, the workspaces of its libraries, graphs.
CONTEXT = 2**30
# More than can be used at once are for prefixes that come again; each costs the host some hundred bytes.
_SPARE_PAGES = 2**18


class Need(NamedTuple):
    """What one process keeps on a GPU, in bytes: its weights, what a forward needs meanwhile, and each page."""

    weights: int
    working: int
    page: int

    @property
    def fixed(self) -> int:
        return self.weights + self.working + CONTEXT


def working(tokens: int, rows: int, width: int, inner: int, vocab_size: int) -> int:
    """Bytes that a forward over `tokens` needs meanwhile, `rows` of which have logits: some copies of the hidden
    states, both halves of the feed-forward, and what samples are made of: of each logit up to four numbers of 32 bits,
    itself, its noise, and two that the noise or their sum is made in. The logits as they come are not among them."""
    return 4 * tokens * (6 * width + 2 * inner) + 16 * rows * vocab_size


class Budget:
    """What may be used of GPUs: a share of each, `utilization`, and no more than is free."""

    def __init__(self, gpus: Sequence[Gpu], utilization: float) -> None:
        self._gpus, self._utilization = gpus, utilization

    def of(self, gpu: int) -> int:
        found = self._gpus[gpu]
        return min(found.free, int(found.total * self._utilization))

    def words(self, gpu: int) -> str:
        found = self._gpus[gpu]
        return (
            f"{_gib(self.of(gpu))} of cuda:{gpu} may be used (--gpu-memory-utilization {self._utilization:g} of "
            f"{_gib(found.total)}, {_gib(found.free)} free)"
        )


def pages(
    budget: Budget,
    target: Need,
    target_gpus: Sequence[int],
    draft: Need,
    draft_gpu: int | None,
    wanted: int,
    least: int,
) -> tuple[int, int]:
    """Pages of target and draft. The draft gets what it can use, `wanted`, and the target the rest; where they
    share a GPU that is too small for it, both get as many. A draft on no GPU, None, gets what it can use.

    Raises UsageError where either has not the `least` pages that one sequence needs.
    """
    drafts = wanted
    if draft_gpu is not None:
        room = budget.of(draft_gpu) - draft.fixed
        each = draft.page
        if draft_gpu in target_gpus:
            room, each = room - target.fixed, each + target.page
        drafts = min(wanted, room // each)
        if drafts < least:
            raise UsageError(_no_room("the draft", draft, target, draft_gpu, target_gpus, least, budget))
    taken: Mapping[int, int] = {} if draft_gpu is None else {draft_gpu: draft.fixed + drafts * draft.page}
    found = max(wanted, _SPARE_PAGES)
    for gpu in target_gpus:
        room = budget.of(gpu) - target.fixed - taken.get(gpu, 0)
        if room < least * target.page:
            raise UsageError(_no_room("the target", target, draft, gpu, [draft_gpu], least, budget))
        found = min(found, room // target.page if target.page else found)
    return found, drafts


def _no_room(
    who: str, need: Need, other: Need, gpu: int, others: Sequence[int | None], least: int, budget: Budget
) -> str:
    parts = f"{_gib(need.weights)} of weights, {_gib(need.working + CONTEXT)} to work in, "
    parts += f"{_gib(least * need.page)} for the keys and values of one sequence"
    beside = ""
    if gpu in others:
        name = "target" if who == "the draft" else "draft"
        beside = f" beside the {name}'s {_gib(other.fixed + least * other.page)}"
    help = "lower --max-model-len or --max-num-batched-tokens"
    help += ", or give another --draft-device" if who == "the draft" or beside else ""
    return f"{who} has no room on cuda:{gpu}: it needs {parts}{beside}, and {budget.words(gpu)}; {help}"


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
