"""Kernels on whole rows of logits, and Philox: against NumPy, on every instruction set."""

from collections.abc import Iterator
from types import ModuleType

import numpy as np
import pytest
import torch
from compare import assert_close, float64
from torch import Tensor

from lmhead import Sampler
from lmhead import reference as ref
from lmhead.sampling import distribution
from lmhead.sampling.distribution import FullDistribution
from lmhead.sampling.truncation_stages import TopP, Typical
from lmhead.sweep import kernels
from native.conftest import Twin

# Around the widths of vectors, a chunk of noise (512), a piece of a row (32768).
SHAPES = [(1, 1), (3, 2), (2, 7), (5, 33), (4, 511), (3, 513), (2, 32767), (2, 32769), (1, 98305)]
EVERY_SHAPE = pytest.mark.parametrize(("batch", "vocab"), SHAPES)
POISON = 1e30


@pytest.fixture(params=kernels.core.instruction_sets() if kernels.core else ["none"])
def isa(request: pytest.FixtureRequest, core: ModuleType) -> Iterator[str]:
    """Each instruction set in turn, the best one again at the end."""
    before = core.instruction_set()
    core.use(request.param)
    yield request.param
    core.use(before)


def logits(batch: int, vocab: int, scale: float = 3.0) -> Tensor:
    """Between two rows that no kernel may read; a tenth of the tokens masked."""
    random = torch.Generator().manual_seed(batch * 100_003 + vocab)
    guarded = torch.full((batch + 2, vocab), POISON)
    z = guarded[1:-1]
    z.copy_(torch.randn(batch, vocab, generator=random) * scale)
    z[:, 9::10] = -torch.inf
    return z


def per_row(batch: int, low: float, high: float) -> Tensor:
    random = torch.Generator().manual_seed(batch)
    return torch.rand(batch, generator=random, dtype=torch.float64) * (high - low) + low


SUMS = ("max", "mass", "weighted", "n", "shift", "square")


def sums(core: ModuleType, z: Tensor, beta: Tensor, threads: int) -> Tensor:
    """What three kernels tell of each row: (B, 6)."""
    out = torch.full((6, len(z)), torch.nan, dtype=torch.float64)
    core.row_max(z, out[0], out[3], threads)
    core.row_softmax_sums(z, beta[None], out[0], out[1:3, None], threads)
    core.row_moments(z, out[0], out[4], out[5], threads)
    return out.T


@EVERY_SHAPE
@pytest.mark.parametrize("threads", [1, 3])
def test_sums(core: ModuleType, isa: str, batch: int, vocab: int, threads: int) -> None:
    z, beta = logits(batch, vocab), per_row(batch, 0.2, 3.0)
    out = sums(core, z, beta, threads)
    x = float64(z)
    top = x.max(1, keepdims=True)
    alive = np.isfinite(x)
    far = np.where(alive, x - top, 0.0)
    e = np.where(alive, np.exp(far * float64(beta)[:, None]), 0.0)
    want = [
        top[:, 0],
        e.sum(1),
        (e * far * float64(beta)[:, None]).sum(1),
        alive.sum(1),
        far.sum(1),
        (far * far).sum(1),
    ]
    for i, (name, true) in enumerate(zip(SUMS, want, strict=True)):
        assert_close(out[:, i], true.astype(float), rtol=1e-12, atol=1e-12, what=f"{isa} {name}")


def test_sums_do_not_depend_on_threads_or_neighbours(core: ModuleType, isa: str) -> None:
    z, beta = logits(5, 70_001), per_row(5, 0.2, 3.0)
    whole = sums(core, z, beta, 1)
    for threads in (2, 3, 8):
        assert torch.equal(sums(core, z, beta, threads), whole)
    for row in range(5):
        alone = sums(core, z[row : row + 1], beta[row : row + 1].clone(), 1)
        assert torch.equal(alone[0], whole[row]), isa


@pytest.mark.parametrize("place", [0, 5, 32768, 40_000])
def test_sums_tell_of_a_nan_an_inf_and_of_nothing(core: ModuleType, isa: str, place: int) -> None:
    z = logits(4, 40_001)
    z[0, place], z[1, place] = torch.nan, torch.inf
    z[2] = -torch.inf
    out = sums(core, z, torch.ones(4, dtype=torch.float64), 2)
    assert torch.isnan(out[0, 0]), isa
    assert out[1:3, 0].tolist() == [torch.inf, -torch.inf]
    assert out[3, 0].isfinite()
    assert out[3, 0] == z[3].max()


@EVERY_SHAPE
@pytest.mark.parametrize("middle", [False, True], ids=["from the top", "from the middle"])
def test_reach(core: ModuleType, isa: str, batch: int, vocab: int, middle: bool) -> None:
    """At least the limit within the radius, and less than that two steps further in."""
    z, beta = logits(batch, vocab), per_row(batch, 0.2, 3.0)
    x, b = float64(z), float64(beta)[:, None]
    top = z.double().amax(1)
    centre = top - 2.0 if middle else top
    width = torch.full_like(beta, 1 / 64)
    distance = np.abs(x - float64(centre)[:, None])
    mass = np.exp((x - float64(top)[:, None]) * b)
    for share in (0.0, 1e-3, 0.5, 0.9, 1.0, 1.5):
        limit = torch.tensor(mass.sum(1) * share * (1 - 1e-9))
        radius = torch.full_like(beta, torch.nan)
        core.row_mass_radius(z, beta, top, centre, width, limit, radius, 2)
        r = float64(radius)[:, None]
        inside = (mass * (distance <= r)).sum(1)
        found = np.isfinite(r[:, 0])
        enough = inside >= float64(limit) * (1 - 1e-12)
        assert enough[found].all(), isa
        order = distance.argsort(1)
        within = np.take_along_axis(mass, order, 1).cumsum(1) >= float64(limit)[:, None]
        nearest = np.where(within, np.take_along_axis(distance, order, 1), np.inf).min(1)
        in_sight = nearest * b[:, 0] < 4095 / 64  # the search takes at most 4095 steps
        assert (found == in_sight).all(), isa
        # Two steps of the search nearer, it would not be enough.
        nearer = r - 2.1 * float64(width)[:, None] / b
        less = (mass * (distance <= nearer)).sum(1)
        assert (less < float64(limit))[found & (nearer[:, 0] > 0) & (share > 0)].all(), isa


@EVERY_SHAPE
def test_band(core: ModuleType, isa: str, batch: int, vocab: int) -> None:
    z = logits(batch, vocab)
    for lo, hi in ((-torch.inf, torch.inf), (-1.0, 2.0), (0.5, 0.5), (3.0, torch.inf), (2.0, 1.0)):
        lows, highs = torch.full((batch,), lo), torch.full((batch,), hi)
        lows[-1] = z[-1, 0]  # a border that is exactly a token
        x = z.numpy()
        inside = (x >= lows.numpy()[:, None]) & (x <= highs.numpy()[:, None]) & (x > -np.inf)
        most = int(inside.sum(1).max())
        for width in (most + 2, max(1, most // 2)):
            counts = torch.full((batch,), -1)
            ids = torch.full((batch, width), -7)
            values = torch.full((batch, width), torch.nan, dtype=torch.float64)
            core.row_range(z, lows, highs, counts, ids, values, 2)
            assert counts.tolist() == inside.sum(1).tolist(), isa
            for row in range(batch):
                want = np.flatnonzero(inside[row])
                want = want[np.argsort(-x[row, want], kind="stable")]
                n = len(want)
                if n <= width:
                    assert ids[row, :n].tolist() == want.tolist()
                    assert np.array_equal(values[row, :n].numpy(), float64(z)[row, want])
                    assert (ids[row, n:] == -7).all(), "what is not found is not written"


def gumbels(keys: Tensor, vocab: int) -> np.ndarray:
    seeds, places = keys.numpy().view(np.uint64).T
    return np.stack(
        [
            ref.philox_gumbel(int(s), int(p), np.arange(vocab))
            for s, p in zip(seeds, places, strict=True)
        ]
    )


@EVERY_SHAPE
@pytest.mark.parametrize("scale", [0.0, 3.0, 100.0])
def test_race(core: ModuleType, isa: str, batch: int, vocab: int, scale: float) -> None:
    """The winner is the textbook's, for every temperature."""
    z = logits(batch, vocab, scale)
    z[0, 0] = -torch.inf if vocab > 1 else z[0, 0]
    keys = distribution.make_keys(
        [2**64 - 1 - 7 * i for i in range(batch)], torch.arange(batch) * 2**33
    )
    g = gumbels(keys, vocab)
    for b in (1e-3, 1.0, 7.0):
        beta = torch.full((batch,), b, dtype=torch.float64)
        for threads in (1, 3):
            winners = torch.full((batch,), -5)
            core.row_gumbel_argmax(z, beta, keys, winners, threads)
            score = float64(z) * b + g
            assert winners.tolist() == score.argmax(1).tolist(), isa


def test_gumbel_argmax_of_masked_tokens_has_no_winner(core: ModuleType, isa: str) -> None:
    z = torch.full((2, 40_000), -torch.inf)
    z[1, 39_999] = -1e30
    keys = distribution.make_keys([1, 1], torch.tensor([0, 0]))
    winners = torch.zeros(2, dtype=torch.int64)
    core.row_gumbel_argmax(z, torch.ones(2, dtype=torch.float64), keys, winners, 2)
    assert winners.tolist() == [-1, 39_999], isa


KEYS = [(0, 0), (1, 2), (2**32 - 1, 2**32), (2**63, 2**40 + 5), (2**64 - 1, 2**63 - 1)]


@pytest.mark.parametrize("stream", [0, 1, 2**32 - 1])
def test_uniforms(without: Twin[Tensor], stream: int) -> None:
    ids = torch.tensor([[0, 1, 2, 3, 511, 512, 262_143, 2**24 + 2, 2**31, 2**33 - 1]] * len(KEYS))
    keys = distribution.make_keys([s for s, _ in KEYS], torch.tensor([p for _, p in KEYS]))
    want = np.stack([ref.philox_uniform(s, p, ids[0].numpy(), stream=stream) for s, p in KEYS])
    assert np.array_equal(distribution.uniforms(keys, ids, stream).numpy(), want)
    assert np.array_equal(without(lambda: distribution.uniforms(keys, ids, stream)).numpy(), want)


@EVERY_SHAPE
def test_rows_without_the_core(without: Twin[Tensor], batch: int, vocab: int) -> None:
    """The torch operations that serve in its place give the same, or a bound as good."""
    z, beta = logits(batch, vocab), per_row(batch, 0.2, 3.0)
    keys = distribution.make_keys(list(range(batch)), torch.arange(batch))
    ours, theirs = (
        distribution.gumbel_argmax(z, beta, keys),
        without(lambda: distribution.gumbel_argmax(z, beta, keys)),
    )
    assert torch.equal(ours, theirs)

    def numbers() -> Tensor:
        largest, n = distribution.row_max(z)
        k = torch.arange(1, batch + 1).double() * 3
        least = FullDistribution.of(z).kth(k).nan_to_num(neginf=-1e30)
        masses = distribution.softmax_sums(z, torch.stack([beta, torch.ones_like(beta)]), largest)
        sums = (*masses.flatten(0, 1), *distribution.moments(z, largest))
        return torch.stack([largest, n, least, *sums])

    assert_close(numbers(), without(numbers), rtol=1e-12, atol=1e-12)
    lo, hi = torch.full_like(beta, -1.0), torch.full_like(beta, 2.0)
    full = FullDistribution.of(z).scaled(beta)
    found = full.within(lo, hi)
    real = found.z > -torch.inf
    assert torch.equal(found.ids[real], without(lambda: full.within(lo, hi).ids)[real])
    assert torch.equal(found.z[real], (z.gather(1, found.ids).double() * beta[:, None])[real])


@EVERY_SHAPE
def test_the_nucleus_is_what_the_definition_keeps(batch: int, vocab: int) -> None:
    """The short way through the core, and the long one by masks."""
    sampler = Sampler(seed=0)
    for z in (logits(batch, vocab), logits(batch, vocab).round()):  # and with many ties
        call = sampler.call(z.shape, None, None, None, None, None, None)
        whole = FullDistribution.of(z.contiguous()).scaled(per_row(batch, 0.4, 2.0))
        for cut in (TopP(0.7), TopP(0.95, min_tokens_to_keep=3), Typical(0.3), Typical(0.8)):
            few = cut.find_candidates(whole, call)
            want = few.keep(cut.keep_mask(few, whole, call))
            quick = cut.find_kept(whole, call)
            if quick is not None:
                assert torch.equal(quick.n, want.n)
                real = want.z > -torch.inf
                assert torch.equal(quick.ids[:, : real.shape[1]][real], want.ids[real])
