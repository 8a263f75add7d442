"""The gpt-oss family: all modes of a whole engine, its stacks of experts, and its attention in transformers' model."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from ssd import LLM, SamplingParams
from ssd.config.params import Speculation
from ssd.errors import UsageError
from ssd.execution.batch import Row
from ssd.execution.runner import Runner
from ssd.models import fallback
from ssd.models.checkpoint import inspect
from tests.models import tiny
from tests.models.knobs import FAMILIES

KNOBS = FAMILIES["gpt_oss"][1]


def test_all_modes_give_the_ids_of_ar(tmp_path: Path) -> None:
    options = KNOBS | {"vocab_size": 300, "eos_token_id": 2}
    target = tiny.tokenizer(tiny.model("gpt_oss", tmp_path / "target", **options))
    draft = tiny.tokenizer(tiny.noisy_copy(target, tmp_path / "draft", noise=0.002))
    asked = SamplingParams(max_tokens=60, ignore_eos=True)
    modes = Speculation("ar"), Speculation("ngram", 3, (3,), "jit"), Speculation("sd", 3, (3,), "jit")
    with LLM(str(target), [str(draft)], dtype="float32") as llm:
        plain, *others, waiting, ahead = (
            llm.generate(["A tiny random checkpoint"], [msgspec.structs.replace(asked, speculation=speculation)])[0]
            for speculation in (*modes, Speculation("ssd", 3, (2,), "jit"))
        )
    assert len(plain.token_ids) == 60
    assert all(other.token_ids == plain.token_ids for other in (*others, waiting, ahead))
    assert waiting.metrics.mean_acceptance_length > 1


def test_transformers_own_model_attends_with_sinks(tmp_path: Path) -> None:
    """In the fallback, which other families with sinks go through."""
    directory, text = tiny.model("gpt_oss", tmp_path, **KNOBS), tiny.token_ids(50, 0)
    model = fallback.load(inspect(directory), torch.float32, tiny.CPU, tiny.MAX_POSITION, dummy=False)
    runner = Runner(model, 64, 4)
    logits = [runner.forward([Row(text[a:b], a, range(64), b - a)]) for a, b in ((0, 40), (40, 41), (41, 50))]
    assert (torch.cat(logits) - tiny.oracle_logits(tiny.oracle(directory), text)).abs().max() <= 1e-4


@pytest.mark.parametrize(
    ("name", "fault"), [("gate_up_proj", lambda stack: stack[:5]), ("down_proj_bias", lambda stack: stack[None])]
)
def test_a_stack_of_another_shape_is_refused(name: str, fault: object, tmp_path: Path) -> None:
    file = tiny.model("gpt_oss", tmp_path, **KNOBS) / "model.safetensors"
    tensors = load_file(file)
    wrong = f"model.layers.1.mlp.experts.{name}"
    assert callable(fault)
    save_file(tensors | {wrong: fault(tensors[wrong]).contiguous()}, file, metadata={"format": "pt"})
    with pytest.raises(UsageError, match=f"{wrong} of shape .* is not a stack of 6 experts"):
        inspect(tmp_path)
