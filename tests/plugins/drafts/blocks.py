"""Tiny block drafters: a checkpoint in each published layout, and a plain forward to check the engine's against."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import silu

from ssd.execution.runner import Runner
from ssd.models import registry
from ssd.models.checkpoint import inspect
from ssd.models.pairs import borrowed
from tests.exactness.plain import Plain
from tests.models import tiny
from tests.plugins.drafts import heads

LAYERS = (1, 3)  # of the target, after which hidden states are read
BLOCK, MASK, RANK, DEPTH = 5, 7, 8, 2
DIM = 8
THETA = 10000.0

target = heads.target


class Layout(NamedTuple):
    """What the definition of a layout says about rows, and which optional tensors its checkpoints have."""

    from_anchor: bool = True
    markov: bool = True
    confidence: bool = True
    head_norms: bool = True
    embedding: bool = False
    outputs: bool = False


LAYOUTS = {
    # deepseek-ai/DeepSpec: flat.
    "dspark": Layout(embedding=True, outputs=True),
    # The same over a Llama's layers.
    "llama": Layout(head_norms=False, embedding=True, outputs=True),
    # z-lab: fields in `dflash_config`.
    "dflash": Layout(from_anchor=False, markov=False, confidence=False),
    # SpecForge's DSpark: the fields in `dflash_config`, too.
    "specforge": Layout(),
    # vLLM's `speculators`.
    "speculators-dflash": Layout(from_anchor=False, markov=False, confidence=False),
    "speculators-dspark": Layout(embedding=True, outputs=True),
}


def block(
    directory: Path, layout: str = "dspark", predicted: int = 131, seed: int = 0, depth: int = DEPTH, **fields: Any
) -> Path:
    """A random block drafter of `predicted` tokens in a layout of LAYOUTS; `fields` are of its config, None for those
    to be left out."""
    has = LAYOUTS[layout]
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: (len(shape) == 1) + 0.2 * torch.randn(shape, generator=generator)
        for name, shape in _shapes(has, predicted, depth).items()
    }
    vocabulary = tiny.SIZES["vocab_size"]
    if predicted < vocabulary:
        ids = torch.randperm(vocabulary, generator=generator)[:predicted].sort().values
        tensors["d2t"] = ids - torch.arange(predicted)
        if layout.startswith("speculators"):
            tensors["t2d"] = torch.zeros(vocabulary, dtype=torch.bool).index_fill(0, ids, True)
            tensors["lm_head.weight"] = 0.2 * torch.randn(predicted, tiny.SIZES["hidden_size"], generator=generator)
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    config = {name: value for name, value in (_config(layout, predicted, depth) | fields).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _shapes(has: Layout, predicted: int, depth: int) -> dict[str, tuple[int, ...]]:
    names = "num_attention_heads", "num_key_value_heads", "hidden_size", "intermediate_size", "vocab_size"
    count, groups, width, inner, vocabulary = (tiny.SIZES[name] for name in names)
    shapes: dict[str, tuple[int, ...]] = {"norm.weight": (width,)}
    shapes |= {"fc.weight": (width, len(LAYERS) * width), "hidden_norm.weight": (width,)}
    for index in range(depth):
        layer = f"layers.{index}"
        shapes |= {f"{layer}.{norm}_layernorm.weight": (width,) for norm in ("input", "post_attention")}
        shapes |= {f"{layer}.self_attn.{part}_proj.weight": (groups * DIM, width) for part in "kv"}
        shapes |= {f"{layer}.self_attn.q_proj.weight": (count * DIM, width)}
        shapes |= {f"{layer}.self_attn.o_proj.weight": (width, count * DIM)}
        if has.head_norms:
            shapes |= {f"{layer}.self_attn.{part}_norm.weight": (DIM,) for part in "qk"}
        shapes |= {f"{layer}.mlp.{part}_proj.weight": (inner, width) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (width, inner)}
    if has.markov:
        shapes |= {
            "markov_head.markov_w1.weight": (vocabulary, RANK),
            "markov_head.markov_w2.weight": (predicted, RANK),
        }
    if has.confidence:
        shapes |= {"confidence_head.proj.weight": (1, width + RANK), "confidence_head.proj.bias": (1,)}
    if has.embedding:
        shapes["embed_tokens.weight"] = vocabulary, width
    if has.outputs:
        shapes["lm_head.weight"] = predicted, width
    return shapes


def _config(layout: str, predicted: int, depth: int) -> dict[str, Any]:
    sizes = tiny.SIZES | {"num_hidden_layers": depth, "head_dim": DIM, "rope_theta": THETA}
    qwen = sizes | {"model_type": "qwen3", "layer_types": ["full_attention"] * depth, "attention_bias": False}
    fields = {"mask_token_id": MASK, "target_layer_ids": [layer - 1 for layer in LAYERS]}
    markov = {"markov_rank": RANK, "markov_head_type": "vanilla"}
    markov |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
    flat = {"block_size": BLOCK, "num_anchors": 512} | fields | markov
    if layout == "dspark":
        return {**qwen, "architectures": ["Qwen3DSparkModel"]} | flat
    if layout == "llama":
        return {**sizes, "architectures": ["LlamaDSparkModel"], "model_type": "llama"} | flat
    if layout == "dflash":
        code = {"auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "num_target_layers": 4, "block_size": BLOCK}
        return {**qwen, "architectures": ["DFlashDraftModel"], "dflash_config": fields} | code
    if layout == "specforge":
        nested = fields | markov | {"projector_type": "dspark"}
        return {**qwen, "architectures": ["DSparkDraftModel"], "dflash_config": nested, "block_size": BLOCK}
    kind = layout.removeprefix("speculators-")
    found = {
        "architectures": ["Qwen3DSparkModel" if kind == "dspark" else "DFlashDraftModel"],
        "auto_map": {"": "config.DFlashSpeculatorConfig"},
        "aux_hidden_state_layer_ids": list(LAYERS),
        "block_size": BLOCK,
        "draft_vocab_size": predicted,
        "mask_token_id": MASK,
        "sliding_window_non_causal": False,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": "x/y", "architectures": []}},
        "speculators_model_type": kind,
        "target_hidden_size": None,
        "transformer_layer_config": qwen | {"architectures": ["Qwen3ForCausalLM"]},
    }
    return found | (markov | {"sample_from_anchor": True} if kind == "dspark" else {})


def runner(directory: Path, of: Path, dtype: torch.dtype = torch.float64) -> Runner:
    """The engine's own way from a folder to a drafter."""
    checkpoint = borrowed(inspect(directory), inspect(of))
    return Runner(registry.load(checkpoint, dtype, tiny.CPU, tiny.MAX_POSITION), 512, 4)


class PlainBlock:
    """The drafter in `directory`, of a layout, over the target `of`, in plain torch: nothing of the engine.

    `from_anchor` is that of the layout unless given."""

    def __init__(
        self,
        directory: Path,
        of: Plain,
        layout: str = "dspark",
        *,
        causal: bool = False,
        from_anchor: bool | None = None,
        dtype: torch.dtype = torch.float64,
    ) -> None:
        has = LAYOUTS[layout]
        self.causal = causal
        self.from_anchor = has.from_anchor if from_anchor is None else from_anchor
        self.target, self.dtype = of, dtype
        weights = load_file(directory / "model.safetensors")
        self.vocabulary = of.config["vocab_size"]
        differences = weights.pop("d2t", torch.zeros(self.vocabulary, dtype=torch.long))
        self.ids = torch.arange(len(differences)) + differences
        weights.pop("t2d", None)
        self.weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
        self.depth = len({name.split(".")[1] for name in weights if name.startswith("layers.")})
        theirs = of.weights
        self.embedding = self.weights.get("embed_tokens.weight", theirs["model.embed_tokens.weight"].to(dtype))
        tied = theirs["model.embed_tokens.weight"]
        rows = theirs.get("lm_head.weight", tied).to(dtype)[self.ids]
        self.outputs = self.weights.get("lm_head.weight", rows)
        self.mask = self.embedding[MASK]

    def _norm(self, x: Tensor, name: str) -> Tensor:
        scale = (x.square().mean(-1, keepdim=True) + tiny.SIZES["rms_norm_eps"]).rsqrt()
        return x * scale * self.weights[f"{name}.weight"]

    def _heads(self, x: Tensor, layer: str, part: str, positions: Tensor) -> Tensor:
        """Queries, keys or values [n, heads, DIM] of x [n, width]."""
        found = (x @ self.weights[f"{layer}.self_attn.{part}_proj.weight"].T).unflatten(-1, (-1, DIM))
        if part == "v":
            return found
        if f"{layer}.self_attn.{part}_norm.weight" in self.weights:
            found = self._norm(found, f"{layer}.self_attn.{part}_norm")
        angles = (positions.float()[:, None] * THETA ** (-2 * torch.arange(DIM // 2).float() / DIM))[:, None]
        cos, sin = angles.cos().to(self.dtype), angles.sin().to(self.dtype)
        a, b = found.chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    @torch.inference_mode()
    def states(self, committed: Sequence[int], known: Sequence[int], masks: int) -> Tensor:
        """[known and masks, width]: of a block behind `committed` tokens, which all have hidden states.

        `known` is the anchor, or it and tokens before it whose hidden states are missing; these see no later rows."""
        found = self.target.states(committed)
        context = torch.cat([found[layer] for layer in LAYERS], -1).to(self.dtype) @ self.weights["fc.weight"].T
        context = self._norm(context, "hidden_norm")
        x = torch.cat((self.embedding[torch.tensor(known)], self.mask.expand(masks, -1)))
        before, rows = torch.arange(len(committed)), len(committed) + torch.arange(len(x))
        hidden = torch.ones(len(x), len(x), dtype=torch.bool).triu(1)
        if not self.causal:
            hidden[len(known) - 1 :] = False
        hidden = torch.cat((torch.zeros(len(x), len(committed), dtype=torch.bool), hidden), 1)
        groups = tiny.SIZES["num_attention_heads"] // tiny.SIZES["num_key_value_heads"]
        for index in range(self.depth):
            layer = f"layers.{index}"
            y = self._norm(x, f"{layer}.input_layernorm")
            q = self._heads(y, layer, "q", rows)
            k, v = (
                torch.cat((self._heads(context, layer, part, before), self._heads(y, layer, part, rows)))
                for part in "kv"
            )
            k, v = (each.repeat_interleave(groups, 1) for each in (k, v))
            scores = (torch.einsum("nhd,mhd->hnm", q, k) / DIM**0.5).masked_fill(hidden, -torch.inf)
            attended = torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v).flatten(1)
            x = x + attended @ self.weights[f"{layer}.self_attn.o_proj.weight"].T
            y = self._norm(x, f"{layer}.post_attention_layernorm")
            gate, up, down = (self.weights[f"{layer}.mlp.{part}_proj.weight"].T for part in ("gate", "up", "down"))
            x = x + (silu(y @ gate) * (y @ up)) @ down
        return self._norm(x, "norm")

    def logits(self, text: Sequence[int], committed: int, count: int = 1) -> Tensor:
        """[count, vocab_size]: about the `count` tokens after `text`, without the first-order head; -inf for tokens
        that are not predicted. The target has computed all but the last of the first `committed` tokens."""
        masks = count - self.from_anchor
        found = self.states(text[: committed - 1], text[committed - 1 :], masks)[-count:] @ self.outputs.T
        wide = torch.full((count, self.vocabulary), -torch.inf, dtype=self.dtype)
        return wide.index_copy(1, self.ids, found)

    def bias(self, before: int) -> Tensor:
        """[vocab_size]: what the token `before` adds to the logits of the token behind it."""
        wide = torch.zeros(self.vocabulary, dtype=self.dtype)
        if "markov_head.markov_w2.weight" not in self.weights:
            return wide
        row = self.weights["markov_head.markov_w1.weight"][before]
        return wide.index_copy(0, self.ids, self.weights["markov_head.markov_w2.weight"] @ row)

    def each(self, text: Sequence[int], committed: int, tokens: Sequence[int]) -> list[Tensor]:
        """[vocab_size] for each of `tokens` after `text` that one pass drafts, given the tokens before it: `logits` and
        `bias`."""
        found = self.logits(text, committed, min(BLOCK, len(tokens)))
        return [row + self.bias(before) for row, before in zip(found, [text[-1], *tokens], strict=False)]

    def guesses(self, text: Sequence[int], committed: int, count: int = 1) -> list[int]:
        """The `count` likeliest tokens after `text`, each after the one before it."""
        found = [text[-1]]
        for row in self.logits(text, committed, count):
            found.append(int((row + self.bias(found[-1])).argmax()))
        return found[1:]
