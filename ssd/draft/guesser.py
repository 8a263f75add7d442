"""From the logits of a draft step to guesses: what to go on with, and which bonus tokens to prepare for."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from ssd.draft.tree import Guess, Tree
from ssd.kernels import cpu
from ssd.speculation.fan_out import fan_out_at, most_candidates
from ssd.speculation.noise import NoiseCache, Stream, stream_seed
from ssd.speculation.sampling import argmax, filtered, perturbed, ranked, saguaro, warmth


class Places(NamedTuple):
    """Where the guessed tokens of one sequence stand: absolute `positions`, and how many draft tokens come before each
    in its speculation (`nodes`)."""

    tree: Tree
    positions: Sequence[int]
    nodes: Sequence[int]


def candidates_of(trees: Iterable[Tree]) -> int:
    """How many candidates may be asked for: one of them may be in flight."""
    return 1 + max(most_candidates(tree.speculation.fan_out) for tree in trees)


class Guesser:
    """Ranks and samples under each sequence's law. `noise` has the vectors that chains, rounds and levels share, of the
    target's vocabulary, of which `logits` may be a part."""

    def __init__(self, noise: NoiseCache) -> None:
        self._noise = noise

    @torch.inference_mode()
    def __call__(self, logits: Tensor, places: Sequence[Places]) -> list[Guess]:
        """A guess for each row of `logits` [n, V]; `places` name, run by run, what the rows are about."""
        if not len(logits):
            return []  # prompt chunks only
        sampled = [place for place in places if place.tree.law.temperature > 0]
        shared = (place for place in sampled if not place.tree.ratio_rule)
        self._noise.prepare((p.tree.law.seed, position) for p in shared for position in p.positions)
        count = candidates_of(place.tree for place in places)
        runs = logits.split([len(place.positions) for place in places])
        if cpu.serve(logits) and not any(p.tree.ratio_rule or p.tree.law.filters for p in places):
            rows = [row for place in places for row in warmth(place.tree.law, place.positions, self._noise)]
            candidates = cpu.rank(logits, min(count, logits.shape[1]), rows)
        else:
            if sampled:
                runs = tuple(self._scores(run, place) for run, place in zip(runs, places, strict=True))
                logits = torch.cat(runs)
            candidates = ranked(logits.float().contiguous(), count)
        guesses = [Guess(found[0], found) for found in candidates]
        start = 0
        for run, place in zip(runs, places, strict=True):
            if place.tree.ratio_rule and len(run):
                mine = slice(start, start + len(run))
                guesses[mine] = self._drawn(run, place, guesses[mine])
            start += len(run)
        return guesses

    def _scores(self, logits: Tensor, place: Places) -> Tensor:
        """The scores that rank bonus tokens: those that decide the target's own sample (ALGORITHM 6), or, where the
        ratio rule decides, the draft's law."""
        law = place.tree.law
        if place.tree.ratio_rule:
            return filtered(logits.float() / law.temperature, law)
        width = logits.shape[-1]
        return perturbed(logits, law, place.positions, lambda seed, position: self._noise(seed, position)[:width])

    def _drawn(self, scaled: Tensor, place: Places, guesses: Sequence[Guess]) -> list[Guess]:
        """Guesses that go on with a token drawn from the draft's law, by Saguaro sampling."""
        tree = place.tree
        fan_outs = [fan_out_at(node, tree.lookahead, tree.speculation.fan_out) for node in place.nodes]
        lowered = saguaro(scaled, fan_outs, tree.speculation.saguaro_c)
        laws = torch.softmax(lowered, dim=-1)
        seed = stream_seed(tree.law.seed, Stream.DRAFT)
        noise = torch.stack([self._noise(seed, position) for position in place.positions])
        tokens = argmax(lowered + noise[:, : lowered.shape[-1]])
        drawn = zip(tokens, guesses, laws, strict=True)
        # Logits that are no numbers have no sample; the target will refuse the law.
        return [
            Guess(guess.candidates[0] if token < 0 else token, guess.candidates, law) for token, guess, law in drawn
        ]
