"""Bugs that other samplers had, one test each. In brackets, whose."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from compare import assert_close, float64

from lmhead import LMHead, Sampler
from lmhead import reference as ref

BOTH = pytest.mark.both_cores


def kept(logits: torch.Tensor, **options: Any) -> list[int]:
    found: list[int] = Sampler(seed=0, **options)(logits).kept[0].tolist()
    return found


@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_p_at_the_exact_boundary(dtype: torch.dtype) -> None:
    """The token that reaches p stays, the next one does not (transformers 18976)."""
    z = torch.tensor([[0.5, 0.25, 0.125, 0.125]], dtype=dtype).log()
    z = z.double().to(dtype)
    powers = torch.tensor([[0.0, 1.0, 2.0, 2.0]], dtype=torch.float64) * -math.log(2)
    for given in (z, powers):
        assert kept(given, top_p=0.5 - 1e-6) == [0]
        assert kept(given, top_p=0.5 + 1e-6) == [0, 1]
        assert kept(given, top_p=0.75 + 1e-6) == [0, 1, 2]
        assert kept(given, top_p=0.875 + 1e-6) == [0, 1, 2, 3]
    even = torch.zeros(1, 4, dtype=dtype)  # quarters, without rounding
    assert [len(kept(even, top_p=p)) for p in (0.25, 0.5, 0.75, 1.0)] == [1, 2, 3, 4]
    assert [len(kept(even, top_p=p + 1e-9)) for p in (0.25, 0.5, 0.75)] == [2, 3, 4]


@BOTH
def test_top_p_of_zero_keeps_the_best_token(served_by: str) -> None:
    """(transformers PR 19839)."""
    z = torch.randn(3, 1000)
    sampled = Sampler(top_p=0.0, seed=0)(z)
    assert sampled.token.tolist() == z.argmax(1).tolist(), served_by
    assert sampled.kept.counts() == [1, 1, 1]
    assert (sampled.log_prob == 0).all()


@BOTH
def test_typical_keeps_the_token_that_reaches_the_mass() -> None:
    """Off by one (transformers PR 27165): of surprises near the entropy, until p is reached."""
    z = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    assert kept(z, typical_p=0.1) == [1]
    assert kept(z, typical_p=0.3) == [1, 2]
    assert kept(z, typical_p=0.5) == [1, 2, 3]
    assert kept(z, typical_p=0.7) == [0, 1, 2, 3]
    sure = torch.tensor([[0.97, 0.01, 0.01, 0.01]]).log()
    assert kept(sure, typical_p=0.5) == [0]


@BOTH
def test_ties_at_the_last_place_do_not_keep_more_than_k() -> None:
    """(transformers, FlashInfer 3774)."""
    z = torch.zeros(2, 1000)
    z[1, 500] = 1.0
    found = Sampler(top_k=3, seed=0)(z).kept
    assert [k.tolist() for k in found] == [[0, 1, 2], [0, 1, 500]]
    everything = Sampler(top_k=3, ties="keep", seed=0)(z).kept
    assert everything.counts() == [1000, 1000]


def test_repetition_penalty_lowers_negative_logits_too() -> None:
    """(transformers 2302)."""
    z = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    out = Sampler(repetition_penalty=2.0).process(z, [[0, 1, 2]])
    assert out.tolist() == [[1.0, -4.0, 0.0, 1.0]]


@pytest.mark.parametrize(
    "options",
    [
        {"repetition_penalty": 2.0},
        {"frequency_penalty": 1.0},
        {"presence_penalty": 1.0},
        {"no_repeat_ngram_size": 1},
        {"dry_multiplier": 1.0, "dry_allowed_length": 1},
        {"bad_words_ids": [[0, 3]]},
        {"sequence_bias": {(0, 3): 5.0}},
        {"min_length": 3, "eos_token_id": 2},
        {"min_new_tokens": 2, "eos_token_id": 2},
        {"forced_tokens": {4: 3}},
        {"begin_suppress_tokens": [3]},
    ],
    ids=lambda o: str(next(iter(o))),
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(options: dict[str, Any], side: str) -> None:
    z = torch.tensor([[1.0, 0.5, 0.7, 0.2, 0.9]])
    context = torch.tensor([[1, 2, 1]])
    padding = torch.zeros(1, 2, dtype=torch.int64)
    padded = torch.cat([padding, context] if side == "left" else [context, padding], 1)
    mask = torch.cat([padding, context] if side == "left" else [context, padding], 1) > 0
    sampler = Sampler(seed=4, **options)
    for prompt in (1, 3):
        plain = sampler.process(z, context, prompt_length=prompt)
        masked = sampler.process(z, padded, context_mask=mask, prompt_length=prompt)
        assert torch.equal(masked, plain)
        one = sampler(z, padded, context_mask=mask, prompt_length=prompt)
        other = sampler(z, context, prompt_length=prompt)
        assert one.token == other.token, "nor in the position"


def test_negative_temperature_is_refused() -> None:
    """(vLLM 22180)."""
    with pytest.raises(ValueError, match=r"temperature must be a number from 0; got -0\.5"):
        Sampler(temperature=-0.5)
    with pytest.raises(ValueError, match=r"temperature must be a number from 0; got nan"):
        Sampler(temperature=math.nan)


@BOTH
def test_zero_temperature_takes_the_best_token() -> None:
    """(vLLM 22180), the lowest id of equal ones; with other rows that are drawn."""
    z = torch.randn(4, 1000).round(decimals=1)
    z[0, 5] = z[0, 900] = 9.0
    greedy = Sampler(temperature=0.0, seed=1)(z)
    assert greedy.token.tolist() == ref.greedy(float64(z)).tolist()
    assert greedy.token[0] == 5
    assert (greedy.log_prob == 0).all()
    assert greedy.kept.counts() == [1] * 4
    mixed = Sampler(temperature=[0.0, 1.0, 0.0, 1.0], seed=1)(z)
    drawn = Sampler(seed=1)(z)
    assert mixed.token.tolist() == [
        int((greedy if row % 2 == 0 else drawn).token[row]) for row in range(4)
    ]
    tiny = Sampler(temperature=1e-30, seed=1)(z[1:])
    assert tiny.log_prob.isfinite().all()
    for row, token in enumerate(tiny.token.tolist()):
        assert z[1 + row, token] == z[1 + row].max()


@BOTH
def test_a_small_temperature_does_not_overflow() -> None:
    z = torch.tensor([[1000.0, 999.0, -1000.0]])
    for t in (1e-2, 1e-6, 1e-12, 1e-30):
        sampled = Sampler(temperature=t, top_p=0.9, seed=0)(z)
        assert sampled.token.item() == 0
        assert sampled.log_prob.isfinite().all()


@pytest.mark.parametrize(
    ("options", "stage"),
    [
        ({"suppress_tokens": [0, 1, 2]}, "suppress_tokens"),
        ({"logit_bias": {0: -math.inf, 1: -math.inf, 2: -math.inf}}, "logit_bias"),
        ({"bad_words_ids": [[0], [1], [2]]}, "bad_words_ids"),
        ({"allowed_token_ids": [1], "suppress_tokens": [1]}, "suppress_tokens"),
        ({"allowed_token_ids": [1], "bad_words_ids": [[1]]}, "allowed_token_ids"),
        ({"no_repeat_ngram_size": 1}, "no_repeat_ngram_size"),
        ({"suppress_tokens": [1, 2], "min_length": 9, "eos_token_id": 0}, "suppress_tokens"),
        ({"begin_suppress_tokens": [0, 1, 2]}, "begin_suppress_tokens"),
        ({"suppress_tokens": [0, 1, 2], "top_p": 0.9, "temperature": 0.5}, "suppress_tokens"),
        ({"suppress_tokens": [0, 1, 2], "do_sample": False}, "suppress_tokens"),
        ({"sequence_bias": {(0,): -math.inf, (1,): -math.inf, (2,): -math.inf}}, "sequence_bias"),
        ({"min_length": 9, "eos_token_id": [0, 1, 2]}, "min_length"),
        ({"min_new_tokens": 9, "eos_token_id": [0, 1, 2]}, "min_new_tokens"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
def test_all_tokens_masked_names_the_stage(options: dict[str, Any], stage: str, lazy: bool) -> None:
    sampler = Sampler(**options)
    logits = torch.zeros(2, 3)
    context = [[0, 1, 2], [2, 1, 0]]
    given = LMHead(4, 3)(torch.ones(2, 4)) if lazy else logits
    with pytest.raises(ValueError, match=f"^{stage} removed the last token of row 0"):
        sampler(given, context)
    with pytest.raises(ValueError, match=f"^{stage} removed the last token"):
        sampler.explain(logits, context)


@BOTH
@pytest.mark.parametrize("place", [0, 7, 999, 40_000])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}], ids=str
)
def test_a_row_with_a_nan_is_named(options: dict[str, Any], place: int) -> None:
    """(FlashInfer 2455), wherever in the row it is."""
    for value in (math.nan, math.inf):
        z = torch.randn(3, 40_001)
        z[1, place] = value
        with pytest.raises(ValueError, match=rf"logits must be finite or -inf.*{value}.*row 1"):
            Sampler(seed=0, **options)(z)
    z[1] = -math.inf
    with pytest.raises(ValueError, match="row 1 is all -inf"):
        Sampler(seed=0, **options)(z)


@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"top_k": 5}, {"temperature": 0.0}], ids=str
)
def test_a_hidden_state_with_a_nan_is_named(options: dict[str, Any]) -> None:
    hidden = torch.randn(3, 8)
    hidden[2, 1] = math.nan
    with pytest.raises(ValueError, match=r"logits must be finite or -inf.*row 2"):
        Sampler(seed=0, **options)(LMHead(8, 50)(hidden))


@pytest.mark.parametrize("wrong", [-1, 5, 2**40])
def test_ids_out_of_range_are_refused(wrong: int) -> None:
    """(FlashInfer 384)."""
    z = torch.zeros(2, 5)
    with pytest.raises(ValueError, match=rf"context ids must be in \[0, 5\); got {wrong} in row 1"):
        Sampler(repetition_penalty=1.1)(z, [[0], [1, wrong]])
    lists: tuple[tuple[str, Any], ...] = (
        ("logit_bias", {wrong: 1.0}),
        ("sequence_bias", {(0, wrong): 1.0}),
        ("bad_words_ids", [[wrong]]),
        ("allowed_token_ids", [0, wrong]),
        ("suppress_tokens", [wrong]),
        ("begin_suppress_tokens", [wrong]),
        ("forced_tokens", {1: wrong}),
    )
    for name, value in lists:
        with pytest.raises(ValueError, match=rf"{name} must hold ids in \[0, 5\); got {wrong}"):
            Sampler(**{name: value})(z, [[0], [1]])
    with pytest.raises(ValueError, match=rf"eos_token_id must hold ids in .*got {wrong}"):
        Sampler(min_length=3, eos_token_id=wrong)(z, [[0], [1]])


@BOTH
def test_the_seed_of_a_row_is_not_moved_by_neighbours() -> None:
    """(vLLM 17524, 51226; FlashInfer 4861), nor by their parameters."""
    z = torch.randn(5, 1000)
    alone = Sampler(seed=77, top_p=0.8)(z[:1], position=3)
    for rows in (2, 5):
        batch = Sampler(
            seed=[77, *range(rows - 1)],
            top_p=[0.8, *[0.1] * (rows - 1)],
            temperature=[1.0, *[0.0] * (rows - 1)],
        )(z[:rows], position=[3, *range(rows - 1)])
        assert batch.token[0] == alone.token[0]
        flipped = Sampler(
            seed=[*range(rows - 1), 77],
            top_p=[*[0.1] * (rows - 1), 0.8],
            temperature=[*[0.0] * (rows - 1), 1.0],
        )(z[:rows].flip(0), position=[*range(rows - 1), 3])
        assert flipped.token[-1] == alone.token[0]


@BOTH
def test_tokens_of_probability_zero_never_come(served_by: str) -> None:
    """(torch 48841): masked ones, and ones that are rounded to 0."""
    n = 20_000 if served_by == "native" else 500
    z = torch.full((100,), -math.inf)
    z[3], z[50], z[99] = 0.0, -200.0, 1.0
    chains: list[dict[str, Any]] = [{}, {"temperature": 5.0}, {"top_p": 0.999999}, {"min_p": 1e-30}]
    for options in chains:
        token = Sampler(seed=0, **options)(z.expand(n, 100), position=torch.arange(n)).token
        assert set(token.tolist()) == {3, 99}


def test_more_than_2_to_the_24_tokens() -> None:
    """(torch 2576), where float32 has no more integers."""
    vocab = 2**24 + 3
    z = torch.full((1, vocab), -math.inf)
    ids = np.array([5, vocab - 2, vocab - 1])
    z[0, ids] = torch.tensor([0.0, 1.0, 1.0])
    for position in range(3):
        sampled = Sampler(seed=3, top_p=0.99)(z, position=position)
        race = ref.philox_gumbel(3, position, ids) + np.array([0.0, 1.0, 1.0])
        assert sampled.token.item() == ids[race.argmax()]
        assert sampled.kept[0].tolist() == ids.tolist()
    z.zero_()
    few = Sampler(seed=3, top_k=2)(z)
    assert few.kept[0].tolist() == [0, 1]
    assert_close(few.raw_log_prob, torch.tensor([-math.log(vocab)]), atol=1e-6)
    z[0, -1000:] = 40.0  # more than any noise: one of the last
    last = np.arange(vocab - 1000, vocab)
    for position in range(3):
        token = Sampler(seed=3)(z, position=position).token
        assert token.item() == last[ref.philox_gumbel(3, position, last).argmax()]


@BOTH
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"mirostat": 1},
        {"mirostat": 2},
        {"top_p": 0.5},
        {"typical_p": 0.5},
        {"top_n_sigma": 1.0},
    ],
    ids=str,
)
def test_a_vocabulary_of_one_token(options: dict[str, Any]) -> None:
    sampled = Sampler(seed=0, **options)(torch.zeros(2, 1))
    assert sampled.token.tolist() == [0, 0]
    assert sampled.log_prob.tolist() == [0.0, 0.0]


@BOTH
@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.7}, {"temperature": 0.1}, {"top_k": 3}, {"typical_p": 0.5}, {"min_p": 0.3}],
    ids=str,
)
def test_reported_probabilities_add_to_one_at_most(options: dict[str, Any], served_by: str) -> None:
    """(llama.cpp PR 7125): over all tokens that can be drawn."""
    z = torch.randn(1, 12) * 3
    sampler = Sampler(seed=0, **options)
    n = 4000 if served_by == "native" else 300
    sampled = sampler(z.expand(n, 12), position=torch.arange(n))
    for log_p in (sampled.log_prob, sampled.raw_log_prob):
        assert (log_p <= 0).all()
        per_word = {int(t): float(p) for t, p in zip(sampled.token, log_p.exp(), strict=True)}
        assert sum(per_word.values()) <= 1 + 1e-9
    assert (sampled.log_kept_mass <= 0).all()
    whole = sampler.process(z.double()).softmax(1)
    for token, p in zip(sampled.token.tolist(), sampled.log_prob.exp().tolist(), strict=True):
        assert p == pytest.approx(float(whole[0, token]), abs=1e-6)


@BOTH
@pytest.mark.parametrize("lazy", [False, True], ids=["dense", "lazy"])
def test_options_do_not_leak_into_raw_log_probs(lazy: bool) -> None:
    """(vLLM 9453)."""
    random = torch.Generator().manual_seed(0)
    head = LMHead(8, 50)
    hidden = torch.randn(4, 8, generator=random)
    dense = (hidden.double() @ head.weight.detach().double().T).log_softmax(1)
    for options in (
        {"temperature": 0.1},
        {"top_k": 2},
        {"top_p": 0.3, "temperature": 3.0},
        {"temperature": 0.0},
        {"repetition_penalty": 5.0, "logit_bias": {3: 9.0}},
        {"forced_tokens": {2: 7}},
    ):
        given = head(hidden) if lazy else (hidden @ head.weight.T).detach()
        sampler = Sampler(seed=1, **options)
        sampled = sampler(given, [[1, 2]] * 4)
        true = dense.gather(1, sampled.token[:, None])[:, 0]
        assert_close(sampled.raw_log_prob, true, atol=1e-5, what=str(options))
