"""The tensors of an inflated model, each made when it is asked for.

The old model's numbers lie in the first numbers of the new hidden states. The others are always 0, as nothing writes
them: the rows of output projections that would are 0, and so are the columns of extra heads and extra feed-forward
numbers, and all of the extra layers' output. Everything that only reads is random, so that it costs what it would cost.

With c = old width / new width, the mean square of a state is c times what it was. An RMS norm with eps * c is then 1 /
sqrt(c) times what it was, which its weight takes back. The norms of query and key heads (Qwen3) keep their eps, so
their input is scaled to c times its mean square."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from tools.inflate.sizes import Fit

# Random numbers are copied from so many, a prime, so that rows differ; drawing each would take most of the time.
_POOL = 4194301

Read = Callable[[str], Tensor]
"""Name -> the old model's tensor, float32."""


class Part(NamedTuple):
    """A tensor to write."""

    name: str
    shape: tuple[int, ...]
    make: Callable[[], Tensor]


class Inflation:
    """The parts of a model that lies in a larger one as `fit` says; with norms of its heads if `heads_normed`."""

    def __init__(self, fit: Fit, read: Read, dtype: torch.dtype, heads_normed: bool, seed: int) -> None:
        self._fit, self._old, self._new, self._read, self._dtype = fit, fit.old, fit.new, read, dtype
        self._share = self._old.hidden_size / self._new.hidden_size
        self._stretch = self._new.head_dim / self._old.head_dim
        self._normed = heads_normed
        generator = torch.Generator().manual_seed(seed)
        self._pool = torch.randn(_POOL, generator=generator).mul_(self._old.hidden_size**-0.5).to(dtype)

    def parts(self, vocab_size: int, tied: bool, has: Callable[[str], bool]) -> Iterator[Part]:
        """Yield all parts in order; `has` tells which biases there are."""
        width, old = self._new.hidden_size, slice(self._old.hidden_size)
        yield self._part("model.embed_tokens.weight", (vocab_size, width), (slice(None), old), blank=True)
        for layer in range(self._new.num_hidden_layers):
            yield from self._layer(f"model.layers.{layer}", layer < self._old.num_hidden_layers, has)
        yield self._norm("model.norm", True)
        if not tied:
            yield self._part("lm_head.weight", (vocab_size, width), (slice(None), old))

    def _layer(self, name: str, real: bool, has: Callable[[str], bool]) -> Iterator[Part]:
        yield self._norm(f"{name}.input_layernorm", real)
        yield from self._attention(f"{name}.self_attn", real, has)
        yield self._norm(f"{name}.post_attention_layernorm", real)
        yield from self._feed_forward(f"{name}.mlp", real, has)

    def _attention(self, name: str, real: bool, has: Callable[[str], bool]) -> Iterator[Part]:
        new, old = self._new, slice(self._old.hidden_size)
        key_size = new.num_key_value_heads * new.head_dim
        queries, keys = self._queries(), self._keys()
        # What the mean square of a head, then of its share, asks for; and softmax divides by the root of the new size.
        q_scale = (self._share * self._stretch) ** 0.5 if self._normed else self._stretch**0.5
        k_scale = q_scale if self._normed else 1.0
        for part, size, (rows, source), scale in (
            ("q_proj", new.num_attention_heads * new.head_dim, queries, q_scale),
            ("k_proj", key_size, keys, k_scale),
            ("v_proj", key_size, keys, 1.0),
        ):
            used = self._whole_heads(rows)
            yield self._part(
                f"{name}.{part}.weight", (size, new.hidden_size), (rows, old), source, scale, real, clear=used
            )
            if has(f"{part}.bias"):
                yield self._part(f"{name}.{part}.bias", (size,), (rows,), source, scale, real, clear=used)
        rows, source = queries
        shape = (new.hidden_size, new.num_attention_heads * new.head_dim)
        yield self._part(f"{name}.o_proj.weight", shape, (old, rows), (slice(None), source), 1.0, real, blank=True)
        if has("o_proj.bias"):
            yield self._part(f"{name}.o_proj.bias", (new.hidden_size,), (old,), real=real, blank=True)
        if self._normed:
            places = self._stretched()
            for part, scale in (("q_norm", 1.0), ("k_norm", self._stretch**-0.5)):
                yield self._part(f"{name}.{part}.weight", (new.head_dim,), (places,), None, scale, real)

    def _feed_forward(self, name: str, real: bool, has: Callable[[str], bool]) -> Iterator[Part]:
        width, inner = self._new.hidden_size, self._new.intermediate_size
        old, old_inner = slice(self._old.hidden_size), slice(self._old.intermediate_size)
        for part in ("gate_proj", "up_proj"):
            yield self._part(f"{name}.{part}.weight", (inner, width), (old_inner, old), real=real)
            if has(f"{part}.bias"):
                yield self._part(f"{name}.{part}.bias", (inner,), (old_inner,), real=real)
        yield self._part(f"{name}.down_proj.weight", (width, inner), (old, old_inner), real=real, blank=True)
        if has("down_proj.bias"):
            yield self._part(f"{name}.down_proj.bias", (width,), (old,), real=real, blank=True)

    def _norm(self, name: str, real: bool) -> Part:
        shape, old = (self._new.hidden_size,), (slice(self._old.hidden_size),)
        return self._part(f"{name}.weight", shape, old, None, self._share**0.5, real)

    def _part(
        self,
        name: str,
        shape: tuple[int, ...],
        where: tuple[slice | Tensor, ...],
        source: slice | Tensor | tuple[slice | Tensor, ...] | None = None,
        scale: float = 1.0,
        real: bool = True,
        *,
        blank: bool = False,
        clear: Tensor | None = None,
    ) -> Part:
        """Return a tensor with `scale` times the old one's `source` (all of it) in `where`, if the layer is `real`.

        The rest is random, or 0 if `blank`; rows `clear` are 0 where the old numbers are read."""

        def make() -> Tensor:
            out = torch.zeros(shape, dtype=self._dtype) if blank else self._random(name, shape)
            if not real:
                return out
            if clear is not None:
                out[(clear, slice(self._old.hidden_size)) if len(shape) == 2 else clear] = 0
            old = self._read(name)
            out[where] = ((old if source is None else old[source]) * scale).to(self._dtype)
            return out

        return Part(name, shape, make)

    def _random(self, name: str, shape: tuple[int, ...]) -> Tensor:
        count = torch.Size(shape).numel()
        if name.endswith("norm.weight"):
            return torch.full(shape, self._share**0.5 if count == self._new.hidden_size else 1.0, dtype=self._dtype)
        start = zlib.crc32(name.encode()) % _POOL
        whole = torch.cat([self._pool[start:], self._pool.repeat(-(-count // _POOL))])
        return whole[:count].view(shape).clone()

    def _queries(self) -> tuple[Tensor, Tensor]:
        """Return where rows of query heads go, and which old rows they are."""
        heads = range(self._old.num_attention_heads)
        return self._rows([(self._fit.query_place(head), head) for head in heads])

    def _keys(self) -> tuple[Tensor, Tensor]:
        """Return the same for key heads, which may have copies."""
        heads = range(self._old.num_key_value_heads)
        return self._rows([(place, head) for head in heads for place in self._fit.key_places(head)])

    def _rows(self, heads: list[tuple[int, int]]) -> tuple[Tensor, Tensor]:
        places, numbers = self._stretched(), torch.arange(self._old.head_dim)
        rows = torch.cat([place * self._new.head_dim + places for place, _ in heads])
        return rows, torch.cat([head * self._old.head_dim + numbers for _, head in heads])

    def _stretched(self) -> Tensor:
        """Return where the numbers of a head go: each half is spread, so that each number turns as fast as before."""
        half = torch.arange(self._old.head_dim // 2) * self._fit.stretch
        return torch.cat([half, half + self._new.head_dim // 2])

    def _whole_heads(self, rows: Tensor) -> Tensor:
        """Return all rows of the heads that some of `rows` belong to."""
        heads = (rows // self._new.head_dim).unique()
        return (heads[:, None] * self._new.head_dim + torch.arange(self._new.head_dim)).flatten()
