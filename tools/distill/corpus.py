"""Stage corpus: the target writes prompts and answers them, and every answer is stored with what a student learns from.

A shard has, of all its conversations one after the other, `token_ids` int32 [sum of lengths], `lengths` and
`prompt_lengths` int32 [n], and of every token of the answers the TOP likeliest tokens, `ids` int32 and `logprobs`
float16 [sum of answers, TOP]. If the plan has `features`, also the target's hidden states, `features` bfloat16 [sum of
lengths - n, layers x width]. The metadata has the user messages as `prompts`, and
which `layers` the hidden states are of."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from itertools import cycle
from multiprocessing import get_context
from pathlib import Path
from random import Random

import torch
from rich.progress import Progress
from torch import Tensor

from ssd.errors import UsageError
from ssd.execution.runner import device_of
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.models import hub
from ssd.models.checkpoint import inspect, stop_token_ids
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
_INVENTING = 0.9  # temperature of user messages
_TRIES = 20

Messages = list[ChatMessage]


@dataclass(frozen=True)
class CorpusPlan:
    """The corpus to write: `conversations` in shards of `shard`, each answer at one of `temperatures`.

    `features`: after which of the target's layers hidden states are stored; without any, training runs the target."""

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
    """The processes that write: how many, each with its share of the cores, and how many texts each has in hand."""

    count: int = 1
    batch: int = 64
    device: str = "cpu"
    dtype: str = "float32"


def write_corpus(target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers) -> None:
    """Write the missing shards.

    `prompts` are answered in turn; without any the target writes its own. But for rounding, a shard depends on its
    number and the plan alone, not on who writes it or when."""
    missing = [index for index in plan.shards if not is_done(directory, "corpus", index)]
    if not missing:
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
            pool.shutdown(cancel_futures=True)  # one has failed, or somebody has had enough


_shard_writer: Callable[[], ShardWriter]


def _start(target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers) -> None:
    global _shard_writer
    torch.set_num_threads(max(1, torch.get_num_threads() // workers.count))
    # Loaded by the first shard, whose error is reported; one in an initializer is not.
    _shard_writer = cache(lambda: ShardWriter(target, directory, plan, prompts, workers))


def _run(index: int) -> None:
    _shard_writer().write_shard(index)


class ShardWriter:
    """Writes whole shards; the only owner of a model in its process."""

    def __init__(
        self, target: str, directory: Path, plan: CorpusPlan, prompts: Sequence[str], workers: Workers
    ) -> None:
        checkpoint = inspect(hub.resolve(target))
        longest = min(LONGEST, int(checkpoint.config.get("max_position_embeddings") or LONGEST))
        runner = load_runner(
            target, getattr(torch, workers.dtype), device_of(workers.device), longest, copies=workers.batch
        )
        self._tokenizer = Tokenizer(checkpoint.directory)
        self._writer = Writer(runner, stop_token_ids(checkpoint), workers.batch, longest, plan.features, TOP)
        self._room = longest - plan.answer_tokens
        self._directory, self._plan, self._prompts = directory, plan, prompts
        self._dice = Random()

    def write_shard(self, index: int) -> None:
        plan = self._plan
        self._dice = Random(f"{plan.seed}/{index}")
        if self._prompts:
            messages = self._prompts[index * plan.shard : (index + 1) * plan.shard]
            chats = [[ChatMessage("user", message)] for message in messages]
            texts = self._answer(self._fitting(chats))
        else:
            # Of 16 conversations 10 are two answers each to 5 messages, 3 go on after such an answer, 3 are about it.
            count = -(-plan.shard * 5 // 16)
            chats = self._opened(count)
            messages = [chat[-1].content or "" for chat in chats]
            doubled = [chat for chat in chats for _ in range(2)]
            texts = self._answer(doubled)
            answers = [self._tokenizer.decode(text.token_ids[text.prompt :]).strip() for text in texts]
            rest = plan.shard - 2 * count
            pairs = list(zip(doubled, texts, answers, strict=True))
            ended = [(chat, answer) for chat, text, answer in pairs if text.ended]
            long = [answer for _, text, answer in pairs if len(text.token_ids) - text.prompt >= _DOCUMENT_TOKENS]
            more = self._followed(ended, rest // 2) + self._about(long, rest - rest // 2)
            texts += self._answer(self._fitting(more))
        about = {"prompts": json.dumps(messages), "layers": json.dumps(plan.features)}
        save(shard_path(self._directory, "corpus", index), packed(texts), about)

    def _answer(self, chats: Sequence[Messages]) -> list[Text]:
        """Return the chats that got an answer, each at one of the plan's temperatures in turn."""
        requests = [
            self._request(self._tokenizer.encode_chat(chat), temperature, self._plan.answer_tokens)
            for chat, temperature in zip(chats, cycle(self._plan.temperatures), strict=False)
        ]
        return [text for text in self._writer.write(requests, record=True) if len(text.token_ids) > text.prompt]

    def _request(self, prompt: Sequence[int], temperature: float, max_tokens: int) -> Request:
        return Request(prompt, temperature, max_tokens, self._dice.randrange(2**62))

    def _opened(self, count: int) -> list[Messages]:
        """Return chats of one user message each, every kind of task in turn; one in eight has a system prompt."""
        names, found = sorted(KINDS), dict[str, Messages]()
        for _ in range(_TRIES):
            openers = [self._dice.choice(KINDS[names[i % len(names)]]) for i in range(count)]
            for message in self._continued([[] for _ in openers], openers):
                system = [ChatMessage("system", self._dice.choice(SYSTEM_PROMPTS))] if len(found) % 8 == 7 else []
                found[message] = [*system, ChatMessage("user", message)]
            fitting = self._fitting(list(found.values()))
            if len(fitting) >= count:
                return fitting[:count]
        raise UsageError(f"the target's user messages hardly ever end within {_MESSAGE_TOKENS} tokens: give --prompts")

    def _followed(self, ended: Sequence[tuple[Messages, str]], count: int) -> list[Messages]:
        """Return chats that go on with a second user message."""
        chosen = self._dice.sample(ended, min(count, len(ended)))
        chats = [[*chat, ChatMessage("assistant", answer)] for chat, answer in chosen]
        chats = self._fitting(chats)
        openers = [self._dice.choice(FOLLOW_UPS) for _ in chats]
        found = self._continued(chats, openers, keep_unfinished=True)
        return [[*chat, ChatMessage("user", message)] for chat, message in zip(chats, found, strict=True)]

    def _about(self, answers: Sequence[str], count: int) -> list[Messages]:
        """Return chats with a task about an earlier answer."""
        chosen = self._dice.sample(answers, min(count, len(answers)))
        tasks = [self._dice.choice(DOCUMENT_TASKS).format(text=text) for text in chosen]
        openers = [task for task in tasks if task.endswith(("Who", "What", "How"))]
        whole = [task for task in tasks if task not in openers]
        return [[ChatMessage("user", m)] for m in [*whole, *self._continued([[] for _ in openers], openers)]]

    def _continued(self, chats: Sequence[Messages], openers: Sequence[str], keep_unfinished: bool = False) -> list[str]:
        """Let the target continue `openers` as the next user messages of `chats`; return the messages.

        A message that did not end within _MESSAGE_TOKENS is left out, unless `keep_unfinished`."""
        prompts = [
            self._tokenizer.encode(self._before_user(chat) + opener, add_special_tokens=False)
            for chat, opener in zip(chats, openers, strict=True)
        ]
        written = self._writer.write([self._request(ids, _INVENTING, _MESSAGE_TOKENS) for ids in prompts])
        messages = [
            (opener + self._tokenizer.decode(text.token_ids[text.prompt :])).strip()
            for opener, text in zip(openers, written, strict=True)
        ]
        return [m for m, text in zip(messages, written, strict=True) if text.ended or keep_unfinished]

    def _before_user(self, chat: Messages) -> str:
        """Return what precedes the next user's first words in the model's chat format."""
        text = self._tokenizer.render_chat([*chat, ChatMessage("user", _MARK)])
        return text[: text.rindex(_MARK)]

    def _fitting(self, chats: Sequence[Messages]) -> list[Messages]:
        return [chat for chat in chats if _fits(self._tokenizer, chat, self._room)]


def within(tokenizer: Tokenizer, prompts: Sequence[str], room: int) -> list[str]:
    """Return the prompts of at most `room` tokens in chat format."""
    return [prompt for prompt in prompts if _fits(tokenizer, [ChatMessage("user", prompt)], room)]


def _fits(tokenizer: Tokenizer, chat: Messages, room: int) -> bool:
    return len(tokenizer.encode_chat(chat)) <= room


def packed(texts: Sequence[Text]) -> dict[str, Tensor]:
    """Return a shard's tensors."""
    ids = [row for text in texts for row in text.ids]
    logprobs = [row for text in texts for row in text.logprobs]
    tensors = {
        "token_ids": torch.tensor([token for text in texts for token in text.token_ids], dtype=torch.int32),
        "lengths": torch.tensor([len(text.token_ids) for text in texts], dtype=torch.int32),
        "prompt_lengths": torch.tensor([text.prompt for text in texts], dtype=torch.int32),
        "ids": torch.stack(ids) if texts else torch.zeros(0, TOP, dtype=torch.int32),
        "logprobs": torch.stack(logprobs) if texts else torch.zeros(0, TOP, dtype=torch.float16),
    }
    features = [part for text in texts for part in text.features]
    return tensors | ({"features": torch.cat(features)} if features else {})
