"""What `python -m tools.distill` does: its stages in order, each from the files that the one before left."""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch

from ssd.errors import UsageError
from ssd.execution.runner import Runner, device_of
from ssd.frontend.tokenization import Tokenizer
from ssd.ipc.public import ChatMessage
from ssd.models import hub
from ssd.models.checkpoint import inspect
from ssd.plugins.bench.datasets import texts
from tools.distill import head
from tools.distill.card import card
from tools.distill.corpus import LONGEST, CorpusPlan, Workers, longest_text, write_corpus
from tools.distill.head import HeadPlan, HeadStudent
from tools.distill.layouts import Layout
from tools.distill.report import fitting, measured, prompt_sets, write
from tools.distill.shards import SHARD_VERSION, Conversation, claim, is_done
from tools.distill.student import Store, Student, StudentPlan, build, round_in_training
from tools.distill.teacher import hidden, load_runner
from tools.distill.training import (
    Example,
    TrainingPlan,
    computes_in_bfloat16,
    examples,
    process_group,
    split,
    train,
)

KINDS = ("decoder", "eagle3")
STAGES = ("corpus", "train", "evaluate")
_ALL = 10**6  # most prompts of a data set that are read
HELD_OUT_FILE = "held_out.jsonl"
"""In a draft's folder: opening messages that were not trained on, as prompts to evaluate on."""
_HELD_OUT = 128  # conversations, or a few more, that are not trained on


@dataclass(frozen=True)
class Job:
    """The command's flags by name, and its stages in order."""

    target: str
    out: Path
    work: Path | None
    prompts: str | None
    conversations: int
    shard: int
    answer_tokens: int
    keep_features: tuple[int, ...]
    kind: str
    layers: tuple[int, ...]
    width: int
    depth: int
    draft_vocab: int
    unroll: int
    feed_forward: int
    own_head: bool
    store: Store
    layout: Layout
    begin: str | None
    epochs: int
    optimizer: str | None
    learning_rate: float | None
    batch_tokens: int
    seed: int
    device: str
    dtype: str | None
    workers: int
    batch: int
    evaluate_on: tuple[str, ...]
    evaluate_prompts: int
    until: str
    write_seconds: float | None = None
    train_seconds: float | None = None

    def run(self) -> None:
        """Run the stages up to `until`. Raises UsageError before the first one for flags that do not fit."""
        stages = STAGES[: STAGES.index(self.until) + 1]
        directory = hub.ensure(self.target)
        prompts = texts(self.prompts, _ALL) if self.prompts else []
        asked = min(self.conversations, len(prompts) or self.conversations)
        corpus = CorpusPlan(asked, self.shard, self.answer_tokens, features=self.keep_features, seed=self.seed)
        self._check_corpus(directory, corpus)
        sets = fitting(directory, prompt_sets(self.evaluate_on), self.answer_tokens, self.evaluate_prompts)
        if "train" in stages:
            self._check_student(directory, corpus)
        work = self.work or self.out / "work"
        digest = inspect(directory).digest
        made = {"target": digest, "prompts": hashlib.sha256(json.dumps(prompts).encode()).hexdigest()}
        claim(work / "recipe.json", made | asdict(corpus) | {"conversations": "any", "version": SHARD_VERSION})
        if "train" in stages:
            begun = {"store": self.store, "begin": inspect(self._begin).digest if self._begin else None}
            student, training = asdict(self._plan) | begun, asdict(self._training)
            used = {"target": digest, "student": student, "training": training, "corpus": asdict(corpus)}
            claim(self.out / "recipe.json", used)
        stop = math.inf if self.write_seconds is None else time.monotonic() + self.write_seconds
        write_corpus(
            self.target, work, corpus, prompts, Workers(self.workers, self.batch, self.device, self._dtype, stop)
        )
        shards = [index for index in corpus.shards if is_done(work, "corpus", index)]
        if not shards:
            raise UsageError(f"{work} has no shard of the corpus yet: give more --write-seconds")
        if "train" in stages:
            messages, log = self._train(directory, work, shards)
        if "evaluate" in stages:
            self._evaluate(sets | {"held out": messages[: self.evaluate_prompts]}, corpus, log)

    @cached_property
    def _begin(self) -> Path | None:
        return hub.ensure(self.begin) if self.begin else None

    @property
    def _dtype(self) -> str:
        return self.dtype or ("bfloat16" if computes_in_bfloat16(device_of(self.device)) else "float32")

    @property
    def _training(self) -> TrainingPlan:
        muon = (self.optimizer or ("muon" if self.kind == "eagle3" else "adamw")) == "muon"
        rate = self.learning_rate or (6e-3 if muon else 1e-3)
        return TrainingPlan(self.epochs, self.batch_tokens, rate, muon, seed=self.seed)

    @property
    def _plan(self) -> StudentPlan | HeadPlan:
        if self.kind == "decoder":
            of_heads = {
                "--format speculators": self.layout == "speculators",
                "--own-head": self.own_head,
                "--feed-forward": self.feed_forward,
            }
            if wrong := [flag for flag, given in of_heads.items() if given]:
                raise UsageError(f"{wrong[0]} is for --kind eagle3")
            return StudentPlan(self.layers, self.width, self.depth or 4, self.draft_vocab)
        if self.width:
            raise UsageError("--width: a head is as wide as its target")
        return HeadPlan(self.layers, self.draft_vocab, self.unroll, self.feed_forward, self.own_head)

    def _check_corpus(self, directory: Path, corpus: CorpusPlan) -> None:
        """Raise UsageError for a corpus that the target cannot write."""
        checkpoint, tokenizer = inspect(directory), Tokenizer(directory)
        if not tokenizer.has_chat:
            raise UsageError(f"{directory} has no chat template, which a corpus of conversations needs")
        if corpus.shard < 2 and not self.prompts:
            raise UsageError("--shard must be 2 or more: every message is answered twice")
        longest, shortest = longest_text(checkpoint), len(tokenizer.encode_chat([ChatMessage("user", "?")]))
        if corpus.answer_tokens + shortest > longest:
            raise UsageError(
                f"--answer-tokens {corpus.answer_tokens} leaves no room for a prompt: "
                f"a conversation has at most {longest} tokens"
            )
        layers = checkpoint.count("num_hidden_layers")
        if wrong := [layer for layer in corpus.features if not 0 <= layer <= layers]:
            raise UsageError(f"--keep-features {wrong[0]}: the target has {layers} layers")
        if corpus.features:
            hidden(self._runner(1), [Conversation([0, 0], 1)], corpus.features)

    def _check_student(self, directory: Path, corpus: CorpusPlan) -> None:
        """Raise UsageError for a student that does not fit the target, or a corpus that does not fit the student."""
        student = self._build(directory)
        read = student.plan.layers if isinstance(student, HeadStudent) else ()
        if corpus.features and (missing := set(read) - set(corpus.features)):
            raise UsageError(f"--keep-features lacks {min(missing)}, which the head reads")
        if corpus.conversations < 10:
            raise UsageError(f"--conversations: {corpus.conversations} are too few to train on")

    def _runner(self, tokens: int) -> Runner:
        return load_runner(self.target, getattr(torch, self._dtype), device_of(self.device), tokens)

    def _build(self, directory: Path, data: Sequence[Example] = ()) -> Student | HeadStudent:
        """Return the student before training."""
        plan, device = self._plan, device_of(self.device)
        student: Student | HeadStudent
        if isinstance(plan, StudentPlan):
            student = build(directory, plan, data).to(device)
            if self._begin is not None:
                student.begin_with(self._begin)
        else:
            tokens = max(LONGEST, 2 * self.batch_tokens)  # texts of a few tokens leave much of their pages empty
            student = head.build(directory, plan, self._runner(tokens), data).to(device)
            if self._begin is not None:
                student.begin_with(self._begin, directory)
        round_in_training(student, self.store)
        return student

    def _prepare(
        self, directory: Path, work: Path, shards: Sequence[int]
    ) -> tuple[Student | HeadStudent, list[Example], list[Example]]:
        """Return the student before training, the examples to train on, and those held out."""
        data, held = split(examples(work, shards), _HELD_OUT)
        return self._build(directory, data), data, held

    def _train(self, directory: Path, work: Path, shards: Sequence[int]) -> tuple[list[str], list[dict[str, Any]]]:
        """Return the opening messages that were not trained on, and the figures of the epochs."""
        prepare = partial(self._prepare, directory, work, shards)
        student, data, held = prepare()
        processes = self.workers if student.head.device.type == "cpu" else 1
        messages = list(dict.fromkeys(example.text.opening for example in held))
        self.out.mkdir(parents=True, exist_ok=True)
        (self.out / HELD_OUT_FILE).write_text("".join(json.dumps({"prompt": m}) + "\n" for m in messages))
        seconds = self.train_seconds or math.inf
        with process_group(processes, prepare, self._training, self.out, seconds):
            log = train(student, data, held, self._training, self.out, seconds)
        if isinstance(student, HeadStudent):
            student.write(directory, self.out, self.store, self.layout)
        else:
            student.write(directory, self.out, self.store)
        return messages, log

    def _evaluate(self, sets: dict[str, list[str]], corpus: CorpusPlan, log: list[dict[str, Any]]) -> None:
        report, known = measured(self.target, str(self.out), sets, self.answer_tokens, self.device)
        write(self.out, report, known)
        recipe = {"target": self.target} | asdict(corpus) | asdict(self._plan) | asdict(self._training)
        (self.out / "README.md").write_text(card(self.out.name, recipe, log, report))
