"""Replays conversations to the engine's lookup, suffix memory and draft: tokens a round, by what guesses them.

No target runs. Its answers are recorded at temperature 0, or, in a file of messages, those of another model: then the
draft, which imitates the built-in target, is at a disadvantage. A round costs what `--verify` says."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import AutoTokenizer

from ssd import LLM, SamplingParams
from ssd.config.params import MAX_LOOKAHEAD, Speculation, Structured
from ssd.draft.engine import DraftEngine
from ssd.draft.process import load
from ssd.errors import UsageError
from ssd.execution.pages import PagePool, PageTable
from ssd.ipc.board import BoardWriter, size_bytes
from ssd.ipc.messages import Admit, Launch, Launched, Outcomes, Release, Submit, Verified
from ssd.ipc.process import memory_file
from ssd.ipc.public import Source
from ssd.launch.options import EngineOptions
from ssd.launch.resolve import resolve
from ssd.models.pull import BUILTIN
from ssd.speculation.prefix import common_prefix_length
from ssd.speculation.sampling import Law
from ssd.speculation.theory import LinearCost
from ssd.tuning.estimates import DecodingRound, DraftTelemetry, Estimates
from ssd.tuning.knowledge import Knowledge
from ssd.verifier.memory import SuffixMemory
from ssd.verifier.misses import Lookup, WaitCosts
from ssd.verifier.sequence import Sequence as Row
from tools.schemas.making import schemas

_MEMORY_BYTES = 64 * 2**20
SCHEMAS = "schemas"


class Trace(NamedTuple):
    """Ids of a prompt, and of the answer that it got."""

    prompt: list[int]
    answer: list[int]


class Recalled(NamedTuple):
    """Figures of a pass over a data set with some guessers: `accepted` tokens a round by source, speed over `ar`."""

    dataset: str
    turn: int
    guessers: str
    rounds: int
    tokens: float
    accepted: dict[Source, float]
    over_ar: float


@dataclass
class _Counts:
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    accepted: dict[Source, int] = field(default_factory=dict)


# -- traces ------------------------------------------------------------------------------------------------------------


def recorded(dataset: str, count: int, tokens: int) -> list[Trace]:
    """Return the first `count` conversations of a JSONL file, or of "schemas", answer by answer.

    A line has `messages` with answers, or a `prompt`, or `turns` of the user, which the built-in target answers. Raises
    UsageError for other lines."""
    if dataset == SCHEMAS:
        return _answers_by_schema(count, tokens)
    try:
        lines = [json.loads(line) for line in islice(Path(dataset).read_text().splitlines(), count)]
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read {dataset}: {error}") from None
    if all("messages" in line for line in lines):
        return [trace for line in lines for trace in _given(line["messages"])]
    if not all({"turns", "prompt"} & line.keys() for line in lines):
        raise UsageError(f"{dataset}: each line must have messages, or each turns or a prompt")
    with LLM(mode="ar") as llm:
        return [trace for line in lines for trace in _conversation(llm, line.get("turns") or [line["prompt"]], tokens)]


def _given(messages: Sequence[dict[str, Any]]) -> Iterator[Trace]:
    tokenizer = AutoTokenizer.from_pretrained(BUILTIN["smollm2"].directory)
    turns = [{"role": each["role"], "content": each["content"]} for each in messages]
    for index, turn in enumerate(turns):
        if turn["role"] == "assistant" and index:
            text = tokenizer.apply_chat_template(turns[:index], tokenize=False, add_generation_prompt=True)
            yield Trace(tokenizer(text)["input_ids"], tokenizer(turn["content"])["input_ids"])


def _conversation(llm: LLM, turns: Sequence[str], tokens: int) -> Iterator[Trace]:
    messages: list[dict[str, Any]] = []
    for turn in turns:
        messages.append({"role": "user", "content": turn})
        (completion,) = llm.chat([messages], SamplingParams(max_tokens=tokens))
        messages.append({"role": "assistant", "content": completion.text})
        yield Trace(completion.prompt_token_ids, completion.token_ids)


def _answers_by_schema(count: int, tokens: int) -> list[Trace]:
    found = []
    with LLM(mode="ar") as llm:
        for schema in schemas(count):
            asked = f"Call the tool. Its arguments are JSON that obeys this schema:\n{json.dumps(schema)}"
            params = SamplingParams(max_tokens=tokens, structured=Structured("json", json.dumps(schema)))
            (completion,) = llm.generate([asked], params, chat=True)
            found.append(Trace(completion.prompt_token_ids, completion.token_ids))
    return found


# -- the replay --------------------------------------------------------------------------------------------------------


class _Draft:
    """The built-in draft in this process, which is told of one sequence and works as long as it can in each round."""

    def __init__(self, lookahead: int) -> None:
        config = resolve(EngineOptions(num_speculative_tokens=lookahead, max_num_seqs=1))
        descriptor = memory_file("board", size_bytes(1))
        self.speculation = Speculation("ssd", lookahead)
        self._engine = DraftEngine(config, load(config), BoardWriter(descriptor, 1), 1, config.vocab_size)
        self._request, self._proposed, self.longest = -1, 0, config.max_model_len - MAX_LOOKAHEAD

    def begin(self, row: Row) -> None:
        if self._request in self._engine.trees:
            self._engine.handle(Release([self._request]))
        self._request = row.request
        self._engine.handle(Admit(row.request, 0, 0, list(row.tokens), *Law(), self.speculation))

    def outcome(self, accepted: int, token: int) -> list[int]:
        """Tell the draft an outcome; return its tokens for the next round, which it has not launched yet."""
        tree = self._engine.trees[self._request]
        self._work()
        self._engine.handle(Outcomes([Verified(self._request, tree.round, accepted, token, None)]))
        self._work()
        return tree.trunk[: tree.lookahead]

    def launch(self, own: Sequence[int], drafted: int) -> None:
        """Say that the target verifies its `own` tokens; without any, `drafted` tokens of the draft."""
        tree = self._engine.trees[self._request]
        self._engine.handle(Launched([Launch(self._request, tree.round, len(own) or drafted, list(own))]))

    def _work(self) -> None:
        while self._engine.step():
            pass


class Replay:
    """One engine's guessers, which keep what they learn from one trace to the next."""

    def __init__(self, verify: LinearCost, memory: bool, draft: _Draft | None = None) -> None:
        estimates, self._verify = Estimates(), verify
        estimates.recall(Knowledge(tables={"verify": {n: verify.at(n) for n in range(1, MAX_LOOKAHEAD + 2)}}))
        self._costs, self._lookup, self._draft = WaitCosts(estimates), Lookup(), draft
        self._memory = SuffixMemory(_MEMORY_BYTES) if memory else None
        self._requests = 0

    def run(self, traces: Sequence[Trace]) -> _Counts:
        counts = _Counts()
        for trace in traces:
            self._play(trace, counts)
        return counts

    def _play(self, trace: Trace, counts: _Counts) -> None:
        self._requests += 1
        asked, truth = Speculation("ngram"), [*trace.prompt, *trace.answer]
        params = SamplingParams(max_tokens=len(trace.answer), seed=0)
        submit = Submit(self._requests, trace.prompt, params)
        row = Row(submit, asked, len(truth) + 1, PageTable(PagePool(1, 16)), 0.0)
        draft = self._draft if self._draft is not None and len(truth) < self._draft.longest else None
        drafts: list[int] = []
        first = truth[len(trace.prompt)]
        if draft is not None:
            draft.begin(row)
            drafts = draft.outcome(0, first)
        row.tokens.append(first)
        while len(row.tokens) < len(truth):
            row.round += 1
            source, tokens = self._chosen(row, drafts)
            if draft is not None:
                draft.launch(() if source == "draft" else tokens, len(tokens))
            base = len(row.tokens)
            accepted = common_prefix_length(tokens, truth[base:-1])
            row.tokens += truth[base : base + accepted + 1]
            if draft is None:
                self._lookup.note(row.request, len(tokens) if source == "lookup" else 0, row.tokens[base:])
            self._note(counts, source, len(tokens), accepted)
            if draft is not None:
                drafts = draft.outcome(accepted, row.tokens[-1])
        self._lookup.forget(row.request)
        if self._memory is not None:
            self._memory.release([row])

    def _chosen(self, row: Row, drafts: list[int]) -> tuple[Source, Sequence[int]]:
        """Return what the engine would verify: the draft's or looked up tokens, or better ones of the memory."""
        guess = None if self._memory is None else self._memory.guess(row, self._costs.pricing)
        source: Source = "draft" if drafts else "lookup"
        found = drafts or self._lookup.propose(row, self._costs)
        gain = self._costs.draft_gain(len(drafts)) if drafts else self._lookup.gain(row.request)
        if guess is not None and guess.gain > (gain or 0.0):
            return "memory", guess.tokens
        return source, found

    def _note(self, counts: _Counts, source: Source, drafted: int, accepted: int) -> None:
        seconds = self._verify.at(1 + drafted)
        counts.rounds, counts.tokens = counts.rounds + 1, counts.tokens + 1 + accepted
        counts.seconds += seconds
        counts.accepted[source] = counts.accepted.get(source, 0) + accepted
        if source == "draft":
            self._costs.estimates.acceptance.note_outcome(drafted, accepted)
        round_ = DecodingRound(1, 1 + drafted, seconds, 0.0, 1 + accepted, False, False, None)
        self._costs.estimates.note(round_, DraftTelemetry(0, 0, 0.0, 0))


@torch.inference_mode()
def recalled(
    datasets: Sequence[str], record: Callable[[str], list[Trace]], turns: int, verify: LinearCost, lookahead: int
) -> Iterator[Recalled]:
    """Yield what `turns` passes over each data set bring: lookup in the text or a draft, alone and with the memory.

    The draft has all the time that it can use, and copies what the text repeats. Without a `lookahead` no draft takes
    part. Raises UsageError for data that cannot be read."""
    for dataset in datasets:
        traces = record(dataset)
        kinds = {"lookup": (False, 0), "lookup, memory": (True, 0)}
        if lookahead:
            kinds |= {"draft": (False, lookahead), "draft, memory": (True, lookahead)}
        for name, (memory, depth) in kinds.items():
            replay = Replay(verify, memory, _Draft(depth) if depth else None)
            for turn in range(1, turns + 1):
                counts = replay.run(traces)
                accepted = {source: n / counts.rounds for source, n in counts.accepted.items() if n}
                over_ar = counts.tokens * verify.at(1) / counts.seconds
                yield Recalled(
                    Path(dataset).stem, turn, name, counts.rounds, counts.tokens / counts.rounds, accepted, over_ar
                )
