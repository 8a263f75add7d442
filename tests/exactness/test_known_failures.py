"""Failures of other engines, tried on ours (docs/known-failures.md): a slot's next request, long penalties, the end of
thoughts inside a speculation."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Reference
from torch import Tensor

from ssd.config.engine import EngineConfig, ServerConfig
from ssd.config.params import Mode, SamplingParams, Speculation, Structured
from ssd.draft.chain_scheduler import ChainScheduler
from ssd.draft.chances import Chances
from ssd.execution.batch import Row
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.runner import Runner
from ssd.frontend.detokenization import Vocabulary
from ssd.frontend.parsers.answer import AnswerFormat, joined
from ssd.frontend.parsers.reasoning import Thought
from ssd.frontend.tokenization import Tokenizer
from ssd.grammar.source import serialized
from ssd.ipc.messages import Submit
from ssd.law import Law
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.speculation.noise import NoiseCache
from ssd.speculation.sampling import argmax, perturbed
from ssd.tuning.tuner import Tuning
from ssd.verifier.engine import TargetEngine
from ssd.verifier.misses import MissCosts
from ssd.verifier.proposer import Proposer
from ssd.verifier.sequence import Sequence as Running
from ssd.verifier.suffix_memory import SuffixMemory
from ssd.verifier.verification import PlainVerification, VerifiedBatch
from tests.draft.pair import PAGE_SIZE, Clock, Draft, Pair, config, params, use_clock
from tests.exactness.plain import Plain
from tests.exactness.test_grammar import ENDS, PERSON, VOCABULARY
from tests.exactness.test_grammar import World as GrammarWorld
from tests.exactness.test_grammar import expected as plainly_obeying
from tests.models import tiny

DRAFTED: tuple[Mode, ...] = ("ngram", "sd", "ssd", "auto")
LONGEST = 1200


@dataclass(frozen=True)
class World:
    """A target of a long context, a draft that agrees with it now and then, and the target once more as a draft."""

    words: int
    target: Runner
    draft: Runner
    twin: Runner

    def pair(self, mode: str, twin: bool = False, memory: SuffixMemory | None = None) -> Pair:
        sizes = {
            "max_model_len": LONGEST,
            "num_pages": 700,
            "draft_num_pages": 700,
            "max_num_seqs": 1,
            "vocab_size": self.words,
        }
        settings = config(speculation(mode), **sizes)
        draft = None if mode == "ar" else Draft(settings, self.twin if twin else self.draft)
        return Pair(settings, self.target, draft, memory=memory)


def speculation(mode: str) -> Speculation:
    """`joint` is `ssd` without a list of fan-outs."""
    kinds = {"auto": Speculation(), "joint": Speculation("ssd", 4, (), "jit", budget=12)}
    return kinds.get(mode) or Speculation(mode, 4, (3,), "jit")  # type: ignore[arg-type]


def world_of(folder: Path, words: int) -> World:
    target = tiny.llama(folder / "target", seed=3, vocab_size=words, max_position_embeddings=LONGEST)
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)

    def runner(directory: Path) -> Runner:
        model = registry.load(inspect(directory), torch.float64, torch.device("cpu"), LONGEST)
        return Runner(model, 700, PAGE_SIZE)

    return World(words, runner(target), runner(draft), runner(target))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its texts go on meeting new words."""
    return world_of(tmp_path_factory.mktemp("world"), 1500)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Its texts repeat themselves."""
    return world_of(tmp_path_factory.mktemp("small"), 24)


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> list[tuple[list[int], int]]:
    """The draft tokens of each verified row, and how many of them were accepted."""
    seen, verify = list[tuple[list[int], int]](), PlainVerification.verify

    def watched(self: PlainVerification, *given: Any) -> VerifiedBatch:
        found = verify(self, *given)
        rows = zip(found.batch, found.outcomes, strict=True)
        seen.extend((list(part.draft), outcome.accepted) for part, outcome in rows)
        return found

    monkeypatch.setattr(PlainVerification, "verify", watched)
    return seen


# -- the next request in a slot ---------------------------------------------------------------------------------------


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing is decided by times, nor by how often the draft was right before, so that two runs decide alike. Mode
    `auto` alone does."""
    follow = Tuning.current

    def current(self: Tuning, asked: Speculation, kind: int = 0) -> Speculation:
        return follow(self, asked, kind) if asked.mode == "auto" else asked

    monkeypatch.setattr(Tuning, "current", current)
    monkeypatch.setattr(ChainScheduler, "note_step", lambda self, chains, seconds: None)
    monkeypatch.setattr(Chances, "learn", lambda self, node, token: None)
    monkeypatch.setattr(MissCosts, "depths", lambda self, rows, otherwise=1.0: {s.request: s.lookahead for s in rows})
    use_clock(Clock())
    yield
    use_clock(time)


@pytest.mark.usefixtures("clock")
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", [*DRAFTED, "joint"])
def test_a_short_request_after_a_long_one_sees_nothing_of_it(
    small: World, verified: list[tuple[list[int], int]], mode: str, temperature: float
) -> None:
    """There is one slot, and even the request's number is the same. The long text has all that the short ones say, with
    other tokens after it. Ids are those of `ar`, and every proposal is the one that an engine makes that has seen
    nothing else: of the text of an n-gram's own request, of board, tree, cells and pages."""
    motif = tiny.token_ids(6, 2, small.words)
    shorts = [[*motif[:4], *motif[:4]], [*motif, 5, *motif[:3]]]
    laws = params(1, 40, temperature)
    answers = [small.pair("ar").run([short], laws).ids[0] for short in shorts]
    long = [*answers[0], *motif, *answers[1][::-1], *motif[::-1], *answers[0][::-1]] * 4
    used = small.pair(mode)
    used.run([long], laws)
    for short, answer in zip(shorts, answers, strict=True):
        verified.clear()
        assert used.run([short], laws).ids == [answer]
        again = list(verified)
        verified.clear()
        fresh = small.pair(mode)
        assert fresh.run([short], laws).ids == [answer]
        if mode != "auto":  # whose tuner has learned what pays here
            assert again == verified
    if used.draft is not None:
        used.draft.assert_empty()


# -- penalties over a long answer -------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_thousand_tokens_under_a_repetition_penalty(
    world: World, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ids of every mode are those of `ar`, also where a memory proposes long runs that are all right. With draft =
    target, the draft's tokens are rejected exactly where the penalty changes the target's choice, in the first round as
    in the last: it knows no penalties, and nothing else is lost."""
    prompt, asked = tiny.token_ids(20, 1), params(1, 1000, temperature, repetition_penalty=1.3)
    expected = world.pair("ar").run([prompt], asked).ids
    for mode in DRAFTED:
        assert world.pair(mode).run([prompt], asked).ids == expected, mode
    with monkeypatch.context() as patch:
        patch.setattr(MissCosts, "pricing", lambda self: lambda more: 0.001 * more)
        remembering = world.pair("ngram", memory=SuffixMemory(2**20))
        for _ in range(2):
            again = remembering.run([prompt], asked)
            assert again.ids == expected
    assert again.metrics[0].accepted_tokens > 700
    texts = world.pair("sd", twin=True).run([prompt], asked)
    assert texts.ids == expected
    text = [*prompt, *expected[0]]
    context = Runner(world.twin.model, 400, PAGE_SIZE)
    logits = context.forward([Row(text, 0, range(400), len(text))])
    # What the draft says after each token: the sample without the penalty.
    plain = params(1, 1, temperature)[0]
    same = _agreeing(logits, text, plain)
    accepted, rounds, at = 0, 0, len(prompt) + 1
    while at < len(text):
        most = min(4, len(text) - at - 1)
        taken = next((n for n in range(most) if not same[at + n]), most)
        accepted, rounds, at = accepted + taken, rounds + 1, at + taken + 1
    assert (texts.metrics[0].rounds, texts.metrics[0].accepted_tokens) == (rounds, accepted)
    assert accepted > 40 and not all(same)


def _agreeing(logits: Tensor, text: Sequence[int], plain: SamplingParams) -> list[bool]:
    """For each position, if the unpenalised sample there is the text's token."""
    assert plain.seed is not None
    law = Law(plain.temperature, seed=plain.seed)
    own = argmax(perturbed(logits[:-1], law, range(1, len(text)), NoiseCache(logits.shape[1])))
    return [False] + [token == said for token, said in zip(own, text[1:], strict=True)]


# -- thoughts, then a schema ------------------------------------------------------------------------------------------

THINK, CLOSE = "<think>", "</think>"


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> GrammarWorld:
    """A tiny world with `<think>` and `</think>` as tokens; its models like to end their thoughts."""
    folder = tmp_path_factory.mktemp("thinking")
    target = tiny.tokenizer(tiny.llama(folder / "target", seed=3, vocab_size=VOCABULARY))
    tiny.edit(target, eos_token_id=sorted(ENDS))
    tokenizer = Reference.from_file(str(target / "tokenizer.json"))
    tokenizer.add_special_tokens([THINK, CLOSE])
    tokenizer.save(str(target / "tokenizer.json"))
    tensors = load_file(target / "model.safetensors")
    name = next(name for name in ("lm_head.weight", "model.embed_tokens.weight") if name in tensors)
    tensors[name][tokenizer.token_to_id(CLOSE)] *= 3.0
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    runners = [tiny.runner(each, torch.float64, pages=1024) for each in (target, draft, target)]
    return GrammarWorld(target, Plain(target), *runners)


@dataclass(frozen=True)
class Asking:
    """Requests whose prompts end with `<think>`, what `ar` answers, and ids of `</think>` and of how JSON begins."""

    format: AnswerFormat
    vocabulary: Vocabulary
    prompts: list[list[int]]
    params: list[SamplingParams]
    answers: list[list[int]]
    close: int
    begins: list[int]

    def check(self, prompt: list[int], ids: Sequence[int]) -> None:
        """The frontend finds thoughts and an answer that obeys the schema."""
        shown = self.format.special(None)
        written = [self.vocabulary.piece_bytes(token) for token in ids if token in shown or token not in ENDS]
        text, parser = b"".join(written).decode(errors="replace"), self.format.parser(None, {}, prompt)
        answer = joined([*(parser.feed(text[at : at + 3]) for at in range(0, len(text), 3)), parser.finish("")])
        assert isinstance(answer.pieces[0], Thought) and not answer.calls
        jsonschema.validate(json.loads(answer.content), PERSON)


def asking(thinking: GrammarWorld, temperature: float) -> Asking:
    """What the frontend makes of a schema for a model that thinks: one grammar of thoughts and answer. The requests are
    those of twelve whose thoughts are not empty and end."""
    tokenizer = Tokenizer(thinking.directory)
    vocabulary = tokenizer.vocabulary()
    format = AnswerFormat(ServerConfig(names=("tiny",), reasoning_parser="think"), vocabulary)
    (opening,), (close,) = format.ids(THINK), format.ids(CLOSE)
    prompts = [[*tiny.token_ids(5 + 3 * n, n, 300), opening] for n in range(12)]
    source = serialized(Structured("json", json.dumps(PERSON)), format.thoughts(prompts[0], None))
    laws = params(12, 100, temperature, structured=Structured("compiled", source))
    plain = Pair(thinking_settings(thinking, "ar"), thinking.target, stops=ENDS).run(prompts, laws).ids
    chosen = [n for n, ids in enumerate(plain) if close in ids[3:] and ENDS & set(ids)]
    assert len(chosen) > 2
    return Asking(
        format,
        vocabulary,
        [prompts[n] for n in chosen],
        [laws[n] for n in chosen],
        [plain[n] for n in chosen],
        close,
        tokenizer.encode('{"name": "'),
    )


def thinking_settings(thinking: GrammarWorld, mode: Mode) -> EngineConfig:
    fields = {"num_pages": 1024, "draft_num_pages": 1024, "vocab_size": VOCABULARY, "target": str(thinking.directory)}
    return config(Speculation() if mode == "auto" else Speculation(mode, 8, (3,), "jit"), **fields)


def crossings(verified: Sequence[tuple[list[int], int]], close: int) -> int:
    """How many verified rows have `</think>` and tokens after it, all accepted at least one token beyond it."""
    return sum(close in drafted and accepted > drafted.index(close) + 1 for drafted, accepted in verified)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("mode", ["ar", *DRAFTED])
def test_a_schema_begins_after_thoughts_that_end_inside_a_speculation(
    thinking: GrammarWorld,
    verified: list[tuple[list[int], int]],
    mode: Mode,
    temperature: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a draft, with draft = target, and with a memory of the same answers: `</think>` and the first tokens of JSON
    are proposed in one go."""
    monkeypatch.setattr(MissCosts, "pricing", lambda self: lambda more: 0.01 * more)
    asked = asking(thinking, temperature)
    prompts, expected = asked.prompts, asked.answers
    if mode == "ar":
        assert expected == [plainly_obeying(thinking, p, q) for p, q in zip(prompts, asked.params, strict=True)]
    for prompt, ids in zip(prompts, expected, strict=True):
        asked.check(prompt, ids)
    verified.clear()
    settings = thinking_settings(thinking, mode)
    if mode == "ar":
        return
    for draft, memory in ((thinking.draft, None), (thinking.twin, None), (thinking.draft, SuffixMemory(2**20))):
        verified.clear()
        pair = Pair(settings, thinking.target, Draft(settings, draft), stops=ENDS, memory=memory)
        for _ in range(2):
            assert pair.run(prompts, asked.params).ids == expected
        if memory is not None or (draft is thinking.twin and mode in ("sd", "ssd")):
            assert crossings(verified, asked.close)


class Boundary(Proposer):
    """Proposes what a draft may say at the end of thoughts. `texts` are the right ones, by request."""

    def __init__(self, texts: Sequence[Sequence[int]], close: int, kind: str, begins: Sequence[int]) -> None:
        self._texts, self._close, self._kind, self._begins = texts, close, kind, list(begins)

    def settle(self, sequences: Sequence[Running], meanwhile: Task = nothing) -> float:
        for sequence in sequences:
            if sequence.round:
                sequence.proposal = self._proposal(sequence)[: sequence.acceptable][:8]
        return 0.0

    def _proposal(self, sequence: Running) -> list[int]:
        text, at, close = self._texts[sequence.request], len(sequence.tokens), self._close
        right = list(text[at : at + 8])
        if self._kind == "after the end":
            return [*right, max(ENDS), 70, close]
        if self._kind == "too early":
            return [close, *self._begins] if close not in sequence.tokens else right
        if close not in right or self._kind == "right":
            return right
        before = right[: right.index(close) + 1]
        return [*before, *{"a fence": [66, 66, 66], "closed twice": [close, *self._begins]}[self._kind]]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", ["right", "a fence", "closed twice", "too early", "after the end"])
def test_no_proposal_at_the_end_of_thoughts_changes_the_answer(
    thinking: GrammarWorld, verified: list[tuple[list[int], int]], kind: str, temperature: float
) -> None:
    """A draft that opens a code block after `</think>`, says it twice or too early, or goes on after the end."""
    asked = asking(thinking, temperature)
    settings, expected = thinking_settings(thinking, "sd"), asked.answers
    texts = [[*prompt, *ids] for prompt, ids in zip(asked.prompts, expected, strict=True)]
    verified.clear()
    engine = TargetEngine(
        settings, PlainVerification(thinking.target), Boundary(texts, asked.close, kind, asked.begins), ENDS
    )
    for request, (prompt, law) in enumerate(zip(asked.prompts, asked.params, strict=True)):
        engine.submit(Submit(request, prompt, law))
    found: list[list[int]] = [[] for _ in asked.prompts]
    while engine.busy:
        for emission in engine.step():
            assert emission.finish_reason in (None, "stop"), emission.error
            found[emission.request] += emission.token_ids
    assert found == expected
    for prompt, ids in zip(asked.prompts, found, strict=True):
        asked.check(prompt, ids)
    beyond = [(drafted, accepted) for drafted, accepted in verified if asked.close in drafted[:-1]]
    assert beyond
    if kind == "right":
        assert crossings(verified, asked.close)
    elif kind in ("a fence", "closed twice"):
        assert all(accepted <= drafted.index(asked.close) + 1 for drafted, accepted in beyond)
