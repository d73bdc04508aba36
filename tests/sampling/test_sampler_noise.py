"""Noise: a function of (seed, position, token id), and nothing else has a say."""

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close, float64
from scipy import stats
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead import reference as ref
from lmhead.sampling import distribution

CHAINS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "temperature": {"temperature": 0.7},
    "top_p": {"temperature": 0.8, "top_p": 0.9},
    "top_k": {"top_k": 20},
    "min_p": {"min_p": 0.05},
    "typical_p": {"typical_p": 0.8},
    "penalty and xtc": {"repetition_penalty": 1.3, "xtc_probability": 0.5, "xtc_threshold": 0.01},
    "mirostat": {"mirostat": 2, "mirostat_tau": 3.0},
}
EVERY_CHAIN = pytest.mark.parametrize("options", CHAINS.values(), ids=CHAINS)
V = 501
DRAWS = int(os.environ.get("LMHEAD_DRAWS", "300000"))


def logits(rows: int = 12, vocab: int = V) -> Tensor:
    z = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    z[:, 7::50] = -math.inf
    return z


def contexts(rows: int = 12) -> list[list[int]]:
    r = np.random.default_rng(0)
    return [r.integers(V, size=int(r.integers(1, 9))).tolist() for _ in range(rows)]


def same(a: Any, b: Any, rows: Tensor | slice = slice(None)) -> None:
    """Rows of one result are those of another: tokens and kept tokens exactly."""
    for name in ("token", "raw_log_prob"):
        assert torch.equal(getattr(a, name), getattr(b, name)[rows]), name
    for name in ("log_prob", "log_kept_mass"):  # sums of rows that are padded to other widths
        assert_close(getattr(a, name), getattr(b, name)[rows], atol=1e-13, rtol=1e-13, what=name)
    numbers = torch.arange(len(b.kept))[rows].tolist()
    assert all(torch.equal(a.kept[i], b.kept[j]) for i, j in enumerate(numbers))


@pytest.mark.both_cores
@pytest.mark.parametrize("stream", [0, 1])
def test_numbers_are_philox(stream: int) -> None:
    seeds, positions = [0, 5, 2**64 - 1, 2**63], [0, 2**32 + 3, 17, 2**62]
    ids = torch.randint(2**33, (4, 50), generator=torch.Generator().manual_seed(0))
    keys = distribution.make_keys(seeds, torch.tensor(positions))
    got = distribution.uniforms(keys, ids, stream)
    for row, (seed, position) in enumerate(zip(seeds, positions, strict=True)):
        want = ref.philox_uniform(seed, position, ids[row].numpy(), stream=stream)
        assert np.array_equal(got[row].numpy(), want)
    g = np.stack([ref.gumbel(row) for row in distribution.uniforms(keys, ids).numpy()])
    assert_close(distribution.gumbel(keys, ids), g, atol=1e-13, rtol=1e-13)


def test_a_negative_seed_is_its_two_complement() -> None:
    keys = distribution.make_keys([-1, 2**64 - 1], torch.tensor([3, 3]))
    assert torch.equal(keys[0], keys[1])
    z = logits()
    assert torch.equal(Sampler(seed=-1)(z).token, Sampler(seed=2**64 - 1)(z).token)


@pytest.mark.both_cores
@EVERY_CHAIN
def test_a_token_is_that_of_the_reference(options: dict[str, Any]) -> None:
    z, context = logits(), contexts()
    sampler = Sampler(seed=9, **options)
    sampled = sampler(z, context)
    left = float64(sampler.process(z.double(), context))
    g = ref.philox_gumbel(9, [[len(c)] for c in context], np.arange(V))
    assert sampled.token.tolist() == (left + g).argmax(1).tolist()


@pytest.mark.both_cores
@EVERY_CHAIN
def test_alone_in_any_batch_in_any_order(options: dict[str, Any]) -> None:
    z, context = logits(), contexts()
    sampler = Sampler(seed=3, **options)
    whole = sampler(z, context)
    for row in range(len(z)):
        same(sampler(z[row : row + 1], [context[row]]), whole, slice(row, row + 1))
    order = torch.randperm(len(z), generator=torch.Generator().manual_seed(0))
    same(sampler(z[order], [context[i] for i in order.tolist()]), whole, order)
    half = torch.tensor([2, 3, 3, 11])
    same(sampler(z[half], [context[i] for i in half.tolist()]), whole, half)
    one = sampler(z[4], [context[4]])
    assert one.token.shape == ()
    assert one.token == whole.token[4]


@pytest.mark.both_cores
@EVERY_CHAIN
def test_dense_or_lazy(options: dict[str, Any]) -> None:
    """A head's lazy logits and the tensor of the same numbers give the same tokens."""
    random = torch.Generator().manual_seed(1)
    head = LMHead(16, V, bias=True)
    hidden = torch.randn(12, 16, generator=random) * 2
    with torch.no_grad():
        head.weight.copy_(torch.randn(V, 16, generator=random))
    context = contexts()
    lazy = head(hidden)
    assert head.bias is not None
    dense = torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
    sampler = Sampler(seed=5, **options)
    a, b = sampler(lazy, context), sampler(dense.detach(), context)
    assert a.token.tolist() == b.token.tolist()
    for name in ("log_prob", "raw_log_prob", "log_kept_mass"):
        assert_close(getattr(a, name), getattr(b, name), atol=1e-5, what=name)
    assert [k.tolist() for k in a.kept] == [k.tolist() for k in b.kept]
    alone = [sampler(head(hidden[i : i + 1]), [context[i]]).token for i in range(12)]
    assert torch.equal(torch.cat(alone), a.token)


@pytest.mark.both_cores
@EVERY_CHAIN
def test_contiguous_or_not_and_of_any_shape(options: dict[str, Any]) -> None:
    z, context = logits(), contexts()
    sampler = Sampler(seed=3, **options)
    whole = sampler(z, context)
    same(sampler(z.T.contiguous().T, context), whole)
    wide = torch.full((12, 2 * V), math.nan)
    wide[:, ::2] = z
    same(sampler(wide[:, ::2], context), whole)
    folded = sampler(z.reshape(3, 4, V), context)
    assert folded.token.shape == (3, 4)
    assert torch.equal(folded.token.reshape(-1), whole.token)
    assert torch.equal(sampler(z.double(), context).token, whole.token)
    assert torch.equal(
        sampler(z.bfloat16(), context).token, sampler(z.bfloat16().float(), context).token
    )


@pytest.mark.parametrize("threads", [2, 3, 8])
@EVERY_CHAIN
def test_threads_change_nothing(options: dict[str, Any], threads: int) -> None:
    z = torch.randn(3, 70_001, generator=torch.Generator().manual_seed(0)) * 3
    sampler = Sampler(seed=3, **options)
    one = sampler(z)
    torch.set_num_threads(threads)
    try:
        many = sampler(z)
    finally:
        torch.set_num_threads(1)
    same(many, one)


@pytest.mark.both_cores
def test_own_seed_and_own_parameters_per_row() -> None:
    z, context = logits(6), contexts(6)
    columns: dict[str, Any] = {
        "temperature": [1.0, 0.5, 0.0, 2.0, 0.7, 1.3],
        "top_k": [0, 10, 5, -1, 1, 50],
        "top_p": [1.0, 0.9, 0.5, 0.3, 1.0, 0.0],
        "min_p": [0.0, 0.0, 0.1, 0.01, 0.0, 0.2],
        "typical_p": [1.0, 0.9, 1.0, 0.4, 1.0, 0.95],
        "epsilon_cutoff": [0.0, 0.01, 0.0, 0.001, 0.0, 0.0],
        "eta_cutoff": [0.0, 0.0, 0.01, 0.001, 0.0, 0.0],
        "repetition_penalty": [1.0, 1.2, 0.5, 1.0, 3.0, 1.0],
        "frequency_penalty": [0.0, 0.3, 0.0, -1.0, 0.0, 0.0],
        "presence_penalty": [0.2, 0.0, 0.0, 0.5, 0.0, 0.0],
    }
    seeds = [1, 2, 3, 4, 2**63, 1]
    whole = Sampler(seed=seeds, **columns)(z, context, prompt_length=1)
    for row in range(6):
        options = {name: values[row] for name, values in columns.items()}
        alone = Sampler(seed=seeds[row], **options)(
            z[row : row + 1], [context[row]], prompt_length=1
        )
        assert alone.token[0] == whole.token[row], f"row {row}"
        assert alone.kept[0].tolist() == whole.kept[row].tolist()
        assert_close(alone.log_prob[0], whole.log_prob[row], atol=1e-6)
        assert_close(alone.log_kept_mass[0], whole.log_kept_mass[row], atol=1e-6)


@pytest.mark.parametrize(
    "columns",
    [
        {"top_n_sigma": [1.0, 2.0, 0.5]},
        {"top_h": [0.2, 0.9, 0.5]},
        {"xtc_probability": [0.0, 1.0, 0.5], "xtc_threshold": [0.1, 0.01, 0.02]},
        {"mirostat": 2, "mirostat_tau": [1.0, 3.0, 5.0], "mirostat_eta": [0.1, 0.2, 0.3]},
        {"mirostat": 1, "mirostat_tau": [1.0, 3.0, 5.0], "mirostat_eta": [0.1, 0.2, 0.3]},
        {"temperature": [1.0, 0.5, 2.0], "dynatemp_range": [0.5, 0.0, 1.0]},
        {"dry_multiplier": [0.0, 1.0, 2.0], "dry_allowed_length": 1},
        {"guidance_scale": [1.0, 2.0, 0.5]},
    ],
    ids=lambda c: str(next(iter(c))),
)
def test_other_parameters_per_row(columns: dict[str, Any]) -> None:
    z, context = logits(3).double(), [[5, 6, 5], [1, 2, 1], [9, 9, 9]]
    other = {"unconditional": z.flip(0).clone()} if "guidance_scale" in columns else {}
    if other:
        z[:, 7::50] = -9.0
        other["unconditional"][:, 7::50] = -9.0
    whole = Sampler(seed=8, **columns)(z, context, **other)
    for row in range(3):
        options = {k: v[row] if isinstance(v, list) else v for k, v in columns.items()}
        mine = {k: v[row : row + 1] for k, v in other.items()}
        alone = Sampler(seed=8, **options)(z[row : row + 1], [context[row]], **mine)
        assert alone.token[0] == whole.token[row]
        assert alone.kept[0].tolist() == whole.kept[row].tolist()
        assert_close(alone.log_prob[0], whole.log_prob[row], atol=1e-12)
        if whole.state is not None:
            assert alone.state is not None
            assert_close(alone.state[0], whole.state[row], atol=1e-12)


def test_position_and_seed_matter() -> None:
    z = torch.zeros(1, 1000).expand(200, 1000)
    by_position = Sampler(seed=1)(z, position=torch.arange(200)).token
    by_seed = Sampler(seed=list(range(200)))(z, position=4).token
    for tokens in (by_position, by_seed):
        assert len(set(tokens.tolist())) > 150
    assert by_position[4] == by_seed[1]
    one_position = Sampler(seed=1)(z, position=4).token
    assert (one_position == by_position[4]).all()
    context = [[0] * n for n in range(200)]
    assert torch.equal(Sampler(seed=1)(z, context).token, by_position), "as many as the context has"


def test_without_a_seed_torch_decides() -> None:
    z = torch.zeros(50, 1000)
    sampler = Sampler()
    torch.manual_seed(3)
    first, second = sampler(z).token, sampler(z).token
    assert not torch.equal(first, second)
    assert len(set(first.tolist())) > 40, "rows have their own noise"
    torch.manual_seed(3)
    assert torch.equal(sampler(z).token, first)
    assert torch.equal(sampler(z).token, second)
    torch.manual_seed(4)
    assert not torch.equal(sampler(z).token, first)


def test_a_seed_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    Sampler(seed=1, top_p=0.9)(logits())
    assert torch.equal(torch.get_rng_state(), before)


def counts_of(sampler: Sampler, z: Tensor, draws: int, batch: int = 50_000) -> Tensor:
    """How often each token came."""
    counts = torch.zeros(len(z), dtype=torch.int64)
    for start in range(0, draws, batch):
        n = min(batch, draws - start)
        token = sampler(z.expand(n, -1), position=torch.arange(start, start + n)).token
        counts += token.bincount(minlength=len(z))
    return counts


def chi_square(counts: Tensor, p: Tensor) -> float:
    """The chance of counts this far off; tokens expected less than ten times are put together."""
    draws = int(counts.sum())
    assert int(counts[p == 0].sum()) == 0, "a word of probability 0 came"
    rare = p * draws < 10
    seen = np.append(counts[~rare].numpy(), int(counts[rare].sum()))
    expected = np.append((p[~rare] * draws).numpy(), float(p[rare].sum()) * draws)
    some = expected > 0
    return float(stats.chisquare(seen[some], expected[some] * draws / expected.sum()).pvalue)


def peaked(tokens: int = 1000) -> Tensor:
    """From 0.05 down to 1e-9, in no order, a tenth of them 0."""
    generator = torch.Generator().manual_seed(0)
    p = torch.linspace(0, -18, tokens, dtype=torch.float64).exp()[
        torch.randperm(tokens, generator=generator)
    ]
    p[::10] = 0
    return p / p.sum()


@pytest.mark.both_cores
@pytest.mark.parametrize("options", [{}, {"top_p": 0.9}, {"temperature": 2.0}], ids=str)
def test_frequencies(options: dict[str, Any], served_by: str) -> None:
    p = peaked()
    z = p.log().float()
    draws = 50_000 if served_by == "native" else 3_000
    counts = counts_of(Sampler(seed=2, **options), z, draws, 10_000)
    true = Sampler(**options).process(z.double()[None])[0].softmax(0)
    assert chi_square(counts, true) > 1e-3


def test_millions_of_draws() -> None:
    """`LMHEAD_DRAWS=10000000` for ten million: some minutes."""
    p = peaked()
    counts = counts_of(Sampler(seed=7), p.log().float(), DRAWS, 20_000)
    true = p.log().float().double().softmax(0)
    assert chi_square(counts, true) > 1e-3


def test_noise_of_neighbours_is_independent() -> None:
    """Two positions, two seeds: pairs of tokens come as often as their product says."""
    z = torch.log(torch.tensor([0.1, 0.2, 0.3, 0.4]))
    n = 100_000
    for a, b in (((1, 0), (1, 1)), ((1, 0), (2, 0))):
        tokens = [
            Sampler(seed=[seed + 10 * i for i in range(n)])(z.expand(n, 4), position=at).token
            for seed, at in (a, b)
        ]
        pairs = (tokens[0] * 4 + tokens[1]).bincount(minlength=16)
        p = z.double().exp()
        assert chi_square(pairs, (p[:, None] * p).reshape(-1) / p.sum() ** 2) > 1e-3
