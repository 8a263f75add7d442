"""Attention over pages by the flash-attn package, if it is installed (Dao, arXiv 2307.08691)."""

from __future__ import annotations

import torch
from flash_attn import flash_attn_varlen_func
from torch import Tensor

from ssd.errors import UsageError
from ssd.layers.attention import Scores
from ssd.layers.paged import PagedRows
from ssd.layers.triton_attention import TritonAttention

PAGE_SIZE = 256  # flash-attn refuses page sizes that are not a multiple of this
_MOST_DIM = 256
_FEW = 16  # queries of a row; verifications have no more


class FlashAttention(TritonAttention):
    """Computes prompts in 16 bits by flash-attn, and everything else by Triton.

    flash-attn divides keys among processors for single queries only, so it does not serve verifications."""

    def __init__(self, device: torch.device, page_size: int, deterministic: bool) -> None:
        if deterministic:
            raise UsageError("--attention flash-attn cannot be --deterministic: how it adds depends on the batch")
        if page_size % PAGE_SIZE:
            raise UsageError(f"--attention flash-attn needs pages of {PAGE_SIZE} tokens, not of {page_size}")
        super().__init__(device)

    def attend(self, q: Tensor, keys: Tensor, values: Tensor, rows: PagedRows, scale: float, rule: Scores) -> Tensor:
        few = rows.longest <= _FEW or not rows.causal or keys.dtype != q.dtype or rule.sinks is not None
        if few or q.dtype.itemsize != 2 or q.shape[-1] > _MOST_DIM or q.shape[-1] % 8:
            return super().attend(q, keys, values, rows, scale, rule)
        paged = (-1, rows.page_size, *keys.shape[1:])
        out: Tensor = flash_attn_varlen_func(
            q,
            keys.view(paged),
            values.view(paged),
            cu_seqlens_q=rows.starts,
            cu_seqlens_k=rows.key_starts,
            max_seqlen_q=rows.longest,
            max_seqlen_k=rows.reach,
            softmax_scale=scale,
            causal=True,
            window_size=(-1 if rule.window is None else rule.window - 1, -1 if rule.window is None else 0),
            softcap=rule.softcap or 0.0,
            block_table=rows.tables,
        )
        return out.flatten(1)
