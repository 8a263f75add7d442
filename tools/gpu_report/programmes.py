"""List the steps of a report, and of the programmes for a GPU that is there for minutes (README.md)."""

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


def _ids(name: str, seconds: float, prediction: str, decision: str, **more: Any) -> Step:
    options = {"texts": 40, "tokens": 32, "kills": 0, **more.pop("options", {})}
    return Step("ids", seconds, name, options, **more, prediction=prediction, decision=decision)


def _rounds(name: str, seconds: float, expected: float, prediction: str, decision: str, **options: Any) -> Step:
    chosen = {"draft_devices": ("cuda",)} | options
    return Step("pipeline", seconds, name, chosen, {}, expected, prediction, decision)


FEW_BITS = tuple(bits + by for bits in ("fp8", "int4") for by in ("", ", humming", ", humming, varying"))
_ONE_GPU = (
    Step(
        "probe",
        35.0,
        expected=16,
        prediction="A share of 20 % sees 27 processors; a green context of 16 captures and replays; NVRTC, no headers.",
        decision="Other than 132 processors under MPS: rehearse with that number. No green context replays: drop them. "
        "No header: carry cccl with humming. AMX, and over 100 GB/s: the draft on the host is worth kernels for it.",
    ),
    _ids(
        "ids",
        50.0,
        "All equal; accepted tokens in every row; no memory lost.",
        "A text that differs, or no draft token: nothing else counts before that is mended.",
        options={"kills": 4},
        expected=32,
    ),
    _rounds(
        "prompts",
        50.0,
        35,
        "A prompt step takes under 5 ms in the first run, too; nothing is compiled.",
        "A longer step or a late compile: its warm-up comes before all else. Neither, and slow: profile that step.",
        modes=("sd",),
        batches=(1, 16),
        lengths=((8,), (32,), (100,), (500,), (8, 32, 100, 500)),
        tokens=32,
        repeats=2,
    ),
    _rounds(
        "rounds by turns",
        80.0,
        58,
        "`sd` 460 tok/s at one sequence and 5,500 at 16; `ssd` 390 and 3,500.",
        "`sd` at 16 below 4,500: read the traces, and leave l2 until the cause is known. Else the README says it.",
        batches=(1, 16),
    ),
    *(
        _rounds(
            f"rounds under MPS, {share} %",
            45.0,
            30,
            "`ssd` at one sequence .95 of `sd`, which loses 8 % to that by turns.",
            "MPS stays recommended for `sd` only within 3 % of turns; the share with the higher `ssd` is the default.",
            modes=("sd", "ssd"),
            batches=(1, 16),
            share=share,
        )
        for share in (20, 50)
    ),
    Step(
        "beside",
        60.0,
        expected=40,
        prediction="Two streams: a depth of 1.5 ms. 16 multiprocessors: verification 4 % longer, a depth of .4 ms.",
        decision="Green contexts are built if a verification takes at most 6 % more and a depth a sixth of it.",
    ),
    Step(
        "draft_steps",
        30.0,
        "six depths, profiled",
        {"pairs": ("llama-8b small", "qwen3-32b 0.6b"), "chains": (1, 16), "depths": 6, "profile": True},
        expected=20,
        prediction="A depth takes .5 ms, .2 of them in kernels; 65 launches.",
        decision="`sd` in the target's process pays where kernels are under .3 of .5 ms; else fewer kernels do.",
    ),
    _ids(
        "ids, dependent launches",
        45.0,
        "All equal.",
        "All equal, with accepted tokens: dependent launches are on by default.",
        environment={"SSD_PDL": "1"},
        expected=25,
    ),
    Step(
        "gemm",
        120.0,
        "gemm, few bits",
        {"counts": (1, 8, 16), "kinds": FEW_BITS, "models": ("llama-8b",)},
        expected=60,
        prediction="gate_up, 8 rows: FP8 .65 of the copy, int4 .50; humming-kernels .75 or more, invariant .70.",
        decision="The library becomes an extra at .70 with equal bits in any batch, unless ours is within 10 % of it.",
    ),
)
_PLACES = (
    _rounds(
        "32B by turns",
        105.0,
        80,
        "`ar` 54 tok/s, `sd` 143, `ssd` 130; at 16 sequences 740, 1,900, 1,500.",
        "The README's figure of one GPU. `sd` below 2.4 times `ar`: read the traces.",
        pairs=("qwen3-32b 0.6b",),
        batches=(1, 16),
        tokens=128,
        repeats=2,
    ),
    _rounds(
        "32B under MPS, 20 %",
        45.0,
        28,
        "`ssd` 150 tok/s at one sequence.",
        "`ssd` above `sd` by turns: recommend MPS from 32B on.",
        pairs=("qwen3-32b 0.6b",),
        modes=("ssd",),
        batches=(1, 16),
        tokens=128,
        repeats=2,
        share=20,
    ),
    Step(
        "draft_steps",
        50.0,
        "depths on the host",
        {
            **{"pairs": ("llama-8b small", "qwen3-32b 0.6b"), "draft_device": "cpu"},
            **{"chains": (1, 4, 8, 12, 16, 32), "cores": (4, 8, 15)},
        },
        expected=32,
        prediction="0.6B, 15 cores: 3.3 ms at 8 chains, 6 at 32; 3 % of 8B: 2 ms.",
        decision="0.6B at 12 chains within 3.5 ms: from 32B on the draft belongs on the host. Above 6: only with AMX.",
    ),
    _rounds(
        "8B, draft on the host",
        40.0,
        24,
        "`ssd` 300 tok/s at one sequence: one or two depths a round.",
        "Below `sd` by turns (l1): below 32B the draft stays on the GPU.",
        modes=("ssd",),
        draft_devices=("cpu",),
        tokens=128,
    ),
    _rounds(
        "32B, draft on the host",
        45.0,
        28,
        "`ssd` 160 tok/s at one sequence.",
        "Above `sd` by turns: recommended from 32B on, and `auto` places the draft there.",
        pairs=("qwen3-32b 0.6b",),
        modes=("ssd",),
        draft_devices=("cpu",),
        tokens=128,
        repeats=2,
    ),
    Step(
        "forward",
        60.0,
        "8B, few bits",
        {"models": ("llama-8b",), "kinds": ("fp8", "int4")},
        expected=36,
        prediction="One sequence: FP8 4.6 ms, 4 bits 3.9, as products of .45 and .28 of the copy.",
        decision="Above 3.6 and 2.6 ms: products of another library, or our own in pairs, come first.",
    ),
    *(
        Step(
            "forward",
            30.0,
            f"8B, 8k tokens, cache in {name}",
            {"models": ("llama-8b",), "batches": (1, 4), "contexts": (8192,), "cache": cache},
            expected=14,
            prediction=prediction,
            decision="Less than a third off the time of the keys: arithmetic bounds attention over FP8; profile it.",
        )
        for name, cache, prediction in (
            ("16 bits", "auto", "Keys at .75 of the copy."),
            ("FP8", "fp8", "Half the time of the keys."),
        )
    ),
    _rounds(
        "hybrid of 0.5B",
        45.0,
        28,
        "`ar` 40 tok/s, kernel by kernel; all modes run.",
        "A failure: mend it, else static shapes for models with states are next.",
        pairs=("hybrid small",),
        modes=("ar", "ssd"),
        batches=(1, 16),
        tokens=64,
        repeats=1,
    ),
    _rounds(
        "gpt_oss, small",
        40.0,
        24,
        "Runs, kernel by kernel.",
        "A failure: mend it before the family is called supported on a GPU.",
        pairs=("gpt_oss small",),
        modes=("ar", "sd"),
        tokens=32,
        repeats=1,
        options={"enforce_eager": True},
    ),
    _ids(
        "kills under MPS",
        50.0,
        "The target survives with 75 %.",
        "A target that dies or an altered answer: no MPS where drafts may be killed, and the page says so.",
        options={"texts": 4, "kills": 3, "mps": True},
        expected=35,
    ),
)
_REST = (
    Step("tests", 150.0, "all tests", {"processes": 12}, expected=85, prediction="All pass."),
    Step(
        "audit",
        40.0,
        "audit, 8B",
        {"texts": 30, "model": "llama-8b"},
        expected=25,
        prediction="Differences in near-ties alone.",
    ),
    Step(
        "tests",
        70.0,
        "memory checker",
        {"tests": _KERNEL_TESTS, "sanitizer": True, "chosen": _CHECKED},
        expected=60,
        prediction="0 errors.",
    ),
    Step("variants", 90.0, expected=45, prediction="Norm with 16 warps 2.2 us for 3.1; products within 10 %."),
    Step("compiled", 120.0, expected=90, prediction="transformers, compiled: 5.5 ms at one token."),
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

_DRAFT_OF_A_CORPUS = (
    Step("pieces", 40.0, "target of a carried corpus", {"join": True}, expected=12),
    Step(
        "draft",
        540.0,
        "draft of a carried corpus",
        {"seconds": 490.0},
        expected=530,
        prediction="2,800 steps of 16,384 tokens; at T = 0 1.9 tokens a round of K = 4.",
    ),
)

CALLS: dict[str, Sequence[Step]] = {
    "l1": _ONE_GPU,
    "l2": _PLACES,
    "l3": _REST,
    "3a": _FIRST_PIECE,
    "3b": _DRAFT,
    "3c": _DRAFT_OF_A_CORPUS,
}
"""Programmes l1, one GPU, l2, other sizes and places, and l3, the rest; then 3, a draft, call by call."""

SECONDS = {"l1": 360.0, "l2": 350.0}
"""Calls that end after this time, though the limits of their steps allow more: with two starts l1 and l2 take 13
minutes. Steps at the end then have no time."""
START_S = 35.0  # of a machine, before a call
