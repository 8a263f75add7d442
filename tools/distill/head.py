"""A student that is an EAGLE-3 head (Li et al., arXiv 2503.01840): one layer over the target's hidden states.

It is trained as it will be used (the paper's training-time test): first from features of the target, then several
tokens further from its own states. The corpus has the features, or else the engine's own target computes them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ssd.errors import UsageError
from ssd.execution.runner import Runner
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.draft_kinds import kinds
from ssd.models.head import check_ids
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.weights import from_checkpoint
from tools.distill.layouts import EAGLE3, LAYER_IDS, LAYER_NAMES, Layout, speculators
from tools.distill.shards import Conversation
from tools.distill.student import EMBEDDING, HEAD, SIZES, Store, check_same_shape, frequent, write_folder
from tools.distill.teacher import hidden
from tools.distill.training import Example, Learner, SoftLabels, StoredFeatures

# The loss of step s has weight _DECAY**s: a draft token is of use only if all before it are accepted.
_DECAY = 0.8
# Conversations whose features set the scales.
_MEASURED = 16


@dataclass(frozen=True)
class HeadPlan:
    """The plan of a head.

    It reads the hidden states after three of the target's `layers` (none: those of EAGLE-3), predicts the `vocab` most
    frequent tokens of its corpus (0: all), and is trained to go `unroll` tokens beyond the target's features. Its
    feed-forward is `feed_forward` wide (0: as the target's). `own_head`: it has an `lm_head` of its own, which begins
    as the target's; else it reads the target's."""

    layers: tuple[int, ...] = ()
    vocab: int = 0
    unroll: int = 4
    feed_forward: int = 0
    own_head: bool = False


class PairAttention(nn.Module):
    """Attention of pairs (token, state) to committed pairs, and to those that were unrolled from the same place.

    Here and below, parameters have the names of the checkpoint."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, self._dim, self._kv_heads = config.hidden_size, config.head_dim, config.num_key_value_heads
        inner, keys = config.num_attention_heads * self._dim, self._kv_heads * self._dim
        self.q_proj = nn.Linear(2 * width, inner, bias=False)
        self.k_proj = nn.Linear(2 * width, keys, bias=False)
        self.v_proj = nn.Linear(2 * width, keys, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def keys(self, pairs: Tensor, angles: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Return keys and values [kv_heads, n, dim] of `pairs` [n, 2 x width].

        `angles` are the cosines and sines of their positions."""
        k, v = (layer(pairs).unflatten(-1, (-1, self._dim)).transpose(0, 1) for layer in (self.k_proj, self.v_proj))
        return _rotated(k, angles), v

    def forward(
        self,
        pairs: Tensor,
        angles: tuple[Tensor, Tensor],
        rows: _Rows,
        committed: tuple[Tensor, Tensor],
        own: Sequence[tuple[Tensor, Tensor]],
    ) -> Tensor:
        """Return the layer's output [n, width] for `pairs` [n, 2 x width], which are those of `rows`.

        Each sees the keys and values of its text's `committed` pairs up to its own place, and of each later step,
        `own`, only the one that was unrolled from the same place."""
        q = _rotated(self.q_proj(pairs).unflatten(-1, (-1, self._dim)).transpose(0, 1), angles) * self._dim**-0.5
        q = q.unflatten(0, (self._kv_heads, -1))  # [kv_heads, group, n, dim]
        later = [(q * k[:, None]).sum(-1, keepdim=True) for k, _ in own]
        found = []
        for span, text, unseen in zip(rows.spans, rows.texts, rows.unseen, strict=True):
            keys, values = (part[:, None, text] for part in committed)
            scores = torch.cat(
                [q[:, :, span] @ keys.transpose(2, 3) + unseen, *(part[:, :, span] for part in later)], -1
            )
            shares = scores.softmax(-1)
            n = keys.shape[2]
            out = shares[..., :n] @ values
            for step, (_, value) in enumerate(own):
                out = out + shares[..., n + step, None] * value[:, None, span]
            found.append(out)
        return self.o_proj(torch.cat(found, 2).flatten(0, 1).transpose(0, 1).flatten(1))


def _rotated(x: Tensor, angles: tuple[Tensor, Tensor]) -> Tensor:
    """Apply RoPE to x [heads, n, dim]."""
    cos, sin = angles
    return x * cos + rotate_half(x) * sin


class PairLayer(nn.Module):
    """The head's only layer: a norm on each half of a pair, attention, feed-forward."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.hidden_norm, self.input_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.post_attention_layernorm = LlamaRMSNorm(width, eps)
        self.self_attn, self.mlp = PairAttention(config), LlamaMLP(config)

    def pairs(self, tokens: Tensor, x: Tensor) -> Tensor:
        """Return [n, 2 x width] from embeddings and states [n, width]."""
        return torch.cat((self.input_layernorm(tokens), self.hidden_norm(x)), -1)

    def rest(self, x: Tensor, attended: Tensor) -> Tensor:
        """Return the layer's output from its input x and the attention's output, both [n, width]."""
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x))


class _Rows:
    """The places from which a head is unrolled, of all texts one after the other: those that lead to answer tokens.

    A text of t tokens has t - 1 pairs. `kept` int64 [n]: the indices of the places among the pairs of all texts.
    `places` int64 [n]: their positions in their own texts. Per text: `spans`, its rows; `texts`, its pairs; `unseen`
    [rows, pairs], -inf where a row does not see a pair."""

    def __init__(self, texts: Sequence[Conversation], steps: int, device: torch.device) -> None:
        firsts = [max(0, text.prompt - 2 - steps) for text in texts]
        counts = [len(text.token_ids) - 1 for text in texts]
        ends = list(accumulate(counts, initial=0))
        edges = list(accumulate((count - first for count, first in zip(counts, firsts, strict=True)), initial=0))
        self.texts, self.spans = ([slice(*pair) for pair in pairwise(found)] for found in (ends, edges))
        places = [torch.arange(first, count) for first, count in zip(firsts, counts, strict=True)]
        self.firsts, self.places = firsts, torch.cat(places).to(device)
        starts = zip(ends, places, strict=False)
        self.kept = torch.cat([start + own for start, own in starts]).to(device)
        self.unseen = [
            torch.zeros(len(own), count, device=device).masked_fill_(
                torch.arange(count, device=device) > own.to(device)[:, None], -torch.inf
            )
            for own, count in zip(places, counts, strict=True)
        ]


class HeadStudent(Learner):
    """The head as it is trained. The target and its embedding [V, width] stay as they are.

    `head` [ids, width] are the rows of the target's head for `ids`, the tokens that it predicts, in order. Features are
    divided by `scales` [3 x width], their usual sizes, as a few of them are a thousand times larger than the others;
    `write` undoes that."""

    def __init__(
        self, config: LlamaConfig, plan: HeadPlan, target: Runner, embedding: Tensor, head: Tensor, ids: Tensor
    ) -> None:
        super().__init__()
        width = config.hidden_size
        self.config, self.plan, self._target = config, plan, target
        self.fc = nn.Linear(len(plan.layers) * embedding.shape[1], width, bias=False)
        self.midlayer = PairLayer(config)
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.lm_head = nn.Linear(width, len(ids), bias=False).requires_grad_(plan.own_head)
        self.lm_head.weight.data.copy_(head)
        self._rotary = LlamaRotaryEmbedding(config)
        places = torch.full((len(embedding),), -1).index_copy(0, ids, torch.arange(len(ids)))
        tables = {"_embedding": embedding, "ids": ids, "_places": places, "scales": torch.ones(self.fc.in_features)}
        for name, tensor in tables.items():
            self.register_buffer(name, tensor, persistent=False)

    @property
    def head(self) -> Tensor:  # type: ignore[override]
        return self.lm_head.weight

    def measure(self, batch: Sequence[Example]) -> None:
        """Set `scales` to the root mean squares of the features of some conversations."""
        rows = torch.cat([row for e in batch for row in self._features([e.text], [e.features])]).float()
        self.scales.copy_(rows.pow(2).mean(0).sqrt().clamp_min(1e-6))

    def unroll(
        self, texts: Sequence[Conversation], steps: int, stored: Sequence[StoredFeatures | None] = ()
    ) -> Iterator[list[Tensor]]:
        """Return the states of each step that predict tokens of the answers: per text [n, width], the last n tokens.

        State i of the first step predicts token i + 2, from the target's features up to token i. State i of step s
        after it predicts token i + 2 + s, from the head's own states since. `stored`: where a text's features are
        stored."""
        device, layer = self.head.device, self.midlayer
        rows = _Rows(texts, steps, device)
        features = torch.cat(self._features(texts, stored)).to(self.fc.weight)
        x = self.fc(features / self.scales)
        ids = torch.tensor([token for text in texts for token in text.token_ids[1:]], device=device)
        places = torch.cat([torch.arange(len(text.token_ids) - 1, device=device) for text in texts])
        committed = layer.self_attn.keys(layer.pairs(self._embedding[ids], x), self._angles(x, places))
        x = x[rows.kept]
        own = list[tuple[Tensor, Tensor]]()
        for step in range(steps + 1):
            tokens = self._embedding[ids.roll(-step)[rows.kept]]  # no row that is used sees what rolls in at the end
            pairs, angles = layer.pairs(tokens, x), self._angles(x, rows.places + step)
            if step:
                own.append(layer.self_attn.keys(pairs, angles))
            x = layer.rest(x, layer.self_attn(pairs, angles, rows, committed, own))
            states = self.norm(x)
            yield [
                states[span][_first(text, step) + text.prompt - 2 - step - start :][: text.answer - _first(text, step)]
                for text, span, start in zip(texts, rows.spans, rows.firsts, strict=True)
            ]

    def _angles(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        cos, sin = self._rotary(x, places[None])
        return cos[0], sin[0]

    def _features(self, texts: Sequence[Conversation], stored: Sequence[StoredFeatures | None]) -> list[Tensor]:
        """Return the hidden states of each text [tokens - 1, 3 x width], stored or computed."""
        known = [one.read(self.plan.layers) for one in stored if one is not None]
        return known if len(known) == len(texts) else hidden(self._target, texts, self.plan.layers)

    def states(self, batch: Sequence[Example]) -> list[Tensor]:
        texts, stored = [example.text for example in batch], [example.features for example in batch]
        return [torch.cat(states) for states in self.unroll(texts, self.plan.unroll, stored)]

    def labels(self, batch: Sequence[Example]) -> list[SoftLabels]:
        found = []
        all_places = self._places.cpu()
        places = [all_places[example.ids] for example in batch]
        for step in range(self.plan.unroll + 1):
            first = [_first(example.text, step) for example in batch]
            ids = torch.cat([own[start:] for own, start in zip(places, first, strict=True)])
            labels = torch.cat([example.probabilities[start:] for example, start in zip(batch, first, strict=True)])
            found.append(SoftLabels(ids.clamp_min(0), labels * (ids >= 0), _DECAY**step))
        return found

    def begin_with(self, draft: Path, target: Path) -> None:
        """Copy the weights of the folder `draft`, in either layout.

        Rows of an `lm_head` are matched by token id; tokens that `draft` does not predict keep the target's rows.
        Raises UsageError if it is no head of the same shape."""
        checkpoint = inspect(draft)
        if not kinds()[EAGLE3].recognises(checkpoint):
            raise UsageError(f"--begin: {draft} is a decoder, the student is an EAGLE-3 head")
        if (layers := kinds()[EAGLE3].layers(checkpoint, inspect(target))) != self.plan.layers:
            raise UsageError(f"--begin: {draft} reads hidden states after {layers} layers, not {self.plan.layers}")
        if checkpoint.config.get("norm_before_residual"):
            raise UsageError(f"--begin: {draft} has norm_before_residual, which is not trained")
        check_same_shape(checkpoint, self.config.to_dict(), SIZES)
        weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
        layer = next((name for name in LAYER_NAMES if weights.has(f"{name}.hidden_norm.weight")), LAYER_NAMES[0])
        for name, parameter in self.named_trainable():
            if name != HEAD:
                parameter.data.copy_(weights(name.replace(LAYER_NAMES[0], layer), *parameter.shape))
        self.fc.weight.data.mul_(self.scales)
        if self.plan.own_head and weights.has(HEAD):
            ids = _predicted(checkpoint)
            rows, places = weights(HEAD, len(ids), self.config.hidden_size), self._places.cpu()[ids]
            self.head.data[places[places >= 0].to(self.head.device)] = rows[places >= 0].to(self.head.device)

    @torch.no_grad()
    def logits(self, texts: Sequence[Conversation], lookahead: int) -> list[Tensor]:
        """Return the logits that a `tools.distill.evaluation.Draft` reangles."""
        found = []
        for step, states in enumerate(self.unroll(texts, lookahead)):
            rows = [pad(own, (0, 0, _first(text, step), 0)) for own, text in zip(states, texts, strict=True)]
            scores = (torch.cat(rows) @ self.head.T).cpu()
            found.append(torch.full((len(scores), len(self._places)), -torch.inf).index_copy(1, self.ids.cpu(), scores))
        return found

    def write(self, target: Path, directory: Path, store: Store = "bfloat16", layout: Layout = "sglang") -> None:
        """Write a checkpoint folder. The embedding stays in the target's.

        An `lm_head` that is the target's stays there too, except in the layout of `speculators`, which wants one."""
        config = self.config.to_dict() | {"architectures": ["LlamaForCausalLMEagle3"]}
        config |= {DRAFT_VOCAB: len(self.ids), LAYER_IDS: list(self.plan.layers)}
        state = self.state_dict()
        state["fc.weight"] = self.fc.weight / self.scales
        if len(self.ids) < len(self._places):
            state["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        if layout == "speculators":
            config, state = speculators(config, state, inspect(target), max(1, self.plan.unroll))
        elif not self.plan.own_head:
            del state[HEAD]
        write_folder(directory, state, config, target, store)


def _first(text: Conversation, step: int) -> int:
    """Return the first token of the answer that can be predicted from features."""
    return min(max(0, 2 + step - text.prompt), text.answer)


def _predicted(draft: Checkpoint) -> Tensor:
    """Return int64 [n]: the ids of the tokens that a head predicts, one for each row of its `lm_head`."""
    vocab_size = draft.count("vocab_size")
    ids = torch.arange(draft.count(DRAFT_VOCAB, vocab_size))
    if "d2t" in draft.tensors:
        ids = ids + from_checkpoint(draft, torch.float32, torch.device("cpu")).integers("d2t", len(ids))
    check_ids(ids, vocab_size, "d2t")
    return ids


def load(target: Path, draft: Path, runner: Runner) -> HeadStudent:
    """Return the head that the folder `draft` has, over the target that `runner` runs. Raises UsageError."""
    checkpoint = inspect(draft)
    if EMBEDDING.removeprefix("model.") in checkpoint.tensors:
        raise UsageError(f"{draft} has an embedding of its own; heads are evaluated over their target's")
    layers = kinds()[EAGLE3].layers(checkpoint, inspect(target))
    ids = _predicted(checkpoint)
    plan = HeadPlan(layers, len(ids), 0, checkpoint.count("intermediate_size"), own_head=HEAD in checkpoint.tensors)
    student = _over(target, plan, runner, ids)
    student.begin_with(draft, target)
    return student


def build(target: Path, plan: HeadPlan, runner: Runner, data: Sequence[Example]) -> HeadStudent:
    """Return the head before training, over the target that `runner` runs.

    It predicts the tokens that are frequent in the answers of `data`. Raises UsageError for a plan that does not fit
    the target."""
    fields = _config_of(target).to_dict() | ({LAYER_IDS: list(plan.layers)} if plan.layers else {})
    layers = kinds()[EAGLE3].layers(Checkpoint(Path("to be trained"), fields, {}, 0, ""), inspect(target))
    ids = _to_predict(target, layers, plan.vocab, runner, data)
    student = _over(target, replace(plan, layers=layers), runner, ids)
    if data:
        student.measure(data[:_MEASURED])
    return student


def _to_predict(target: Path, layers: Sequence[int], vocab: int, runner: Runner, data: Sequence[Example]) -> Tensor:
    """Return the ids, in order, that a head predicts which reads hidden states after `layers`; `vocab` as in a plan.

    Raises UsageError if the target does not show these, or has no embedding that the head can read."""
    checkpoint = inspect(target)
    if EMBEDDING not in checkpoint.tensors:
        raise UsageError(f"{target} has no tensor {EMBEDDING}, which the draft reads of its target")
    vocab_size = checkpoint.count("vocab_size")
    if not 0 <= vocab <= vocab_size:
        raise UsageError(f"--draft-vocab: the target has {vocab_size} ids")
    hidden(runner, [Conversation([0, 0], 1)], layers)
    return frequent(data, vocab, vocab_size).sort().values


def _over(target: Path, plan: HeadPlan, runner: Runner, ids: Tensor) -> HeadStudent:
    """Return a head that predicts `ids`, with random weights and the target's embedding and rows."""
    checkpoint, config = inspect(target), _config_of(target)
    config.intermediate_size = plan.feed_forward or config.intermediate_size
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    embedding = weights(EMBEDDING, config.vocab_size, config.hidden_size)
    table = weights(HEAD, *embedding.shape) if HEAD in checkpoint.tensors else embedding
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return HeadStudent(config, plan, runner, embedding, table[ids], ids)


def _config_of(target: Path) -> LlamaConfig:
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
