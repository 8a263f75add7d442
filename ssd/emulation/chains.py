"""A target and a draft that agree as often as stated: Markov chains as checkpoints of the Llama family.

Every token of the vocabulary has a direction. After token s the target likes the tokens whose directions are near that
of `next(s)`, and `next` is one cycle through the whole vocabulary: greedy texts do not repeat before all of it was
said. The draft believes in the same directions, blurred. Attention and feed-forward run as in any model and add
nothing: a forward is nearly free, and what it gives is known exactly, so that the blur can be found at which the two
agree as often as asked for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.errors import UsageError

VOCABULARY = 1024
# With this width three guesses of the draft hold what a greedy text wants as often as those of the paper's pairs, .85.
_WIDTH, _HEAD, _INNER = 64, 2, 2
_SHARPNESS = 8.0  # of the logits: at T = 1 the likeliest token has a probability of about .6
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
_MOST_BLUR, _HALVINGS = 16.0, 20
_VISITS = 64  # steps after which a chain has forgotten where it began


class Pair(NamedTuple):
    """The folders of a target and its draft, and how often a single draft token is accepted."""

    target: Path
    draft: Path
    acceptance: float


class Chain(NamedTuple):
    """`liked` [V, width] are unit vectors, what is liked after each token; `directions` [V, width] those of tokens."""

    liked: Tensor
    directions: Tensor

    @property
    def logits(self) -> Tensor:
        """[V, V]: of every token after every token."""
        return _SHARPNESS * self.liked @ self.directions.T


def write_pair(directory: Path, acceptance: float, temperature: float, seed: int = 0) -> Pair:
    """Write a pair whose draft tokens are accepted at the rate `acceptance` at `temperature`, greedily or by the
    sampler `coupled`. Raises `UsageError` for a rate that no blur gives."""
    target, draft = pair(acceptance, temperature, seed)
    found = agreement(target, draft, temperature)
    return Pair(_written(directory / "target", target), _written(directory / "draft", draft), found)


def pair(acceptance: float, temperature: float, seed: int = 0) -> tuple[Chain, Chain]:
    """The target and the draft of `write_pair`."""
    random = torch.Generator().manual_seed(seed)
    directions = _unit(torch.randn(VOCABULARY, _WIDTH, generator=random))
    order = torch.randperm(VOCABULARY, generator=random)
    following = torch.empty_like(order)
    following[order] = order.roll(-1)
    target = Chain(directions[following], directions)
    noise = _unit(torch.randn(VOCABULARY, _WIDTH, generator=random))

    def draft(blur: float) -> Chain:
        return Chain(_unit(target.liked + blur * noise), directions)

    low, high = 0.0, _MOST_BLUR
    if not agreement(target, draft(high), temperature) <= acceptance <= 1:
        raise UsageError(f"no draft is accepted at a rate of {acceptance:g} at temperature {temperature:g} here")
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if agreement(target, draft(middle), temperature) < acceptance:
            high = middle
        else:
            low = middle
    return target, draft(low)


def agreement(target: Chain, draft: Chain, temperature: float) -> float:
    """How often both choose the same next token over the texts of the target: greedily, or with shared noise."""
    if temperature == 0.0:  # a text goes through every token
        return float((target.logits.argmax(-1) == draft.logits.argmax(-1)).float().mean())
    p, q = (torch.softmax(chain.logits.double() / temperature, dim=-1) for chain in (target, draft))
    visits = torch.full((VOCABULARY,), 1 / VOCABULARY, dtype=p.dtype)
    for _ in range(_VISITS):
        visits = visits @ p
    return float(visits @ _coupled(p, q))


def _coupled(p: Tensor, q: Tensor) -> Tensor:
    """[n] from laws [n, V]: the chance that argmax(log p + g) is argmax(log q + g) for Gumbel noise g, which is the sum
    over x of 1 / sum over y of max(p_y / p_x, q_y / q_x) (Daliri, Musco, Suresh, arXiv 2408.07978).

    With tokens in order of p / q, the first part of the inner sum is q_y / q_x and the rest p_y / p_x.
    """
    order = (p / q).argsort(-1)
    p, q = p.gather(-1, order), q.gather(-1, order)
    until, after = q.cumsum(-1), p.flip(-1).cumsum(-1).flip(-1) - p
    return (1 / (until / q + after / p)).sum(-1)


def _unit(vectors: Tensor) -> Tensor:
    return F.normalize(vectors, dim=-1)


def _written(directory: Path, chain: Chain) -> Path:
    """The chain as a checkpoint. The norm leaves embeddings as unit vectors; what is added to them is 0."""
    from safetensors.torch import save_file

    layer = "model.layers.0"
    tensors = {
        "model.embed_tokens.weight": chain.liked * _WIDTH**0.5,
        "model.norm.weight": torch.full((_WIDTH,), _WIDTH**-0.5),
        "lm_head.weight": _SHARPNESS * chain.directions,
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
    """A word for every token: "t0", "t1", ..., with spaces between them."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {f"t{token}": token for token in range(VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="t0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
