"""A screened sample is the token that the sampler gives for the float64 logits of all tokens."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead.screen import ScreenedHead, ScreenedSample
from lmhead.sweep import SweptScores
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


def exact_logits(head: LMHead, hidden: Tensor) -> Tensor:
    scores = head.scores(hidden)
    assert isinstance(scores, SweptScores)
    source = scores.source
    every = torch.arange(source.vocab)
    rows = [
        source.pairs(torch.full_like(every, row), every, max_bytes=2**24)
        for row in range(source.rows)
    ]
    return torch.stack(rows)


def check(answer: ScreenedSample, sampler: Sampler, logits: Tensor, context: Any) -> None:
    want = sampler(logits, context)
    assert answer.token.tolist() == want.token.tolist()
    for interval, true in (
        (answer.log_prob, want.log_prob),
        (answer.raw_log_prob, want.raw_log_prob),
    ):
        slack = 1e-9 * (1 + true.abs())
        assert bool((interval.low <= true + slack).all())
        assert bool((true <= interval.high + slack).all())


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
    check(answer, sampler, exact_logits(head, hidden), context)


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
    check(answer, sampler, exact_logits(head, hidden), context)


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
    want = sampler(exact_logits(head, hidden.reshape(6, 32)))
    assert torch.allclose(answer.log_prob.low.reshape(-1), want.log_prob, atol=1e-12)
    assert torch.allclose(answer.raw_log_prob.low.reshape(-1), want.raw_log_prob, atol=1e-6)


def test_what_the_bounds_cannot_serve_falls_back_and_says_so() -> None:
    random = torch.Generator().manual_seed(7)
    head = heads.head_of(heads.plain(900, 32, random))
    hidden = heads.normal(3, 32, random=random)
    screened = ScreenedHead(head)
    served = screened.sample(hidden, Sampler(top_k=4, seed=1)).certificate
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
