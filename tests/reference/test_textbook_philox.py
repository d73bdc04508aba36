"""Philox: the published answers, the layout of words, and the distribution of the noise."""

import numpy as np
import pytest
from compare import assert_close
from scipy import stats

from lmhead import reference as ref
from lmhead.reference import philox

FF = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "answer"),
    [  # the known-answer vectors of Random123, philox4x32 with 10 rounds
        ([0] * 4, [0] * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ([FF] * 4, [FF] * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            "d16cfe09 94fdcceb 5001e420 24126ea1",
        ),
    ],
)
def test_known_answers(counter: list[int], key: list[int], answer: str) -> None:
    assert " ".join(f"{w:08x}" for w in ref.philox_4x32(counter, key)) == answer


def test_one_round_by_hand() -> None:
    # c = (2, 3, 1, 5), k = (7, 9): M_0 · 2 = 1 a4a23ea6 and M_1 · 1 = 0 cd9e8d57 in hex, so
    # (0 ^ 3 ^ 7, cd9e8d57, 1 ^ 5 ^ 9, a4a23ea6), with 3 ^ 7 = 4 and 1 ^ 5 ^ 9 = 13.
    out = ref.philox_4x32([2, 3, 1, 5], [7, 9], rounds=1)
    assert out.tolist() == [4, 0xCD9E8D57, 13, 0xA4A23EA6]


def test_layout() -> None:
    seed, position, stream = 0x123456789ABCDEF0, 0xFEDCBA9876543210, 3
    out = ref.philox_4x32([10, 0x76543210, 0xFEDCBA98, stream], [0x9ABCDEF0, 0x12345678])
    w = [int(x) for x in out]
    even, odd = (w[0] << 32 | w[1]) >> 11, (w[2] << 32 | w[3]) >> 11
    u = ref.philox_uniform(seed, position, [20, 21], stream=stream)
    assert_close(u, np.array([even + 0.5, odd + 0.5]) * 2.0**-53)
    assert_close(ref.philox_gumbel(seed, position, [20, 21], stream=stream), ref.gumbel(u))


def test_a_word_has_its_noise_wherever_it_is_asked() -> None:
    seeds, positions = np.array([[1], [2], [2]]), np.array([[5], [5], [6]])
    all_of_them = ref.philox_uniform(seeds, positions, np.arange(9))
    assert all_of_them.shape == (3, 9)
    for row, (seed, position) in enumerate([(1, 5), (2, 5), (2, 6)]):
        for v in (0, 3, 8):
            alone = ref.philox_uniform(seed, position, v)
            assert alone.shape == ()
            assert float(alone) == all_of_them[row, v]
    assert len(np.unique(all_of_them)) == 27
    assert (ref.philox_uniform(1, 5, np.arange(9), stream=1) != all_of_them[0]).all()


def test_uniform_and_gumbel_in_distribution() -> None:
    u = ref.philox_uniform(0, np.arange(200)[:, None], np.arange(100)).reshape(-1)
    assert stats.kstest(u, "uniform").pvalue > 1e-3
    g = ref.philox_gumbel(1, np.arange(200)[:, None], np.arange(100)).reshape(-1)
    assert stats.kstest(g, "gumbel_r").pvalue > 1e-3
    # Neighbours know nothing of each other.
    pairs = u.reshape(-1, 2)
    assert abs(np.corrcoef(pairs[:, 0], pairs[:, 1])[0, 1]) < 0.04


@pytest.mark.parametrize("word", [0, FF])
def test_the_smallest_and_the_largest_have_finite_noise(
    word: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(philox, "philox_4x32", lambda *_: np.full((1, 4), word, dtype=np.uint64))
    u = ref.philox_uniform(0, 0, [0])
    assert ((u > 0) & (u < 1)).all()
    assert np.isfinite(ref.philox_gumbel(0, 0, [0])).all()


def test_bad_numbers_are_named() -> None:
    with pytest.raises(ValueError, match=r"seed must be in \[0, 2\*\*64\); got -1"):
        ref.philox_uniform(-1, 0, 0)
    with pytest.raises(ValueError, match=r"stream must be in \[0, 2\*\*32\); got 4294967296"):
        ref.philox_uniform(0, 0, 0, stream=2**32)
    with pytest.raises(TypeError, match="position must be integers"):
        ref.philox_uniform(0, 0.5, 0)
    with pytest.raises(ValueError, match=r"counter must be \(..., 4\) and key \(..., 2\)"):
        ref.philox_4x32([0, 0, 0], [0, 0])
