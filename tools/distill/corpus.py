"""Stage corpus: the target writes prompts and answers them, and every answer is stored with what a student learns from.

A shard has, of all its conversations one after the other, `token_ids` int32 [sum of lengths], `lengths` and
`prompt_lengths` int32 [n], and the TOP likeliest tokens at every token of the answers, `ids` int32 and `logprobs`
float16 [sum of answers, TOP]. If the plan has `features`, also the target's hidden states, `features` bfloat16 [sum of
lengths - n, layers x width]. The metadata has the opening messages as `prompts`, and which `layers` the hidden states
are of. `openings` int32 [n] is the index in `prompts` of the message that a conversation opens with or derives from."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import torch
from rich.progress import Progress
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.runner import device_of
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.models import hub
from ssd.models.checkpoint import Checkpoint, inspect, stop_token_ids
from tools.distill.kinds import DOCUMENT_TASKS, FOLLOW_UPS, KINDS, SYSTEM_PROMPTS
from tools.distill.shards import is_done, save, shard_path
from tools.distill.teacher import load_runner
from tools.distill.writing import Request, Text, Writer

TOP = 32
LONGEST = 1280
"""Tokens of the longest conversation, prompt and answer."""
_MARK = "\u2603"
_MESSAGE_TOKENS = 200  # of a user message that the target writes
_DOCUMENT_TOKENS = 60  # a shorter answer is no document
_MESSAGE_TEMPERATURE = 0.9
_FREE_TEMPERATURE = 1.0  # of a message that the target begins, too
_FREE = 3  # one opening message of so many has no opening of ours
_TRIES = 20

Messages = list[ChatMessage]


class Chat(NamedTuple):
    """Messages to answer, and the index in its shard of the opening message that they derive from."""

    messages: Messages
    opening: int


@dataclass(frozen=True)
class CorpusPlan:
    """The corpus to write: `conversations` in shards of `shard`, each answer at one of `temperatures`.

    `features`: after which of the target's layers hidden states are stored; without any, a head's training runs the
    target."""

    conversations: int = 4096
    shard: int = 128
    answer_tokens: int = 320
    temperatures: tuple[float, ...] = (0.0, 0.6, 0.0, 0.8, 0.0, 1.0)
    features: tuple[int, ...] = ()
    seed: int = 0

    @property
    def shards(self) -> range:
        return range(-(-self.conversations // self.shard))


@dataclass(frozen=True)
class Workers:
    """The processes that write: `count` with a share of the cores each. Each writes `batch` texts at a time.

    They stop at `stop`, of time.monotonic()."""

    count: int = 1
    batch: int = 64
    device: str = "cpu"
    dtype: str = "float32"
    stop: float = math.inf


def write_corpus(target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers) -> None:
    """Write the missing shards.

    `prompts` are answered in turn; without any the target writes its own. But for rounding, a shard depends on its
    number and the plan alone, not on who writes it or when. Shards that were being written at `workers.stop` are
    shorter: their last conversations break off or lack."""
    missing = [index for index in plan.shards if not is_done(directory, "corpus", index)]
    if not missing or time.monotonic() >= workers.stop:
        return
    start = target, directory, plan, prompts, workers
    with (
        Progress(transient=True) as progress,
        ProcessPoolExecutor(workers.count, get_context("spawn"), _start, start) as pool,
    ):
        task = progress.add_task("corpus", total=len(plan.shards), completed=len(plan.shards) - len(missing))
        jobs = [pool.submit(_run, index) for index in missing]
        try:
            for job in as_completed(jobs):
                job.result()
                progress.advance(task)
        finally:
            pool.shutdown(cancel_futures=True)  # after a failure or an interruption


_shard_writer: Callable[[], ShardWriter]


def _start(target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers) -> None:
    global _shard_writer
    torch.set_num_threads(max(1, torch.get_num_threads() // workers.count))
    # Loaded by the first shard, whose error is reported; one in an initializer is not.
    _shard_writer = cache(lambda: ShardWriter(target, directory, plan, prompts, workers))


def _run(index: int) -> None:
    writer = _shard_writer()
    if not writer.is_over:
        writer.write_shard(index)


class ShardWriter:
    """Writes whole shards; the only owner of a model in its process."""

    def __init__(
        self, target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers
    ) -> None:
        checkpoint = inspect(hub.resolve(target))
        longest = longest_text(checkpoint)
        dtype, device = getattr(torch, workers.dtype), device_of(workers.device)
        options: dict[str, Any] = {"rows": workers.batch, "layers": plan.features} if device.type == "cuda" else {}
        runner = load_runner(target, dtype, device, longest, copies=workers.batch, **options)
        self._tokenizer = Tokenizer(checkpoint.directory)
        stop = stop_token_ids(checkpoint)
        self._writer = Writer(runner, stop, workers.batch, longest, plan.features, TOP, workers.stop)
        self._room = longest - plan.answer_tokens
        self._directory, self._plan, self._prompts = directory, plan, prompts
        self._rng = Random()

    @property
    def is_over(self) -> bool:
        """Tell whether no more is written."""
        return self._writer.is_over

    def write_shard(self, index: int) -> None:
        plan = self._plan
        self._rng = Random(f"{plan.seed}/{index}")
        if self._prompts:
            messages = list(self._prompts[index * plan.shard : (index + 1) * plan.shard])
            chats = [Chat([ChatMessage("user", message)], opening) for opening, message in enumerate(messages)]
            answered = self._answer(self._fitting(chats))
        else:
            # Of 16 conversations 10 are two answers each to 5 messages, 3 go on after such an answer, 3 are about it.
            count = -(-plan.shard * 5 // 16)
            opened = self._opened(count)
            messages = [chat[-1].content or "" for chat in opened]
            answered = self._answer([Chat(chat, opening) for opening, chat in enumerate(opened) for _ in range(2)])
            rest = plan.shard - 2 * count
            more = self._followed(answered, rest // 2) + self._about(answered, rest - rest // 2)
            answered += self._answer(self._fitting(more))
        if not answered and self.is_over:
            return
        tensors = packed([text for _, text in answered], [chat.opening for chat, _ in answered])
        metadata = {"prompts": json.dumps(messages), "layers": json.dumps(plan.features)}
        save(shard_path(self._directory, "corpus", index), tensors, metadata)

    def _answer(self, chats: Sequence[Chat]) -> list[tuple[Chat, Text]]:
        """Return the chats that got an answer, each at one of the plan's temperatures in turn."""
        requests = [
            self._request(self._tokenizer.encode_chat(chat.messages), temperature, self._plan.answer_tokens)
            for chat, temperature in zip(chats, cycle(self._plan.temperatures), strict=False)
        ]
        pairs = zip(chats, self._writer.write(requests, record=True), strict=True)
        return [(chat, text) for chat, text in pairs if len(text.token_ids) > text.prompt]

    def _answer_of(self, text: Text) -> str:
        return self._tokenizer.decode(text.token_ids[text.prompt :]).strip()

    def _request(self, prompt: Sequence[int], temperature: float, max_tokens: int) -> Request:
        return Request(prompt, temperature, max_tokens, self._rng.randrange(2**62))

    def _opened(self, count: int) -> list[Messages]:
        """Return chats of one user message each, every kind of task in turn; one in eight has a system prompt.

        Every third message is sampled after the chat template alone (Magpie, arXiv 2406.08464)."""
        kinds, found = cycle(KINDS[name] for name in sorted(KINDS)), dict[str, Messages]()
        for _ in range(_TRIES):
            openers = ["" if i % _FREE == _FREE - 1 else self._rng.choice(next(kinds)) for i in range(count)]
            for message in filter(None, self._continued([[] for _ in openers], openers)):
                system = [ChatMessage("system", self._rng.choice(SYSTEM_PROMPTS))] if len(found) % 8 == 7 else []
                found[message] = [*system, ChatMessage("user", message)]
            fitting = [chat for chat in found.values() if _fits(self._tokenizer, chat, self._room)]
            if len(fitting) >= count or self.is_over:
                return fitting[:count]
        raise UsageError(f"the target's user messages hardly ever end within {_MESSAGE_TOKENS} tokens: give --prompts")

    def _followed(self, answered: Sequence[tuple[Chat, Text]], count: int) -> list[Chat]:
        """Return chats that go on with a second user message after an answer that ended."""
        ended = [(chat, text) for chat, text in answered if text.ended]
        chosen = self._rng.sample(ended, min(count, len(ended)))
        chats = self._fitting(
            [Chat([*m, ChatMessage("assistant", self._answer_of(text))], opening) for (m, opening), text in chosen]
        )
        openers = [self._rng.choice(FOLLOW_UPS) for _ in chats]
        found = self._continued([chat.messages for chat in chats], openers, keep_unfinished=True)
        pairs = zip(chats, found, strict=True)
        return [Chat([*chat.messages, ChatMessage("user", message)], chat.opening) for chat, message in pairs]

    def _about(self, answered: Sequence[tuple[Chat, Text]], count: int) -> list[Chat]:
        """Return chats with a task about a long answer."""
        long = [pair for pair in answered if len(pair[1].token_ids) - pair[1].prompt >= _DOCUMENT_TOKENS]
        chosen = self._rng.sample(long, min(count, len(long)))
        tasks = [(self._rng.choice(DOCUMENT_TASKS).format(text=self._answer_of(text)), c.opening) for c, text in chosen]
        unfinished = [task for task in tasks if task[0].endswith(("Who", "What", "How"))]
        whole = [task for task in tasks if task not in unfinished]
        questions = self._continued([[] for _ in unfinished], [task for task, _ in unfinished])
        asked = [(task, opening) for task, (_, opening) in zip(questions, unfinished, strict=True) if task]
        return [Chat([ChatMessage("user", task)], opening) for task, opening in [*whole, *asked]]

    def _continued(self, chats: Sequence[Messages], openers: Sequence[str], keep_unfinished: bool = False) -> list[str]:
        """Let the target continue `openers` as the next user messages of `chats`; return a message for each.

        It samples a message with an empty opener from its whole distribution. One that did not end within
        _MESSAGE_TOKENS is empty, unless `keep_unfinished`."""
        prompts = [
            self._tokenizer.encode(self._before_user(chat) + opener, add_special_tokens=False)
            for chat, opener in zip(chats, openers, strict=True)
        ]
        temperatures = (_MESSAGE_TEMPERATURE if opener else _FREE_TEMPERATURE for opener in openers)
        requests = [
            self._request(ids, temperature, _MESSAGE_TOKENS)
            for ids, temperature in zip(prompts, temperatures, strict=True)
        ]
        written = self._writer.write(requests)
        messages = [
            (opener + self._tokenizer.decode(text.token_ids[text.prompt :])).strip()
            for opener, text in zip(openers, written, strict=True)
        ]
        return [m if text.ended or keep_unfinished else "" for m, text in zip(messages, written, strict=True)]

    def _before_user(self, chat: Messages) -> str:
        """Return what precedes the next user's first words in the model's chat format."""
        text = self._tokenizer.render_chat([*chat, ChatMessage("user", _MARK)])
        return text[: text.rindex(_MARK)]

    def _fitting(self, chats: Sequence[Chat]) -> list[Chat]:
        return [chat for chat in chats if _fits(self._tokenizer, chat.messages, self._room)]


def longest_text(target: Checkpoint) -> int:
    """Return the most tokens of a conversation with this target."""
    return min(LONGEST, target.count("max_position_embeddings", LONGEST))


def within(tokenizer: Tokenizer, prompts: Sequence[str], room: int) -> list[str]:
    """Return the prompts of at most `room` tokens in chat format."""
    return [prompt for prompt in prompts if _fits(tokenizer, [ChatMessage("user", prompt)], room)]


def _fits(tokenizer: Tokenizer, messages: Messages, room: int) -> bool:
    return len(tokenizer.encode_chat(messages)) <= room


def packed(texts: Sequence[Text], openings: Sequence[int]) -> dict[str, Tensor]:
    """Return a shard's tensors."""
    ids = [row for text in texts for row in text.ids]
    logprobs = [row for text in texts for row in text.logprobs]
    tensors = {
        "token_ids": torch.tensor([token for text in texts for token in text.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        "openings": torch.tensor(openings, dtype=torch.int32),
        "ids": torch.stack(ids) if texts else torch.zeros(0, TOP, dtype=torch.int32),
        "logprobs": torch.stack(logprobs) if texts else torch.zeros(0, TOP, dtype=torch.float16),
    }
    features = [part for text in texts for part in text.features]
    return tensors | ({"features": torch.cat(features)} if features else {})
