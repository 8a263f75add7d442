"""A Llama in one page of plain torch, sharing nothing with the engine but the way a score becomes a sample.

No cache, no batch, no packing: every token is one forward over everything before it, in the type one asks for.
What requests do to logits is written out here once more, from its definition.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from ssd.config.params import SamplingParams
from ssd.law import Law
from ssd.speculation.noise import gumbel
from ssd.speculation.sampling import argmax, perturbed

Adjust = Callable[[Tensor, Sequence[int]], Tensor]
"""(logits [1, V], the text up to here) -> logits [1, V]."""


def adjust_by(params: SamplingParams, prompt_length: int) -> Adjust:
    """Biases, no stop token before there are enough tokens, penalties: the text's tokens one by one."""

    def adjust(logits: Tensor, text: Sequence[int]) -> Tensor:
        row, output = logits[0].clone(), list(text[prompt_length:])
        for token, bias in params.logit_bias.items():
            row[token] += bias
        if params.allowed_token_ids:
            row[[token for token in range(len(row)) if token not in params.allowed_token_ids]] = -torch.inf
        if len(output) < params.min_tokens:
            row[list(params.stop_token_ids)] = -torch.inf
        for token in set(text):
            row[token] *= 1 / params.repetition_penalty if row[token] > 0 else params.repetition_penalty
        for token in output:
            row[token] -= params.frequency_penalty
        for token in set(output):
            row[token] -= params.presence_penalty
        return row[None]

    return adjust


class Plain:
    """The checkpoint in `directory`: untied or tied, any GQA ratio, unscaled rotary positions, no biases."""

    def __init__(self, directory: Path, dtype: torch.dtype = torch.float64) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        assert self.config["rope_parameters"]["rope_type"] == "default"
        self.weights = {name: t.to(dtype) for name, t in load_file(directory / "model.safetensors").items()}
        self._rows: dict[tuple[int, ...], Tensor] = {}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        variance = x.square().sum(-1, keepdim=True) / x.shape[-1]
        return x / (variance + self.config["rms_norm_eps"]).sqrt() * self.weights[f"{name}.weight"]

    def _rotate(self, x: Tensor) -> Tensor:
        """x [n, heads, dim] turned in the complex plane; angles in float32, as everyone computes them."""
        half = x.shape[-1] // 2
        theta: float = self.config["rope_parameters"]["rope_theta"]
        frequencies = 1.0 / theta ** (torch.arange(half).float() * 2 / (2 * half))
        angles = (torch.arange(len(x)).float()[:, None] * frequencies)[:, None]
        turned = torch.complex(x[..., :half], x[..., half:]) * torch.complex(angles.cos().to(x), angles.sin().to(x))
        return torch.cat((turned.real, turned.imag), dim=-1)

    def _attention(self, x: Tensor, name: str) -> Tensor:
        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        q, k, v = (
            (x @ self.weights[f"{name}.{part}_proj.weight"].T).view(len(x), count, -1)
            for part, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        q, k = self._rotate(q), self._rotate(k)
        out = []
        for head in range(heads):
            mine = head // (heads // kv_heads)
            scores = q[:, head] @ k[:, mine].T / q.shape[-1] ** 0.5
            future = torch.ones(len(x), len(x)).triu(1).bool()
            out.append(scores.masked_fill(future, -torch.inf).softmax(-1) @ v[:, mine])
        return torch.cat(out, dim=-1) @ self.weights[f"{name}.o_proj.weight"].T

    def _feed_forward(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.weights[f"{name}.{part}_proj.weight"].T for part in ("gate", "up", "down"))
        inner = x @ gate
        return (inner * inner.sigmoid() * (x @ up)) @ down

    @torch.inference_mode()
    def states(self, token_ids: Sequence[int]) -> list[Tensor]:
        """What goes into the first layer, and what comes out of each: [len(token_ids), width]."""
        x = self.weights["model.embed_tokens.weight"][torch.tensor(token_ids)]
        found = [x]
        for index in range(self.config["num_hidden_layers"]):
            layer = f"model.layers.{index}"
            x = x + self._attention(self._norm(x, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            x = x + self._feed_forward(self._norm(x, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
            found.append(x)
        return found

    @torch.inference_mode()
    def logits(self, token_ids: Sequence[int]) -> Tensor:
        """[len(token_ids), vocab_size]."""
        name = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return self._norm(self.states(token_ids)[-1], "model.norm") @ self.weights[name].T

    def scores(self, token_ids: Sequence[int], law: Law, adjust: Adjust | None = None) -> Tensor:
        """[vocab_size]: what decides the token after `token_ids`; each text is computed once."""
        key = tuple(token_ids)
        if key not in self._rows:
            self._rows[key] = self.logits(token_ids)[-1:]
        vocab_size = self._rows[key].shape[1]
        logits = self._rows[key] if adjust is None else adjust(self._rows[key], token_ids)
        return perturbed(logits, law, [len(key)], lambda seed, at: gumbel(seed, at, vocab_size))[0]

    def next(self, token_ids: Sequence[int], law: Law, adjust: Adjust | None = None) -> int:
        """The token after `token_ids`."""
        return argmax(self.scores(token_ids, law, adjust)[None])[0]

    def generate(self, prompt: Sequence[int], law: Law, params: SamplingParams) -> list[int]:
        """The tokens after `prompt` up to the first stop token, at most `params.max_tokens`."""
        text, adjust = list(prompt), adjust_by(params, len(prompt))
        while len(text) < len(prompt) + params.max_tokens:
            text.append(self.next(text, law, adjust))
            if text[-1] in params.stop_token_ids:
                break
        return text[len(prompt) :]
