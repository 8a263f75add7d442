"""The functions that a GPU runs as graphs, of models of every size, on `meta` tensors."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pkgutil import resolve_name
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssd.config.params import MAX_FAN_OUT, MAX_LOOKAHEAD, Speculation
from ssd.draft.static_shapes import TreeRunner
from ssd.execution.graph_shapes import GraphShape
from ssd.execution.runner import Runner
from ssd.execution.static import StaticRunner
from ssd.ipc.board import BoardReader, size_bytes
from ssd.ipc.device_board import DeviceBoard
from ssd.ipc.process import memory_file
from ssd.layers.triton_attention import TritonAttention
from ssd.models.draft_kinds import kinds
from ssd.models.interface import Model
from ssd.models.registry import GROUP
from ssd.models.weights import Weights
from ssd.speculation.sampling import Drawing
from ssd.system.registered import entries
from ssd.verifier.overlap import DeviceScheduler
from tests.capture.watch import META, Counts, kernels_in
from tests.draft.pair import config

PROCESSORS = 132  # of an H100
PAGE, LONGEST, ROWS = 16, 4096, 1
SHAPE = GraphShape(1, 8, 8)
"""One sequence: a committed token and up to seven of a draft."""

HEAD = "eagle3"


def _llama(width: int, inner: int, layers: int, heads: int, kv: int, vocab: int, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "vocab_size": vocab}
    return sizes | {"num_attention_heads": heads, "num_key_value_heads": kv, "model_type": "llama"} | more


_QWEN = {"model_type": "qwen3", "head_dim": 128}
CONFIGS: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": _llama(2048, 8192, 16, 32, 8, 128256, head_dim=64, tie_word_embeddings=True),
    "Llama 3.1 8B": _llama(4096, 14336, 32, 32, 8, 128256),
    "Llama 3.1 70B": _llama(8192, 28672, 80, 64, 8, 128256),
    "Qwen3 0.6B": _llama(1024, 3072, 28, 16, 8, 151936, **_QWEN, tie_word_embeddings=True),
    "Qwen3 32B": _llama(5120, 25600, 64, 64, 8, 151936, **_QWEN),
}
if HEAD in kinds():
    CONFIGS["EAGLE-3 for 8B"] = _llama(4096, 14336, 1, 32, 8, 128256, draft_vocab_size=32000, model_type=HEAD)
"""The sizes of these checkpoints' config.json. A head has one layer, whatever is asked for."""


class Function(NamedTuple):
    """A function that is captured; `layers` of its model are in it, 0: none."""

    run: Callable[[], None]
    layers: int


def model_of(name: str, layers: int | None = None) -> Model:
    """A model in bfloat16, with its own number of layers or `layers`."""
    said = CONFIGS[name] | ({} if layers is None else {"num_hidden_layers": layers})
    said = {"max_position_embeddings": LONGEST, **said}
    found = [entry.load for entry in entries(GROUP) if entry.name == said["model_type"]]
    kind: Any = found[0]() if found else resolve_name(kinds()[HEAD].model)

    def read(name: str, shape: tuple[int, ...], piece: object = None) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device=META)

    longest = min(LONGEST, said["max_position_embeddings"])
    names = [] if found else ["embed_tokens.weight", "lm_head.weight"]
    made: Model = kind(said, Weights(read, names=names), torch.bfloat16, META, longest)
    return made


def _on_triton(runner: Runner) -> None:
    runner.attention = TritonAttention(META, processors=PROCESSORS)


def target_functions(name: str, layers: int | None = None) -> dict[str, Function]:
    """`verify`, and what else runs between two verifications."""
    model = model_of(name, layers)
    runner = StaticRunner(model, 600, PAGE, attention="torch", most_rows=ROWS, longest=SHAPE.tokens)
    _on_triton(runner)
    step = runner.steps[SHAPE]
    step.logits = torch.empty(SHAPE.tokens, model.shape.vocab_size, dtype=torch.bfloat16, device=META)
    narrow = StaticRunner(model, 600, PAGE, attention="torch", most_rows=ROWS, longest=SHAPE.tokens, cache_dtype="fp8")
    _on_triton(narrow)
    reader = BoardReader(memory_file("capture", size_bytes(ROWS)), ROWS, model.shape.vocab_size)
    with kernels_in(Counts()):
        device = DeviceScheduler(runner, DeviceBoard(reader, META))
    return {
        "verify": Function(step._forward, model.shape.layers),
        "verify, FP8 cache": Function(narrow.steps[SHAPE]._forward, model.shape.layers),
        "draw": Function(step.draws[Drawing.WARM], 0),
        "filtered draw": Function(step.draws[Drawing.FILTERED], 0),
        "adjusted draw": Function(step.draws[Drawing.ADJUSTED], 0),
        "decide": Function(device._make_decision, 0),
        "note outcomes": Function(device._add_to_texts, 0),
        "build": Function(lambda: device._make_batch(step), 0),
    }


def draft_functions(name: str, layers: int | None = None) -> dict[str, Function]:
    """`tree step`, without noise, with it and with filters, and `next depth`, with noise."""
    model = model_of(name, layers)
    sizes = {"max_num_seqs": ROWS, "draft_num_pages": 600, "page_size": PAGE, "vocab_size": model.shape.vocab_size}
    settings = config(Speculation("ssd", 5, (3,), "jit"), max_model_len=LONGEST - MAX_LOOKAHEAD - 1, **sizes)
    runner = TreeRunner(model, settings, attention="torch", capture=False)
    _on_triton(runner)
    shape = next(shape for shape in runner._steps if shape.tokens >= 16)
    plain, warm, filtered = runner._steps[shape].ranked
    size = shape.tokens, 1 + MAX_FAN_OUT

    def next_depth() -> None:
        """A forward more in the same step: all that is launched between two of them, the second, and what keeps it."""
        warm.ids = torch.empty(size, dtype=torch.int64, device=META)
        warm.scores = torch.empty(size, device=META)
        warm.hidden = torch.empty(shape.tokens, CONFIGS[name]["hidden_size"], dtype=torch.bfloat16, device=META)
        warm.go_on(1, warm._compute)

    return {
        "tree step": Function(plain._compute, model.shape.layers),
        "warm tree step": Function(warm._compute, model.shape.layers),
        "filtered tree step": Function(filtered._compute, model.shape.layers),
        "next depth": Function(next_depth, model.shape.layers),
    }


@cache
def functions(name: str, layers: int | None = None) -> dict[str, Function]:
    """All functions of a model, as target and as draft; a head is a draft alone."""
    of_target = {} if CONFIGS[name]["model_type"] == HEAD else target_functions(name, layers)
    return of_target | draft_functions(name, layers)
