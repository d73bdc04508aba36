"""Cut-offs: the cheapest of all that the model allows, and sane at the corners."""

from itertools import combinations, pairwise

import pytest
import torch

from lmhead.vocab import choose_cutoffs
from lmhead.vocab.cutoffs import _cluster_cost, _grid, _head_cost, widths
from lmhead.vocab.frequencies import zipf


@pytest.mark.parametrize("hidden_size", [32, 512])
def test_it_finds_the_cheapest(hidden_size: int) -> None:
    vocab, tokens = 4000, 2048
    shares = zipf(vocab)
    covered = shares.cumsum(0)
    chosen = choose_cutoffs(vocab, hidden_size, max_clusters=2, tokens=tokens, coverage=0.5)
    places = [p for p in _grid(vocab)[:-1] if covered[p - 1] >= 0.5]
    every = [(), *combinations(places, 1)]
    if hidden_size > 128:  # of width 2, a second cluster is not considered
        every += combinations(places, 2)

    def cost(cuts: tuple[int, ...]) -> float:
        ends = [*cuts, vocab]
        total = _head_cost(ends[0], len(cuts), hidden_size, tokens)
        for (lo, hi), width in zip(
            pairwise(ends), widths(hidden_size, len(cuts), 4.0), strict=True
        ):
            share = float(shares[lo:hi].sum())
            total += float(_cluster_cost(share, hi - lo, width, hidden_size, tokens))
        return total

    assert cost(chosen) == pytest.approx(min(map(cost, every)), rel=1e-12)


def test_the_shortlist_covers_what_it_must() -> None:
    shares = zipf(50_000)
    for coverage in (0.5, 0.8, 0.95):
        cuts = choose_cutoffs(50_000, 256, coverage=coverage)
        assert float(shares[: cuts[0]].sum()) >= coverage
        assert list(cuts) == sorted(set(cuts))


def test_the_order_of_frequencies_does_not_matter() -> None:
    counts = zipf(5000)
    mixed = counts[torch.randperm(5000, generator=torch.Generator().manual_seed(0))]
    assert choose_cutoffs(5000, 256, frequencies=mixed) == choose_cutoffs(
        5000, 256, frequencies=counts
    )


def test_small_vocabularies_are_not_cut() -> None:
    for vocab in (1, 2, 3, 50):
        assert choose_cutoffs(vocab, 64) == ()
    assert choose_cutoffs(100_000, 4) == ()


def test_bad_input() -> None:
    with pytest.raises(ValueError, match="coverage must be in"):
        choose_cutoffs(100, 8, coverage=1.5)
    with pytest.raises(ValueError, match="vocab_size must be at least 1"):
        choose_cutoffs(0, 8)
