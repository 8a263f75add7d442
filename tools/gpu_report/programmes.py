"""List the steps of a report, and of the programmes for a GPU that is there for minutes (see README.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Step(msgspec.Struct, frozen=True):
    """Runs the module `part` of `tools.gpu_report` in a process of its own, for at most `seconds`.

    `options` are keyword arguments of the part's `rows`; `name` tells steps of one part apart; `environment` is added
    to the process's. `expected` seconds, `prediction` and `decision`, what to do by the result, were written before the
    step first ran on a device."""

    part: str
    seconds: float
    name: str = ""
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    expected: float = 0.0
    prediction: str = ""
    decision: str = ""

    @property
    def title(self) -> str:
        return self.name or self.part


EVERYTHING = (
    Step("tests", 300.0),
    Step("forward", 150.0),
    Step("audit", 60.0),
    Step("ids", 300.0),
    Step("pipeline", 400.0, "modes", {"batches": (1, 4, 16), "temperatures": (0.0, 1.0)}),
    Step("assisted", 60.0),
)
"""The report of a pair, without a programme."""

_KERNEL_TESTS = ("test_static.py", "test_attention.py", "test_arithmetic.py", "test_draft.py")
_CHECKED = "what_is_drawn or guesses_are_those and greedy or a_cache_in_8_bits and bfloat16 or logits_are_those_of_the"


_PAIRS = ("llama-8b small", "qwen3-32b 0.6b")
FEW_BITS = tuple(bits + by for bits in ("fp8", "int4") for by in ("", ", humming", ", humming, varying"))


def _steps(*given: tuple[Any, ...]) -> Sequence[Step]:
    """Return steps of (part, name, limit, expected seconds, options[, environment]), with what `_TOLD` says of them.

    Modes are measured with the draft on the GPU."""
    found = []
    for part, name, limit, expected, options, *environment in given:
        own = {"draft_devices": ("cuda",)} | options if part == "pipeline" else options
        found.append(Step(part, limit, name, own, *(environment or [{}]), expected, *_TOLD[name]))
    return found


_TOLD: dict[str, tuple[str, str]] = {
    "probe": (
        "A share of 20 % sees 27 processors; a green context of 16 captures and replays; NVRTC, no headers.",
        "Other than 132 processors under MPS: rehearse with that number. No green context replays: drop them. No "
        "header: carry cccl with humming. AMX, and over 100 GB/s: the draft on the host is worth kernels for it.",
    ),
    "ids": (
        "All equal; accepted tokens in every row; no memory lost.",
        "A text that differs, or no draft token: nothing else counts before that is mended.",
    ),
    "prompts": (
        "A prompt step takes under 5 ms in the first run, too; nothing is compiled.",
        "A longer step or a late compile: its warm-up comes before all else. Neither, and slow: profile that step.",
    ),
    "rounds by turns": (
        "`sd`, in the target's process, 600 tok/s at one sequence and 7,400 at 16; `ssd` 390 and 3,500.",
        "`sd` at 16 below 5,500: read the traces, and leave l2 until the cause is known. Else the README says it.",
    ),
    "rounds under MPS, 20 %": (
        "`ssd` 370 tok/s at one sequence.",
        "MPS stays recommended for `ssd` if that gains; the share with the higher `ssd` is the default.",
    ),
    "rounds under MPS, 50 %": (
        "`ssd` 370 tok/s at one sequence.",
        "MPS stays recommended for `ssd` if that gains; the share with the higher `ssd` is the default.",
    ),
    "beside": (
        "Two streams: a depth of 1.5 ms. 16 multiprocessors: verification 4 % longer, a depth of .4 ms.",
        "Green contexts are built if a verification takes at most 6 % more and a depth a sixth of it.",
    ),
    "a trunk, profiled": (
        "A depth takes .3 ms, .2 of them in kernels; 65 launches. The trunk of one chain is two graphs.",
        "A depth of `sd` in one stream should take what its kernels do. Above .3 ms: fewer kernels come first.",
    ),
    "one stream": (
        "`sd` in the target's process: 12 launches a round, host 300 us at one sequence.",
        "Host time of a round above a verification: the host bounds it; its largest part comes first.",
    ),
    "ids, dependent launches": (
        "All equal.",
        "All equal, with accepted tokens: dependent launches are on by default.",
    ),
    "gemm, few bits": (
        "gate_up, 8 rows: FP8 .65 of the copy, int4 .50; humming-kernels .75 or more, invariant .70.",
        "The library becomes an extra at .70 with equal bits in any batch, unless ours is within 10 % of it.",
    ),
    "32B by turns": (
        "`ar` 54 tok/s, `sd`, in the target's process, 153, `ssd` 130; at 16 sequences 740, 2,040, 1,500.",
        "The README's figure of one GPU. `sd` below 2.4 times `ar`: read the traces.",
    ),
    "32B under MPS, 20 %": (
        "`ssd` 150 tok/s at one sequence.",
        "`ssd` above `sd` by turns: recommend MPS from 32B on.",
    ),
    "depths on the host": (
        "0.6B, 15 cores: 3.3 ms at 8 chains, 6 at 32; 3 % of 8B: 2 ms.",
        "0.6B at 12 chains within 3.5 ms: from 32B on the draft belongs on the host. Above 6: only with AMX.",
    ),
    "8B, both drafts": (
        "`auto` drafts in the target's process: 590 tok/s at one sequence, within 2 % of `sd`.",
        "It drafts on the host, or is slower by 5 %: read the plan's figures; until then docs recommend `--mode sd`.",
    ),
    "32B, draft on the host": (
        "`ssd` 160 tok/s at one sequence.",
        "Above `sd` by turns: recommended from 32B on, where `auto` should choose it.",
    ),
    "8B, few bits": (
        "One sequence: FP8 4.6 ms, 4 bits 3.9, as products of .45 and .28 of the copy.",
        "Above 3.6 and 2.6 ms: products of another library, or our own in pairs, come first.",
    ),
    "8B, 8k tokens, cache in 16 bits": (
        "Keys at .75 of the copy.",
        "Less than a third off the time of the keys: arithmetic bounds attention over FP8; profile it.",
    ),
    "8B, 8k tokens, cache in FP8": (
        "Half the time of the keys.",
        "Less than a third off the time of the keys: arithmetic bounds attention over FP8; profile it.",
    ),
    "hybrid of 0.5B": (
        "`ar` 40 tok/s, kernel by kernel; all modes run.",
        "A failure: mend it, else static shapes for models with states are next.",
    ),
    "gpt_oss, small": (
        "Runs, kernel by kernel.",
        "A failure: mend it before the family is called supported on a GPU.",
    ),
    "kills under MPS": (
        "The target survives with 75 %.",
        "A target that dies or an altered answer: no MPS where drafts may be killed, and the page says so.",
    ),
    "all tests": (
        "All pass.",
        "",
    ),
    "audit, 8B": (
        "Differences in near-ties alone.",
        "",
    ),
    "memory checker": (
        "0 errors.",
        "",
    ),
    "variants": (
        "Norm with 16 warps 2.2 us for 3.1; products within 10 %.",
        "",
    ),
}
"""Predictions and decisions."""

_BOTH = {"batches": (1, 16)}
_MIXES = {"lengths": ((8,), (32,), (100,), (500,), (8, 32, 100, 500)), "tokens": 32, "repeats": 2}
_ONE_GPU = _steps(
    ("probe", "probe", 35, 16, {}),
    ("ids", "ids", 65, 42, {"texts": 40, "tokens": 32, "kills": 4}),
    ("pipeline", "prompts", 50, 35, {**_BOTH, **_MIXES, "modes": ("ssd",)}),
    ("pipeline", "rounds by turns", 80, 58, _BOTH),
    ("pipeline", "rounds under MPS, 20 %", 30, 18, {**_BOTH, "modes": ("ssd",), "share": 20}),
    ("pipeline", "rounds under MPS, 50 %", 30, 18, {**_BOTH, "modes": ("ssd",), "share": 50}),
    ("beside", "beside", 60, 40, {}),
    ("one_stream", "one stream", 40, 20, {}),
    ("draft_steps", "a trunk, profiled", 30, 20, {"pairs": _PAIRS, "chains": (1, 16), "depths": 5, "profile": True}),
    ("ids", "ids, dependent launches", 45, 25, {"texts": 40, "tokens": 32, "kills": 0}, {"SSD_PDL": "1"}),
    ("gemm", "gemm, few bits", 120, 60, {"counts": (1, 8, 16), "kinds": FEW_BITS, "models": ("llama-8b",)}),
)
_32B = {"pairs": _PAIRS[1:], "tokens": 128, "repeats": 2}
_HOST = {"modes": ("ssd",), "draft_devices": ("cpu",)}
_SIZES = {"chains": (1, 4, 8, 12, 16, 32), "cores": (4, 8, 15)}
_LONG = {"models": ("llama-8b",), "batches": (1, 4), "contexts": (8192,)}
_FEW = {"tokens": 64, "repeats": 1}
_EAGER = {**_FEW, "options": {"enforce_eager": True}}
_PLACES = _steps(
    ("pipeline", "32B by turns", 105, 80, _32B | _BOTH),
    ("pipeline", "32B under MPS, 20 %", 45, 28, {**_32B, **_BOTH, "modes": ("ssd",), "share": 20}),
    ("draft_steps", "depths on the host", 50, 32, {**_SIZES, "pairs": _PAIRS, "draft_device": "cpu"}),
    ("pipeline", "8B, both drafts", 40, 30, {"tokens": 128, "modes": ("auto",)}),
    ("pipeline", "32B, draft on the host", 45, 28, _32B | _HOST),
    ("forward", "8B, few bits", 60, 36, {"models": ("llama-8b",), "kinds": ("fp8", "int4")}),
    ("forward", "8B, 8k tokens, cache in 16 bits", 30, 14, _LONG),
    ("forward", "8B, 8k tokens, cache in FP8", 30, 14, {**_LONG, "cache": "fp8"}),
    ("pipeline", "hybrid of 0.5B", 45, 28, {**_BOTH, "pairs": ("hybrid small",), "modes": ("ar", "ssd"), **_FEW}),
    ("pipeline", "gpt_oss, small", 40, 24, {**_EAGER, "pairs": ("gpt_oss small",), "modes": ("ar", "sd")}),
    ("ids", "kills under MPS", 50, 35, {"texts": 4, "tokens": 32, "kills": 3, "mps": True}),
)
_REST = _steps(
    ("tests", "all tests", 150, 85, {"processes": 12}),
    ("audit", "audit, 8B", 40, 25, {"texts": 30, "model": "llama-8b"}),
    ("tests", "memory checker", 70, 60, {"tests": _KERNEL_TESTS, "sanitizer": True, "chosen": _CHECKED}),
    ("variants", "variants", 90, 45, {}),
)

_FIRST_PIECE = (
    Step("pieces", 20.0, "first piece", expected=2, prediction="48 MiB."),
    Step(
        "corpus",
        60.0,
        "corpus, tiny",
        {"tiny": True, "seconds": 10.0},
        expected=20,
        prediction="Graphs are captured in two processes; 50 texts.",
    ),
    Step("draft", 60.0, "draft, tiny", {"tiny": True, "seconds": 5.0}, expected=20, prediction="The loss falls."),
)
_DRAFT = (
    Step("pieces", 40.0, "target", {"join": True}, expected=12, prediction="The pinned sha256."),
    Step(
        "corpus",
        190.0,
        options={"seconds": 160.0, "processes": 8, "batch": 256, "mps": True},
        expected=175,
        prediction="35,000 conversations, 10M tokens, 6.5M of answers: 40,000 answer tokens/s.",
    ),
    Step(
        "draft",
        320.0,
        options={"seconds": 270.0},
        expected=300,
        prediction="1,800 steps of 16,384 tokens, 150 ms each; at T = 0 2.2 tokens a round of K = 4.",
    ),
)

CALLS: dict[str, Sequence[Step]] = {
    "l1": _ONE_GPU,
    "l2": _PLACES,
    "l3": _REST,
    "3a": _FIRST_PIECE,
    "3b": _DRAFT,
}
"""Programmes l1, one GPU, l2, other sizes and places, and l3, the rest; then 3, a draft, call by call."""

SECONDS = {"l1": 360.0, "l2": 350.0}
"""Calls that end after this time, though the limits of their steps allow more: with two starts l1 and l2 take 13
minutes. Steps at the end then have no time."""
START_S = 35.0  # of a machine, before a call
