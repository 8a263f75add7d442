"""List the steps of a report, and of the programmes for a GPU that is there for minutes (docs/gpu.md)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec


class Step(msgspec.Struct, frozen=True):
    """Runs the module `part` of `tools.gpu_report` in a process of its own, for at most `seconds`.

    `options` are keyword arguments of the part's `rows`; `name` tells steps of one part apart; `environment` is added
    to the process's. `expected` seconds and `prediction` were written before the step first ran on a device."""

    part: str
    seconds: float
    name: str = ""
    options: dict[str, Any] = {}
    environment: dict[str, str] = {}
    expected: float = 0.0
    prediction: str = ""

    @property
    def title(self) -> str:
        return self.name or self.part


EVERYTHING = (
    Step("tests", 300.0),
    Step("forward", 150.0),
    Step("audit", 60.0),
    Step("ids", 300.0),
    Step("modes", 400.0),
    Step("assisted", 60.0),
)
"""The report of a pair, without a programme."""

_KERNEL_TESTS = ("test_static.py", "test_attention.py", "test_arithmetic.py", "test_draft.py")
_ENGINE_TESTS = ("test_engine.py", "test_overlap.py", "test_ipc.py")
_CHECKED = "what_is_drawn or guesses_are_those and greedy or a_cache_in_8_bits and bfloat16 or logits_are_those_of_the"

_CORRECTNESS = (
    Step("probe", 45.0, expected=20, prediction="Copy 4.2 TB/s on an H200 (3.0 on an H100); 1.5 us a launch; locked."),
    Step(
        "tests",
        110.0,
        "kernel tests",
        {"tests": _KERNEL_TESTS, "processes": 10},
        expected=70,
        prediction="At most five fail, by tolerances.",
    ),
    Step(
        "ids",
        60.0,
        "ids, first",
        {"texts": 16, "tokens": 32, "kills": 0},
        expected=35,
        prediction="All equal with 80 %: products of the same sizes give the same bits.",
    ),
    Step(
        "forward",
        45.0,
        "forward, 8B",
        {"models": ("llama-8b",), "batches": (1,), "profile": True},
        expected=25,
        prediction="Batch 1: 5.1 ms, 68 % of the copy on an H200.",
    ),
    Step(
        "tests",
        100.0,
        "engine tests",
        {"tests": _ENGINE_TESTS, "processes": 4},
        expected=60,
        prediction="One of six fails.",
    ),
    Step(
        "gemm",
        40.0,
        options={"counts": (1, 8, 16, 64)},
        expected=25,
        prediction="At 8 rows: gate_up .87 of the copy, qkv and down .80, o .60; same bits at any place of a batch.",
    ),
)
_FIGURES = (
    Step(
        "forward",
        110.0,
        options={"models": ("llama-1b", "llama-8b", "qwen3-32b")},
        expected=70,
        prediction="Batch 1: 1B .47, 8B .68, 32B .79 of the copy; the call returns after 50 us.",
    ),
    Step("audit", 40.0, "audit, 1B", {"texts": 30}, expected=20, prediction="Differences in near-ties alone."),
    Step(
        "audit",
        40.0,
        "audit, 8B",
        {"texts": 30, "model": "llama-8b"},
        expected=25,
        prediction="Differences in near-ties alone.",
    ),
    Step(
        "ids",
        110.0,
        options={"texts": 40, "tokens": 32, "kills": 8},
        expected=70,
        prediction="All equal; no memory lost.",
    ),
    Step(
        "modes",
        100.0,
        "modes, 8B",
        {"pairs": ("llama-8b small",), "draft_devices": ("cuda",), "batches": (1, 16), "temperatures": (0.0,)},
        expected=60,
        prediction="By turns on one GPU: ssd .8 of sd, sd 1.6 of ar.",
    ),
    Step(
        "modes",
        90.0,
        "modes, 8B, draft on the CPU",
        {"pairs": ("llama-8b small",), "draft_devices": ("cpu",), "batches": (1,), "temperatures": (0.0,)},
        expected=50,
        prediction="A draft step of 250 MB takes 5 ms: ssd about ar.",
    ),
)
_SERVICE = (
    Step("tests", 150.0, "all tests", {"processes": 12}, expected=85, prediction="All pass."),
    Step(
        "pipeline",
        40.0,
        "rounds by turns",
        expected=17,
        prediction="Look-ups come late: a step of several depths ends after the verification.",
    ),
    Step(
        "pipeline",
        45.0,
        "rounds under MPS",
        {"options": {"mps": True}, "batches": (1, 16)},
        expected=20,
        prediction="Hits 60 %; ssd 1.1 of sd.",
    ),
    Step(
        "pipeline",
        45.0,
        "rounds under MPS, same priority",
        {"options": {"mps": True}, "modes": ("sd", "ssd")},
        {"CUDA_MPS_CLIENT_PRIORITY": "0"},
        expected=18,
        prediction="A depth takes 1.0 ms for 1.6.",
    ),
    Step(
        "ids",
        60.0,
        "ids, dependent launches",
        {"texts": 40, "tokens": 32, "kills": 0},
        {"SSD_PDL": "1"},
        expected=25,
        prediction="All equal.",
    ),
    Step(
        "modes",
        90.0,
        "modes, 8B, MPS",
        {
            "pairs": ("llama-8b small",),
            "draft_devices": ("cuda",),
            "batches": (1, 16),
            "temperatures": (0.0,),
            "options": {"mps": True},
        },
        expected=60,
        prediction="With the service, ssd 1.2 of sd.",
    ),
    Step(
        "tests",
        70.0,
        "memory checker",
        {"tests": _KERNEL_TESTS, "sanitizer": True, "chosen": _CHECKED},
        expected=60,
        prediction="0 errors.",
    ),
    Step(
        "ids",
        60.0,
        "kills under MPS",
        {"texts": 4, "tokens": 32, "kills": 3, "mps": True},
        expected=35,
        prediction="The target survives with 75 %.",
    ),
)


def _verification(name: str, prediction: str = "", **environment: str) -> Step:
    options = {"models": ("llama-1b", "llama-8b"), "batches": (1, 4)}
    return Step("forward", 40.0, f"forward, {name}", options, environment, 13, prediction)


def _modes(name: str, seconds: float, prediction: str, environment: dict[str, str], **options: Any) -> Step:
    chosen = {"pairs": ("llama-8b small",), "draft_devices": ("cuda",), "batches": (1,), "temperatures": (0.0,)}
    return Step("modes", seconds, f"modes, {name}", chosen | options, environment, seconds * 0.7, prediction)


FEW_BITS = tuple(bits + by for bits in ("fp8", "int4") for by in ("", ", humming", ", humming, varying"))
_KERNELS = (
    _verification("plain"),
    _verification("dependent launches", "8B batch 1: -.25 ms.", SSD_PDL="1"),
    _verification("plain again"),
    _verification("dependent launches again", SSD_PDL="1"),
    Step("variants", 90.0, expected=45, prediction="Norm with 16 warps 2.2 us for 3.1; products within 10 %."),
    Step(
        "gemm",
        120.0,
        "gemm, few bits",
        {"counts": (1, 8, 16), "kinds": FEW_BITS, "models": ("llama-8b",)},
        expected=75,
        prediction="gate_up, 8 rows: FP8 .65 of the copy, int4 .50; humming-kernels .75 or more, invariant .70.",
    ),
    Step(
        "forward",
        60.0,
        "forward, few bits",
        {"models": ("llama-8b",), "kinds": ("fp8", "int4"), "batches": (1, 4)},
        expected=40,
        prediction="FP8 .60 of the time of 16 bits, int4 .45.",
    ),
    Step(
        "forward",
        40.0,
        "forward, 8k",
        {"models": ("llama-8b",), "batches": (1, 4), "contexts": (8192,)},
        expected=22,
        prediction="Keys at .75 of the copy.",
    ),
    Step(
        "forward",
        40.0,
        "forward, 8k, FP8 cache",
        {"models": ("llama-8b",), "batches": (1, 4), "contexts": (8192,), "cache": "fp8"},
        expected=22,
        prediction="Half the time of the keys.",
    ),
    Step("compiled", 120.0, expected=90, prediction="transformers, compiled: 5.5 ms at one token."),
)
_MODES = (
    _modes("ar with overlap", 40.0, "ar 5 % faster than without.", {}, modes=("ar",), batches=(1, 16)),
    _modes("ar without overlap", 40.0, "", {"SSD_OVERLAP": "0"}, modes=("ar",), batches=(1, 16)),
    *(
        _modes(
            f"MPS at {share} %",
            50.0,
            "20 to 35 % is best." if share == 10 else "",
            {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(share)},
            modes=("ar", "ssd"),
            options={"mps": True},
        )
        for share in (10, 20, 35, 50)
    ),
    _modes("K and F", 90.0, "K = 5, F = 3 is within 5 % of the best.", {}, lookaheads=(3, 5, 7), fan_outs=(1, 3, 5)),
    _modes("32B", 110.0, "ssd over ar 2.0 with a draft of 2 %.", {}, pairs=("qwen3-32b 0.6b",), batches=(1,)),
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
    "1a": _CORRECTNESS,
    "1b": _FIGURES,
    "1c": _SERVICE,
    "2a": _KERNELS,
    "2b": _MODES,
    "3a": _FIRST_PIECE,
    "3b": _DRAFT,
    "3c": _DRAFT_OF_A_CORPUS,
}
"""Programme 1, correctness, programme 2, performance, and programme 3, a draft, call by call."""
