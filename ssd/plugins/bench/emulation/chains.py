"""A scripted target and draft that agree as often as asked: Markov chains as Llama checkpoints.

After token s the target prefers one block of the vocabulary: `next(s)`, a cycle through all tokens, is the likeliest,
each further token e times less likely. The draft ranks decoys, which the target (nearly) never chooses, above the right
token. Attention and feed-forward add nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ssd.config.emulation import StatedAgreement
from ssd.plugins.bench.emulation.agreement import decoys

_BLOCKS, _BLOCK = 32, 32
VOCABULARY = _BLOCKS * _BLOCK
# A logit is the sum of a score of the block and a score of the place in the block. A third part of each hidden state
# makes all of them equally long, so that the norm changes none.
_WIDTH, _HEAD, _INNER = _BLOCKS + _BLOCK + 1, 2, 2
_OF_BLOCK, _OF_DECOYS = 128.0, 64.0  # logits: another block's decoys stay below all of the preferred block
_LENGTH = 256.0  # norm of each hidden state, larger than the norm of its first two parts
_CONTEXT = 8192
_CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": VOCABULARY,
    "hidden_size": _WIDTH,
    "intermediate_size": _INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": _HEAD,
    "max_position_embeddings": _CONTEXT,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


class Pair(NamedTuple):
    """The folders of a target and its draft."""

    target: Path
    draft: Path


def write_pair(directory: Path, asked: StatedAgreement, seed: int = 0) -> Pair:
    """Write a pair that agrees as `asked` at temperatures up to about 2; raise UsageError if none can."""
    target, draft = pair(asked, seed)
    return Pair(_written(directory / "target", target), _written(directory / "draft", draft))


def pair(asked: StatedAgreement, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return target and draft as the hidden state after every token, [V, width]."""
    random = torch.Generator().manual_seed(seed)
    order = torch.randperm(VOCABULARY, generator=random)
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    more_than = torch.tensor([round(VOCABULARY * share) for share in decoys(asked)])
    numbers = (torch.randperm(VOCABULARY, generator=random)[:, None] < more_than).sum(-1)
    return _states(following, torch.zeros_like(numbers)), _states(following, numbers)


def logits(states: Tensor) -> Tensor:
    """Return the logits [V, V] of every token after every token."""
    return states @ _head().T


def _states(following: Tensor, numbers: Tensor) -> Tensor:
    """Return hidden states [V, width] after each token, from its likeliest successor and number of decoys.

    Decoys are the tokens of the successor's block that would otherwise be least likely."""
    blocks = _OF_BLOCK * (torch.arange(_BLOCKS) == (following // _BLOCK)[:, None])
    behind = (torch.arange(_BLOCK) - (following % _BLOCK)[:, None]) % _BLOCK
    places = _OF_DECOYS * (behind >= _BLOCK - numbers[:, None]) - behind
    row = torch.cat([blocks, places], dim=-1)
    rest = (_LENGTH**2 - row.square().sum(-1, keepdim=True)).sqrt()
    return torch.cat([row, rest], dim=-1)


def _head() -> Tensor:
    """Return the head [V, width]: a logit is the score of a token's block plus that of its place there."""
    tokens = torch.arange(VOCABULARY)[:, None]
    block, place = tokens // _BLOCK == torch.arange(_BLOCKS), tokens % _BLOCK == torch.arange(_BLOCK)
    return torch.cat([block, place, torch.zeros(VOCABULARY, 1)], dim=-1)


def _written(directory: Path, states: Tensor) -> Path:
    """Write the chain as a checkpoint: hidden states are the embedding, attention and feed-forward add 0.

    The norm divides by the length of a hidden state and multiplies it back."""
    from safetensors.torch import save_file

    layer, scale = "model.layers.0", _LENGTH / _WIDTH**0.5
    tensors = {
        "model.embed_tokens.weight": states / scale,
        "model.norm.weight": torch.full((_WIDTH,), scale),
        "lm_head.weight": _head(),
        f"{layer}.input_layernorm.weight": torch.ones(_WIDTH),
        f"{layer}.post_attention_layernorm.weight": torch.ones(_WIDTH),
        f"{layer}.self_attn.o_proj.weight": torch.zeros(_WIDTH, _HEAD),
        f"{layer}.mlp.down_proj.weight": torch.zeros(_WIDTH, _INNER),
    }
    tensors |= {f"{layer}.self_attn.{name}_proj.weight": torch.zeros(_HEAD, _WIDTH) for name in "qkv"}
    tensors |= {f"{layer}.mlp.{name}_proj.weight": torch.zeros(_INNER, _WIDTH) for name in ("gate", "up")}
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(_CONFIG))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(directory)
    return directory


def _write_tokenizer(directory: Path) -> None:
    """Write a tokenizer with a word for every token, "t0", "t1", ..., with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
