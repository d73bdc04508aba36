"""A screened sample is the token that the sampler gives for `head(hidden)`, without a copy."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead.sampling.distribution import gumbel, make_keys
from lmhead.screen import ScreenedHead, ScreenedSample
from lmhead.sweep import Source, kernels
from screen import heads

pytestmark = pytest.mark.both_cores

CHAINS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "plain": {},
    "hot": {"temperature": 1.7},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5, "temperature": 0.8},
    "top_p": {"top_p": 0.9},
    "top_p 0": {"top_p": 0.0},
    "min_p": {"min_p": 0.05, "temperature": 1.3},
    "top_h": {"top_h": 0.4},
    "epsilon": {"epsilon_cutoff": 0.01},
    "several": {"top_k": 20, "top_p": 0.8, "min_p": 0.1, "temperature": 0.7},
    "llama.cpp": {"top_p": 0.8, "temperature": 0.5, "order": "llama.cpp"},
    "penalties": {"repetition_penalty": 1.4, "frequency_penalty": 0.3, "top_p": 0.9},
    "penalties, race": {"repetition_penalty": 1.4, "presence_penalty": -2.0},
    "penalties, greedy": {"repetition_penalty": 5.0, "do_sample": False},
    "bias": {"logit_bias": {0: 4.0}, "top_k": 3},
    "bias, min_p": {"logit_bias": {0: 40.0}, "min_p": 0.2},
    "typical": {"typical_p": 0.7},
    "eta": {"eta_cutoff": 0.02},
    "guided by rules": {"allowed_token_ids": [0], "top_p": 0.9},
}


def check(
    answer: ScreenedSample, sampler: Sampler, head: LMHead, hidden: Tensor, context: Any
) -> None:
    want = sampler(head(hidden), context)
    assert answer.token.tolist() == want.token.tolist()
    # The draw follows float32 logits; the intervals hold the log-probabilities of float64 ones.
    wide = sampler(float64_logits(head, hidden), context)
    same = wide.token == answer.token
    for interval, true in (
        (answer.log_prob, wide.log_prob),
        (answer.raw_log_prob, wide.raw_log_prob),
    ):
        slack = 1e-9 * (1 + true.abs())
        assert bool(((interval.low <= true + slack) | ~same).all())
        assert bool(((true <= interval.high + slack) | ~same).all())


def float64_logits(head: LMHead, hidden: Tensor) -> Tensor:
    scores: Any = head.scores(hidden)
    source: Source = scores.source
    rows, every = torch.arange(len(hidden)), torch.arange(source.vocab)
    pairs = source.pairs(rows.repeat_interleave(len(every)), every.repeat(len(rows)))
    return pairs.view(len(rows), -1)


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_every_chain(name: str, bits: Any, softcap: float | None) -> None:
    random = torch.Generator().manual_seed(3)
    weight = heads.plain(1500, 48, random) * 0.4
    head = heads.head_of(weight, heads.bias_of("masks", 1500, random), softcap=softcap, scale=0.9)
    head.bias.data[0] = 0.5  # type: ignore[union-attr]
    hidden = heads.normal(12, 48, random=random)
    context = torch.randint(1500, (12, 6), generator=random)
    sampler = Sampler(seed=11, **CHAINS[name])
    answer = ScreenedHead(head, bits=bits).sample(hidden, sampler, context)
    check(answer, sampler, head, hidden, context)


@settings(max_examples=120, deadline=None)
@given(
    st.sampled_from(sorted(set(heads.WEIGHTS) - {"large"})),
    st.sampled_from([1, 2, 3, 257, 700]),
    st.sampled_from([1, 2, 7, 65]),
    st.sampled_from(heads.BIASES),
    st.sampled_from(sorted(CHAINS)),
    st.sampled_from([8, "4+4"]),
    st.integers(0, 2**32),
)
def test_hard_heads(
    kind: str, vocab: int, size: int, bias: str, name: str, bits: Any, seed: int
) -> None:
    random = torch.Generator().manual_seed(seed)
    weight = heads.WEIGHTS[kind](vocab, size, random)
    head = heads.head_of(weight, heads.bias_of(bias, vocab, random))
    if head.bias is not None:
        head.bias.data[0] = 0.0  # a token that is not masked
    hidden = heads.states(4, weight, random)
    context = [[0], [0, 0], [], [vocab - 1]]
    sampler = Sampler(seed=seed, **CHAINS[name])
    answer = ScreenedHead(head, bits=bits).sample(hidden, sampler, context)
    check(answer, sampler, head, hidden, context)


def test_parameters_and_seeds_per_row() -> None:
    random = torch.Generator().manual_seed(5)
    head = heads.head_of(heads.plain(900, 32, random))
    hidden = heads.normal(4, 32, random=random)
    screened = ScreenedHead(head)
    temperature, top_k, seed = [0.0, 0.5, 1.0, 2.0], [3, 0, 7, 900], [1, 2, 3, 4]
    sampler = Sampler(temperature=temperature, top_k=top_k, seed=seed)
    together = screened.sample(hidden, sampler, position=[9, 8, 7, 6]).token.tolist()
    alone = [
        int(
            screened.sample(
                hidden[i : i + 1],
                Sampler(temperature=temperature[i], top_k=top_k[i], seed=seed[i]),
                position=9 - i,
            ).token
        )
        for i in range(4)
    ]
    assert together == alone


def test_exact_log_probabilities_on_request() -> None:
    random = torch.Generator().manual_seed(6)
    head = heads.head_of(heads.plain(900, 32, random) * 0.3)
    hidden = heads.normal(2, 3, 32, random=random)
    sampler = Sampler(temperature=0.9, seed=1)
    answer = ScreenedHead(head).sample(hidden, sampler, exact=True)
    assert answer.token.shape == (2, 3)
    assert torch.equal(answer.log_prob.low, answer.log_prob.high)
    want = sampler(head(hidden.reshape(6, 32)))
    assert torch.allclose(answer.log_prob.low.reshape(-1), want.log_prob, atol=1e-12)
    assert torch.allclose(answer.raw_log_prob.low.reshape(-1), want.raw_log_prob, atol=1e-6)


def test_what_the_bounds_cannot_serve_falls_back_and_says_so() -> None:
    random = torch.Generator().manual_seed(7)
    head = heads.head_of(heads.plain(900, 32, random))
    hidden = heads.normal(3, 32, random=random)
    screened = ScreenedHead(head)
    served = screened.sample(hidden, Sampler(top_k=4, seed=1)).certificate
    if kernels.core is None:  # nothing is decided without it
        assert bool(served.fell_back.all())
    else:
        assert not bool(served.fell_back.any())
        assert float(served.rows_rescored.double().mean()) < 50
    typical = screened.sample(hidden, Sampler(typical_p=0.9, seed=1)).certificate
    assert bool(typical.fell_back.all())


def test_errors() -> None:
    head = LMHead(8, 20)
    screened = ScreenedHead(head)
    with pytest.raises(TypeError, match="sampler must be a Sampler; got str"):
        screened.sample(torch.randn(1, 8), "greedy")
    with pytest.raises(ValueError, match=r"context ids must be in \[0, 20\); got 20 in row 0"):
        screened.sample(torch.randn(1, 8), Sampler(), context=[[20]])
    with pytest.raises(ValueError, match="mirostat needs its state"):
        screened.sample(torch.randn(1, 8), Sampler(mirostat=2))
    with pytest.raises(ValueError, match="suppress_tokens removed the last token"):
        screened.sample(torch.randn(1, 8), Sampler(suppress_tokens=list(range(20))))


def near_ties(seed: int) -> tuple[LMHead, Tensor]:
    """Return a head whose tokens have equal logits but for the last digits of float32."""
    random = torch.Generator().manual_seed(seed)
    hidden = heads.normal(1, 64, random=random).expand(8, -1).contiguous()
    row = heads.normal(1, 64, random=random)
    # In exact arithmetic a permutation of entries keeps a sum; a rounded one it does not.
    order = torch.stack([torch.randperm(32, generator=random) for _ in range(600)])
    pairs = torch.stack([row[0].view(32, 2)[o] for o in order])
    hidden = hidden.view(8, 32, 2)[:, :1].expand(-1, 32, -1).reshape(8, 64).contiguous()
    return heads.head_of(pairs.reshape(600, 64)), hidden


@pytest.mark.parametrize("name", ["plain", "hot", "top_k", "top_p", "min_p", "epsilon", "several"])
def test_near_ties_give_the_token_of_a_head_without_a_copy(name: str) -> None:
    """Noise differs, so logits that differ by roundings decide cuts; here all of them are close."""
    for seed in range(8):
        head, hidden = near_ties(seed)
        sampler = Sampler(seed=list(range(8 * seed, 8 * seed + 8)), **CHAINS[name])
        want = sampler(head(hidden)).token.tolist()
        assert ScreenedHead(head).sample(hidden, sampler).token.tolist() == want


@pytest.mark.parametrize("side", [-1, 0, 1])
def test_two_tokens_whose_scores_differ_by_a_rounding(side: int) -> None:
    """The bias of one token is such that noise and logits of two add up to the same, or nearly."""
    random = torch.Generator().manual_seed(9)
    hidden = heads.normal(1, 32, random=random)
    for seed in range(20):
        weight = heads.plain(300, 32, random) * 0.05
        sampler = Sampler(seed=seed)
        noise = gumbel(make_keys([seed], torch.tensor([0])), torch.arange(300)[None])[0]
        plain = heads.head_of(weight)(hidden).detach().double()[0]
        first, second = (plain + noise).topk(2).indices.tolist()
        bias = torch.zeros(300)
        gap = plain[first] + noise[first] - plain[second] - noise[second]
        bias[second] = gap.float()
        if side:
            bias[second] = torch.nextafter(bias[second], torch.tensor(side * torch.inf))
        head = heads.head_of(weight, bias)
        want = sampler(head(hidden)).token.tolist()
        assert ScreenedHead(head).sample(hidden, sampler).token.tolist() == want


@pytest.mark.parametrize("allowed", [1, 3, 700, 1499])
@pytest.mark.parametrize("name", ["plain", "top_k", "top_p", "min_p", "penalties"])
def test_masks(name: str, allowed: int) -> None:
    random = torch.Generator().manual_seed(allowed)
    head = heads.head_of(heads.plain(1500, 48, random) * 0.4)
    hidden = heads.normal(3, 48, random=random)
    bits = torch.zeros(3, 1504, dtype=torch.bool)
    for row in range(3):
        bits[row, torch.randperm(1500, generator=random)[:allowed]] = True
    words = (bits.view(3, -1, 32).long() << torch.arange(32)).sum(2)
    mask = torch.where(words >= 2**31, words - 2**32, words).int()
    context = torch.randint(1500, (3, 6), generator=random)
    sampler = Sampler(seed=4, **CHAINS[name])
    want = sampler(head(hidden), context, allowed=mask).token
    screened = ScreenedHead(head).attach()
    # Tokens that no row allows are not read.
    forbidden = ~bits[:, :1500].any(0)
    screened.copy.scales[forbidden] = torch.nan
    got = sampler(head(hidden), context, allowed=mask).token
    assert torch.equal(got, want)
    assert bool(bits.gather(1, got[:, None]).all())
