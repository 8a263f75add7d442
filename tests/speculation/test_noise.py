"""The noise is a function of (seed, position, token) with the law it should have."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from scipy import stats
from torch import Tensor

from ssd.kernels import cpu
from ssd.law import MAX_SEED, Law
from ssd.speculation.acceptance import coupled
from ssd.speculation.noise import NoiseCache, gumbel, gumbels_of, halves, keys_of, lanes_of
from ssd.speculation.sampling import Noise, argmax, filtered, perturbed

SIGMAS = 5.5
seeds = st.integers(0, MAX_SEED)
positions = st.integers(0, 2**31 - 1)


def hash_lanes(seed: int, position: int, size: int) -> Tensor:
    return lanes_of(keys_of([(seed, position)]), torch.arange(size, dtype=torch.int32))[0]


# -- a function of (seed, position, token) ----------------------------------------------------------------------------


@settings(max_examples=200)
@given(seeds, positions, st.integers(1, 400), st.integers(1, 400))
def test_the_noise_of_a_token_does_not_depend_on_the_vocabulary(seed: int, position: int, one: int, two: int) -> None:
    """Nor on anything else: made twice it is the same to the bit."""
    small, large = min(one, two), max(one, two)
    assert torch.equal(gumbel(seed, position, small), gumbel(seed, position, large)[:small])
    assert torch.equal(hash_lanes(seed, position, small), hash_lanes(seed, position, large)[:small])


@settings(max_examples=200)
@given(seeds, positions, st.integers(0, 62), st.integers(0, 30))
def test_any_bit_of_seed_or_position_changes_half_of_the_bits(seed: int, position: int, bit: int, other: int) -> None:
    """Neighbouring requests and neighbouring positions share nothing: of 32 x 256 bits, half differ."""
    here = hash_lanes(seed, position, 256)
    for there in (hash_lanes(seed ^ (1 << bit), position, 256), hash_lanes(seed, position ^ (1 << other), 256)):
        differing = sum(word.bit_count() for word in ((here ^ there).long() & 0xFFFFFFFF).tolist())
        assert abs(differing - 4096) < SIGMAS * math.sqrt(8192 / 4)


def test_no_two_tokens_share_their_bits() -> None:
    assert len(set(hash_lanes(1, 2, 2**17).tolist())) == 2**17


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("width", [1, 15, 16, 5001])
def test_the_definition(width: int) -> None:
    """-ln(-ln(1 - u)) of a u in float32, whatever computes it, for any part of a vocabulary."""
    places = [(0, 0), (7, 11), (MAX_SEED, 2**31 - 1)]
    lanes = torch.stack([hash_lanes(*place, 9 + width) for place in places])
    uniform = ((lanes & 0x7FFFFFFF).float() + 0.5) / 2**31
    expected = -torch.log(-torch.log1p(-uniform.clamp(max=1 - 2**-24).double()))
    noise = gumbels_of(keys_of(places), 9 + width)
    assert torch.allclose(noise.double(), expected, rtol=1e-6, atol=1e-6)
    assert torch.equal(gumbels_of(keys_of(places), width, first=9), noise[:, 9:])


@pytest.mark.parametrize("kernels", [True, False])
@settings(max_examples=50)
@given(places=st.lists(st.tuples(seeds, positions), min_size=1, max_size=3), ids=st.lists(st.integers(0, 999)))
def test_the_noise_of_some_ids_is_that_of_all(kernels: bool, places: list[tuple[int, int]], ids: list[int]) -> None:
    keys, wanted = torch.tensor([halves(place) for place in places], dtype=torch.int32), torch.tensor(ids).long()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu, "present", lambda device: kernels and cpu.library.functions() is not None)
        assert torch.equal(gumbels_of(keys, len(ids), ids=wanted), gumbels_of(keys, 1000)[:, wanted])
        cached = NoiseCache(max(1, len(ids)), ids=wanted)
        if ids:
            assert torch.equal(cached(*places[0]), gumbel(*places[0], 1000)[wanted])


@settings(max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 99)), max_size=200))
def test_the_cache_gives_what_is_made_afresh(asked: list[tuple[int, int]]) -> None:
    """In whatever order it is asked, with room for fewer vectors than it is asked for."""
    noise = NoiseCache(8, most_bytes=0)
    for seed, position in asked:
        assert torch.equal(noise(seed, position), gumbel(seed, position, 8))


# -- its law ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("along", ["token", "position", "seed"])
def test_every_bit_is_even(along: str) -> None:
    """In each direction in which one may walk through (seed, position, token)."""
    count = 8_000
    if along == "token":
        lanes = hash_lanes(3, 4, count)
    elif along == "position":
        lanes = torch.cat([hash_lanes(3, position, 1) for position in range(count)])
    else:
        lanes = torch.cat([hash_lanes(seed, 4, 1) for seed in range(count)])
    ones = torch.stack([(lanes >> bit) & 1 for bit in range(32)]).sum(1)
    assert ((ones - count / 2).abs() < SIGMAS * math.sqrt(count / 4)).all()


def sample(count: int, width: int = 50_000) -> Tensor:
    return torch.cat([gumbel(seed, position, width) for seed in range(2) for position in range(count // 2)])


def test_moments() -> None:
    noise = sample(20).double()
    error = math.pi / math.sqrt(6 * len(noise))
    assert abs(noise.mean() - 0.5772156649) < SIGMAS * error
    # The variance of a sample variance is (kurtosis - 1) s^4 / n, and a Gumbel's kurtosis is 5.4.
    assert abs(noise.var() - math.pi**2 / 6) < SIGMAS * math.sqrt(4.4 / len(noise)) * math.pi**2 / 6


@pytest.mark.parametrize(("seed", "position"), [(0, 0), (1, 0), (0, 1), (MAX_SEED, 2**20)])
def test_kolmogorov_smirnov(seed: int, position: int) -> None:
    assert stats.kstest(gumbel(seed, position, 150_000).numpy(), stats.gumbel_r.cdf).pvalue > 1e-6


@pytest.mark.parametrize("other", [(0, 1), (1, 0), (1, 1), (0, 1000)])
def test_vectors_are_uncorrelated(other: tuple[int, int]) -> None:
    pair = torch.stack([gumbel(0, 0, 150_000), gumbel(*other, 150_000)])
    assert abs(torch.corrcoef(pair)[0, 1]) < SIGMAS / math.sqrt(150_000)


def test_always_finite() -> None:
    """Ten million numbers: the ends u = 0 and u = 1 of the unit interval are out of reach."""
    noise = sample(200)
    assert noise.isfinite().all()
    assert -3 < noise.min() < -2.5 and 14 < noise.max() < 22.5


def test_the_ends_of_the_unit_interval() -> None:
    """Two tokens whose bits, 2 and 2^31 - 14, are next to all zeros and all ones (found by search): the large noise
    keeps its digits, the small one is a number."""
    assert hash_lanes(0, 407, 2**20)[866443] & 0x7FFFFFFF == 2
    assert gumbel(0, 407, 2**20)[866443].item() == pytest.approx(-math.log(2.5 * 2.0**-31), rel=1e-6)
    assert hash_lanes(0, 15, 2**20)[801272] & 0x7FFFFFFF == 2**31 - 14
    assert gumbel(0, 15, 2**20)[801272].item() == pytest.approx(-math.log(24 * math.log(2)), abs=0.01)


# -- samples ----------------------------------------------------------------------------------------------------------

LOGITS = torch.linspace(-2, 2, 16).sin().mul(3)
FILTERED = Law(0.7, top_k=12, min_p=0.01)


def chi_square(observed: list[int], probabilities: list[float]) -> float:
    """p-value; a token without probability must not occur at all."""
    assert all(p > 0 for n, p in zip(observed, probabilities, strict=True) if n)
    total = sum(observed)
    cells = [(n, p * total) for n, p in zip(observed, probabilities, strict=True) if p > 0]
    return float(stats.chisquare(*zip(*cells, strict=True), sum_check=False).pvalue)


def assert_law(law: Law, count: int, noise: Noise) -> None:
    """`count` samples of LOGITS, one at each position, follow softmax(LOGITS / T) under the law's filters."""
    drawn = torch.tensor(argmax(perturbed(LOGITS.expand(count, -1), law, range(count), noise)))
    kept = filtered(LOGITS[None] / law.temperature, law).double()
    assert chi_square(torch.bincount(drawn, minlength=16).tolist(), torch.softmax(kept, -1)[0].tolist()) > 1e-6


@pytest.mark.parametrize(("law", "seed"), [(Law(1.0), MAX_SEED), (FILTERED, 0)], ids=["plain", "filtered"])
def test_chi_square_of_200_000_samples(law: Law, seed: int) -> None:
    """The noise of 1,000 ids at a time serves 62 samples, which is what makes so many of them affordable."""
    vectors = torch.cat([gumbel(seed, position, 1000)[:992] for position in range(3226)]).view(-1, 16)
    assert_law(law, 200_000, lambda _, index: vectors[index])


@pytest.mark.parametrize(
    ("law", "along"), [(Law(1.0), "position"), (replace(FILTERED, top_p=0.95), "seed")], ids=["plain", "filtered"]
)
def test_chi_square_along(law: Law, along: str) -> None:
    """The same few ids over the positions of one request, and over requests at one position."""
    assert_law(
        law, 10_000, lambda seed, index: gumbel(seed, index, 16) if along == "position" else gumbel(index, 7, 16)
    )


@pytest.mark.parametrize("sign", [1.0, -1.0], ids=["draft = target", "draft = -target"])
def test_joint_law_of_three_tokens(sign: float) -> None:
    """Through `coupled`, with a draft of two tokens that shares the noise: which of 27 texts each of 6,000 seeds gives.
    The draft looks back one token, the target too."""
    table = torch.randn(3, 3, generator=torch.Generator().manual_seed(1))
    noise, observed = NoiseCache(3), [0] * 27
    for seed in range(6000):
        law, text = Law(1.0, seed=seed), [0]
        while len(text) < 4:
            draft: list[int] = []
            for position in range(len(text), len(text) + 2):
                draft += argmax(perturbed(sign * table[None, [*text, *draft][-1]], law, [position], noise))
            own = argmax(perturbed(table[[text[-1], *draft]], law, range(len(text), len(text) + 3), noise))
            accepted, token = coupled(draft, own)
            text += [*draft[:accepted], token]
        observed[9 * text[1] + 3 * text[2] + text[3]] += 1
    p = torch.softmax(table.double(), -1)
    joint = p[0][:, None, None] * p[:, :, None] * p[None, :, :]
    assert chi_square(observed, joint.flatten().tolist()) > 1e-6


@pytest.mark.parametrize("vocab_size", [1, 131, 1000, 40_000])
def test_noise_of_several_places_at_once_is_that_of_each(vocab_size: int) -> None:
    places = [(seed, position) for seed in (0, 7, 2**63 - 1) for position in (0, 1, 4095)]
    expected = torch.stack([gumbel(*place, vocab_size) for place in places])
    assert torch.equal(gumbels_of(keys_of(places), vocab_size), expected)
    noise = NoiseCache(vocab_size)
    noise.prepare([*places, *places])
    assert torch.equal(torch.stack([noise(*place) for place in places]), expected)
