"""Runs one draft model: its pages, chain cache and forward, and the sampler of guesses."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, zip_longest
from operator import itemgetter
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ssd.config.engine import EngineConfig
from ssd.config.params import MAX_LOOKAHEAD
from ssd.draft.chain_cache import ChainCache, ChainTokens
from ssd.draft.tree import Guess, Tree
from ssd.draft.tree_attention import TreeContext
from ssd.draft.vocabulary import DraftVocabulary
from ssd.execution.batch import Row, StateUse, output_indices
from ssd.execution.meanwhile import Task, nothing
from ssd.execution.pages import PagePool, PageTable
from ssd.execution.runner import Runner
from ssd.execution.states import StateBatch, StateCache
from ssd.kernels.guess import Ask, Ending, GuessStep
from ssd.speculation.fan_out import fan_out_at, most_candidates
from ssd.speculation.noise import NoiseCache, Stream, gumbels_of, halves, keys_of, stream_seed
from ssd.speculation.sampling import Noise, SampledRows, argmax, ranked, saguaro, scores_of


class PathRow(NamedTuple):
    tree: Tree
    row: Row


class ChainRows(NamedTuple):
    tree: Tree
    tokens: ChainTokens


class LogitRows(NamedTuple):
    """Rows of logits of one sequence, which predict the tokens at absolute `positions`.

    `nodes`: number of draft tokens before each; with a grammar `drafts` has these tokens, or None if unknown."""

    tree: Tree
    positions: Sequence[int]
    nodes: Sequence[int]
    drafts: Sequence[list[int] | None] = ()


class Drafter:
    """Owns a draft model with its page pool and chain cache.

    `recurrent`: see `ssd.draft.tree.Tree`. `goes_on`: its `several` runs later forwards in one step. It `ends` where
    the target wants no more tokens (`Tree.least`). `block`: tokens that one pass predicts; 0 if each needs a pass.
    `most_tokens`: a step of more is several forwards."""

    recurrent, ends = False, True
    block = 0
    most_tokens = sys.maxsize

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
        self.pool = PagePool(config.draft_num_pages, config.page_size, state_slots=runner.state_slots)
        sizes = cells(config), MAX_LOOKAHEAD + 1, runner.cache.keys.dtype, model.device
        self.chain_cache = chain_cache or ChainCache.new(model.shape, *sizes)
        self.max_position = model.shape.max_position
        self.vocabulary = DraftVocabulary(model, vocab_size, noise)
        self._sampler = DraftSampler(self.vocabulary)
        self._step: GuessStep | None = getattr(model, "guess_step", None)

    @property
    def goes_on(self) -> bool:
        return self._step is not None and not self.runner.overlaps

    def blank_guess(self) -> Guess:
        return Guess(0, [0])

    def ready(self, tree: Tree, tokens: list[int]) -> list[int]:
        """Return those of the next path `tokens` that the next forward can compute."""
        return tokens

    def forward(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], meanwhile: Task = nothing
    ) -> Iterator[Guess]:
        """Run a forward; return a guess for every output of the paths, then for every token of the chains."""
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
        return iter(ranked_guesses(ids, scores, [each[index] for index in wanted] if each else ()))

    def several(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows], more: Sequence[int], meanwhile: Task = nothing
    ) -> list[list[Guess]] | None:
        """Run several forwards, each over the tokens that the one before guessed; None if this drafter cannot.

        Returns guesses by path and chain: a path with two outputs and `more` 2 has guesses a, b, c, d, where the second
        forward computes b, and the third c."""
        if not self.goes_on or self._step is None or chains or len(paths) != 1:
            return None
        step, (tree, row) = self._step, paths[0]
        path = PathRow(tree, Row([*row.token_ids, *[0] * more[0]], row.start, row.pages, row.outputs + more[0]))
        rows = logit_rows([path], [])
        views = self._context([path], []).views() if self._sampler.only_ranks(rows) else None
        if views is None:
            return None
        asks, count = self._sampler.asks(rows)
        tokens, wanted, listed = row.token_ids, output_indices([row]), self.vocabulary.listed
        ending = Ending(tree.rates, tree.reached, tree.least) if tree.least and tree.rates else None
        (ids, scores), _ = self.runner.compute(
            len(tokens), lambda: step(tokens, (), views, wanted, asks, listed, count, ending), meanwhile
        )
        return [ranked_guesses(ids, scores)]

    def _guesses(
        self, tokens: list[int], context: TreeContext, wanted: list[int], rows: Sequence[LogitRows], meanwhile: Task
    ) -> list[Guess]:
        texts = self.vocabulary.texts([own.tree for own in rows])  # before the launches: a copy would wait for them
        counts = [len(own.positions) for own in rows]

        def logits() -> Tensor:
            hidden = self.runner.states(tokens, context, wanted)
            return self.vocabulary.logits(hidden, counts, texts) if wanted else hidden[:0]

        return self._sampler(self.runner.compute(len(tokens), logits, meanwhile), rows, texts)

    def _placed(
        self, paths: Sequence[PathRow], chains: Sequence[ChainRows]
    ) -> tuple[Sequence[PathRow], Sequence[ChainRows]]:
        return paths, chains

    def _parts(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[Tensor]:
        return []

    def _context(self, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> TreeContext:
        rows, tokens = [row for _, row in paths], [own for _, own in chains]
        context = TreeContext(self.runner.context(rows), tokens, self.runner.cache, self.chain_cache, self.runner.paged)
        if self.runner.state_cache is not None:
            context.states = _states(self.runner.state_cache, paths, chains)
        return context

    def _finished(self, guesses: list[Guess], made: Tensor | None, wanted: Sequence[int]) -> list[Guess]:
        return guesses

    def promote(self, table: PageTable, start: int, cell: int, count: int, slot: int = 0) -> None:
        """Copy the first `count` tokens of a chain to a path's pages, from position `start` on."""
        slots = self.runner.cache.slots(table.pages, start, start + count)
        self.chain_cache.promote(cell, count, self.runner.cache, slots)
        if self.runner.state_cache is not None:
            self.runner.state_cache.promote(slot, start, cell, count)


def _states(cache: StateCache, paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> StateBatch:
    """Return the states of a forward; a chain's are the committed path's and the changes since.

    The first row of a sequence brings its state up to its committed tokens."""
    batch, first = StateBatch(cache), 0
    for tree, row in paths:
        count = len(row.token_ids)
        batch.add_path(_use(tree, row.stop), tree.slot, row.start, range(first, first + count))
        first += count
    for tree, own in chains:
        for cell, group in groupby(zip(own.cells, own.forks, own.depths, strict=True), key=itemgetter(0)):
            (_, fork, depth), *others = group
            count, use = 1 + len(others), _use(tree, tree.base)
            replayed = cache.path(tree.slot, use.held, tree.base + fork) + cache.chain(cell, 0, depth)
            places = cache.chain(cell, depth, depth + count)
            batch.add(use, tree.slot, replayed, range(first, first + count), places)
            first += count
    return batch


def _use(tree: Tree, stop: int) -> StateUse:
    use = tree.table.use_state(min(stop, tree.base))
    assert use is not None, "a draft with states"
    tree.table.state_computed(use.written)
    return use


def cells(config: EngineConfig) -> int:
    return config.max_num_seqs * config.speculation.chains


def wanted_of(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[int]:
    """Return the indices of a forward's tokens after which a guess is wanted."""
    rows = [row for _, row in paths]
    first = sum(len(row.token_ids) for row in rows)
    return [*output_indices(rows), *range(first, first + sum(len(own.tokens) for _, own in chains))]


def logit_rows(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> list[LogitRows]:
    """Return the rows of logits of a forward, sequence by sequence."""
    rows = [
        LogitRows(tree, row.predicted, [p - tree.base for p in row.predicted], _path_drafts(tree, row))
        for tree, row in paths
    ]
    rows += [
        LogitRows(tree, [p + 1 for p in own.positions], own.depths, _chain_drafts(tree, own)) for tree, own in chains
    ]
    return rows


def rows_of(paths: Sequence[PathRow], chains: Sequence[ChainRows]) -> int:
    return sum(len(row.token_ids) for _, row in paths) + sum(len(own.tokens) for _, own in chains)


def _path_drafts(tree: Tree, row: Row) -> list[list[int] | None]:
    if tree.grammar is None:
        return []
    known = max(0, row.start - tree.base)
    drafts = [*tree.trunk[:known], *row.token_ids[max(0, tree.base - row.start) :]]
    if known > len(tree.trunk):  # a smaller draft's path runs ahead of the trunk
        return [None] * row.outputs
    return [drafts[: position - tree.base] for position in row.predicted]


def _chain_drafts(tree: Tree, own: ChainTokens) -> list[list[int] | None]:
    """Return the draft tokens up to each token of the chains; [] without a grammar."""
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
    """Return how many candidates a guess needs: the largest fan-out, and one in flight."""
    return 1 + max(most_candidates(tree.speculation.fan_out) for tree in trees)


def ranked_guesses(
    ids: Sequence[list[int]], scores: Sequence[list[float]], features: Sequence[Tensor] = ()
) -> list[Guess]:
    rows = zip_longest(ids, scores, features)
    return [Guess(own[0], own, feature=feature, scores=best) for own, best, feature in rows]


class DraftSampler:
    """Turns logits into guesses, with the noise of the target's draws."""

    def __init__(self, vocabulary: DraftVocabulary) -> None:
        self._vocabulary, self._noise = vocabulary, vocabulary.noise

    def only_ranks(self, rows: Sequence[LogitRows]) -> bool:
        """Return True if guesses need only the best logits, over the temperature and with noise."""
        return not any(own.tree.law.filters or reads_logits(own.tree) for own in rows)

    def asks(self, rows: Sequence[LogitRows]) -> tuple[list[Ask], int]:
        """Return an `Ask` to our kernels for each row of logits, and the number of candidates."""
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
        """Return a guess for each row of `logits` (`DraftVocabulary.logits`)."""
        if not len(logits):
            return []  # prompt chunks only
        own_texts = [*texts] if texts else [None] * len(rows)
        logits = self._masked(logits, rows, own_texts)
        self._prepare(rows)
        asked = [
            SampledRows(own.tree.law, own.positions, self._noise_of(text, logits.shape[1]) if _shares(own) else None)
            for own, text in zip(rows, own_texts, strict=True)
        ]
        scores, warmth = scores_of(logits, asked)
        found = ranked(scores, self._count(rows), warmth)
        row_texts = [text for own, text in zip(rows, texts, strict=False) for _ in own.positions]
        guesses = ranked_guesses(self._vocabulary.names(found.ids, row_texts), found.scores)
        if any(own.drafts or own.tree.law.filters for own in rows):
            guesses = [possible(guess) for guess in guesses]
        start, parts = 0, scores.split([len(own.positions) for own in rows])
        for part, own, text in zip(parts, rows, own_texts, strict=True):
            if own.tree.rule.needs_draft_probs and len(part):
                mine = slice(start, start + len(part))
                guesses[mine] = self._drawn(part, own, text, guesses[mine])
            start += len(part)
        return guesses

    def _count(self, rows: Sequence[LogitRows]) -> int:
        return min(candidates_of(own.tree for own in rows), self._vocabulary.listed)

    def _prepare(self, rows: Sequence[LogitRows]) -> None:
        shared = [own for own in rows if own.tree.law.temperature > 0 and _shares(own)]
        self._noise.prepare((own.tree.law.seed, position) for own in shared for position in own.positions)

    def _noise_of(self, text: Tensor | None, width: int) -> Noise:
        def noise(seed: int, position: int) -> Tensor:
            listed = self._noise(seed, position)[:width]
            if text is None:
                return listed
            own = gumbels_of(keys_of([(seed, position)], text.device), len(text), ids=text)[0]
            return F.pad(torch.cat((listed, own)), (0, width - len(listed) - len(own)))

        return noise

    def _masked(self, logits: Tensor, rows: Sequence[LogitRows], texts: Sequence[Tensor | None]) -> Tensor:
        """Return `logits` with -inf for tokens that grammars forbid."""
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

    def _drawn(self, scaled: Tensor, rows: LogitRows, text: Tensor | None, guesses: Sequence[Guess]) -> list[Guess]:
        """Return the guesses with draft probabilities and tokens drawn by Saguaro sampling."""
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
        # A row with NaN has no sample; the target will refuse its probabilities.
        return [
            guess._replace(token=guess.candidates[0] if place < 0 else token, draft_probs=row)
            for place, (token,), guess, row in zip(places, named, guesses, probs, strict=True)
        ]


def reads_logits(tree: Tree) -> bool:
    """Return True if guesses of a sequence need all logits, not only the best."""
    return tree.grammar is not None or tree.rule.needs_draft_probs


def _shares(rows: LogitRows) -> bool:
    return rows.tree.rule.shares_noise


def possible(guess: Guess) -> Guess:
    """Return the guess with only the candidates that grammar and filters allow, but at least one."""
    count = max(1, sum(score > -math.inf for score in guess.scores))
    return guess._replace(candidates=guess.candidates[:count], scores=guess.scores[:count])
