"""Tiny MTP heads: tensors that are added to a target's checkpoint, and transformers' own layer to compare with."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy

from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from tests.models import tiny
from tests.plugins.drafts.heads import fit

PARTS = ("mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight", "mtp.fc.weight")


def with_head(directory: Path, seed: int = 5) -> Path:
    """Add a random head to a checkpoint."""
    tensors, width = load_file(directory / "model.safetensors"), tiny.SIZES["hidden_size"]
    shapes = {_stored(name): tuple(tensor.shape) for name, tensor in _layer(directory).state_dict().items()}
    shapes |= {PARTS[0]: (width,), PARTS[1]: (width,), PARTS[2]: (width, 2 * width)}
    generator = torch.Generator().manual_seed(seed)
    for name, shape in shapes.items():
        tensors[name] = (len(shape) == 1) + 0.2 * torch.randn(shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return tiny.edit(directory, mtp_num_hidden_layers=1)


def runner(directory: Path, dtype: torch.dtype = torch.float32) -> Runner:
    """The engine's own way from a folder to its head."""
    head = registry.own_draft(inspect(directory), "mtp")
    return Runner(registry.load(head, dtype, tiny.CPU, tiny.MAX_POSITION), 512, 4)


def _layer(directory: Path) -> Any:
    """transformers' decoder of one layer of the checkpoint's family."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(directory)
    config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
    model = AutoModel.from_config(config, dtype=torch.float32, attn_implementation="eager")
    del model.embed_tokens
    return model.train(False)


def _stored(name: str) -> str:
    return f"mtp.{name}"


class PlainHead:
    """The head of a checkpoint by transformers' modules: no cache, no pages, nothing of the engine."""

    def __init__(self, directory: Path) -> None:
        self.directory, self.target = directory, tiny.oracle(directory)
        tensors, self.layer = load_file(directory / "model.safetensors"), _layer(directory)
        self.layer.load_state_dict({name: tensors[_stored(name)] for name in self.layer.state_dict()})
        norms = [copy.deepcopy(self.layer.norm) for _ in range(2)]
        for norm, name in zip(norms, PARTS, strict=False):
            norm.load_state_dict({"weight": tensors[name]})
        self.token_norm, self.feature_norm = norms
        self.fc = torch.nn.Parameter(tensors[PARTS[2]])

    def states(self, ids: Tensor) -> Tensor:
        """[batch, n, width] of the target, after its last norm."""
        with torch.no_grad():
            found: Tensor = self.target.model(ids, use_cache=False).last_hidden_state
        return found

    def step(self, ids: Tensor, features: Tensor) -> Tensor:
        """[batch, n, width]: the features after `ids` [batch, n], each with the features of the token before it."""
        embedded = self.token_norm(self.target.get_input_embeddings()(ids))
        pairs = torch.cat((embedded, self.feature_norm(features)), -1) @ self.fc.T
        found: Tensor = self.layer(inputs_embeds=pairs, use_cache=False).last_hidden_state
        return found

    @torch.no_grad()
    def logits(self, text: Sequence[int], committed: int) -> Tensor:
        """[vocab_size]: about the token after `text`, of which the target has computed all but the last of the first
        `committed` tokens."""
        ids, features = torch.tensor([text]), self.states(torch.tensor([text[: committed - 1]]))
        while features.shape[1] < len(text):
            made = self.step(ids[:, 1 : features.shape[1] + 1], features)
            features = torch.cat((features, made[:, -1:]), 1)
        found: Tensor = self.target.get_output_embeddings()(features[0, -1])
        return found

    def train(self, texts: Sequence[Sequence[int]], steps: int, depth: int, rate: float = 1e-2) -> float:
        """Learn what follows in `texts`, of one length, also from its own features; returns the loss."""
        ids, own = torch.tensor(texts), [*self.layer.parameters(), *self.token_norm.parameters()]
        own += [*self.feature_norm.parameters(), self.fc]
        states = self.states(ids)

        def losses() -> Iterator[Tensor]:
            features = states[:, :-1]
            for ahead in range(1, depth + 1):
                features = self.step(ids[:, ahead : ahead + features.shape[1]], features)[:, :-1]
                logits = self.target.get_output_embeddings()(features)
                yield cross_entropy(logits.flatten(0, 1), ids[:, ahead + 1 :].flatten())

        return fit(own, losses, steps, rate)

    def save(self) -> None:
        """Overwrite the head in the checkpoint."""
        learned = {_stored(name): tensor for name, tensor in self.layer.state_dict().items()}
        own = self.token_norm.weight, self.feature_norm.weight, self.fc
        learned |= dict(zip(PARTS, own, strict=True))
        kept = load_file(self.directory / "model.safetensors")
        written = {name: tensor.detach().clone() for name, tensor in learned.items()}
        save_file(kept | written, self.directory / "model.safetensors", metadata={"format": "pt"})
