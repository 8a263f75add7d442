"""Embeddings of every family are transformers' last hidden states, pooled; and those of the built-in target."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ssd.client import Client
from ssd.config.params import Pooling, SamplingParams, Speculation
from ssd.execution.runner import Runner
from ssd.ipc.messages import Submit
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.launch.supervisor import Engine
from ssd.models.pull import BUILTIN
from ssd.verifier.engine import TargetEngine
from ssd.verifier.proposer import Proposer
from ssd.verifier.verification import PlainVerification
from tests.draft.pair import config
from tests.models import tiny
from tests.models.knobs import FAMILIES, RECURRENT
from tests.ranks import split_runner

KINDS = {kind: (kind, knobs) for kind, knobs in reversed((FAMILIES | RECURRENT).values())}
PROMPTS = [tiny.token_ids(length, seed=7 * length) for length in (1, 5, 17, 40)]
POOLINGS: tuple[Pooling, ...] = ("mean", "last")
TEXTS = [
    "The sky is blue because",
    "Grass",
    "A long text about nothing at all. " * 60,
    "def add(a, b):\n    return a + b",
]


def pooled(runner: Runner, prompts: Sequence[list[int]], pooling: Pooling, budget: int = 512) -> list[bytes]:
    """The embeddings of all prompts, while another request decodes."""
    settings = config(Speculation("ar"), max_num_batched_tokens=budget)
    engine = TargetEngine(settings, PlainVerification(runner), Proposer(), state_slots=runner.state_slots)
    engine.submit(Submit(100, [1, 2, 3], SamplingParams(seed=0, max_tokens=60, ignore_eos=True)))
    for number, prompt in enumerate(prompts):
        engine.submit(Submit(number, prompt, SamplingParams(seed=0, max_tokens=1, pooling=pooling)))
    found: dict[int, bytes] = {}
    while engine.busy:
        found |= {emission.request: emission.embedding for emission in engine.step() if emission.embedding}
    return [found[number] for number in range(len(prompts))]


def numbers(raw: bytes) -> Tensor:
    return torch.tensor(array("f", raw))


@torch.inference_mode()
def truth(oracle: Any, prompt: list[int], pooling: Pooling) -> Tensor:
    states = oracle(torch.tensor([prompt]), use_cache=False, output_hidden_states=True).hidden_states[-1][0]
    return states.mean(dim=0) if pooling == "mean" else states[-1]


def check(found: Sequence[bytes], oracle: Any, pooling: Pooling) -> None:
    for raw, prompt in zip(found, PROMPTS, strict=True):
        torch.testing.assert_close(numbers(raw), truth(oracle, prompt, pooling), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_of_transformers(kind: str, tmp_path: Path) -> None:
    check_kind(*KINDS[kind], tmp_path)


def check_kind(name: str, knobs: dict[str, Any], folder: Path, promised: bool = True) -> None:
    """See that a model's vectors are those of transformers, and if `promised` to the bit however they are computed."""
    directory = tiny.model(name, folder, seed=3, **knobs)
    runner, oracle = tiny.runner(directory, deterministic=True), tiny.oracle(directory)
    for pooling in POOLINGS:
        whole = pooled(runner, PROMPTS, pooling)
        check(whole, oracle, pooling)
        check(pooled(runner, PROMPTS, pooling, budget=11), oracle, pooling)
        if promised:
            assert pooled(runner, PROMPTS, pooling, budget=11) == whole
            assert [pooled(runner, [prompt], pooling)[0] for prompt in PROMPTS] == whole


@pytest.mark.parametrize("static", [False, True])
def test_ranks(static: bool, tmp_path: Path) -> None:
    directory = tiny.llama(tmp_path, seed=3)
    oracle = tiny.oracle(directory)
    with split_runner(directory, 2, static=static) as runner:
        for pooling in POOLINGS:
            check(pooled(runner, PROMPTS, pooling, budget=11), oracle, pooling)


# -- the built-in pair, through all processes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    options = EngineOptions(max_num_seqs=4, max_num_batched_tokens=128, activations="int16")
    with Engine(resolve(options)) as engine:
        yield engine


def vectors(client: Client, texts: Sequence[str], pooling: Pooling) -> list[list[float]]:
    return [found.embedding for found in client.generate([*texts], SamplingParams(pooling=pooling))]


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_vector_has_the_same_bits_alone_and_beside_others(engine: Engine, pooling: Pooling) -> None:
    """Beside each other, and beside chats with a draft. The third text is read in several steps."""
    with ThreadPoolExecutor(1) as pool, Client(engine.address) as client, Client(engine.address) as other:
        alone = [vectors(client, [text], pooling)[0] for text in TEXTS]
        chats = pool.submit(other.generate, ["Say hello."] * 4, SamplingParams(max_tokens=60), chat=True)
        together = vectors(client, TEXTS * 8, pooling)
        chats.result()
    assert together == alone * 8


@pytest.mark.parametrize("pooling", POOLINGS)
def test_the_vectors_of_the_built_in_target(engine: Engine, pooling: Pooling) -> None:
    oracle = tiny.oracle(BUILTIN["smollm2"].directory)
    with Client(engine.address) as client:
        found = client.generate(TEXTS, SamplingParams(pooling=pooling))
    for completion in found:
        assert (completion.token_ids, completion.text, completion.finish_reason) == ([], "", "stop")
        expected = truth(oracle, completion.prompt_token_ids, pooling)
        likeness = torch.cosine_similarity(torch.tensor(completion.embedding), expected, dim=0)
        assert likeness > 0.9999
