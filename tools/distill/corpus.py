"""Stage corpus: the target writes prompts and answers them. Conversations are stored as token ids in shards."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from threading import Event
from typing import Any

import torch
from rich.progress import Progress

from ssd import LLM, SamplingParams
from ssd.client import Completion
from ssd.errors import UsageError
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from tools.distill.kinds import KINDS
from tools.distill.shards import is_done, save, shard_path

_MARK = "\u2603"
_PROMPT_TOKENS = 160
_TRIES = 20
LONGEST = 2048
"""Tokens of the longest conversation, prompt and answer."""


@dataclass(frozen=True)
class CorpusPlan:
    """The corpus to write: `conversations` in shards of `shard`, each answer at one of `temperatures`."""

    conversations: int = 4096
    shard: int = 256
    answer_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.0, 0.6, 0.8, 1.0)
    seed: int = 0

    @property
    def shards(self) -> range:
        return range(-(-self.conversations // self.shard))


def write_corpus(
    target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], engines: Sequence[Mapping[str, Any]]
) -> None:
    """Write the missing shards, with an engine for each set of options in `engines`, side by side.

    `prompts` are answered in turn; without any the target writes its own. But for rounding, a shard depends on its
    number and the plan's seed alone, not on who writes it or when."""
    missing = [index for index in plan.shards if not is_done(directory, "corpus", index)]
    if not missing:
        return
    with Progress(transient=True) as progress, ThreadPoolExecutor(len(engines)) as pool:
        task = progress.add_task("corpus", total=len(plan.shards), completed=len(plan.shards) - len(missing))
        lots = [missing[worker :: len(engines)] for worker in range(len(engines))]

        stop = Event()

        def work(options: Mapping[str, Any], lot: Sequence[int]) -> None:
            with LLM(target, mode="ar", **options) as llm:
                for index in lot:
                    if stop.is_set():
                        return
                    _write_shard(llm, directory, index, plan, prompts)
                    progress.advance(task)

        try:
            for future in [pool.submit(work, *pair) for pair in zip(engines, lots, strict=True) if pair[1]]:
                future.result()
        finally:
            stop.set()  # one has failed, or somebody has had enough: the others end with their shard


def _write_shard(llm: LLM, directory: Path, index: int, plan: CorpusPlan, prompts: Sequence[str]) -> None:
    dice = Random(f"{plan.seed}/{index}/answers")
    tokenizer = Tokenizer(Path(llm.engine.config.target))
    room = min(llm.engine.config.max_model_len, LONGEST) - plan.answer_tokens
    if prompts:
        asked = within(tokenizer, prompts[index * plan.shard : (index + 1) * plan.shard], room)
    else:
        asked = _invent(llm, tokenizer, plan, room, Random(f"{plan.seed}/{index}"))
    params = [
        SamplingParams(
            temperature=plan.temperatures[i % len(plan.temperatures)],
            seed=dice.randrange(2**62),
            max_tokens=plan.answer_tokens,
        )
        for i in range(len(asked))
    ]
    answers = llm.generate(asked, params, chat=True)
    save(shard_path(directory, "corpus", index), pack(answers), {"prompts": json.dumps(asked)})


def within(tokenizer: Tokenizer, prompts: Sequence[str], room: int) -> list[str]:
    """Return the prompts of at most `room` tokens in chat format."""
    return [prompt for prompt in prompts if len(tokenizer.encode_chat([ChatMessage("user", prompt)])) <= room]


def _invent(llm: LLM, tokenizer: Tokenizer, plan: CorpusPlan, room: int, dice: Random) -> list[str]:
    """Return a shard's user messages, every kind of task in turn; only those that ended within `room`."""
    header = user_header(tokenizer)
    names = sorted(KINDS)
    found: dict[str, None] = {}
    for _ in range(_TRIES):
        openers = [dice.choice(KINDS[names[i % len(names)]]) for i in range(plan.shard)]
        params = [
            SamplingParams(temperature=1.0, top_p=0.95, seed=dice.randrange(2**62), max_tokens=_PROMPT_TOKENS)
            for _ in openers
        ]
        written = llm.generate([tokenizer.encode(header + o, add_special_tokens=False) for o in openers], params)
        ended = zip(openers, written, strict=True)
        messages = [(o + w.text).strip() for o, w in ended if w.finish_reason == "stop"]
        found |= dict.fromkeys(within(tokenizer, messages, room))
        if len(found) >= plan.shard:
            return list(found)[: plan.shard]
    raise UsageError(f"the target's user messages hardly ever end within {_PROMPT_TOKENS} tokens: give --prompts")


def user_header(tokenizer: Tokenizer) -> str:
    """Return what precedes a user's first words in the model's chat format."""
    text = tokenizer.render_chat([ChatMessage("user", _MARK)])
    return text[: text.index(_MARK)]


def pack(answers: Sequence[Completion]) -> dict[str, torch.Tensor]:
    """Return `token_ids` int32 [sum of lengths], and `lengths` and `prompt_lengths` int32 [n]."""
    whole = [answer.prompt_token_ids + answer.token_ids for answer in answers]
    return {
        "token_ids": torch.tensor([token for ids in whole for token in ids], dtype=torch.int32),
        "lengths": torch.tensor([len(ids) for ids in whole], dtype=torch.int32),
        "prompt_lengths": torch.tensor([len(answer.prompt_token_ids) for answer in answers], dtype=torch.int32),
    }
