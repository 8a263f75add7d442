"""A student that drafts a block of tokens in one pass, from hidden states of its target (docs/distillation.md).

The shape is close to that of DFlash and DSpark (arXiv 2607.05147): a few layers, whose keys and values of the committed
text are made of the target's hidden states, run over a known token and a mask for each further place. A first-order
head adds to the scores of a place what the token before it says. It is trained as it will be used in `ssd`, too: the
hidden states of the last tokens are missing, and the block begins with these tokens instead.

Its layers begin as layers of the target, and each reads the hidden states before that layer. So its keys and values of
the committed text begin as the target's own, and only the layers between are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits, embedding, pad
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoConfig, LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm, LlamaRotaryEmbedding, rotate_half

from ssd.errors import UsageError
from ssd.execution.runner import Runner
from ssd.models.blocks import check_block
from ssd.models.checkpoint import Checkpoint, inspect
from ssd.models.pairs import DRAFT_VOCAB
from ssd.models.weights import from_checkpoint
from tools.distill.head import Projections, config_of, predicted, to_predict
from tools.distill.shards import Conversation
from tools.distill.student import EMBEDDING, HEAD, SIZES, Store, check_same_shape, write_folder
from tools.distill.teacher import observed
from tools.distill.training import Example, arithmetic, padded

# Losses (DSpark): shares of the cross-entropy and of the total variation distance; of the confidence.
_CROSS_ENTROPY, _DISTANCE, _CONFIDENCE = 0.1, 0.9, 0.1
# Tokens without hidden states, as held-out places are counted, and the K of the figures.
_COUNTED, _LOOKAHEAD = (0, 1, 2, 4), 4
ARCHITECTURE = "DSparkDraftModel"
MARKOV_OUT = "markov_head.markov_w2.weight"
# Places of an answer for one block of a step, and between two held-out blocks.
_STRIDE, _HELD_OUT_STRIDE = 4, 8


@dataclass(frozen=True)
class BlockPlan:
    """The plan of a block drafter.

    Its layers begin as these `layers` of the target (none: the first and the last three), and read the hidden states
    before them. It predicts `block` tokens in a pass, of the `vocab` most frequent ones of its corpus (0: all). Its
    first-order head has `rank`. Hidden states of up to `missing` tokens are missing."""

    layers: tuple[int, ...] = ()
    vocab: int = 0
    block: int = 5
    rank: int = 64
    missing: int = 5


Angles = tuple[Tensor, Tensor]


class BlockAttention(Projections):
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


class BlockLayer(nn.Module):
    """A layer of the drafter: that of a Llama, but for keys and values of the committed text and `normed` heads."""

    def __init__(self, config: LlamaConfig, normed: bool) -> None:
        super().__init__()
        width, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm, self.post_attention_layernorm = LlamaRMSNorm(width, eps), LlamaRMSNorm(width, eps)
        self.self_attn, self.mlp = BlockAttention(config, normed), LlamaMLP(config)

    def forward(self, x: Tensor, *rest: Any) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), *rest)
        return x + self.mlp(self.post_attention_layernorm(x))


class Blocks:
    """Blocks of texts, on the host: each begins after the token at `anchors` [texts, blocks]; hidden states of the last
    `missing` tokens before it are missing.

    `ids` int64 [texts, a length] are the texts, `counts` [texts] their numbers of tokens. `places` [texts, blocks,
    block] are the places before the predicted ones, `known` [texts, blocks, missing + 1] the tokens that a block begins
    with. `index` [n]: which of the places, flattened, are before a token of the text, and `before` [n] their tokens."""

    def __init__(self, ids: Tensor, counts: Tensor, anchors: Tensor, missing: int, block: int) -> None:
        self.anchors, self.missing, self._ids = anchors, missing, ids
        self.places = anchors[..., None] + torch.arange(block)
        self.known = self._tokens(anchors[..., None] + torch.arange(-missing, 1))
        valid = (self.places + 1 < counts[:, None, None]).flatten()
        self.index = valid.nonzero().squeeze(1)
        self.before = self._tokens(self.places).flatten()[self.index]

    def _tokens(self, places: Tensor) -> Tensor:
        """Return the tokens at `places` [texts, ...]; those beyond a text are of no meaning."""
        return self._ids.gather(1, places.flatten(1).clamp_max(self._ids.shape[1] - 1)).view_as(places)

    def rows_of(self, first: Sequence[int]) -> Tensor:
        """Return int64 [n]: a row for each place of `index`, that of place p of a text is its `first` + p."""
        return (self.places + torch.tensor(first)[:, None, None]).flatten()[self.index]


class BlockStudent(nn.Module):
    """A `tools.distill.training.Learner`. The target and its embedding [V, width] stay as they are.

    `head` [ids, width] are the rows of the target's head for `ids`, the tokens that it predicts, in order. Heads of
    queries and keys may be `normed`."""

    def __init__(
        self,
        config: LlamaConfig,
        normed: bool,
        plan: BlockPlan,
        target: Runner,
        table: Tensor,
        head: Tensor,
        ids: Tensor,
    ) -> None:
        super().__init__()
        width, vocab = config.hidden_size, len(ids)
        self.config, self.plan, self._target = config, plan, target
        self.layers = nn.ModuleList([BlockLayer(config, normed) for _ in plan.layers])
        self.norm = LlamaRMSNorm(width, config.rms_norm_eps)
        self.mask_embedding = nn.Parameter(table.mean(0))
        self.markov_head, self.confidence_head = nn.Module(), nn.Module()
        self.markov_head.projection = nn.Linear(width, plan.rank, bias=False)
        self.markov_head.projection.weight.data.copy_(_leading(table, plan.rank))
        self.markov_head.markov_w2 = nn.Linear(plan.rank, vocab, bias=False)
        nn.init.zeros_(self.markov_head.markov_w2.weight)
        self.confidence_head.proj = nn.Linear(width + plan.rank, 1)
        self._rotary = LlamaRotaryEmbedding(config)
        for name, tensor in {"_embedding": table, "head": head, "ids": ids}.items():
            self.register_buffer(name, tensor, persistent=False)

    head: Tensor
    ids: Tensor

    def named_trainable(self) -> list[tuple[str, nn.Parameter]]:
        return list(self.named_parameters())

    @property
    def tables(self) -> Sequence[Tensor]:
        return [self.markov_head.markov_w2.weight]

    def begin_as(self, target: Checkpoint) -> None:
        """Copy the target's layers and its last norm. Raises UsageError if its layers have more than the drafter's."""
        weights, lent = from_checkpoint(target, torch.float32, torch.device("cpu")), {"norm": "model.norm"}
        lent |= {f"layers.{place}": f"model.layers.{layer}" for place, layer in enumerate(self.plan.layers)}
        copied = set()
        for ours, theirs in lent.items():
            for name, parameter in self.get_submodule(ours).named_parameters():
                parameter.data.copy_(weights(f"{theirs}.{name}", *parameter.shape))
                copied.add(f"{theirs}.{name}")
        for name in sorted(target.tensors.keys() - copied):
            if name.endswith((".weight", ".bias")) and name.startswith(tuple(f"{each}." for each in lent.values())):
                raise UsageError(f"--kind block: the target has {name}, which a block drafter's layers lack")

    def begin_with(self, draft: Path, target: Path) -> None:
        """Copy the weights of the folder `draft`.

        Rows of the first-order head are matched by token id. Raises UsageError if it has another shape."""
        checkpoint = inspect(draft)
        check_same_shape(checkpoint, self.described(), (*SIZES, "num_hidden_layers", "target_layer_ids", "markov_rank"))
        weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
        theirs = predicted(checkpoint)
        rows = torch.full((len(self._embedding),), -1).index_copy(0, self.ids.cpu(), torch.arange(len(self.ids)))[
            theirs
        ]
        for name, parameter in self.named_trainable():
            if name == MARKOV_OUT:
                known = weights(name, len(theirs), self.plan.rank)
                parameter.data[rows[rows >= 0].to(parameter.device)] = known[rows >= 0].to(parameter.device)
            else:
                parameter.data.copy_(weights(name, *parameter.shape))

    def states(self, features: Tensor, blocks: Blocks) -> Tensor:
        """Return the states [texts, blocks, block, width] that predict the tokens of each block.

        `features` [texts, a length, n x width] are the target's hidden states of all tokens."""
        missing, device = blocks.missing, features.device
        block = blocks.places.shape[2]
        places = blocks.anchors[..., None] + torch.arange(-missing, block)
        known = embedding(blocks.known.to(device), self._embedding)
        masks = self.mask_embedding.expand(*known.shape[:2], block - 1, -1)
        x = torch.cat((known, masks), 2)
        committed = torch.arange(features.shape[1])
        seen = committed < (blocks.anchors - missing)[..., None]
        unseen = torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).to(device)
        its_angles = self._angles(x, committed[None].to(device))
        cos, sin = self._angles(x, places.flatten(1).to(device))
        angles = cos.unflatten(1, places.shape[1:]), sin.unflatten(1, places.shape[1:])
        for layer, states in zip(self.layers, features.chunk(len(self.layers), -1), strict=True):
            x = layer(x, angles, layer.input_layernorm(states), its_angles, unseen)
        predicting: Tensor = self.norm(x[:, :, missing:])
        return predicting

    def _angles(self, x: Tensor, places: Tensor) -> Angles:
        cos, sin = self._rotary(x, places)
        return cos, sin

    def loss(self, batch: Sequence[Example], own: Sequence[Example], generator: torch.Generator) -> Tensor:
        """Return what the examples `own` add to the loss of a batch.

        Each place counts as much as the student trusts that the target accepts all places before it (D-PACE, arXiv
        2605.18810)."""
        # Half of the steps are those of `sd`, where no hidden states are missing.
        several = torch.rand((), generator=generator) < 0.5
        missing = int(torch.randint(1, self.plan.missing + 1, (), generator=generator)) if several else 0
        count = max(1, max(example.text.answer for example in batch) // _STRIDE)
        drawn = dict(zip(map(id, batch), torch.rand(len(batch), count, generator=generator), strict=True))
        places = [_anchors(e.text, missing, drawn[id(e)]) for e in own]
        found = self._run(self._read([example.text for example in own]), missing, torch.stack(places))
        apart = (found.target - found.logits.softmax(-1)).abs().sum(-1)
        distance = (apart + found.outside) / 2
        entropy = -(found.target * found.logits.log_softmax(-1)).sum(-1)
        accepted = found.in_blocks(1 - distance.detach())
        weights = pad(accepted, (1, 0), value=1.0)[..., :-1].cumprod(-1).flatten()[found.index]
        confidence = binary_cross_entropy_with_logits(found.trusted, 1 - distance.detach(), reduction="none")
        losses = _CROSS_ENTROPY * entropy + _DISTANCE * distance + _CONFIDENCE * confidence
        return (weights * losses).sum() / (len(batch) * count)

    @torch.no_grad()
    def agreed(self, batch: Sequence[Example]) -> Tensor:
        """Return `Learner.agreed`: `block` places without missing hidden states, then with some, as in _COUNTED.

        A place counts if the target accepts all before it."""
        counts, texts = [], self._read([example.text for example in batch])
        steps = torch.arange(0, max(len(e.text.token_ids) for e in batch), _HELD_OUT_STRIDE)
        for missing in _COUNTED:
            anchors = torch.stack([max(e.text.prompt - 1, missing) + steps for e in batch])
            found = self._run(texts, missing, anchors)
            right = found.in_blocks((self.ids[found.logits.argmax(-1)] == found.best).float())
            tried = pad(right, (1, 0), value=1.0)[..., :-1].cumprod(-1) * found.in_blocks(
                torch.ones_like(found.trusted)
            )
            counts.append(torch.stack(((tried * right).sum((0, 1)), tried.sum((0, 1))), -1))
        return torch.cat(counts).double().cpu()

    def figures(self, shares: Sequence[float]) -> dict[str, Any]:
        """Return the shares of accepted places, and tokens a round at T = 0, by the number of missing hidden states."""
        rates = torch.tensor(shares).unflatten(0, (len(_COUNTED), -1))
        tokens = (1 + rates.cumprod(-1)[:, :_LOOKAHEAD].sum(-1)).tolist()
        told = {str(missing): round(value, 3) for missing, value in zip(_COUNTED, tokens, strict=True)}
        return {"held_out_agreement": rates[0].tolist(), f"tokens_a_round, K = {_LOOKAHEAD}": told}

    @torch.no_grad()
    def logits(self, texts: Sequence[Conversation], lookahead: int, missing: int = 0) -> list[Tensor]:
        """Return the logits that a `tools.distill.evaluation.Draft` returns, with hidden states missing."""
        longest = max(text.answer for text in texts)
        anchors = torch.stack([torch.arange(longest) + text.prompt - 1 for text in texts])
        found = self._run(self._read(texts), missing, anchors.clamp_min(missing), lookahead + 1)
        vocab = len(self._embedding)
        own = torch.full((len(found.logits), vocab), -torch.inf).index_copy(1, self.ids.cpu(), found.logits.cpu())
        scores = torch.full((found.shape.numel(), vocab), -torch.inf).index_copy(0, found.index.cpu(), own)
        scores = scores.view(*found.shape, vocab)
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
        return _Texts(ids, torch.tensor([len(text.token_ids) for text in texts]), states, firsts, target, best)

    def _run(self, texts: _Texts, missing: int, anchors: Tensor, block: int = 0) -> _Found:
        """Run blocks behind the `anchors` [texts, blocks], of `block` tokens (0: those of the plan)."""
        device, blocks = self.head.device, Blocks(texts.ids, texts.counts, anchors, missing, block or self.plan.block)
        index, rows = blocks.index.to(device), blocks.rows_of(texts.firsts).to(device)
        with arithmetic(device):
            predicting = self.states(texts.states, blocks).flatten(0, 2)[index]
            first = self.markov_head.projection(embedding(blocks.before.to(device), self._embedding))
            logits = (predicting @ self.head.T + self.markov_head.markov_w2(first)).float()
            trusted = self.confidence_head.proj(torch.cat((predicting, first), -1).detach()).float().squeeze(-1)
        target = texts.target[rows]
        return _Found(logits, trusted, target, 1 - target.sum(-1), texts.best[rows], index, blocks.places.shape)

    def described(self) -> dict[str, Any]:
        """Return the config of the checkpoint."""
        config = self.config.to_dict() | {"architectures": [ARCHITECTURE], "num_hidden_layers": len(self.layers)}
        config |= {DRAFT_VOCAB: len(self.ids), "target_layer_ids": [layer - 1 for layer in self.plan.layers]}
        config |= {"context_by_layer": True, "block_size": self.plan.block, "is_causal": True}
        return config | {"markov_rank": self.plan.rank, "markov_projected": True}

    def write(self, target: Path, directory: Path, store: Store = "bfloat16") -> None:
        """Write a checkpoint folder. Embedding and head stay in the target's."""
        state = self.state_dict()
        if len(self.ids) < len(self._embedding):
            state["d2t"] = self.ids - torch.arange(len(self.ids), device=self.ids.device)
        write_folder(directory, state, self.described(), target, store)


class _Texts(NamedTuple):
    """Texts as the target reads them: `ids` [texts, a length] and `counts` [texts] of tokens on the host, hidden states
    `states` [texts, a length, n x width]. Row `firsts` + p of `target` [all answers, ids], probabilities, and `best`
    [all answers] is of the token behind place p of a text."""

    ids: Tensor
    counts: Tensor
    states: Tensor
    firsts: Sequence[int]
    target: Tensor
    best: Tensor


class _Found(NamedTuple):
    """The n rows of blocks that predict a token of an answer, `index` among all rows of `shape` [texts, blocks, block].

    `logits` and the target's probabilities `target` [n, ids], the logits of the confidence `trusted` [n], the
    probability of all other tokens `outside` [n], and the target's `best` token [n]."""

    logits: Tensor
    trusted: Tensor
    target: Tensor
    outside: Tensor
    best: Tensor
    index: Tensor
    shape: torch.Size

    def in_blocks(self, values: Tensor) -> Tensor:
        """Return `values` [n] as [texts, blocks, block], 0 elsewhere."""
        return values.new_zeros(self.shape.numel()).index_copy(0, self.index, values).view(self.shape)


def _anchors(text: Conversation, missing: int, drawn: Tensor) -> Tensor:
    """Return int64 [n], the tokens behind which blocks begin, from n random numbers of [0, 1)."""
    first = max(text.prompt - 1, missing)
    return first + (drawn * max(0, len(text.token_ids) - 1 - first)).long()


def _leading(table: Tensor, rank: int) -> Tensor:
    """Return the projection [rank, width] of `table` [n, width] to its strongest directions, of unit variance."""
    _, vectors = torch.linalg.eigh(table.T @ table)
    directions = vectors[:, -rank:]
    return (directions / (table @ directions).std(0)).T


def build(target: Path, plan: BlockPlan, runner: Runner, data: Sequence[Example]) -> BlockStudent:
    """Return the drafter before training, over the target that `runner` runs.

    It predicts the tokens that are frequent in the answers of `data`. Raises UsageError for a plan that does not fit
    the target."""
    checkpoint = inspect(target)
    count, width = checkpoint.count("num_hidden_layers"), checkpoint.count("hidden_size")
    if plan.rank > width:
        raise UsageError(f"--rank {plan.rank}: the target's embedding is {width} wide")
    layers = plan.layers or tuple(sorted({0, 1, 2, count - 3, count - 2, count - 1} & set(range(count))))
    if not all(first < second for first, second in pairwise((-1, *layers, count))):
        raise UsageError(f"--layers: ascending layers of the target, 0 to {count - 1}, are wanted")
    ids = to_predict(target, layers, plan.vocab, runner, data)
    student = _over(target, replace(plan, layers=layers), runner, ids)
    student.begin_as(checkpoint)
    return student


def _over(target: Path, plan: BlockPlan, runner: Runner, ids: Tensor) -> BlockStudent:
    """Return a drafter that predicts `ids`, with random weights and the target's embedding and rows."""
    checkpoint, config = inspect(target), config_of(target)
    config.num_hidden_layers = len(plan.layers)
    config.rope_parameters = getattr(AutoConfig.from_pretrained(target), "rope_parameters", config.rope_parameters)
    normed = f"model.layers.{plan.layers[0]}.self_attn.q_norm.weight" in checkpoint.tensors
    weights = from_checkpoint(checkpoint, torch.float32, torch.device("cpu"))
    table = weights(EMBEDDING, config.vocab_size, config.hidden_size)
    head = weights(HEAD, *table.shape) if HEAD in checkpoint.tensors else table
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BlockStudent(config, normed, plan, runner, table, head[ids], ids)


def load(target: Path, draft: Path, runner: Runner) -> BlockStudent:
    """Return the drafter that the folder `draft` has, over the target that `runner` runs. Raises UsageError."""
    checkpoint = inspect(draft)
    fields = check_block(checkpoint, inspect(target))
    ours = fields.by_layer and fields.causal and fields.from_anchor and fields.mask is None and fields.projected
    if not ours:
        raise UsageError(f"{draft}: only block drafters that tools.distill has made are evaluated")
    plan = BlockPlan(fields.layers, 0, fields.block, fields.rank)
    student = _over(target, plan, runner, predicted(checkpoint))
    student.begin_with(draft, target)
    return student
