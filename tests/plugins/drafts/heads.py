"""Tiny EAGLE-3 heads: a checkpoint written from scratch, a plain forward to check the engine's against, and an hour of
training in some seconds."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from ssd.execution.runner import Runner
from ssd.ipc.features import FeatureArena
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from tests.exactness.plain import Plain
from tests.models import tiny

LAYERS = (1, 2, 4)
WIDTH = 3 * tiny.SIZES["hidden_size"]


def target(directory: Path, **options: Any) -> Path:
    """A Llama with layers enough to be low, middle and high."""
    return tiny.llama(directory, **{"num_hidden_layers": 4, "seed": 3} | options)


def fit(parameters: Sequence[Tensor], losses: Callable[[], Iterable[Tensor]], steps: int, rate: float) -> float:
    """Train the parameters by the mean of the losses; returns the last one."""
    optimizer = torch.optim.AdamW(parameters, rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for _ in range(steps):
        loss = torch.stack(list(losses())).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    return loss.item()


def head(directory: Path, predicted: int = 131, seed: int = 0, layer: str = "midlayer", **fields: Any) -> Path:
    """A random head of `predicted` tokens, as others write it; `fields` are of its config."""
    sizes = tiny.SIZES | fields
    heads, width, inner = (sizes[name] for name in ("num_attention_heads", "hidden_size", "intermediate_size"))
    kv = sizes["num_key_value_heads"] * (width // heads)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (width, WIDTH), "norm.weight": (width,)}
    shapes |= {f"{layer}.{norm}.weight": (width,) for norm in ("hidden_norm", "input_layernorm")}
    shapes |= {f"{layer}.post_attention_layernorm.weight": (width,), "lm_head.weight": (predicted, width)}
    shapes |= {f"{layer}.self_attn.{part}_proj.weight": (kv, 2 * width) for part in "kv"}
    shapes |= {
        f"{layer}.self_attn.q_proj.weight": (width, 2 * width),
        f"{layer}.self_attn.o_proj.weight": (width, width),
    }
    shapes |= {f"{layer}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
    shapes |= {f"{layer}.mlp.down_proj.weight": (width, inner)}
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (len(shape) == 1) + 0.2 * torch.randn(shape, generator=generator) for name, shape in shapes.items()
    }
    if predicted < sizes["vocab_size"]:
        ids = torch.randperm(sizes["vocab_size"], generator=generator)[:predicted].sort().values
        tensors |= {"d2t": ids - torch.arange(predicted), "t2d": torch.zeros(sizes["vocab_size"], dtype=torch.bool)}
        tensors["t2d"][ids] = True
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = sizes | {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": predicted}
    config = {"eagle_aux_hidden_state_layer_ids": list(LAYERS), "rope_theta": 10000.0} | config
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def edited(source: Path, folder: Path, tensors: dict[str, Tensor | None], **fields: Any) -> Path:
    """A copy with other tensors (None: without) and fields of the config."""
    shutil.copytree(source, folder)
    kept = load_file(folder / "model.safetensors") | tensors
    save_file({name: t for name, t in kept.items() if t is not None}, folder / "model.safetensors")
    return tiny.edit(folder, **fields)


def runner(directory: Path, of: Path, dtype: torch.dtype = torch.float64) -> Runner:
    """The engine's own way from a folder to a head."""
    checkpoint = borrowed(inspect(directory), inspect(of))
    return Runner(registry.load(checkpoint, dtype, tiny.CPU, tiny.MAX_POSITION), 512, 4)


class PlainHead:
    """The head in `directory` over the target `of`, in plain torch: no cache, no pages, nothing of the engine."""

    def __init__(self, directory: Path, of: Plain, dtype: torch.dtype = torch.float64) -> None:
        self.target, self.dtype = of, dtype
        self.weights = load_file(directory / "model.safetensors")
        count = len(self.weights["lm_head.weight"])
        differences = self.weights.pop("d2t", torch.zeros(count, dtype=torch.long))
        self.weights.pop("t2d", None)
        self.ids = torch.arange(count) + differences
        self.weights = {name: tensor.to(dtype) for name, tensor in self.weights.items()}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + tiny.SIZES["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _rows(self, x: Tensor, ids: Tensor, start: int) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values [batch, n, heads, dim] of pairs of which the first is at position `start`."""
        embedding = self.target.weights["model.embed_tokens.weight"].to(self.dtype)
        pair = torch.cat(
            (self._norm(embedding[ids], "midlayer.input_layernorm"), self._norm(x, "midlayer.hidden_norm")), -1
        )
        heads, groups = tiny.SIZES["num_attention_heads"], tiny.SIZES["num_key_value_heads"]
        q, k, v = (
            (pair @ self.weights[f"midlayer.self_attn.{part}_proj.weight"].T).unflatten(-1, (count, -1))
            for part, count in (("q", heads), ("k", groups), ("v", groups))
        )
        half = q.shape[-1] // 2
        frequencies = 10000.0 ** (-torch.arange(half) / half)
        angles = ((start + torch.arange(x.shape[-2]))[:, None] * frequencies)[:, None].to(self.dtype)

        def turned(y: Tensor) -> Tensor:
            a, b = y[..., :half], y[..., half:]
            return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)

        return turned(q), turned(k).repeat_interleave(heads // groups, 2), v.repeat_interleave(heads // groups, 2)

    def unroll(self, ids: Tensor, states: Tensor, depth: int) -> list[Tensor]:
        """For texts [batch, n] and the target's states of them [batch, n, 3 x width]: logits [batch, n - 1 - s, tokens
        that it predicts] for every s up to `depth`. Those at i are about token i + 2 + s, if the target had computed
        the first i + 1 and the head has gone on from its own states since."""
        x, out = states[:, :-1] @ self.weights["fc.weight"].T, []
        n = x.shape[1]
        future = torch.ones(n, n, dtype=torch.bool).triu(1)
        own: list[tuple[Tensor, Tensor]] = []
        for s in range(depth + 1):
            m = n - s
            q, k, v = self._rows(x[:, :m], ids[:, 1 + s : 1 + s + m], s)
            if s == 0:
                first = k, v
            else:
                own.append((k, v))
            scores = torch.einsum("bmhd,bjhd->bhmj", q, first[0]).masked_fill(future[:m], -torch.inf)
            mine = [(q * key[:, :m]).sum(-1).transpose(1, 2) for key, _ in own]
            weights = (torch.cat((scores, *(one[..., None] for one in mine)), -1) / q.shape[-1] ** 0.5).softmax(-1)
            attended = torch.einsum("bhmj,bjhd->bmhd", weights[..., :n], first[1])
            for index, (_, value) in enumerate(own):
                attended = attended + weights[..., n + index].transpose(1, 2)[..., None] * value[:, :m]
            x = x[:, :m] + attended.flatten(2) @ self.weights["midlayer.self_attn.o_proj.weight"].T
            y = self._norm(x, "midlayer.post_attention_layernorm")
            gate, up, down = (self.weights[f"midlayer.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
            x = x + (silu(y @ gate) * (y @ up)) @ down
            out.append(self._norm(x, "norm") @ self.weights["lm_head.weight"].T)
        return out

    def states(self, text: Sequence[int]) -> Tensor:
        """[n, 3 x width] of the target."""
        found = self.target.states(text)
        return torch.cat([found[layer] for layer in LAYERS], -1).to(self.dtype)

    @torch.inference_mode()
    def logits(self, text: Sequence[int], committed: int) -> Tensor:
        """[vocab_size]: about the token after `text`, of which the target has computed all but the last of the first
        `committed` tokens."""
        depth = len(text) - committed
        found = self.unroll(torch.tensor([text]), self.states(text)[None], depth)[depth][0, committed - 2]
        return torch.full((self.target.config["vocab_size"],), -torch.inf, dtype=self.dtype).scatter(0, self.ids, found)

    @torch.enable_grad()
    def train(self, texts: Sequence[Sequence[int]], steps: int, depth: int, rate: float = 1e-2) -> float:
        """Learn what follows in `texts`, of one length, also from its own states, so far as `depth`; returns the
        loss."""
        ids = torch.tensor(texts)
        states = torch.stack([self.states(text) for text in texts])
        parameters = [tensor.requires_grad_() for tensor in self.weights.values()]
        places = torch.full((self.target.config["vocab_size"],), -100)  # what it does not predict is not to be learned
        places[self.ids] = torch.arange(len(self.ids))

        def losses() -> list[Tensor]:
            return [
                cross_entropy(logits[:, :-1].flatten(0, 1), places[ids[:, 2 + s :]].flatten())
                for s, logits in enumerate(self.unroll(ids, states, depth))
            ]

        return fit(parameters, losses, steps, rate)

    def save(self, directory: Path) -> None:
        """Overwrite the weights of the checkpoint."""
        kept = load_file(directory / "model.safetensors")
        learned = {name: tensor.detach().float() for name, tensor in self.weights.items()}
        save_file(kept | learned, directory / "model.safetensors", metadata={"format": "pt"})


def scribbling(arena: FeatureArena) -> Callable[[], None]:
    """Return what scribbles over an arena: versions, tags, table and rows."""
    choice = random.Random(5)

    def scribble() -> None:
        for words in (arena._versions, arena._tags, arena._table):
            words.flat[choice.randrange(words.size) :: 3] = choice.randint(-(2**40), 2**40)
        arena._rows[choice.randrange(len(arena._rows)) :: 2] = choice.choice((float("nan"), 1e30))

    return scribble
