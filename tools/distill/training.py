"""Stage train: cross-entropy to the target's likeliest tokens along its own answers; resumable at any step."""

from __future__ import annotations

import json
import math
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor, nn

from ssd.errors import UsageError
from tools.distill.shards import Conversation, conversations, save, shard_path

# Stored labels of a place that training uses.
_TOP = 16
# Tokens drawn at random into the softmax of a batch, at least, beside those of its labels.
_NEGATIVES = 1024
# AdamW's learning rate for the parameters that Muon does not train.
_BESIDE_MUON = 1e-3
_STATE, _LOG = "training.safetensors", "training.jsonl"
_SAVE_SECONDS = 120
_TIMED_WIDTH, _TIMED_PRODUCTS = 1024, 4
# Sizes are rounded up to a multiple: for every new shape of a product oneDNN compiles and keeps a kernel.
_LENGTHS, _ROWS, _CLASSES = 32, 64, 1024


@dataclass(frozen=True)
class TrainingPlan:
    """The optimiser's plan: warm-up, then cosine decay; `batch_tokens` tokens (with padding) a step.

    `muon`: the student's matrices are trained by Muon (K. Jordan, 2024), in steps as large as AdamW's would be; all
    else by AdamW."""

    epochs: int = 4
    batch_tokens: int = 1024
    learning_rate: float = 1e-3
    muon: bool = False
    warm_up: float = 0.05
    weight_decay: float = 0.01
    seed: int = 0


@dataclass(frozen=True)
class StoredFeatures:
    """The target's hidden states of one conversation, in a shard of the corpus: rows `start` to `stop` - 1.

    `columns` says which are after which layer."""

    path: Path
    start: int
    stop: int
    columns: Mapping[int, slice]

    def read(self, layers: Sequence[int]) -> Tensor:
        """Return bfloat16 [tokens - 1, sum of widths]. Raises UsageError for a layer that is not stored."""
        if missing := [layer for layer in layers if layer not in self.columns]:
            raise UsageError(f"{self.path} has no hidden states after {missing[0]} layers")
        rows: Tensor = _opened(self.path).get_slice("features")[self.start : self.stop]
        return torch.cat([rows[:, self.columns[layer]] for layer in layers], dim=-1)


@lru_cache(None)
def _opened(path: Path) -> Any:
    return safe_open(path, framework="pt")


@dataclass(frozen=True)
class Example:
    """A conversation and the target's soft labels along its answer: `ids` and `probabilities` [answer, top]."""

    text: Conversation
    ids: Tensor
    probabilities: Tensor
    features: StoredFeatures | None = None


class SoftLabels(NamedTuple):
    """The target's likeliest tokens at n places.

    `ids` [n, top] are rows of the student's head, on the CPU; `probabilities` [n, top] are 0 where there is no such
    row. `weight` is that of their loss."""

    ids: Tensor
    probabilities: Tensor
    weight: float = 1.0


class Learner(nn.Module):
    """A student in training. Its logits are states @ head.T; `head` is the only table with a row for each token.

    Subclasses have `head`, `states` and `labels`."""

    head: Tensor

    def states(self, batch: Sequence[Example]) -> list[Tensor]:
        """Return the states [n, width] that predict tokens of the answers; a head has such states for each step that
        it goes on from its own."""
        raise NotImplementedError

    def labels(self, batch: Sequence[Example]) -> list[SoftLabels]:
        """Return what each tensor of `states` is to predict."""
        raise NotImplementedError

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name, parameter) for name, parameter in self.named_parameters() if parameter.requires_grad]

    def loss(self, batch: Sequence[Example], own: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return what the examples `own` add to the cross-entropy of a batch to the target.

        The softmax runs over the labels of the batch and other tokens, which `generator` draws, the same for all `own`.
        The host marks the labels in a table of the vocabulary; it never waits for the device."""
        device, vocab = self.head.device, self.head.shape[0]
        whole = self.labels(batch)
        is_label = torch.zeros(vocab, dtype=torch.bool)
        for labels in whole:
            is_label[labels.ids[labels.probabilities > 0]] = True
        known, others = (table.nonzero().squeeze(1) for table in (is_label, ~is_label))
        wanted = _round_up(len(known) + _NEGATIVES, _CLASSES) - len(known)
        drawn = others[torch.randperm(len(others), generator=generator)[:wanted]]
        classes = self.head[torch.cat((known, drawn)).to(device)]
        places = torch.zeros(vocab, dtype=torch.long).index_copy_(0, known, torch.arange(len(known))).to(device)
        losses = []
        with arithmetic(device):
            predicting = self.states(own)
        mine = whole if own is batch else self.labels(own)
        for states, (ids, probabilities, weight), all_labels in zip(predicting, mine, whole, strict=True):
            with arithmetic(device):
                rows = nn.functional.pad(states, (0, 0, 0, _round_up(len(ids), _ROWS) - len(ids)))
                logits = (rows @ classes.T)[: len(ids)].float()
            if len(drawn):  # each drawn token counts as many times as there are others to one drawn
                shift = torch.zeros(logits.shape[1], device=device)
                shift[len(known) :] = math.log(len(others) / len(drawn))
                logits = logits + shift
            targets = probabilities.to(device, torch.float32)
            likelihoods = logits.gather(1, places[ids.to(device)]) - torch.logsumexp(logits, -1, keepdim=True)
            losses.append(-(likelihoods * targets).sum() / max(1, len(all_labels.ids)) * weight)
        return torch.stack(losses).sum() / sum(labels.weight for labels in whole)

    def agreed(self, batch: Sequence[Example]) -> Tensor:
        """Return float64 [places, 2]: how often student and target have the same best token, and of how many."""
        counts = []
        with arithmetic(self.head.device):
            for states, labels in zip(self.states(batch), self.labels(batch), strict=True):
                best = (states @ self.head.T).argmax(-1).cpu()
                agreed = ((best == labels.ids[:, 0]) & (labels.probabilities[:, 0].cpu() > 0)).sum()
                counts.append((int(agreed), len(best)))
        return torch.tensor(counts, dtype=torch.float64)


Prepare = Callable[[], tuple[Learner, Sequence[Example], Sequence[Example]]]
"""Returns a student before training, the examples to train on, and those held out."""


def examples(directory: Path, shards: Sequence[int]) -> list[Example]:
    """Return the examples of the given shards; the probabilities of a place are scaled to sum to 1."""
    found = []
    for index in shards:
        path = shard_path(directory, "corpus", index)
        texts = conversations(path)
        if not texts:
            continue
        counts = [text.answer for text in texts]
        with safe_open(path, framework="pt") as file:
            ids, logprobs = (file.get_tensor(name)[:, :_TOP] for name in ("ids", "logprobs"))
            shape = file.get_slice("features").get_shape() if "features" in file.keys() else None  # noqa: SIM118
            layers = json.loads(file.metadata()["layers"])
        stored: list[StoredFeatures | None] = [None] * len(texts)
        if shape is not None:
            width = shape[1] // len(layers)
            columns = {layer: slice(i * width, (i + 1) * width) for i, layer in enumerate(layers)}
            ends = list(accumulate((len(text.token_ids) - 1 for text in texts), initial=0))
            stored = [StoredFeatures(path, *rows, columns) for rows in pairwise(ends)]
        soft = ids.long().split(counts), logprobs.float().softmax(-1).split(counts)
        found += [Example(*parts) for parts in zip(texts, *soft, stored, strict=True)]
    return found


def split(data: Sequence[Example], most: int) -> tuple[list[Example], list[Example]]:
    """Return the examples to train on, and those held out: a tenth, or little more than `most`.

    Held out are whole opening messages, the last ones, with all conversations that derive from them. Raises UsageError
    if there are too few examples."""
    openings = Counter(example.text.opening for example in data)
    held, count = set[str](), 0
    while count < min(most, len(data) // 10):
        opening, derived = openings.popitem()
        held.add(opening)
        count += derived
    if not held or not openings:
        raise UsageError(f"{len(data)} conversations are too few to train on")
    return [e for e in data if e.text.opening not in held], [e for e in data if e.text.opening in held]


def epoch(data: Sequence[Example], plan: TrainingPlan, number: int) -> list[list[Example]]:
    """Return an epoch's batches: texts of similar length together, in an order that seed and number decide."""
    rng = Random(f"{plan.seed}/{number}")
    order = list(data)
    rng.shuffle(order)
    found: list[list[Example]] = []
    for start in range(0, len(order), 512):
        batch: list[Example] = []
        for example in sorted(order[start : start + 512], key=lambda e: len(e.text.token_ids)):
            if batch and (len(batch) + 1) * len(example.text.token_ids) > plan.batch_tokens:
                found.append(batch)
                batch = []
            batch.append(example)
        found.append(batch)
    rng.shuffle(found)
    return found


def padded(batch: Sequence[Conversation]) -> Tensor:
    """Return int64 [texts, a length]: all but the last token of each text, filled up with zeros at the end.

    Attention is causal, so no token sees the zeros."""
    longest = _round_up(max(len(text.token_ids) for text in batch) - 1, _LENGTHS)
    ids = torch.zeros(len(batch), longest, dtype=torch.long)
    for row, text in enumerate(batch):
        ids[row, : len(text.token_ids) - 1] = torch.tensor(text.token_ids[:-1])
    return ids


@torch.no_grad()
def held_out(student: Learner, data: Sequence[Example], plan: TrainingPlan) -> list[float]:
    """Return the shares of held-out places at which student and target agree, one for each tensor of its states."""
    rank, processes = _rank()
    counts = torch.zeros_like(student.agreed(data[:1]))
    for batch in epoch(data, plan, -1)[rank::processes]:
        counts += student.agreed(batch)
    if processes > 1:
        dist.all_reduce(counts)
    shares: list[float] = (counts[:, 0] / counts[:, 1].clamp_min(1)).tolist()
    return shares


@lru_cache
def computes_in_bfloat16(device: torch.device) -> bool:
    """Tell whether the device multiplies bfloat16 faster than float32, by the time of one product."""
    return _product_seconds(device, torch.bfloat16) < _product_seconds(device, torch.float32)


def _product_seconds(device: torch.device, dtype: torch.dtype) -> float:
    """Return the least seconds of a square product on the device."""
    square, least = torch.ones(_TIMED_WIDTH, _TIMED_WIDTH, dtype=dtype, device=device), math.inf
    for _ in range(_TIMED_PRODUCTS):
        began = time.perf_counter()
        float((square @ square)[0, 0])  # waits for a GPU
        least = min(least, time.perf_counter() - began)
    return least


def arithmetic(device: torch.device) -> AbstractContextManager[None]:
    """Return a context in which products are computed in the device's fastest type."""
    return torch.autocast(device.type, torch.bfloat16, enabled=computes_in_bfloat16(device))


@torch.enable_grad()  # loading a model for the engine switches it off
def train(
    student: Learner,
    data: Sequence[Example],
    held: Sequence[Example],
    plan: TrainingPlan,
    directory: Path,
    seconds: float = math.inf,
) -> list[dict[str, Any]]:
    """Train in place, from where an earlier run was saved. Returns the figures of every epoch, earlier ones too.

    It ends after `seconds`, and the learning rate falls to its end by then; the figures are then of part of an epoch.
    In a process group, every process calls it with the same arguments and computes its share of each batch; all of
    them make the same steps. The first one writes, and says when time is over."""
    rank, processes = _rank()
    parameters = [parameter for _, parameter in student.named_trainable()]
    optimizers = _optimizers(student, plan)
    steps = [(number, batch) for number in range(plan.epochs) for batch in epoch(data, plan, number)]
    done = _restore(directory, student, optimizers)
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / _LOG
    log: list[dict[str, Any]] = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    log = [entry for entry in log if entry["step"] <= done]
    if processes > 1:
        for parameter in parameters:
            dist.broadcast(parameter.data, 0)
    losses: list[float] = []
    columns = (TextColumn("training {task.fields[loss]}"), BarColumn(), TimeRemainingColumn())
    began = saved = time.monotonic()
    with Progress(*columns, disable=rank > 0) as progress:
        task = progress.add_task("", total=len(steps), completed=done, loss="")
        for step, (number, batch) in enumerate(steps[done:], start=done):
            spent = _of_the_first((time.monotonic() - began) / seconds) if seconds < math.inf else 0.0
            way = min(1.0, max(step / len(steps), spent))
            for group in (group for optimizer in optimizers for group in optimizer.param_groups):
                group["lr"] = group["peak"] * _schedule(way, plan.warm_up)
            if own := batch[rank::processes] if processes > 1 else batch:
                loss = student.loss(batch, own, torch.Generator().manual_seed(plan.seed + step))
                loss.backward()
            else:
                loss = torch.zeros(())
            losses.append(_summed(parameters, loss) if processes > 1 else loss.item())
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            progress.update(task, advance=1, loss=f"loss {losses[-1]:.3f}")
            last = step + 1 == len(steps) or steps[step + 1][0] != number or spent >= 1
            if last:
                seen = sum(example.text.answer for _, own in steps[: step + 1] for example in own)
                entry = {"epoch": number + 1, "step": step + 1, "tokens": seen, "loss": fmean(losses)}
                entry["held_out_agreement"] = held_out(student, held, plan)
                losses = []
                log.append(entry)
                if rank == 0:
                    path.write_text("".join(json.dumps(line) + "\n" for line in log))
                    progress.console.print(entry)
            if rank == 0 and (last or time.monotonic() - saved > _SAVE_SECONDS):
                _save(directory, student, optimizers, step + 1)
                saved = time.monotonic()
            if spent >= 1:
                break
    return log


@contextmanager
def process_group(
    count: int, prepare: Prepare, plan: TrainingPlan, directory: Path, seconds: float = math.inf
) -> Iterator[None]:
    """Start `count` - 1 more processes, which call `train` as this one does within the context.

    Each has its share of this process's threads. `prepare` is called in the others and must return what `train` is
    given here; it is pickled. They end with the context."""
    if count == 1:
        yield
        return
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all are on this machine
    threads = torch.get_num_threads()
    share = max(1, threads // count)
    with TemporaryDirectory() as folder:
        meeting = f"file://{folder}/meeting"
        given = count, share, meeting, prepare, plan, directory, seconds
        others = torch.multiprocessing.spawn(_follow, given, count - 1, join=False, daemon=True)
        torch.set_num_threads(share)
        try:
            dist.init_process_group("gloo", init_method=meeting, rank=0, world_size=count)
            yield
            while not others.join():
                pass
        except RuntimeError:
            others.join(timeout=5)  # raises the error of the process that failed
            raise
        finally:
            torch.set_num_threads(threads)
            if dist.is_initialized():
                dist.destroy_process_group()
            for process in others.processes:
                process.terminate()


def _follow(
    index: int,
    count: int,
    threads: int,
    meeting: str,
    prepare: Prepare,
    plan: TrainingPlan,
    directory: Path,
    seconds: float,
) -> None:
    """Train in a process that `process_group` started."""
    torch.set_num_threads(threads)
    dist.init_process_group("gloo", init_method=meeting, rank=index + 1, world_size=count)
    train(*prepare(), plan, directory, seconds)
    dist.destroy_process_group()


def _rank() -> tuple[int, int]:
    """Return the number of this process, and how many train."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def _of_the_first(number: float) -> float:
    """Return the number that the first process has."""
    if not dist.is_initialized():
        return number
    told = torch.tensor(number, dtype=torch.float64)
    dist.broadcast(told, 0)
    return told.item()


def _summed(parameters: Sequence[nn.Parameter], loss: Tensor) -> float:
    """Sum the gradients of all processes in place, and return the sum of their losses."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    total = torch.cat([*(gradient.flatten() for gradient in gradients), loss.detach().view(1)])
    dist.all_reduce(total)
    parts = total[:-1].split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter)
    return total[-1].item()


def _round_up(number: int, step: int) -> int:
    return -(-number // step) * step


def _schedule(progress: float, warm_up: float) -> float:
    if progress < warm_up:
        return max(1e-3, progress / warm_up)
    return 0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * (progress - warm_up) / (1 - warm_up)))


def _optimizers(student: Learner, plan: TrainingPlan) -> list[torch.optim.Optimizer]:
    """Return the optimisers of the plan; each has its highest learning rate in its groups as `peak`."""
    parameters = [parameter for _, parameter in student.named_trainable()]
    matrices = [p for p in parameters if plan.muon and p.dim() == 2 and p is not student.head]
    rest = [p for p in parameters if all(p is not matrix for matrix in matrices)]
    found: list[torch.optim.Optimizer] = []
    if matrices:
        muon = torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
        found.append(_with_peak(muon, plan.learning_rate))
    if rest:
        adamw = torch.optim.AdamW(rest, betas=(0.9, 0.95), weight_decay=plan.weight_decay, fused=True)
        found.append(_with_peak(adamw, _BESIDE_MUON if matrices else plan.learning_rate))
    return found


def _with_peak(optimizer: torch.optim.Optimizer, rate: float) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["peak"] = rate
    return optimizer


def _save(directory: Path, student: Learner, optimizers: Sequence[torch.optim.Optimizer], step: int) -> None:
    tensors = {"step": torch.tensor(step)}
    moments = {parameter: state for optimizer in optimizers for parameter, state in optimizer.state.items()}
    for name, parameter in student.named_trainable():
        tensors[name] = parameter.detach()
        tensors |= {f"{name}/{kind}": moment for kind, moment in moments[parameter].items()}
    save(directory / _STATE, tensors)


def _restore(directory: Path, student: Learner, optimizers: Sequence[torch.optim.Optimizer]) -> int:
    """Restore what `_save` wrote. Returns the steps done."""
    path = directory / _STATE
    if not path.is_file():
        return 0
    tensors = load_file(path)
    owners = {
        parameter: optimizer
        for optimizer in optimizers
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for name, parameter in student.named_trainable():
        parameter.data.copy_(tensors[name])
        found = {key.rpartition("/")[2]: tensor for key, tensor in tensors.items() if key.startswith(f"{name}/")}
        owners[parameter].state[parameter] = {
            kind: moment if kind == "step" else moment.to(parameter.device) for kind, moment in found.items()
        }
    return int(tensors["step"])
