"""One draft model: its memory, its forward, and the sampler that turns its logits into guesses."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import ChainCache, ChainTokens, TreeContext
from ssd.draft.vocabulary import DraftVocabulary
from ssd.execution.batch import Row, output_indices
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.kernels import cpu
from ssd.kernels.guess import Ask, GuessStep
from ssd.speculation import forks as outcome
from ssd.speculation.fan_out import fan_out_at, most_candidates
from ssd.speculation.noise import NoiseCache, Stream, gumbels_at, halves, stream_seed
from ssd.speculation.sampling import Noise, argmax, filtered, perturbed, ranked, saguaro, warmth


class PathRow(NamedTuple):
    """Tokens of one sequence's path, over its pages."""

    tree: Tree
    row: Row


class ChainRows(NamedTuple):
    """Tokens of one sequence's chains, over the chain cache."""

    tree: Tree
    tokens: ChainTokens


class LogitRows(NamedTuple):
    """Rows of logits of one sequence: the absolute `positions` that they are about.
    `nodes` says how many draft tokens of the speculation come before each. `drafts` are the draft tokens after the
    committed ones, if the sequence has a grammar; None where they are not known."""

    tree: Tree
    positions: Sequence[int]
    nodes: Sequence[int]
    drafts: Sequence[list[int] | None] = ()


class Drafter:
    """A draft model with its page pool and chain cache.
    Guesses are below `vocab_size`, the target's. All drafters of one device share `noise`; one that predicts a short
    list of ids has its own. `recurrent`: see `ssd.draft.tree.Tree`. `goes_on`: it has `several`."""

    recurrent = goes_on = False

    def __init__(
        self,
        config: EngineConfig,
        runner: Runner,
        noise: NoiseCache,
        vocab_size: int,
        chain_cache: ChainCache | None = None,
    ) -> None:
        model = runner.model
        self.runner = runner
        self.pool = PagePool(config.draft_num_pages, config.page_size)
        sizes = cells(config), MAX_LOOKAHEAD + 1, model.dtype, model.device
        self.chain_cache = chain_cache or ChainCache.new(model.shape, *sizes)
        self.max_position = model.shape.max_position
        self.vocabulary = DraftVocabulary(model, vocab_size, noise)
        self._sampler = DraftSampler(self.vocabulary)
        self._step: GuessStep | None = getattr(model, "guess_step", None)

    def blank_guess(self) -> Guess:
        """A guess that says nothing, for chains to fork from."""
        return Guess(0, [0])

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        """As many of the next path tokens as the next forward can compute."""
        return tokens

    def forward(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], meanwhile: Task = nothing
    ) -> Iterator[Guess]:
        """A guess for every output of the paths' rows, then for every token of the chains.
        Calls `meanwhile` while the device computes, if the runner overlaps, else afterwards."""
        context = self._context(paths, chains)
        tokens = [token for _, row in paths for token in row.token_ids]
        tokens += [token for _, own in chains for token in own.tokens]
        wanted, rows = wanted_of(paths, chains), logit_rows(paths, chains)
        step = self._step if wanted and self._sampler.only_ranks(rows) else None
        views = None if step is None else context.views()
        if step is None or views is None:
            guesses = self._guesses(tokens, context, wanted, rows, meanwhile)
            return iter(self._finished(guesses, context.made, wanted))
        asks, count = self._sampler.asks(rows)
        (ids, scores), made = self.runner.compute(
            len(tokens),
            lambda: step(tokens, context.parts, views, wanted, asks, self.vocabulary.listed, count),
            meanwhile,
        )
        each = made.unbind() if context.parts else ()
        return iter(_ranked_guesses(ids, scores, [each[index] for index in wanted] if each else ()))

    def several(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int], meanwhile: Task = nothing
    ) -> list[list[Guess]] | None:
        """Hook for drafters that go on without the host: the guesses after each path, and after the one token of each
        chain, with those of as many `more` tokens, each the last guess's; None if this step cannot."""
        return None

    def _guesses(
        self, tokens: list[int], context: TreeContext, wanted: list[int], rows: Sequence[LogitRows], meanwhile: Task
    ) -> list[Guess]:
        """The guesses of `forward` by single calls."""
        texts = self.vocabulary.texts([own.tree for own in rows])  # before the launches, which a copy would wait for
        counts = [len(own.positions) for own in rows]

        def logits() -> Tensor:
            hidden = self.runner.states(tokens, context, wanted)
            return self.vocabulary.logits(hidden, counts, texts) if wanted else hidden[:0]

        return self._sampler(self.runner.compute(len(tokens), logits, meanwhile), rows, texts)

    def _placed(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows]
    ) -> tuple[Sequence[PathRow], Sequence[ChainRows]]:
        """Hook for drafters that have tokens at other positions."""
        return paths, chains

    def _parts(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[Tensor]:
        """Hook for drafters that read features of the tokens before: those of all rows, part after part."""
        return []

    def _context(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> TreeContext:
        rows, tokens = [row for _, row in paths], [own for _, own in chains]
        return TreeContext(self.runner.context(rows), tokens, self.runner.cache, self.chain_cache, self.runner.paged)

    def _finished(self, guesses: list[Guess], made: Tensor | None, wanted: Sequence[int]) -> list[Guess]:
        """Hook for drafters that keep what a forward `made` of its tokens; `wanted` are the indices of the guesses'."""
        return guesses

    def promote(self, table: PageTable, start: int, cell: int, count: int) -> None:
        """Copy the first `count` tokens of a chain into a path, which has room, from position `start` on."""
        slots = self.runner.cache.slots(table.pages, start, start + count)
        self.chain_cache.promote(cell, count, self.runner.cache, slots)


def cells(config: EngineConfig) -> int:
    """How many chains the chain cache holds."""
    return config.max_num_seqs * config.speculation.chains


def wanted_of(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[int]:
    """The indices of the tokens of a forward that a guess is wanted after."""
    rows = [row for _, row in paths]
    first = sum(len(row.token_ids) for row in rows)
    return [*output_indices(rows), *range(first, first + sum(len(own.tokens) for _, own in chains))]


def logit_rows(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[LogitRows]:
    """What the guesses of a forward are about, sequence by sequence."""
    rows = [
        LogitRows(tree, row.predicted, [p - tree.base for p in row.predicted], _path_drafts(tree, row))
        for tree, row in paths
    ]
    rows += [
        LogitRows(tree, [p + 1 for p in own.positions], own.depths, _chain_drafts(tree, own)) for tree, own in chains
    ]
    return rows


def rows_of(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> int:
    """How many tokens a forward computes."""
    return sum(len(row.token_ids) for _, row in paths) + sum(len(own.tokens) for _, own in chains)


def _path_drafts(tree: Tree, row: Row) -> list[list[int] | None]:
    """The draft tokens before each output of a path's row; empty without a grammar."""
    if tree.grammar is None:
        return []
    known = max(0, row.start - tree.base)
    drafts = [*tree.trunk[:known], *row.token_ids[max(0, tree.base - row.start) :]]
    if known > len(tree.trunk):  # a smaller draft's path runs ahead of the trunk
        return [None] * row.outputs
    return [drafts[: position - tree.base] for position in row.predicted]


def _chain_drafts(tree: Tree, own: ChainTokens) -> list[list[int] | None]:
    """The draft tokens up to each token of the chains; empty without a grammar."""
    if tree.grammar is None:
        return []
    found: list[list[int] | None] = []
    chains = {chain.cell: chain for chain in tree.chains}
    before: tuple[int, int] | None = None
    for fork, cell, depth, token in zip(own.forks, own.cells, own.depths, own.tokens, strict=True):
        if before == (cell, depth - 1):
            draft = found[-1]
        else:
            chain = chains.get(cell)
            draft = [*tree.trunk[:fork], *chain.tokens[:depth]] if chain and depth <= len(chain.tokens) else None
        found.append(None if draft is None else [*draft, token])
        before = cell, depth
    return found


def candidates_of(trees: Iterable[Tree]) -> int:
    """How many candidates a guess needs: the largest fan-out and one more, which may be in flight."""
    return 1 + max(most_candidates(() if tree.either else tree.speculation.fan_out) for tree in trees)


def _ranked_guesses(
    ids: Sequence[list[int]], scores: Sequence[list[float]], features: Sequence[Tensor] = ()
) -> list[Guess]:
    """Guesses that go on with the best of the `ids` of each row; `features`: of each, if there are any."""
    rows = zip_longest(ids, scores, features)
    return [Guess(own[0], own, feature=feature, scores=best) for own, best, feature in rows]


class DraftSampler:
    """Turns logits into guesses: the token to go on with, and the candidates for a bonus token.
    Noise is that of the target's draws: chains, rounds and drafters share it."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        self._vocabulary, self._noise = vocabulary, vocabulary.noise

    def only_ranks(self, rows: Sequence[LogitRows]) -> bool:
        """True if guesses need no more of the logits than the best, over the temperature and with noise."""
        trees = [own.tree for own in rows]
        full = any(tree.ratio_rule or tree.law.filters or tree.grammar is not None for tree in trees)
        return not (full or outcome.NEEDS_PROBABILITIES)

    def asks(self, rows: Sequence[LogitRows]) -> tuple[list[Ask], int]:
        """What one call of our kernels is to rank, a row each, and how many candidates it is to find."""
        self._prepare(rows)
        found: list[Ask] = []
        for own in rows:
            text, law = self._vocabulary.text(own.tree), own.tree.law
            if law.temperature == 0.0:
                found += [Ask(text)] * len(own.positions)
            else:
                found += [
                    Ask(text, law.temperature, self._noise(law.seed, position), halves((law.seed, position)))
                    for position in own.positions
                ]
        return found, self._count(rows)

    @torch.inference_mode()
    def __call__(self, logits: Tensor, rows: Sequence[LogitRows], texts: Sequence[Tensor] = ()) -> list[Guess]:
        """A guess for each row of `logits` (`DraftVocabulary.logits`); `rows` say, sequence by sequence, what they are
        about, and `texts` the ids of their texts, or nothing if there are none."""
        if not len(logits):
            return []  # prompt chunks only
        own_texts = [*texts] if texts else [None] * len(rows)
        logits = self._masked(logits, rows, own_texts)
        self._prepare(rows)
        count = self._count(rows)
        parts, raw = logits.split([len(own.positions) for own in rows]), logits
        if cpu.serve(logits) and not any(own.tree.ratio_rule or own.tree.law.filters for own in rows):
            warm = [
                row
                for own, text in zip(rows, own_texts, strict=True)
                for row in warmth(own.tree.law, own.positions, self._noise_of(text, logits.shape[1]))
            ]
            found = cpu.rank(logits, count, warm)
        else:
            if any(own.tree.law.temperature > 0 for own in rows):
                parts = tuple(map(self._scores, parts, rows, own_texts))
                logits = torch.cat(parts)
            found = ranked(logits.float().contiguous(), count)
        row_texts = [text for own, text in zip(rows, texts, strict=False) for _ in own.positions]
        guesses = _ranked_guesses(self._vocabulary.names(found.ids, row_texts), found.scores)
        if outcome.NEEDS_PROBABILITIES:
            chances = torch.softmax(raw.float(), dim=-1).gather(1, torch.tensor(found.ids, device=raw.device)).tolist()
            guesses = [guess._replace(probabilities=own) for guess, own in zip(guesses, chances, strict=True)]
        if any(own.drafts or own.tree.law.filters for own in rows):
            guesses = [possible(guess) for guess in guesses]
        start = 0
        for part, own, text in zip(parts, rows, own_texts, strict=True):
            if own.tree.ratio_rule and len(part):
                mine = slice(start, start + len(part))
                guesses[mine] = self._drawn(part, own, text, guesses[mine])
            start += len(part)
        return guesses

    def _count(self, rows: Sequence[LogitRows]) -> int:
        return min(candidates_of(own.tree for own in rows), self._vocabulary.listed)

    def _prepare(self, rows: Sequence[LogitRows]) -> None:
        """Make the noise that the rows share with the target."""
        shared = [own for own in rows if own.tree.law.temperature > 0 and not own.tree.ratio_rule]
        if shared:
            self._noise.prepare((own.tree.law.seed, position) for own in shared for position in own.positions)

    def _noise_of(self, text: Tensor | None, width: int) -> Noise:
        """The noise of the columns of `DraftVocabulary.logits` [n, width]."""

        def noise(seed: int, position: int) -> Tensor:
            listed = self._noise(seed, position)[:width]
            if text is None:
                return listed
            own = gumbels_at(torch.tensor([halves((seed, position))], dtype=torch.int32, device=text.device), text)[0]
            return F.pad(torch.cat((listed, own)), (0, width - len(listed) - len(own)))

        return noise

    def _masked(self, logits: Tensor, rows: Sequence[LogitRows], texts: Sequence[Tensor | None]) -> Tensor:
        """`logits` without the tokens that grammars forbid; the very same where there is no grammar."""
        start, masked = 0, logits
        for own, text in zip(rows, texts, strict=True):
            stop = start + len(own.positions)
            grammar = own.tree.grammar
            possible = grammar.possible(own.tree.tokens, own.drafts) if grammar is not None and own.drafts else None
            if possible is not None:
                masked = logits.clone() if masked is logits else masked
                free = self._vocabulary.columns(possible, text).to(logits.device)
                masked[start:stop, : free.shape[1]].masked_fill_(~free, -torch.inf)
            start = stop
        return masked

    def _scores(self, logits: Tensor, rows: LogitRows, text: Tensor | None) -> Tensor:
        """The scores that rank bonus tokens.
        They are the target's own, noise included, or under the ratio rule the draft's filtered logits over
        temperature."""
        law = rows.tree.law
        if rows.tree.ratio_rule:
            return filtered(logits.float() / law.temperature, law)
        return perturbed(logits, law, rows.positions, self._noise_of(text, logits.shape[-1]))

    def _drawn(self, scaled: Tensor, rows: LogitRows, text: Tensor | None, guesses: Sequence[Guess]) -> list[Guess]:
        """The guesses with tokens drawn by Saguaro sampling, and the draft probabilities of each."""
        tree = rows.tree
        fan_out = tree.speculation.fan_out or (max(1, tree.speculation.budget // (tree.lookahead + 1)),)
        fan_outs = [fan_out_at(node, tree.lookahead, fan_out) for node in rows.nodes]
        lowered = saguaro(scaled, fan_outs, tree.speculation.saguaro_c)
        seed, noise = stream_seed(tree.law.seed, Stream.DRAFT), self._noise_of(text, lowered.shape[-1])
        places = argmax(lowered + torch.stack([noise(seed, position) for position in rows.positions]))
        named = self._vocabulary.names(
            [[max(place, 0)] for place in places], [text] * len(places) if text is not None else []
        )
        probs = self._vocabulary.expanded(torch.softmax(lowered, dim=-1), text)
        # A row that is not numbers has no sample; the target will refuse its probabilities.
        return [
            guess._replace(token=guess.candidates[0] if place < 0 else token, draft_probs=row)
            for place, (token,), guess, row in zip(places, named, guesses, probs, strict=True)
        ]


def possible(guess: Guess) -> Guess:
    """The guess with the candidates that grammar and filters leave, or else the first."""
    count = max(1, sum(score > -math.inf for score in guess.scores))
    cut = {name: getattr(guess, name)[:count] for name in ("candidates", "scores", "probabilities")}
    return guess._replace(**cut)
