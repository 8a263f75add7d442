"""Proposers that follow a script and tiny random models to run them against: what the target's tests are made of."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from functools import lru_cache, partial
from random import Random
from typing import Any

import torch
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import SamplingParams, Speculation
from ssd.execution.batch import Row
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.ipc.messages import DraftState, Submit
from ssd.ipc.public import Metrics, TokenLogprob
from ssd.kernels import cpu
from ssd.models.families.llama import Llama
from ssd.models.interface import ForwardContext, Model, Shape
from ssd.models.weights import Weights
from ssd.verifier.engine import TargetEngine
from ssd.verifier.proposer import Counters, Proposer, Result
from ssd.verifier.sequence import Sequence
from ssd.verifier.verification import PlainVerification

CPU = torch.device("cpu")
VOCAB = 64
LONGEST = 48  # tokens of a sequence, unless said otherwise
CONFIG: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


# -- models -----------------------------------------------------------------------------------------------------------


def exact() -> torch.dtype:
    """In which no batch swaps two logits: with our kernels and a deterministic runner a row has the same bits in all of
    them; in double precision no two logits are ever so near."""
    return torch.float32 if cpu.present(CPU) else torch.float64


def tiny_llama(dtype: torch.dtype | None = None, broken: int | None = None) -> Llama:
    """A random Llama in memory, `exact` by default. Large weights make its text vary. The embedding of the token
    `broken`, and so its keys and values, are not numbers."""
    return _tiny_llama(dtype or exact(), broken, cpu.present(CPU))


@lru_cache
def _tiny_llama(dtype: torch.dtype, broken: int | None, kernels: bool) -> Llama:
    """`kernels`: a test may do without ours, and a model is packed for them."""

    def read(name: str, shape: tuple[int, ...]) -> Tensor:
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        plain = torch.ones(shape) if name.endswith("norm.weight") else torch.randn(shape, generator=generator) * 0.2
        weight = plain.to(dtype)
        if broken is not None and "embed_tokens" in name:
            weight[broken] = torch.nan
        return weight

    return Llama(CONFIG, Weights(read), dtype, CPU, LONGEST)


class Wrapped:
    """A model that computes what another one computes."""

    def __init__(self, model: Model) -> None:
        self.shape: Shape = model.shape
        self.dtype, self.device = model.dtype, model.device
        self._model = model

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        return self._model.forward(token_ids, context)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._model.logits(hidden)


class Poisoned(Wrapped):
    """A model whose logits after the token `poison` are not numbers."""

    def __init__(self, model: Model, poison: int) -> None:
        super().__init__(model)
        self._poison = poison

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        return super().forward(token_ids, context).masked_fill((token_ids == self._poison)[:, None], torch.nan)


class BrokenOnce(Wrapped):
    """A model whose first forward leaves only NaN behind: in its result, and in the keys and values it stores."""

    _broken = True

    def forward(self, token_ids: Tensor, context: ForwardContext) -> Tensor:
        hidden = super().forward(token_ids, context)
        if not self._broken:
            return hidden
        self._broken = False
        heads = torch.full((len(token_ids), self.shape.heads, self.shape.head_dim), torch.nan, dtype=self.dtype)
        for layer in range(self.shape.layers):
            context.attend(layer, heads, *[heads[:, : self.shape.kv_heads]] * 2)
        return hidden * torch.nan


def make_engine(
    proposer: Proposer | None = None,
    *,
    model: Model | None = None,
    runner: Runner | None = None,
    page_size: int = 4,
    pages: int = 64,
    budget: int = 64,
    sequences: int = 8,
    longest: int = LONGEST,
    stops: frozenset[int] = frozenset(),
) -> TargetEngine:
    """A real engine over a tiny model. A slot of its cache that is read before it is written makes a NaN."""
    config = EngineConfig(
        target="tiny",
        draft="scripted",
        max_model_len=longest,
        max_num_seqs=sequences,
        max_num_batched_tokens=budget,
        page_size=page_size,
        num_pages=pages,
    )
    runner = runner or Runner(model or tiny_llama(), pages, page_size, deterministic=True)
    runner.cache.keys.fill_(torch.nan)
    runner.cache.values.fill_(torch.nan)
    return TargetEngine(config, PlainVerification(runner), proposer or Proposer(), stops)


def plain_logits(text: list[int], outputs: int) -> Tensor:
    """[outputs, VOCAB] of the last tokens of a text, in one forward that has never seen a scheduler."""
    return Runner(tiny_llama(), 16, 4, deterministic=True).forward([Row(text, 0, range(16), outputs)])


# -- runs -------------------------------------------------------------------------------------------------------------


@dataclass
class Answer:
    """All that a client was told about one request. `steps` are the engine's steps that told it something, `rounds` the
    drafted and accepted tokens and the cache of each."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprob] = field(default_factory=list)
    prompt_logprobs: list[TokenLogprob] | None = None
    rounds: list[tuple[int, int, str]] = field(default_factory=list)
    reason: str | None = None
    metrics: Metrics = field(default_factory=Metrics)
    steps: list[int] = field(default_factory=list)


def submit(request: int, prompt: Iterable[int], *, k: int = 4, **params: Any) -> Submit:
    """`logit_bias` may be pairs, which can be hashed."""
    speculation = Speculation(num_speculative_tokens=k, fan_out=(3,), backup="jit")
    given: dict[str, Any] = {"seed": 0, "speculation": speculation} | params
    given["logit_bias"] = dict(given.get("logit_bias", ()))
    return Submit(request, list(prompt), SamplingParams(**given))


def play(
    engine: TargetEngine,
    submits: Items[Submit],
    arrivals: Mapping[int, int] | None = None,
    aborts: Mapping[int, int] | None = None,
) -> dict[int, Answer]:
    """Run to the end. Requests arrive before step 0 or before the one that `arrivals` names; `aborts` likewise.

    Checks what must hold in every run: one end per request and nothing after it or after an abort, pages and computed
    lengths that are consistent, an end within as many steps as any schedule may take, and nothing left behind.
    """
    arrivals, aborts = arrivals or {}, aborts or {}
    answers: dict[int, Answer] = {}
    meanwhile: list[int] = []
    most = 50 + max([0, *arrivals.values()]) + 20 * sum(len(s.token_ids) + s.params.max_tokens for s in submits)
    for step in range(most):
        for request in (s for s in submits if arrivals.get(s.request, 0) == step):
            answers[request.request] = Answer()
            engine.submit(request)
        for aborted in (request for request, when in aborts.items() if when == step):
            if answers[aborted].reason is None:
                engine.abort(aborted)
                answers[aborted].reason = "aborted"
        for emission in engine.step(partial(meanwhile.append, step)):
            answer = answers[emission.request]
            assert answer.reason is None, "something was emitted after the end"
            answer.ids += emission.token_ids
            answer.logprobs += emission.logprobs or []
            if emission.prompt_logprobs is not None:
                assert not answer.steps, "log-probabilities of the prompt come first, and once"
                answer.prompt_logprobs = emission.prompt_logprobs
            answer.rounds.append((emission.drafted, emission.accepted, emission.cache))
            answer.reason = emission.finish_reason
            answer.metrics = emission.metrics or answer.metrics
            answer.steps.append(step)
        assert meanwhile == list(range(step + 1)), "what is to be done meanwhile is done once a step"
        engine.pool.check()
        assert all(s.computed <= len(s.tokens) for s in engine.scheduler.running)
        load = engine.load()
        assert (load.running, load.waiting) == (len(engine.scheduler.running), len(engine.scheduler.waiting))
        if len(answers) == len(submits) and all(answer.reason for answer in answers.values()):
            break
    assert not engine.busy and all(answer.reason for answer in answers.values()), f"not done after {most} steps"
    assert engine.pool.live == 0 and engine.pool.available == engine.pool.count
    return answers


@lru_cache(maxsize=4096)
def continuation(prompt: tuple[int, ...], law: tuple[tuple[str, Any], ...], longest: int = LONGEST) -> list[int]:
    """What plain decoding of a request alone writes up to `longest` tokens in all, in one chunk and with room."""
    alone = submit(0, prompt, **dict(law) | {"max_tokens": longest, "ignore_eos": True})
    return play(make_engine(longest=longest), [alone])[0].ids


# -- requests --------------------------------------------------------------------------------------------------------

LAWS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 1.0, "seed": 2, "top_k": 8},
    {"temperature": 1.3, "seed": 3, "top_p": 0.8},
    {"temperature": 0.9, "seed": 2**63 - 1, "min_p": 0.1},
    {"temperature": 1.1, "seed": 5, "top_k": 20, "top_p": 0.95, "min_p": 0.02},
]
SAMPLED = LAWS[5]
# What depends on the text so far, and differs along a verification.
ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.4},
    {"presence_penalty": 0.9, "frequency_penalty": 0.6, "temperature": 0.7, "seed": 1},
    {"repetition_penalty": 0.8, "frequency_penalty": -0.5, "logit_bias": ((3, 2.0), (41, -100.0), (17, 1.5))},
    {"repetition_penalty": 1.2, "presence_penalty": -1.0, "logit_bias": ((9, 1.0),), "temperature": 1.1, "top_p": 0.9},
]
RANDOM = torch.randint(VOCAB, (60,), generator=torch.Generator().manual_seed(0)).tolist()
TEXTS = [RANDOM[:20], RANDOM[:8] + RANDOM[20:32], RANDOM[40:60]]  # two begin alike


def truth(prompt: Items[int], law: dict[str, Any], longest: int = LONGEST) -> list[int]:
    return continuation(tuple(prompt), tuple(law.items()), longest)


# -- proposers --------------------------------------------------------------------------------------------------------

Script = Callable[[list[int], list[int], Random], list[int]]
"""(the right tokens, another sequence's tokens, dice) -> the proposal; both are as long as a proposal may be."""


def _adversarial(right: list[int], other: list[int], dice: Random) -> list[int]:
    """Right, then wrong at one position, then right again as if nothing had happened."""
    wrong = dice.randrange(len(right))
    return [token if i != wrong else (token + 1) % VOCAB for i, token in enumerate(right)]


SCRIPTS: dict[str, Script] = {
    "right": lambda right, other, dice: right,
    "wrong": lambda right, other, dice: [(token + 1) % VOCAB for token in right],
    "adversarial": _adversarial,
    "partial": lambda right, other, dice: right[: dice.randint(0, len(right))],
    "absent": lambda right, other, dice: [],
    "garbage": lambda right, other, dice: [dice.randrange(VOCAB) for _ in range(dice.randint(0, len(right)))],
    "stale": lambda right, other, dice: other,
    "changing": lambda *given: SCRIPTS[given[2].choice(("right", "adversarial", "partial", "garbage", "stale"))](
        *given
    ),
}
TIMINGS = ("at once", "late", "either", "eager")


class ScriptedProposer:
    """See `ssd.verifier.proposer.Proposer`. Knows the `texts` (prompt and all that follows) of every request.

    `scripts` names the behaviour by request. Proposals come with the outcome ("at once"), just before the next launch
    ("late"), at one or the other or not at all ("either"), or "eager": late, and even before the prefill is done.
    It checks that the engine keeps its side: every sequence is admitted, then heard of, then released, in this order.
    """

    state: DraftState = "up"
    counters = Counters()
    plan = ""

    def __init__(
        self, texts: Mapping[int, Items[int]], scripts: Mapping[int, str], timing: str = "at once", seed: int = 0
    ) -> None:
        self._texts, self._scripts, self._timing, self._dice = texts, scripts, timing, Random(seed)
        self._known: set[int] = set()
        self.admissions: Counter[int] = Counter()

    def admit(self, sequence: Sequence) -> None:
        assert sequence.request not in self._known and not sequence.proposal
        self._known.add(sequence.request)
        self.admissions[sequence.request] += 1

    def outcomes(self, results: Items[Result]) -> None:
        for result in results:
            sequence, outcome = result.sequence, result.outcome
            assert sequence.request in self._known and not sequence.proposal
            assert sequence.tokens[-1] == outcome.token and len(sequence.tokens) == result.base + outcome.accepted + 1
            if self._timing == "at once" or (self._timing == "either" and self._dice.random() < 0.5):
                self._propose(sequence)

    def settle(self, sequences: Items[Sequence], meanwhile: Task = nothing) -> float:
        assert {sequence.request for sequence in sequences} == self._known
        for sequence in sequences:
            late = self._timing == "late" or (self._timing == "either" and self._dice.random() < 0.5)
            if (late and sequence.round > 0) or self._timing == "eager":
                self._propose(sequence)
        return 0.0

    def replan(self) -> None:
        pass

    def release(self, sequences: Items[Sequence]) -> None:
        self._known -= {sequence.request for sequence in sequences}

    def _propose(self, sequence: Sequence) -> None:
        others = sorted(set(self._texts) - {sequence.request}) or [sequence.request]
        right, other = (
            self._after(self._texts[request], len(sequence.tokens), sequence.lookahead)
            for request in (sequence.request, self._dice.choice(others))
        )
        if right:
            sequence.proposal = SCRIPTS[self._scripts[sequence.request]](right, other, self._dice)

    def _after(self, text: Items[int], start: int, count: int) -> list[int]:
        """`count` tokens of a text; where it has ended, any."""
        found = list(text[start : start + count])
        return found + [self._dice.randrange(VOCAB) for _ in range(count - len(found))]
