"""Stage train: cross-entropy to the teacher's top k along its own answers; resumable at any step."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from statistics import fmean
from typing import NamedTuple, Protocol

import torch
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors.torch import load_file
from torch import Tensor, nn

from tools.distill.shards import Conversation, conversations, save, shard_path

# Beside the tokens that the teacher considers in a batch, as many others share the softmax, each standing for many.
_NEGATIVES = 4096
_STATE, _LOG = "training.safetensors", "training.jsonl"
_SAVE_SECONDS = 120
# Sizes are rounded up to a multiple: for every new shape of a product oneDNN compiles and keeps a kernel.
_LENGTHS, _ROWS, _CLASSES = 32, 64, 1024


@dataclass(frozen=True)
class TrainingPlan:
    """The optimiser's plan: AdamW with warm-up and cosine decay, `batch_tokens` tokens (with padding) a step."""

    epochs: int = 4
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    warm_up: float = 0.05
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """A conversation and the teacher's soft labels along its answer: `ids` and `probabilities` [answer, top]."""

    text: Conversation
    ids: Tensor
    probabilities: Tensor


class Lesson(NamedTuple):
    """The states [n, width] that predict n tokens, and the soft labels that they should match.

    `ids` [n, top] are rows of the student's head, on the CPU; `probabilities` are 0 where there is no such row."""

    states: Tensor
    ids: Tensor
    probabilities: Tensor


class Learner(Protocol):
    """What is trained. Its logits are states @ head.T."""

    @property
    def head(self) -> Tensor:
        """Return the head's weights [ids that it predicts, width]."""

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]: ...

    def lesson(self, batch: Sequence[Example]) -> Lesson:
        """Return what it predicts along the answers, and the teacher's soft labels."""

    def write(self, target: Path, directory: Path) -> None:
        """Write a checkpoint that is a draft for `target`."""


def examples(directory: Path, shards: Sequence[int]) -> list[Example]:
    """Return the examples of the given shards; labels are scaled up for what the top k leaves out."""
    found = []
    for index in shards:
        texts = conversations(shard_path(directory, "corpus", index))
        if not texts:
            continue
        labels = load_file(shard_path(directory, "teacher", index))
        counts = [text.answer for text in texts]
        ids, probabilities = labels["ids"].long(), labels["logprobs"].float().softmax(-1).half()
        parts = zip(texts, ids.split(counts), probabilities.split(counts), strict=True)
        found += [Example(*part) for part in parts]
    return found


def epoch(data: Sequence[Example], plan: TrainingPlan, number: int) -> list[list[Example]]:
    """Return an epoch's batches: texts of similar length together, in an order that seed and number decide."""
    dice = Random(f"{plan.seed}/{number}")
    order = list(data)
    dice.shuffle(order)
    found: list[list[Example]] = []
    for start in range(0, len(order), 512):
        batch: list[Example] = []
        for example in sorted(order[start : start + 512], key=lambda e: len(e.text.token_ids)):
            if batch and (len(batch) + 1) * len(example.text.token_ids) > plan.batch_tokens:
                found.append(batch)
                batch = []
            batch.append(example)
        found.append(batch)
    dice.shuffle(found)
    return found


def padded(batch: Sequence[Conversation]) -> Tensor:
    """Return int64 [texts, a length]: all but the last token of each text, filled up with zeros at the end.

    Causal attention hides the zeros from everything that counts."""
    longest = _round_up(max(len(text.token_ids) for text in batch) - 1, _LENGTHS)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, text in enumerate(batch):
        ids[row, : len(text.token_ids) - 1] = torch.tensor(text.token_ids[:-1])
    return ids


def loss_of(student: Learner, batch: Sequence[Example], generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return the cross-entropy to the teacher, and how often both have the same best token."""
    device, vocab = student.head.device, student.head.shape[0]
    with torch.autocast(device.type, torch.bfloat16):
        states, ids, probabilities = student.lesson(batch)
    probabilities = probabilities.to(device, torch.float32)
    known = ids.unique()
    others = torch.ones(vocab, dtype=torch.bool).index_fill_(0, known, False).nonzero().squeeze(1)
    wanted = _round_up(len(known) + _NEGATIVES, _CLASSES) - len(known)
    drawn = others[torch.randperm(len(others), generator=generator)[:wanted]]
    with torch.autocast(device.type, torch.bfloat16):
        rows = nn.functional.pad(states, (0, 0, 0, _round_up(len(ids), _ROWS) - len(ids)))
        logits = (rows @ student.head[torch.cat((known, drawn)).to(device)].T)[: len(ids)]
    logits = logits.float()
    where = torch.searchsorted(known, ids).to(device)
    agreement = _agreed(logits, where, probabilities).float().mean()
    if len(drawn):  # each drawn token stands for as many as were left out
        logits[:, len(known) :] += math.log(len(others) / len(drawn))
    loss = -(torch.log_softmax(logits, -1).gather(1, where) * probabilities).sum(-1).mean()
    return loss, agreement


@torch.no_grad()
def held_out(student: Learner, data: Sequence[Example], plan: TrainingPlan) -> float:
    """Return how often student and teacher have the same best token on held-out positions, over all ids."""
    agreed = total = 0
    for batch in epoch(data, plan, -1):
        with torch.autocast(student.head.device.type, torch.bfloat16):
            states, ids, probabilities = student.lesson(batch)
            logits = states @ student.head.T
        agreed += int(_agreed(logits, ids.to(logits.device), probabilities.to(logits.device)).sum())
        total += len(ids)
    return agreed / total


def _agreed(logits: Tensor, ids: Tensor, probabilities: Tensor) -> Tensor:
    """Return bool [n]: where the likeliest id is the teacher's."""
    return (logits.argmax(-1) == ids[:, 0]) & (probabilities[:, 0] > 0)


@torch.enable_grad()  # loading a model for the engine switches it off
def train(
    student: Learner, data: Sequence[Example], held: Sequence[Example], plan: TrainingPlan, directory: Path
) -> list[dict[str, float]]:
    """Train in place, from where an earlier run was saved. Returns the figures of every epoch, earlier ones too."""
    parameters = [parameter for _, parameter in student.named_trainable()]
    optimizer = torch.optim.AdamW(
        parameters, plan.learning_rate, (0.9, 0.95), weight_decay=plan.weight_decay, fused=True
    )
    steps = [(number, batch) for number in range(plan.epochs) for batch in epoch(data, plan, number)]
    done = _restore(directory, student, optimizer)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _LOG
    log: list[dict[str, float]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    log = [entry for entry in log if entry["step"] <= done]
    losses: list[float] = []
    columns = (TextColumn("training {task.fields[loss]}"), BarColumn(), TimeRemainingColumn())
    saved = time.monotonic()
    with Progress(*columns) as progress:
        task = progress.add_task("", total=len(steps), completed=done, loss="")
        for step, (number, batch) in enumerate(steps[done:], start=done):
            for group in optimizer.param_groups:
                group["lr"] = plan.learning_rate * _schedule(step / len(steps), plan.warm_up)
            loss, agreement = loss_of(student, batch, torch.Generator().manual_seed(plan.seed + step))
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            progress.update(task, advance=1, loss=f"loss {loss.item():.3f} agreement {agreement.item():.3f}")
            last = step + 1 == len(steps) or steps[step + 1][0] != number
            if last:
                agreed = held_out(student, held, plan)
                entry = {"epoch": number + 1, "step": step + 1, "loss": fmean(losses), "held_out_agreement": agreed}
                losses = []
                log.append(entry)
                path.write_text("".join(json.dumps(line) + "\n" for line in log))
                progress.console.print(entry)
            if last or time.monotonic() - saved > _SAVE_SECONDS:
                _save(directory, student, optimizer, step + 1)
                saved = time.monotonic()
    return log


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _schedule(progress: float, warm_up: float) -> float:
    if progress < warm_up:
        return max(1e-3, progress / warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def _save(directory: Path, student: Learner, optimizer: torch.optim.Optimizer, step: int) -> None:
    tensors = {"step": torch.tensor(step)}
    for name, parameter in student.named_trainable():
        tensors[name] = parameter.detach()
        for kind in ("exp_avg", "exp_avg_sq"):
            tensors[f"{name}/{kind}"] = optimizer.state[parameter][kind]
    save(directory / _STATE, tensors)


def _restore(directory: Path, student: Learner, optimizer: torch.optim.Optimizer) -> int:
    """Restore what `_save` wrote. Returns the steps done."""
    path = directory / _STATE
    if not path.is_file():
        return 0
    tensors = load_file(path)
    step = int(tensors["step"])
    for name, parameter in student.named_trainable():
        parameter.data.copy_(tensors[name])
        moments = {kind: tensors[f"{name}/{kind}"].to(parameter.device) for kind in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.tensor(float(step)), **moments}
    return step
