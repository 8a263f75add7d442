"""The sizes that decide what a forward of a Llama-like model costs, of known models and for inflated ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from ssd.errors import UsageError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True)
class Sizes:
    """Sizes by their names in config.json."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Sizes:
        """Return a checkpoint's sizes. Raises UsageError for a family not in `FAMILIES`, or if a size is missing."""
        if config.get("model_type") not in FAMILIES:
            raise UsageError(f"family {config.get('model_type')!r} cannot be inflated ({', '.join(FAMILIES)} can)")
        try:
            heads, width = int(config["num_attention_heads"]), int(config["hidden_size"])
            return cls(
                width,
                int(config["num_hidden_layers"]),
                heads,
                int(config.get("num_key_value_heads") or heads),
                int(config.get("head_dim") or width // heads),
                int(config["intermediate_size"]),
            )
        except KeyError as error:
            raise UsageError(f"config.json lacks {error}") from None

    @property
    def repeat(self) -> int:
        """Return how many query heads share a key head."""
        return self.num_attention_heads // self.num_key_value_heads


class Like(NamedTuple):
    """A known model, as large as which others can be made."""

    model_type: str
    vocab_size: int
    sizes: Sizes

    def config(self, context: int) -> dict[str, Any]:
        """Return a config.json of such a model, for random weights."""
        return {
            "model_type": self.model_type,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-6,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            **asdict(self.sizes),
        }


LIKE = {
    "llama-1b": Like("llama", 128256, Sizes(2048, 16, 32, 8, 64, 8192)),
    "llama-3b": Like("llama", 128256, Sizes(3072, 28, 24, 8, 128, 8192)),
    "llama-8b": Like("llama", 128256, Sizes(4096, 32, 32, 8, 128, 14336)),
    "llama-70b": Like("llama", 128256, Sizes(8192, 80, 64, 8, 128, 28672)),
    "qwen3-0.6b": Like("qwen3", 151936, Sizes(1024, 28, 16, 8, 128, 3072)),
    "qwen3-8b": Like("qwen3", 151936, Sizes(4096, 36, 32, 8, 128, 12288)),
    "qwen3-32b": Like("qwen3", 151936, Sizes(5120, 64, 64, 8, 128, 25600)),
}
"""Llama 3.1 and 3.2, Qwen3, from their public configs; all as if their heads were not tied to their embeddings."""


class Fit(NamedTuple):
    """How a model of size `old` lies in one of size `new`.

    Every key head is copied `copies` times if fewer query heads share one in the new model than in the old."""

    old: Sizes
    new: Sizes
    copies: int

    @property
    def stretch(self) -> int:
        """Return the factor by which a half head is spread: number i goes to `stretch` * i, which turns as fast."""
        return self.new.head_dim // self.old.head_dim

    def query_place(self, head: int) -> int:
        """Return where a query head goes: beside a copy of its key head."""
        key, index = divmod(head, self.old.repeat)
        copy, beside = divmod(index, self.new.repeat)
        return (key * self.copies + copy) * self.new.repeat + beside

    def key_places(self, head: int) -> list[int]:
        """Return where the copies of a key head go."""
        return list(range(head * self.copies, (head + 1) * self.copies))


def fit(old: Sizes, new: Sizes) -> Fit:
    """Return how `old` lies in `new`. Raises UsageError if `new` has no room for it."""
    for name, size in asdict(old).items():
        wanted = getattr(new, name)
        if wanted < size and name != "num_key_value_heads":
            raise UsageError(f"{name} {wanted} is fewer than the {size} that there are: nothing is taken away")
    if new.head_dim % old.head_dim:
        raise UsageError(
            f"head_dim {new.head_dim} is no multiple of {old.head_dim}: its numbers would turn at other speeds"
        )
    if new.num_attention_heads % new.num_key_value_heads:
        raise UsageError(
            f"num_attention_heads {new.num_attention_heads} are no multiple of num_key_value_heads "
            f"{new.num_key_value_heads}"
        )
    found = Fit(old, new, -(-old.repeat // new.repeat))
    needed = old.num_key_value_heads * found.copies
    if needed > new.num_key_value_heads:
        why = f", as {new.repeat} query heads share one where {old.repeat} did" if found.copies > 1 else ""
        raise UsageError(f"num_key_value_heads {new.num_key_value_heads} is fewer than the {needed} needed{why}")
    return found
