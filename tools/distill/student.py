"""A student that is a decoder of the target's family, over the target's embedding or its own."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, PretrainedConfig, PreTrainedModel

from ssd.errors import UsageError
from ssd.layers.int8 import LEVELS, round_to_int8
from ssd.models.checkpoint import LIST_FILE, Checkpoint, inspect
from ssd.models.draft_kinds import PLAIN, draft_kind
from ssd.models.head import LISTED
from ssd.models.pairs import SHARED
from ssd.models.quantization import QUANTIZATION
from ssd.models.weights import Weights, from_checkpoint, scaled
from tools.distill.layouts import quantization_config
from tools.distill.shards import save
from tools.distill.training import Example, Learner, SoftLabels, padded

Store = Literal["bfloat16", "int8", "int4"]
"""The type in which a draft's folder has the linear layers of attention and feed-forward. All else is in bfloat16."""
# What compressed-tensors adds to the name of a weight for that of its integers, of its shape and of its scales.
PACKED, SHAPE, SCALE = "_packed", "_shape", "_scale"
# Its numbers of 4 bits in a word of 32, and what is added to each.
IN_A_WORD, ZERO = 8, 8

_GROUP = 64  # inputs that share a scale in 4 bits
_ROUNDED = ("_proj",)  # end the names of the layers that are stored in 4 or 8 bits
_NOT_ROUNDED = ("fc", "lm_head")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
_ARCHITECTURE = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
# Fields of a config that decide the shapes of tensors.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json")


@dataclass(frozen=True)
class StudentPlan:
    """The plan of a student: layers of the target, or an independent model.

    With `layers` it takes these over the target's embedding and head, which stay frozen. Else it has `width` and
    `depth`, and its embedding begins as the leading directions of the target's. It predicts the `vocab` most frequent
    tokens of its corpus, all if 0."""

    layers: tuple[int, ...] = ()
    width: int = 0
    depth: int = 0
    vocab: int = 0


class Student(Learner):
    """A decoder of the target's family and its head [V, width].

    The target's own are frozen. In training it predicts every token, in the engine only `ids`, likeliest first; None:
    all."""

    def __init__(self, model: PreTrainedModel, head: nn.Parameter, ids: Tensor | None) -> None:
        super().__init__()
        self.model, self.head, self._ids = model, head, ids

    @property
    def shares(self) -> bool:
        """Return whether embedding and head are the target's."""
        return not self.head.requires_grad

    def states(self, batch: Sequence[Example]) -> list[Tensor]:
        ids = padded([example.text for example in batch])
        states = self.model(ids.to(self.head.device), use_cache=False).last_hidden_state
        spans = [(e.text.prompt - 1, len(e.text.token_ids) - 1) for e in batch]
        return [torch.cat([states[row, start:stop] for row, (start, stop) in enumerate(spans)])]

    def labels(self, batch: Sequence[Example]) -> list[SoftLabels]:
        return [SoftLabels(torch.cat([e.ids for e in batch]), torch.cat([e.probabilities for e in batch]))]

    def begin_with(self, draft: Path) -> None:
        """Copy the weights of the folder `draft`. Raises UsageError if it is no decoder of the same shape."""
        checkpoint = inspect(draft)
        if (kind := draft_kind(checkpoint)) is not PLAIN:
            raise UsageError(f"--begin: {draft} is {kind.name}, the student is a decoder")
        check_same_shape(checkpoint, self.model.config.to_dict(), (*SIZES, "num_hidden_layers"))
        weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
        for name, parameter in self.named_trainable():
            parameter.data.copy_(weights(name, *parameter.shape))

    def write(self, target: Path, directory: Path, store: Store = "bfloat16") -> None:
        """Write a checkpoint folder; a frozen embedding stays in the target's ("shared_with_target" in the config)."""
        state = {f"model.{name}": tensor for name, tensor in self.model.state_dict().items()}
        config = self.model.config.to_dict()
        config.pop("_name_or_path", None)  # a path of this machine
        config["architectures"] = [_ARCHITECTURE[config["model_type"]]]
        if self.shares:
            del state[EMBEDDING]
            config[SHARED] = [EMBEDDING] if config["tie_word_embeddings"] else [EMBEDDING, HEAD]
        write_folder(directory, state, config, target, store)
        if self._ids is not None:
            save(directory / LIST_FILE, {LISTED: self._ids})


def frequent(data: Iterable[Example], count: int, vocab_size: int) -> Tensor:
    """Return int64 [count]: the most frequent tokens of the answers, most frequent first; then the lowest ids."""
    seen = Counter(range(vocab_size))
    for example in data:
        seen.update(example.text.token_ids[example.text.prompt :])
    return torch.tensor([token for token, _ in seen.most_common(count or vocab_size)])


def build(target: Path, plan: StudentPlan, data: Sequence[Example]) -> Student:
    """Return the student before training, in float32, which predicts what is frequent in the answers of `data`.

    Raises UsageError for a plan that does not fit the target."""
    checkpoint = inspect(target)
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    config = AutoConfig.from_pretrained(target)
    _check(plan, config)
    if getattr(config, "layer_types", None):  # one entry a layer; all are alike in the families that the engine runs
        config.layer_types = config.layer_types[:1] * (len(plan.layers) or plan.depth)
    vocab, width = config.vocab_size, config.hidden_size
    embedding = weights(EMBEDDING, vocab, width)
    ids = frequent(data, plan.vocab, vocab) if plan.vocab else None
    if plan.layers:
        config.num_hidden_layers = len(plan.layers)
        model = AutoModel.from_config(config, dtype=torch.float32)
        state = _layers(checkpoint, weights, plan.layers)
        state |= {"embed_tokens.weight": embedding, "norm.weight": weights("model.norm.weight", width)}
        model.load_state_dict(state)
        model.embed_tokens.weight.requires_grad_(False)
        head = embedding if config.tie_word_embeddings else weights(HEAD, vocab, width)
        return Student(model, nn.Parameter(head, requires_grad=False), ids)
    config.hidden_size, config.num_hidden_layers, config.tie_word_embeddings = plan.width, plan.depth, True
    config.num_attention_heads, config.num_key_value_heads = plan.width // config.head_dim, 1
    config.intermediate_size = -(-plan.width * 8 // 3 // 64) * 64
    model = AutoModel.from_config(config, dtype=torch.float32)
    model.embed_tokens.weight.data.copy_(_leading_directions(embedding, plan.width))
    return Student(model, model.embed_tokens.weight, ids)


def _check(plan: StudentPlan, config: PretrainedConfig) -> None:
    if config.model_type not in _ARCHITECTURE:
        raise UsageError(f"a target of family {config.model_type!r}; drafts are made for {', '.join(_ARCHITECTURE)}")
    if bool(plan.layers) == bool(plan.width):
        raise UsageError("give either --layers or --width")
    if plan.layers and not all(0 <= layer < config.num_hidden_layers for layer in plan.layers):
        raise UsageError(f"--layers: the target's layers are 0 to {config.num_hidden_layers - 1}")
    if not 0 <= plan.vocab <= config.vocab_size:
        raise UsageError(f"--draft-vocab: the target has {config.vocab_size} ids")
    if plan.width % config.head_dim:
        raise UsageError(f"--width must be a multiple of {config.head_dim}, the width of a head")


def _layers(checkpoint: Checkpoint, weights: Weights, chosen: tuple[int, ...]) -> dict[str, Tensor]:
    """Return the tensors of the chosen layers, renumbered from 0."""
    found = {}
    for new, old in enumerate(chosen):
        prefix = f"model.layers.{old}."
        for name, info in checkpoint.tensors.items():
            if name.startswith(prefix) and not name.endswith(SCALE):
                found[f"layers.{new}.{name.removeprefix(prefix)}"] = weights(name, *info.shape)
    return found


def _leading_directions(embedding: Tensor, width: int) -> Tensor:
    """Return the embedding [V, d] in its `width` strongest directions (truncated SVD)."""
    _, vectors = torch.linalg.eigh(embedding.T @ embedding)
    return embedding @ vectors[:, -width:].flip(1)


def check_same_shape(draft: Checkpoint, config: Mapping[str, Any], sizes: Sequence[str]) -> None:
    """Raise UsageError unless the config of a draft has the `sizes` of a student's `config`, or does not tell them."""
    for key in sizes:
        if (found := draft.config.get(key)) is not None and found != config[key]:
            raise UsageError(f"--begin: {draft.directory} has {key} {found}, the student {config[key]}")


def round_to_int4(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Round `weight` [out, in]: returns integers from -8 to 7 [out, in], and scales bfloat16 [out, groups]."""
    groups = weight.unflatten(1, (-1, _GROUP))
    scales = (groups.abs().amax(-1) / 7.5).clamp_min(1e-30).bfloat16()
    integers = (groups / scales.float()[..., None]).round().clamp(-8, 7)
    return integers.flatten(1), scales


def packed(integers: Tensor) -> Tensor:
    """Return int32 [out, in / 8] from integers from -8 to 7 [out, in]."""
    parts = (integers.long() + ZERO).unflatten(1, (-1, IN_A_WORD))
    words = (parts << torch.arange(0, 32, 4)).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).int()


class RoundedLinear(nn.Linear):
    """A linear layer that computes with its weight in 4 or 8 bits, and learns as if it had not been rounded."""

    store: Store

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            if self.store == "int4":
                rounded = scaled(*round_to_int4(self.weight))
            else:
                integers, scales = round_to_int8(self.weight, LEVELS)
                rounded = scaled(integers, scales[:, None])
            change = rounded - self.weight
        return nn.functional.linear(x, self.weight + change, self.bias)


def round_in_training(student: nn.Module, store: Store) -> None:
    """Let the layers of a student that are stored in 4 or 8 bits compute as they are stored.

    Raises UsageError if their sizes do not fit."""
    if store == "bfloat16":
        return
    for name, layer in student.named_modules():
        if isinstance(layer, nn.Linear) and name.endswith(_ROUNDED):
            if store == "int4" and layer.in_features % _GROUP:
                raise UsageError(
                    f"--store int4 takes layers of a multiple of {_GROUP} inputs: {name} has {layer.in_features}"
                )
            layer.__class__ = RoundedLinear
            cast(RoundedLinear, layer).store = store


def write_folder(
    directory: Path, state: Mapping[str, Tensor], config: Mapping[str, Any], target: Path, store: Store
) -> None:
    """Write a checkpoint and the target's tokenizer.

    Weights are in bfloat16, except those that `Store` names. The config lists the other linear layers as ignored."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in state.items():
        tensor = tensor.detach().cpu()
        rounded = name.removesuffix(".weight").endswith(_ROUNDED)
        if store == "int8" and rounded:
            tensors[name], scales = round_to_int8(tensor.float(), LEVELS)
            tensors[name + SCALE] = scales[:, None]
        elif store == "int4" and rounded:
            integers, scales = round_to_int4(tensor.float())
            tensors |= {name + PACKED: packed(integers), name + SCALE: scales, name + SHAPE: torch.tensor(tensor.shape)}
        else:
            tensors[name] = (tensor.bfloat16() if tensor.is_floating_point() else tensor).contiguous()
    described = {"int8": quantization_config(8), "int4": quantization_config(4, _GROUP)}
    ignored = [name for name in _NOT_ROUNDED if f"{name}.weight" in tensors]
    stored = {QUANTIZATION: described[store] | {"ignore": ignored}} if store in described else {}
    save(directory / "model.safetensors", tensors, {"format": "pt"})
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", **stored}, indent=2) + "\n")
    for name in _TOKENIZER_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, directory / name)
