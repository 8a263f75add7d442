"""A student that is an EAGLE-3 head (Li et al., arXiv 2503.01840): one layer over the target's hidden states.

It is trained as it will be used (the paper's training-time test): first from features of the target, then several
tokens further from its own states. The engine's own target computes the features when they are needed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from ssd.errors import UsageError
from ssd.execution.runner import Runner
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.pairs import DRAFT_VOCAB, FUSED, LAYER_IDS, check_head
from ssd.models.weights import from_checkpoint
from tools.distill.layouts import Layout, speculators
from tools.distill.shards import Conversation
from tools.distill.student import EMBEDDING, HEAD, Store, write_folder
from tools.distill.teacher import hidden
from tools.distill.training import Example, Lesson, padded

# A guess that is further from the target's features counts only if those before it were right.
_DECAY = 0.8


@dataclass(frozen=True)
class HeadPlan:
    """The plan of a head.

    It reads the hidden states after three of the target's `layers` (none: those of EAGLE-3), predicts the `vocab` most
    frequent tokens of its corpus (0: all), and is trained to go `unroll` tokens beyond the target's features."""

    layers: tuple[int, ...] = ()
    vocab: int = 0
    unroll: int = 8


class PairAttention(nn.Module):
    """Attention of pairs (token, state) to committed tokens, and to what was unrolled from the same one.

    Here and below, parameters have the names of the checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self._dim = config.hidden_size, config.head_dim
        self._groups = config.num_attention_heads // config.num_key_value_heads
        inner, keys = config.num_attention_heads * self._dim, config.num_key_value_heads * self._dim
        self.q_proj = nn.Linear(2 * width, inner, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def forward(self, pairs: Tensor, turns: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]) -> Tensor:
        """Return the layer's output for `pairs` [texts, n, 2 x width].

        `turns`: cosines and sines of their positions. `past` holds keys and values of every step so far, this one last:
        of the first step a pair sees those up to its own, of later steps only its own."""
        q, k, v = (
            layer(pairs).unflatten(-1, (-1, self._dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = apply_rotary_pos_emb(q, k, *turns)
        past.append((k.repeat_interleave(self._groups, 1), v.repeat_interleave(self._groups, 1)))
        (keys, values), *own = past
        n = keys.shape[2]
        future = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = [(q @ keys.transpose(2, 3)).masked_fill(future, -torch.inf)]
        scores += [(q * key).sum(-1, keepdim=True) for key, _ in own]
        shares = (torch.cat(scores, -1) * self._dim**-0.5).softmax(-1).to(values.dtype)
        out = shares[..., :n] @ values
        for step, (_, value) in enumerate(own):
            out = out + shares[..., n + step, None] * value
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PairLayer(nn.Module):
    """The head's only layer: a norm on each half of a pair, attention, feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.input_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn, self.mlp = PairAttention(config), LlamaMLP(config)

    def forward(
        self, tokens: Tensor, x: Tensor, turns: tuple[Tensor, Tensor], past: list[tuple[Tensor, Tensor]]
    ) -> Tensor:
        pairs = torch.cat((self.input_layernorm(tokens), self.hidden_norm(x)), -1)
        x = x + self.self_attn(pairs, turns, past)
        return x + self.mlp(self.post_attention_layernorm(x))


class HeadStudent(nn.Module):
    """A `tools.distill.training.Learner`. The target and its embedding [V, width] stay as they are.

    `ids` are the tokens that it predicts, in order."""

    def __init__(self, config: LlamaConfig, plan: HeadPlan, target: Runner, embedding: Tensor, ids: Tensor) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.plan, self._target = config, plan, target
        self.fc = nn.Linear(FUSED * embedding.shape[1], width, bias=False)
        self.midlayer = PairLayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(ids), bias=False)
        self._rotary = LlamaRotaryEmbedding(config)
        places = torch.full((len(embedding),), -1).index_copy(0, ids, torch.arange(len(ids)))
        for name, tensor in {"_embedding": embedding, "ids": ids, "_places": places}.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def head(self) -> Tensor:
        return self.lm_head.weight

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    def unroll(self, texts: Sequence[Conversation], steps: int) -> Iterator[Tensor]:
        """Return the states [texts, n, width] of each step.

        State i of the first step predicts token i + 2, from the target's features up to token i. State i of step s
        after it predicts token i + 2 + s, from the head's own states since."""
        ids = padded(texts).to(self.head.device)
        states = hidden(self._target, texts, self.plan.layers)
        x = self.fc(
            torch.stack([pad(one.to(self.fc.weight.dtype), (0, 0, 0, ids.shape[1] - len(one))) for one in states])
        )
        past: list[tuple[Tensor, Tensor]] = []
        for step in range(steps + 1):
            tokens = self._embedding[ids.roll(-1 - step, 1)]  # what comes in at the end, nothing that counts sees
            turns = self._rotary(x, torch.arange(step, step + ids.shape[1], device=ids.device)[None])
            x = self.midlayer(tokens, x, turns, past)
            yield self.norm(x)

    def lesson(self, batch: Sequence[Example]) -> Lesson:
        parts = []
        for step, states in enumerate(self.unroll([example.text for example in batch], self.plan.unroll)):
            for row, example in zip(states, batch, strict=True):
                first = _first(example.text, step)
                places = self._places.cpu()[example.ids[first:]]
                weight = (places >= 0) * _DECAY**step
                about = _about(row, example.text, step)
                parts.append((about, places.clamp_min(0), example.probabilities[first:] * weight))
        return Lesson(*(torch.cat(part) for part in zip(*parts, strict=True)))

    @torch.no_grad()
    def logits(self, texts: Sequence[Conversation], lookahead: int) -> list[Tensor]:
        """Return the logits that a `tools.distill.evaluation.Draft` returns."""
        found = []
        for step, states in enumerate(self.unroll(texts, lookahead)):
            rows = [
                pad(_about(row, text, step), (0, 0, _first(text, step), 0))
                for row, text in zip(states, texts, strict=True)
            ]
            scores = (torch.cat(rows) @ self.head.T).cpu()
            found.append(torch.full((len(scores), len(self._places)), -torch.inf).index_copy(1, self.ids.cpu(), scores))
        return found

    def write(self, target: Path, directory: Path, store: Store = "bfloat16", layout: Layout = "sglang") -> None:
        """Write a checkpoint folder. The embedding stays in the target's.

        An `lm_head` that equals the target's rows stays there too, except in the layout of `speculators`, which wants
        one."""
        config = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}
        config |= {DRAFT_VOCAB: len(self.ids), LAYER_IDS: list(self.plan.layers)}
        state = self.state_dict()
        lender = inspect(target)
        if len(self.ids) < len(self._places):
            state["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        if layout == "speculators":
            config, state = speculators(config, state, lender, max(1, self.plan.unroll // 2))
        elif torch.equal(self.head.cpu(), _rows(lender, self.ids.cpu())):
            del state[HEAD]
        write_folder(directory, state, config, target, store)


def _first(text: Conversation, step: int) -> int:
    """Return the first token of the answer that can be predicted from features."""
    return min(max(0, 2 + step - text.prompt), text.answer)


def _about(states: Tensor, text: Conversation, step: int) -> Tensor:
    """Return, of a text's states [n, width], those that predict tokens of its answer from `_first` on."""
    first = _first(text, step)
    start = text.prompt + first - 2 - step
    return states[start : start + text.answer - first]


def frequent(answers: Iterable[Conversation], count: int, vocab_size: int) -> Tensor:
    """Return int64 [count], sorted: the most frequent tokens of the answers, filled up with the lowest ids."""
    seen = Counter(range(vocab_size))
    for text in answers:
        seen.update(text.token_ids[text.prompt :])
    return torch.tensor(sorted(token for token, _ in seen.most_common(count or vocab_size)))


def build(target: Path, plan: HeadPlan, runner: Runner, answers: Iterable[Conversation]) -> HeadStudent:
    """Return the head before training, over the target that `runner` runs.

    It predicts the tokens that are frequent in `answers`. Raises UsageError for a plan that does not fit the target."""
    checkpoint = inspect(target)
    config = _config(target)
    fields = config.to_dict() | ({LAYER_IDS: list(plan.layers)} if plan.layers else {})
    plan = replace(plan, layers=check_head(Checkpoint(Path("to be trained"), fields, {}, 0, ""), checkpoint))
    if EMBEDDING not in checkpoint.tensors:
        raise UsageError(f"{target} has no tensor {EMBEDDING}, which a head reads of its target")
    if not 0 <= plan.vocab <= config.vocab_size:
        raise UsageError(f"--vocab: the target has {config.vocab_size} ids")
    hidden(runner, [Conversation([0, 0], 1)], plan.layers)  # whether it shows them
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    embedding = weights(EMBEDDING, config.vocab_size, config.hidden_size)
    ids = frequent(answers, plan.vocab, config.vocab_size)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        student = HeadStudent(config, plan, runner, embedding, ids)
    student.lm_head.weight.data.copy_(_rows(checkpoint, ids))
    return student


def _rows(target: Checkpoint, ids: Tensor) -> Tensor:
    """Return the rows [ids, width] of the target's table that predict the tokens `ids`, in float32."""
    name = HEAD if HEAD in target.tensors else EMBEDDING
    return from_checkpoint(target, torch.float32, torch.device("cpu"))(name, *target.tensors[name].shape)[ids]


def _config(target: Path) -> LlamaConfig:
    """Return the config of a layer of the target's sizes, in the fields of a Llama."""
    known = AutoConfig.from_pretrained(target)
    width, heads = known.hidden_size, known.num_attention_heads
    rope = getattr(known, "rope_parameters", None) or {}
    return LlamaConfig(
        vocab_size=known.vocab_size,
        hidden_size=width,
        intermediate_size=getattr(known, "intermediate_size", None) or 4 * width,
        num_hidden_layers=1,
        num_attention_heads=heads,
        num_key_value_heads=getattr(known, "num_key_value_heads", None) or heads,
        head_dim=getattr(known, "head_dim", None) or width // heads,
        max_position_embeddings=known.max_position_embeddings,
        rms_norm_eps=getattr(known, "rms_norm_eps", 1e-6),
        rope_parameters={"rope_type": "default", "rope_theta": rope.get("rope_theta", 10000.0)},
        tie_word_embeddings=False,
    )
