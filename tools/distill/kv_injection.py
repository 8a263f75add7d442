"""A student that drafts token by token, over keys and values that are made of its target's hidden states
(docs/distillation.md).

It has a few layers of the target, and each reads the hidden states before that layer (KV injection, as in DFlash). So
its keys and values of the committed text begin as the target's own, and only the layers between are missing. Drafted
tokens have keys and values of the drafter. To train both, answers are cut into blocks of tokens. The first token of a
block attends to keys and values from the target's states. Each later one also attends to the drafter's own, of the
tokens before it in the block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ssd.errors import UsageError
from ssd.execution.runner import Runner
from ssd.models.blocks import check_block
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.layouts import KV_INJECTION
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.weights import from_checkpoint
from tools.distill.head import Projections, config_of, predicted, to_predict
from tools.distill.shards import Conversation
from tools.distill.student import EMBEDDING, HEAD, SIZES, Store, check_same_shape, write_folder
from tools.distill.teacher import observed
from tools.distill.training import Example, arithmetic, padded

# Shares of the cross-entropy and of the total variation distance in the loss (DSpark).
_CROSS_ENTROPY, _DISTANCE = 0.1, 0.9
# Tokens without hidden states, as held-out places are counted, and the K of the figures.
_COUNTED, _LOOKAHEAD = (0, 1, 2, 4), 4
# Families whose layers are those of a Llama, but for normed heads and biases.
_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
# A Llama with `attention_bias` has this bias, too. Qwen2 lacks it: it begins at zero.
_OUTPUT_BIAS = "self_attn.o_proj.bias"
# Places between two held-out blocks.
_HELD_OUT_STRIDE = 8


@dataclass(frozen=True)
class KVInjectionPlan:
    """The plan of a drafter with injected keys and values.

    Its layers begin as these `layers` of the target (none: the first and the last three), and read the hidden states
    before them. It predicts the `vocab` most frequent tokens of its corpus (0: all). It is trained on at
    most `unroll` of its own states."""

    layers: tuple[int, ...] = ()
    vocab: int = 0
    unroll: int = 4


Angles = tuple[Tensor, Tensor]


class KVInjectionAttention(Projections):
    """Attention of blocks to the committed text before them and, causally, to themselves.

    `normed`: heads of queries and keys are normed, as in Qwen3. Here and below, parameters have the names of the
    checkpoint."""

    def __init__(self, config: LlamaConfig, normed: bool) -> None:
        super().__init__(config)
        norms = (LlamaRMSNorm(self._dim, config.rms_norm_eps) if normed else nn.Identity() for _ in "qk")
        self.q_norm, self.k_norm = norms

    def forward(self, x: Tensor, angles: Angles, context: Tensor, its_angles: Angles, unseen: Tensor) -> Tensor:
        """Return the output [texts, blocks, rows, width] for rows `x` of that shape.

        `context` [texts, n, width] are the states of the committed text, `unseen` [texts, blocks, n] is -inf where a
        block does not see them. `angles` are cosines and sines [texts, blocks, rows, dim] and [texts, n, dim]."""
        texts, blocks, rows, _ = x.shape
        heads = self._kv_heads, self._dim
        q = _rotated(self.q_norm(self.q_proj(x).unflatten(-1, (-1, self._dim))), angles, 3) * self._dim**-0.5
        q = q.unflatten(3, (self._kv_heads, -1)).permute(
            0, 3, 1, 4, 2, 5
        )  # [texts, kv heads, blocks, group, rows, dim]
        own_k = _rotated(self.k_norm(self.k_proj(x).unflatten(-1, heads)), angles, 3).permute(0, 3, 1, 2, 4)
        own_v = self.v_proj(x).unflatten(-1, heads).permute(0, 3, 1, 2, 4)  # [texts, kv heads, blocks, rows, dim]
        k = _rotated(self.k_norm(self.k_proj(context).unflatten(-1, heads)), its_angles, 2).transpose(1, 2)
        v = self.v_proj(context).unflatten(-1, heads).transpose(1, 2)  # [texts, kv heads, n, dim]
        before = (q.flatten(2, 4) @ k.transpose(2, 3)).unflatten(2, q.shape[2:5]) + unseen[:, None, :, None, None]
        later = torch.ones(rows, rows, dtype=torch.bool, device=x.device).triu(1)
        within = (q @ own_k[:, :, :, None].transpose(4, 5)).masked_fill(later, -torch.inf)
        shares = torch.cat((before, within), -1).softmax(-1).to(v.dtype)
        n = k.shape[2]
        out = (shares[..., :n].flatten(2, 4) @ v).unflatten(2, q.shape[2:5]) + shares[..., n:] @ own_v[:, :, :, None]
        return self.o_proj(out.permute(0, 2, 4, 1, 3, 5).reshape(texts, blocks, rows, -1))


def _rotated(x: Tensor, angles: Angles, axis: int) -> Tensor:
    """Apply RoPE to x; its heads are along `axis`, which the angles lack."""
    cos, sin = (part.unsqueeze(axis) for part in angles)
    return x * cos + rotate_half(x) * sin


class KVInjectionLayer(nn.Module):
    """A layer of the drafter: that of a Llama, but for keys and values of the committed text and `normed` heads."""

    def __init__(self, config: LlamaConfig, normed: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.self_attn, self.mlp = KVInjectionAttention(config, normed), LlamaMLP(config)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *rest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks:
    """Blocks of texts, on the host: each has `rows` tokens, the first at `anchors` [texts, blocks].

    `ids` int64 [texts, a length] are the texts. `places` and `tokens` [texts, blocks, rows] are those of the rows.
    `index` [n]: the rows, flattened, that predict a token of an answer; these are tokens `answers` of the texts, and
    row `silent` and later ones of a block."""

    def __init__(self, ids: Tensor, answers: Sequence[range], anchors: Tensor, rows: int, silent: int) -> None:
        self.anchors = anchors
        self.places = anchors[..., None] + torch.arange(rows)
        self.tokens = ids.gather(1, self.places.flatten(1).clamp_max(ids.shape[1] - 1)).view_as(self.places)
        first, stop = (
            torch.tensor(edge)[:, None, None] for edge in zip(*((a.start, a.stop) for a in answers), strict=True)
        )
        predicted = self.places + 1
        wanted = (first <= predicted) & (predicted < stop) & (torch.arange(rows) >= silent)
        self.index = wanted.flatten().nonzero().squeeze(1)

    def rows_of(self, first: Sequence[int]) -> Tensor:
        """Return int64 [n]: a row for each place of `index`, that of place p of a text is its `first` + p."""
        return (self.places + torch.tensor(first)[:, None, None]).flatten()[self.index]


class KVInjectionStudent(nn.Module):
    """A `tools.distill.training.Learner`. The target and its embedding [V, width] stay as they are.

    `head` [ids, width] are the rows of the target's head for `ids`, the tokens that it predicts, in order. Heads of
    queries and keys may be `normed`."""

    def __init__(
        self,
        config: LlamaConfig,
        normed: bool,
        plan: KVInjectionPlan,
        target: Runner,
        table: Tensor,
        head: Tensor,
        ids: Tensor,
    ) -> None:
        super().__init__()
        self.config, self.plan, self._target = config, plan, target
        self.layers = nn.ModuleList([KVInjectionLayer(config, normed) for _ in plan.layers])
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self._rotary = LlamaRotaryEmbedding(config)
        for name, tensor in {"_embedding": table, "head": head, "ids": ids}.items():
            self.register_buffer(name, tensor, persistent=False)

    head: Tensor
    ids: Tensor

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    @property
    def tables(self) -> Sequence[Tensor]:
        return []

    def begin_as(self, target: Checkpoint) -> None:
        """Copy the target's layers and its last norm. Raises UsageError if its layers have more than the drafter's."""
        weights, lent = from_checkpoint(target, torch.float32, torch.device("cpu")), {"norm": "model.norm"}
        lent |= {f"layers.{place}": f"model.layers.{layer}" for place, layer in enumerate(self.plan.layers)}
        copied = set()
        for ours, theirs in lent.items():
            for name, parameter in self.get_submodule(ours).named_parameters():
                if name == _OUTPUT_BIAS and f"{theirs}.{name}" not in target.tensors:
                    parameter.data.zero_()
                    continue
                parameter.data.copy_(weights(f"{theirs}.{name}", *parameter.shape))
                copied.add(f"{theirs}.{name}")
        for name in sorted(target.tensors.keys() - copied):
            if name.endswith((".weight", ".bias")) and name.startswith(tuple(f"{each}." for each in lent.values())):
                raise UsageError(
                    f"--kind kv-injection: the target has {name}, which the layers of a KV-injected drafter lack"
                )

    def begin_with(self, draft: Path, target: Path) -> None:
        """Copy the weights of the folder `draft`. Raises UsageError if it has another shape."""
        checkpoint = inspect(draft)
        check_same_shape(checkpoint, self.described(), (*SIZES, "num_hidden_layers", "target_layer_ids"))
        weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
        for name, parameter in self.named_trainable():
            parameter.data.copy_(weights(name, *parameter.shape))

    def states(self, features: Tensor, blocks: Blocks) -> Tensor:
        """Return the states [texts, blocks, rows, width] that predict the token behind each row of the blocks.

        `features` [texts, a length, n x width] are the target's hidden states of all tokens."""
        device = features.device
        x = embedding(blocks.tokens.to(device), self._embedding)
        committed = torch.arange(features.shape[1])
        seen = committed < blocks.anchors[..., None]
        unseen = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).to(device)
        its_angles = self._angles(x, committed[None].to(device))
        cos, sin = self._angles(x, blocks.places.flatten(1).to(device))
        angles = cos.unflatten(1, blocks.places.shape[1:]), sin.unflatten(1, blocks.places.shape[1:])
        for layer, states in zip(self.layers, features.chunk(len(self.layers), -1), strict=True):
            x = layer(x, angles, layer.input_layernorm(states), its_angles, unseen)
        predicting: Tensor = self.norm(x)
        return predicting

    def _angles(self, x: Tensor, places: Tensor) -> Angles:
        cos, sin = self._rotary(x, places)
        return cos, sin

    def loss(self, batch: Sequence[Example], own: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return what the examples `own` add to the loss of a batch.

        Blocks of one length cut each answer, from a place that is drawn, too."""
        rows = int(torch.randint(1, self.plan.unroll + 2, (), generator=generator))
        before = int(torch.randint(rows, (), generator=generator))  # rows before the answer
        starts = torch.arange(0, max(example.text.answer for example in own) + before, rows)
        anchors = torch.stack([max(example.text.prompt - 1 - before, 0) + starts for example in own])
        found = self._run(self._read([example.text for example in own]), anchors, rows)
        apart = (found.target - found.logits.softmax(-1)).abs().sum(-1)
        distance = (apart + found.outside) / 2
        entropy = -(found.target * found.logits.log_softmax(-1)).sum(-1)
        loss = (_CROSS_ENTROPY * entropy + _DISTANCE * distance).sum()
        return loss / sum(example.text.answer for example in batch)

    @torch.no_grad()
    def agreed(self, batch: Sequence[Example]) -> Tensor:
        """Return `Learner.agreed`: _LOOKAHEAD places without missing hidden states, then with some, as in _COUNTED.

        A place counts if the target accepts all before it."""
        counts, texts = [], self._read([example.text for example in batch])
        steps = torch.arange(0, max(len(e.text.token_ids) for e in batch), _HELD_OUT_STRIDE)
        for missing in _COUNTED:
            anchors = torch.stack([max(e.text.prompt - 1 - missing, 0) + steps for e in batch])
            found = self._run(texts, anchors, missing + _LOOKAHEAD, missing)
            right = found.in_blocks((self.ids[found.logits.argmax(-1)] == found.best).float())[..., missing:]
            counted = found.in_blocks(torch.ones_like(found.outside))[..., missing:]
            tried = pad(right, (1, 0), value=1.0)[..., :-1].cumprod(-1) * counted
            counts.append(torch.stack(((tried * right).sum((0, 1)), tried.sum((0, 1))), -1))
        return torch.cat(counts).double().cpu()

    def figures(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the shares of accepted places, and tokens a round at T = 0, by the number of missing hidden states."""
        rates = torch.tensor(shares).unflatten(0, (len(_COUNTED), -1))
        tokens = (1 + rates.cumprod(-1).sum(-1)).tolist()
        told = {str(missing): round(value, 3) for missing, value in zip(_COUNTED, tokens, strict=True)}
        return {"held_out_agreement": rates[0].tolist(), f"tokens_a_round, K = {_LOOKAHEAD}": told}

    @torch.no_grad()
    def logits(self, texts: Sequence[Conversation], lookahead: int, missing: int = 0) -> list[Tensor]:
        """Return the logits that a `tools.distill.evaluation.Draft` returns.

        The last `missing` hidden states are missing; places with fewer tokens before them have no logits."""
        longest = max(text.answer for text in texts)
        anchors = torch.stack([torch.arange(longest) + text.prompt - 1 - missing for text in texts])
        found = self._run(self._read(texts), anchors.clamp_min(0), missing + lookahead + 1, missing)
        vocab = len(self._embedding)
        own = torch.full((len(found.logits), vocab), -torch.inf).index_copy(1, self.ids.cpu(), found.logits.cpu())
        scores = torch.full((found.shape.numel(), vocab), -torch.inf).index_copy(0, found.index.cpu(), own)
        scores = scores.view(*found.shape, vocab)[:, :, missing:]
        scores.masked_fill_((anchors < 0)[..., None, None], -torch.inf)
        places = []
        for step in range(lookahead + 1):
            rows = [
                pad(own[: max(0, text.answer - step), step], (0, 0, min(step, text.answer), 0))
                for own, text in zip(scores, texts, strict=True)
            ]
            places.append(torch.cat(rows))
        return places

    def _read(self, texts: Sequence[Conversation]) -> _Texts:
        """Run the target over some texts."""
        features, scores = observed(self._target, texts, self.plan.layers)
        ids = padded(texts)
        states = pad_sequence([part.to(self.norm.weight) for part in features], batch_first=True)
        states = pad(states, (0, 0, 0, ids.shape[1] - states.shape[1]))
        ends = accumulate((text.answer for text in texts), initial=0)
        firsts = [end - (text.prompt - 1) for end, text in zip(ends, texts, strict=False)]
        with torch.no_grad():
            target = scores.float().softmax(-1)[:, self.ids]
            best = scores.argmax(-1)
        answers = [range(text.prompt, len(text.token_ids)) for text in texts]
        return _Texts(ids, answers, states, firsts, target, best)

    def _run(self, texts: _Texts, anchors: Tensor, rows: int, silent: int = 0) -> _Found:
        """Run blocks of `rows` tokens from `anchors` [texts, blocks] on; their first `silent` rows predict nothing."""
        device, blocks = self.head.device, Blocks(texts.ids, texts.answers, anchors, rows, silent)
        index, places = blocks.index.to(device), blocks.rows_of(texts.firsts).to(device)
        with arithmetic(device):
            predicting = self.states(texts.states, blocks).flatten(0, 2)[index]
            logits = (predicting @ self.head.T).float()
        target = texts.target[places]
        return _Found(logits, target, 1 - target.sum(-1), texts.best[places], index, blocks.places.shape)

    def described(self) -> dict[str, Any]:
        """Return the config of the checkpoint."""
        config = self.config.to_dict() | {"architectures": [KV_INJECTION], "num_hidden_layers": len(self.layers)}
        config |= {DRAFT_VOCAB: len(self.ids), "target_layer_ids": [layer - 1 for layer in self.plan.layers]}
        return config | {"context_by_layer": True, "block_size": 1, "is_causal": True, "sample_from_anchor": True}

    def write(self, target: Path, directory: Path, store: Store = "bfloat16") -> None:
        """Write a checkpoint folder. Embedding and head stay in the target's."""
        state = self.state_dict()
        if len(self.ids) < len(self._embedding):
            state["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        write_folder(directory, state, self.described(), target, store)


class _Texts(NamedTuple):
    """Texts as the target reads them: `ids` [texts, a length] on the host, places of `answers`, hidden states
    `states` [texts, a length, n x width]. Row `firsts` + p of `target` [all answers, ids], probabilities, and `best`
    [all answers] is of the token behind place p of a text."""

    ids: Tensor
    answers: Sequence[range]
    states: Tensor
    firsts: Sequence[int]
    target: Tensor
    best: Tensor


class _Found(NamedTuple):
    """The n rows of blocks that predict a token of an answer, `index` among all rows of `shape` [texts, blocks, rows].

    `logits` and the target's probabilities `target` [n, ids], the probability of all other tokens `outside` [n], and
    the target's `best` token [n]."""

    logits: Tensor
    target: Tensor
    outside: Tensor
    best: Tensor
    index: Tensor
    shape: torch.Size

    def in_blocks(self, values: Tensor) -> Tensor:
        """Return `values` [n] as [texts, blocks, rows], 0 elsewhere."""
        return values.new_zeros(self.shape.numel()).index_copy(0, self.index, values).view(self.shape)


def build(target: Path, plan: KVInjectionPlan, runner: Runner, data: Sequence[Example]) -> KVInjectionStudent:
    """Return the drafter before training, over the target that `runner` runs.

    It predicts the tokens that are frequent in the answers of `data`. Raises UsageError for a plan that does not fit
    the target."""
    checkpoint = inspect(target)
    if (kind := checkpoint.config.get("model_type")) not in _FAMILIES:
        raise UsageError(
            f"--kind kv-injection: targets of type {kind!r} are not supported ({', '.join(_FAMILIES)} are)"
        )
    count = checkpoint.count("num_hidden_layers")
    layers = plan.layers or tuple(sorted({0, 1, 2, count - 3, count - 2, count - 1} & set(range(count))))
    if not all(first < second for first, second in pairwise((-1, *layers, count))):
        raise UsageError(f"--layers: ascending layers of the target, 0 to {count - 1}, are wanted")
    ids = to_predict(target, layers, plan.vocab, runner, data)
    student = _over(target, replace(plan, layers=layers), runner, ids)
    student.begin_as(checkpoint)
    return student


def _over(target: Path, plan: KVInjectionPlan, runner: Runner, ids: Tensor) -> KVInjectionStudent:
    """Return a drafter that predicts `ids`, with random weights and the target's embedding and rows."""
    checkpoint, config = inspect(target), config_of(target)
    config.num_hidden_layers = len(plan.layers)
    config.rope_parameters = getattr(AutoConfig.from_pretrained(target), "rope_parameters", config.rope_parameters)
    normed, config.attention_bias = (
        f"model.layers.{plan.layers[0]}.self_attn.{name}" in checkpoint.tensors
        for name in ("q_norm.weight", "q_proj.bias")
    )
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    table = weights(EMBEDDING, config.vocab_size, config.hidden_size)
    head = weights(HEAD, *table.shape) if HEAD in checkpoint.tensors else table
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KVInjectionStudent(config, normed, plan, runner, table, head[ids], ids)


def load(target: Path, draft: Path, runner: Runner) -> KVInjectionStudent:
    """Return the drafter that the folder `draft` has, over the target that `runner` runs. Raises UsageError."""
    checkpoint = inspect(draft)
    fields = check_block(checkpoint, inspect(target))
    if not (fields.by_layer and fields.block == 1):
        raise UsageError(f"{draft}: of block drafters, only those that tools.distill makes are evaluated")
    student = _over(target, KVInjectionPlan(fields.layers), runner, predicted(checkpoint))
    student.begin_with(draft, target)
    return student
