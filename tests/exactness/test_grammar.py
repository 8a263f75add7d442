"""Structured output in every mode against a plain forward and a fresh matcher for each token."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLMatcher, LLTokenizer
from scipy import stats
from tokenizers import Tokenizer
from torch import Tensor

from ssd.config.params import Mode, SamplingParams, Speculation, Structured
from ssd.draft.engine import DraftEngine
from ssd.execution.runner import Runner
from ssd.grammar.background import BackgroundCompiler
from ssd.grammar.matcher import Grammar
from ssd.grammar.source import serialized
from ssd.ipc.messages import Submit
from ssd.law import Law
from ssd.speculation.sampling import probabilities
from tests.draft.pair import Draft, Pair, Texts, config
from tests.exactness.plain import Plain, adjust_by
from tests.models import tiny
from tools.schemas.making import fault, schemas

MODES: tuple[Mode, ...] = ("ar", "ngram", "sd", "ssd")
VOCABULARY, PAGES, ENDS = 340, 1024, frozenset({0, 2})  # the tokenizer has 300 tokens
PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 5},
        "kind": {"enum": ["alpha", "beta", "alphabet"]},
        "ages": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99}, "maxItems": 3},
    },
    "required": ["name", "kind", "ages"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_pattern": " "},
}
SCHEMA = Structured("json", json.dumps(PERSON))
ASKED = {
    "schema": SCHEMA,
    "regex": Structured("regex", "(foo|bar){1,9}-[0-9]{2,4}"),
    "choice": Structured("choice", '["positive", "negative", "neither \\"nor\\""]'),
    "lark": Structured("grammar", 'start: GREETING ", " NAME\nGREETING: "hi" | "hello"\nNAME: /[A-Z][a-z]{1,6}/'),
    "gbnf": Structured("grammar", 'root ::= ("a" | "b"){2,5} "!"'),
}
LAWS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "T .8": {"temperature": 0.8},
    "filters": {"temperature": 1.2, "top_k": 30, "top_p": 0.9, "min_p": 0.01},
    "penalties": {
        "temperature": 0.8,
        "repetition_penalty": 1.3,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
        "logit_bias": {60: 3.0, 5: -100.0},
        "min_tokens": 30,
    },
}


@dataclass(frozen=True)
class World:
    """A target, a draft that agrees with it now and then, and the plain forward of the target."""

    directory: Path
    plain: Plain
    target: Runner
    draft: Runner
    twin: Runner

    def pair(self, speculation: Speculation, twin: bool = False, **fields: Any) -> Pair:
        """`twin`: the draft is the target's own model."""
        sizes = {"num_pages": PAGES, "draft_num_pages": PAGES, "vocab_size": VOCABULARY}
        settings = config(speculation, **sizes | {"target": str(self.directory)} | fields)
        draft = None if speculation.mode == "ar" else Draft(settings, self.twin if twin else self.draft)
        return Pair(settings, self.target, draft, stops=ENDS)

    def text(self, ids: Sequence[int]) -> str:
        return str(_tokenizer(self.directory).decode(list(ids), skip_special_tokens=True))


@cache
def _tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@cache
def _matcher(directory: Path, asked: Structured) -> LLMatcher:
    text = (directory / "tokenizer.json").read_text()
    return LLMatcher(LLTokenizer(text, n_vocab=VOCABULARY, eos_token=sorted(ENDS)), serialized(asked))


def possible(directory: Path, asked: Structured, output: Sequence[int]) -> Tensor:
    """What a matcher that has read the output, and nothing else, allows: bool [VOCABULARY]."""
    matcher = _matcher(directory, asked).deep_copy()
    assert matcher.consume_tokens(list(output))
    bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
    return torch.from_numpy(np.unpackbits(bits, count=VOCABULARY, bitorder="little").astype(bool))


def possible_text(directory: Path, asked: Structured, output: Sequence[int]) -> bool:
    return _matcher(directory, asked).deep_copy().validate_tokens(list(output)) == len(output)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    folder = tmp_path_factory.mktemp("world")
    target = tiny.tokenizer(tiny.llama(folder / "target", seed=3, vocab_size=VOCABULARY))
    tiny.edit(target, eos_token_id=sorted(ENDS))
    draft = tiny.noisy_copy(target, folder / "draft", noise=0.03)
    runners = [tiny.runner(each, torch.float64, pages=PAGES) for each in (target, draft, target)]
    return World(target, Plain(target), *runners)


def expected(world: World, prompt: list[int], params: SamplingParams) -> list[int]:
    assert params.structured is not None and params.seed is not None
    law = Law(params.temperature, params.top_k, params.top_p, params.min_p, params.seed)
    others = adjust_by(params, len(prompt))
    output: list[int] = []

    def adjust(logits: Tensor, text: Sequence[int]) -> Tensor:
        assert params.structured is not None
        allowed = possible(world.directory, params.structured, output)
        early = len(output) < params.min_tokens and allowed.nonzero()[:, 0].tolist() != sorted(ENDS)
        if early:
            allowed[list(ENDS)] = False
        return others(logits, text).masked_fill(~allowed, -torch.inf)

    while len(output) < params.max_tokens and not ENDS & set(output):
        output.append(world.plain.next(prompt + output, law, adjust))
    return output


def requests(lengths: Sequence[int], **fields: Any) -> tuple[list[list[int]], list[SamplingParams]]:
    prompts = [tiny.token_ids(length, seed=7 * index, vocab_size=300) for index, length in enumerate(lengths)]
    return prompts, [SamplingParams(seed=index, **{"max_tokens": 100} | fields) for index in range(len(lengths))]


def check(world: World, texts: Texts, prompts: Sequence[list[int]], params: Sequence[SamplingParams]) -> None:
    assert texts.ids == [expected(world, p, q) for p, q in zip(prompts, params, strict=True)]
    for ids, asked in zip(texts.ids, params, strict=True):
        check_text(world.text(ids), asked.structured)


def check_text(text: str, asked: Structured | None) -> None:
    assert asked is not None
    if asked.kind == "json":
        jsonschema.validate(json.loads(text), json.loads(asked.source))
    elif asked.kind == "choice":
        assert text in json.loads(asked.source)
    else:
        patterns = [asked.source, "(hi|hello), [A-Z][a-z]{1,6}", "[ab]{2,5}!"]
        assert any(re.fullmatch(pattern, text) for pattern in patterns), text


@pytest.mark.parametrize("name", ASKED)
@pytest.mark.parametrize("law", LAWS)
def test_ids_are_those_of_the_plain_forward(world: World, name: str, law: str) -> None:
    prompts, params = requests((1, 17, 40), structured=ASKED[name], **LAWS[law])
    for mode in MODES:
        check(world, world.pair(Speculation(mode, 4, (3,), "jit")).run(prompts, params), prompts, params)


def test_schemas_of_all_kinds(world: World) -> None:
    """The first of those that `tools/schemas` asks a real engine for: each kind greedy and sampled. Answers that are
    not cut are valid."""
    made = schemas(22)
    prompts, params = requests(range(1, len(made) + 1), max_tokens=64)
    asked = [
        replace_params(each, structured=Structured("json", json.dumps(schema)), temperature=float(index % 2))
        for index, (each, schema) in enumerate(zip(params, made, strict=True))
    ]
    expected = world.pair(Speculation("ar"), max_num_seqs=8).run(prompts, asked).ids
    whole = [(schema, world.text(ids)) for schema, ids in zip(made, expected, strict=True) if ENDS & set(ids)]
    assert len(whole) > 0.7 * len(made)
    assert [fault(*each) for each in whole] == [""] * len(whole)
    for mode in ("sd", "ssd"):
        assert world.pair(Speculation(mode, 4, (3,), "jit"), max_num_seqs=8).run(prompts, asked).ids == expected


@pytest.mark.parametrize("mode", MODES)
def test_a_batch_of_all_kinds_and_of_none(world: World, mode: Mode) -> None:
    """Rows with a grammar beside rows without one, in chunks, with log-probabilities."""
    prompts, params = requests((30, 3, 22, 20, 9, 12, 5, 8), temperature=0.8, max_tokens=60)
    kinds = [None, *ASKED.values()]
    mixed = [replace_params(p, structured=kinds[i % 6], logprobs=2, prompt_logprobs=0) for i, p in enumerate(params)]
    texts = world.pair(Speculation(mode, 4, (3,), "jit"), max_num_batched_tokens=16).run(prompts, mixed)
    alone = [world.pair(Speculation("ar")).run([p], [q]).ids[0] for p, q in zip(prompts, mixed, strict=True)]
    assert texts.ids == alone
    for ids, asked in zip(texts.ids, mixed, strict=True):
        if asked.structured is not None:
            check_text(world.text(ids), asked.structured)


def replace_params(params: SamplingParams, **fields: Any) -> SamplingParams:
    return SamplingParams(**{name: getattr(params, name) for name in params.__struct_fields__} | fields)


@pytest.mark.parametrize("mode", MODES)
def test_preemption(world: World, mode: Mode) -> None:
    prompts, params = requests((5, 9, 14, 3, 8, 11, 2, 6), structured=SCHEMA, temperature=0.8)
    texts = world.pair(Speculation(mode, 4, (3,), "jit"), num_pages=50, max_model_len=150).run(prompts, params)
    assert texts.preemptions > 2
    check(world, texts, prompts, params)


def test_only_requests_of_one_key_and_salt_share_a_compiled_grammar(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the target and in the draft: the time would tell who has used a schema."""
    given: list[Future[Grammar]] = []
    compile = BackgroundCompiler.compile

    def noting(compiler: BackgroundCompiler, *asked: Any) -> Future[Grammar]:
        given.append(compile(compiler, *asked))
        return given[-1]

    monkeypatch.setattr(BackgroundCompiler, "compile", noting)
    pair = world.pair(Speculation("ssd", 4, (3,), "jit"), max_num_seqs=8)
    scopes = [("", ""), ("ann", ""), ("", "ann"), ("ann", "ann"), ("bob", ""), ("", ""), ("ann", "")]
    for number, (owner, salt) in enumerate(scopes):
        params = SamplingParams(seed=1, max_tokens=8, structured=ASKED["choice"], cache_salt=salt)
        pair.engine.submit(Submit(number, [1, 2, 3], params, owner))
    while pair.engine.busy:
        pair.engine.step()
    assert len(given) == 2 * len(scopes)
    assert len(set(given)) == 2 * len(set(scopes))


def test_a_draft_that_is_lost_changes_nothing(world: World) -> None:
    """The draft begins anew, knowing nothing, every fifth step."""
    prompts, params = requests((5, 9, 14), structured=SCHEMA, temperature=0.8)
    pair = world.pair(Speculation("ssd", 4, (3,), "jit"))
    steps = 0

    def lose() -> None:
        nonlocal steps
        steps += 1
        if steps % 5 == 0 and pair.draft is not None:
            pair.draft.restart()
            pair.proposer.session.join(pair.draft.epoch)

    pair.between_steps = lose
    check(world, pair.run(prompts, params), prompts, params)


@pytest.mark.parametrize("mode", ["sd", pytest.param("ssd", marks=pytest.mark.thorough)])
def test_the_ratio_rule_keeps_the_distribution(world: World, mode: Mode) -> None:
    """Chi-square of which choice is made, against the exact probabilities of the three."""
    asked, prompt, count = ASKED["choice"], tiny.token_ids(9, 9, vocab_size=300), 480
    law = Law(temperature=2.0)
    exact: Counter[str] = Counter()
    open_texts: dict[tuple[int, ...], float] = {(): 1.0}
    while open_texts:
        output, weight = open_texts.popitem()
        logits = world.plain.logits([*prompt, *output])[-1:]
        p = probabilities(logits.masked_fill(~possible(world.directory, asked, output), -torch.inf), law)[0]
        for token in p.nonzero()[:, 0].tolist():
            if token in ENDS:
                exact[world.text(output)] += weight * float(p[token])
            else:
                open_texts[(*output, token)] = weight * float(p[token])
    assert sum(exact.values()) == pytest.approx(1, abs=1e-5)
    pair = world.pair(Speculation(mode, 2, (2,), "jit", sampler="rejection"), max_num_seqs=32)
    found: Counter[str] = Counter()
    for first in range(0, count, 32):
        params = [SamplingParams(temperature=2.0, seed=first + i, max_tokens=40, structured=asked) for i in range(32)]
        found.update(world.text(ids) for ids in pair.run([prompt] * 32, params).ids)
    assert set(found) <= set(exact)
    likely = [text for text in exact if exact[text] * count > 5]
    rest = count - sum(found[text] for text in likely)
    observed = [*(found[text] for text in likely), rest]
    wanted = [*(exact[text] * count for text in likely), count * (1 - sum(exact[text] for text in likely))]
    pairs = [(o, w) for o, w in zip(observed, wanted, strict=True) if w > 1e-3]
    scale = count / sum(w for _, w in pairs)
    assert len(likely) > 1
    assert stats.chisquare([o for o, _ in pairs], [w * scale for _, w in pairs]).pvalue > 1e-3


@pytest.mark.parametrize("mode", ["sd", "ssd"])
@pytest.mark.parametrize("sampler", ["coupled", "rejection"])
@pytest.mark.parametrize("name", ASKED)
def test_a_draft_that_is_the_target_is_always_right(world: World, mode: Mode, sampler: str, name: str) -> None:
    """It knows the grammar: trunk, chains and their candidates. No one copies from the text."""
    prompts, params = requests((1, 17, 40), structured=ASKED[name], temperature=0.8)
    pair = world.pair(Speculation(mode, 4, (3,), "jit", sampler=sampler), twin=True)  # type: ignore[arg-type]
    pair.run(prompts, params)  # the grammar is compiled in the first one
    for metrics in pair.run(prompts, params).metrics:
        assert metrics.accepted_tokens == metrics.drafted_tokens > 0


def test_what_a_grammar_forces_costs_no_round_of_its_own(world: World) -> None:
    """Mode `ngram`, without a draft: forced tokens are proposed and accepted, many a round."""
    asked = Structured("regex", "[ab]-the only way to go on-[cd]")
    prompts, params = requests((5, 17), structured=asked)
    texts = world.pair(Speculation("ngram", 4, (3,), "jit")).run(prompts, params)
    assert texts.ids == [expected(world, p, q) for p, q in zip(prompts, params, strict=True)]
    for ids, metrics in zip(texts.ids, texts.metrics, strict=True):
        assert metrics.accepted_tokens == metrics.drafted_tokens
        assert metrics.accepted_by_source == {"grammar": metrics.accepted_tokens}
        assert len(ids) > 10 and metrics.rounds < len(ids) / 2


def test_no_outcome_is_prepared_that_the_grammar_forbids(world: World) -> None:
    asked = ASKED["schema"]
    prompts, params = requests((5, 17), structured=asked, temperature=0.8)
    pair = world.pair(Speculation("ssd", 4, fan_out=(), backup="jit"))
    pair.run(prompts, params)
    assert pair.draft is not None
    seen = 0

    def watch(engine: DraftEngine) -> None:
        nonlocal seen
        for tree in engine.trees.values():
            length = len(prompts[tree.request])
            for chain in tree.chains:
                text = [*tree.tokens[length:], *tree.trunk[: chain.fork]]
                if not ENDS & set(text) and possible_text(world.directory, asked, text):
                    seen += 1
                    assert possible(world.directory, asked, text)[chain.tokens[0]]

    pair.draft.watch = watch
    check(world, pair.run(prompts, params), prompts, params)
    assert seen > 100


def test_what_cannot_be_compiled_ends_its_request_alone(world: World) -> None:
    prompts, params = requests((5, 9), temperature=0.8, max_tokens=8)
    bad = replace_params(params[0], structured=Structured("compiled", "start: nothing"))
    pair = world.pair(Speculation("ar"))
    pair.engine.submit(Submit(0, prompts[0], bad))
    pair.engine.submit(Submit(1, prompts[1], params[1]))
    ends = {}
    while pair.engine.busy:
        ends |= {e.request: (e.finish_reason, e.error) for e in pair.engine.step() if e.finish_reason}
    assert ends[0][0] == "error" and "nothing" in ends[0][1]
    assert ends[1] == ("length", "")


def test_a_grammar_and_allowed_ids_that_exclude_each_other_end_their_request(world: World) -> None:
    prompts, params = requests((5,), structured=SCHEMA, allowed_token_ids=(100, 101))
    pair = world.pair(Speculation("ar"))
    pair.engine.submit(Submit(0, prompts[0], params[0]))
    ends = []
    while pair.engine.busy:
        ends += [(e.finish_reason, e.error) for e in pair.engine.step()]
    ((reason, error),) = ends
    assert reason == "error" and "allowed_token_ids" in error


def test_an_abort_while_it_is_compiled(world: World) -> None:
    prompts, params = requests((5,), structured=SCHEMA)
    pair = world.pair(Speculation("ar"))
    pair.engine.submit(Submit(0, prompts[0], params[0]))
    assert pair.engine.busy and pair.engine.load().waiting == 1
    pair.engine.abort(0)
    assert not pair.engine.busy and pair.engine.step() == []
