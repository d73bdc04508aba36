"""Bad input: the argument, what it must be, what it was. Chains that make no sense: the reason."""

import math
from typing import Any

import pytest
import torch

from lmhead import Sampler, sampling

Z = torch.zeros(2, 5)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"temperature": -1.0}, ValueError, "temperature must be a number from 0; got -1"),
        ({"temperature": math.inf}, ValueError, "temperature must be .* got inf"),
        ({"temperature": "hot"}, TypeError, "temperature must be a number from 0; got 'hot'"),
        ({"temperature": [1.0, -2.0]}, ValueError, "temperature must be .* got -2"),
        ({"temperature": []}, ValueError, "temperature must be .* got an empty list"),
        ({"top_p": 1.1}, ValueError, "top_p must be a number from 0 to 1; got 1.1"),
        ({"top_p": -0.1}, ValueError, "top_p must be .* got -0.1"),
        ({"top_p": True}, TypeError, "top_p must be .* got True"),
        ({"top_k": 1.5}, TypeError, "top_k must be an integer of at least -1; got 1.5"),
        ({"top_k": "5"}, TypeError, "top_k must be an integer"),
        ({"top_k": -2}, ValueError, "top_k must be an integer of at least -1; got -2"),
        ({"top_k": [5, 2.5]}, TypeError, "top_k must be .* got 2.5"),
        ({"min_p": 2.0}, ValueError, "min_p must be a number from 0 to 1; got 2"),
        ({"typical_p": 0.0}, ValueError, "typical_p must be a number above 0 up to 1; got 0"),
        ({"top_h": 0.0}, ValueError, "top_h must be a number above 0 up to 1; got 0"),
        ({"epsilon_cutoff": -1e-3}, ValueError, "epsilon_cutoff must be"),
        ({"eta_cutoff": 1.5}, ValueError, "eta_cutoff must be"),
        ({"top_n_sigma": math.nan}, ValueError, "top_n_sigma must be a finite number; got nan"),
        ({"xtc_probability": 1.5}, ValueError, "xtc_probability must be"),
        ({"xtc_threshold": -0.5}, ValueError, "xtc_threshold must be"),
        ({"mirostat": 3}, ValueError, "mirostat must be 0, 1 or 2; got 3"),
        ({"mirostat_tau": -1.0}, ValueError, "mirostat_tau must be"),
        ({"repetition_penalty": 0.0}, ValueError, "repetition_penalty must be a number above 0"),
        ({"frequency_penalty": math.inf}, ValueError, "frequency_penalty must be a finite number"),
        ({"dry_base": 0.5}, ValueError, "dry_base must be a number from 1; got 0.5"),
        ({"dry_allowed_length": 0}, ValueError, "dry_allowed_length must be"),
        ({"no_repeat_ngram_size": 1.0}, TypeError, "no_repeat_ngram_size must be an integer"),
        ({"min_tokens_to_keep": 0}, ValueError, "min_tokens_to_keep must be .* at least 1; got 0"),
        ({"allowed_token_ids": []}, ValueError, "allowed_token_ids must allow at least one id"),
        ({"bad_words_ids": []}, ValueError, "bad_words_ids must not be empty"),
        ({"bad_words_ids": [[]]}, ValueError, "bad_words_ids must hold sequences of at least one"),
        ({"bad_words_ids": [3]}, ValueError, "bad_words_ids must hold sequences"),
        ({"sequence_bias": {}}, ValueError, "sequence_bias must not be empty"),
        ({"min_length": 5}, ValueError, "min_length needs eos_token_id"),
        ({"min_new_tokens": 5}, ValueError, "min_new_tokens needs eos_token_id"),
        ({"forced_eos_token_id": 5}, ValueError, "forced_eos_token_id needs max_length"),
        ({"order": "gpt"}, ValueError, "order must be one of hf, vllm, llama.cpp; got 'gpt'"),
        ({"ties": "all"}, ValueError, "ties must be one of lowest, keep; got 'all'"),
        ({"seed": 1.5}, TypeError, "seed must be an integer, or one per row; got 1.5"),
        ({"seed": [1, "2"]}, TypeError, "seed must be an integer"),
        ({"top_o": 3}, TypeError, "Sampler has no option 'top_o'; did you mean"),
        ({"colour": "red"}, TypeError, "Sampler has no option 'colour'; see"),
        ({"min_tokens": 1, "min_new_tokens": 2}, TypeError, "the same option; give one of them"),
    ],
    ids=lambda x: str(next(iter(x))) if isinstance(x, dict) else "",
)
def test_an_option_that_cannot_be(
    options: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        Sampler(**options)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (([1.0, 2.0],), TypeError, "logits must be a torch.Tensor or LazyLogits; got list"),
        ((torch.tensor(1.0),), ValueError, r"logits must be floating, of shape \(\.\.\., V\)"),
        ((torch.zeros(2, 5).long(),), ValueError, "logits must be floating.*got torch.int64"),
        ((torch.zeros(2, 0),), ValueError, "logits must be .* V > 0"),
        ((Z, [[1]]), ValueError, "context must have one list per row of logits, 2; got 1"),
        ((Z, torch.ones(3, 2).long()), ValueError, r"context must have shape \(2, L\)"),
        ((Z, torch.ones(2, 2)), TypeError, "context must hold integer ids; got torch.float32"),
        ((Z, [[1], [5]]), ValueError, r"context ids must be in \[0, 5\); got 5 in row 1"),
        ((Z, [[1], [-1]]), ValueError, r"context ids must be in \[0, 5\); got -1 in row 1"),
        ((Z, None, [1, 2, 3]), ValueError, "position must be a number or one per row, 2; got 3"),
        ((Z, None, 1.5), TypeError, "position must be an integer; got float"),
        ((Z, None, [1, 2.5]), TypeError, "position must be an integer; got float"),
        ((Z, None, torch.ones(2)), TypeError, "position must be integers .*got torch.float32"),
        ((Z, None, -1), ValueError, "position must be in .*got -1"),
        ((Z, None, 2**64), ValueError, "position must be in .*got 18446744073709551616"),
        ((Z, None, "a"), TypeError, "position must be an integer, or one per row; got str"),
    ],
    ids=range(16),
)
def test_a_call_that_cannot_be(call: tuple[Any, ...], error: type[Exception], message: str) -> None:
    for method in (Sampler(), Sampler().explain):
        with pytest.raises(error, match=message):
            method(*call)


def test_more_calls_that_cannot_be() -> None:
    context = torch.ones(2, 3).long()
    with pytest.raises(ValueError, match=r"context_mask must have the shape of context, \(2, 3\)"):
        Sampler()(Z, context, context_mask=torch.ones(2, 2).bool())
    with pytest.raises(TypeError, match="context_mask needs a context tensor"):
        Sampler()(Z, [[1], [2]], context_mask=torch.ones(2, 1).bool())
    for wrong in (4, -1):
        with pytest.raises(ValueError, match=f"prompt_length must be from 0 to the 3.*got {wrong}"):
            Sampler()(Z, context, prompt_length=wrong)
    with pytest.raises(ValueError, match="prompt_length must be a number or one per row, 2"):
        Sampler()(Z, context, prompt_length=[1, 2, 3])
    with pytest.raises(ValueError, match="seed must be a number or one per row, 2; got 3"):
        Sampler(seed=[1, 2, 3])(Z)
    with pytest.raises(ValueError, match="top_k must be a number or one per row, 2; got 3"):
        Sampler(top_k=[1, 2, 3])(Z)
    with pytest.raises(ValueError, match="temperature must be a number or one per row, 2; got 3"):
        Sampler(temperature=[1.0, 2.0, 3.0])(Z)
    with pytest.raises(ValueError, match="guidance_scale needs unconditional"):
        Sampler(guidance_scale=2.0)(Z)
    with pytest.raises(ValueError, match=r"unconditional must have the shape of logits, \(2, 5\)"):
        Sampler(guidance_scale=2.0)(Z, unconditional=torch.zeros(2, 4))
    with pytest.raises(ValueError, match="state must have one entry per row, 2"):
        Sampler(mirostat=2)(Z, state=torch.zeros(3))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"mirostat": 2, "top_k": 5}, "mirostat picks its own cutoff; remove top_k"),
        ({"mirostat": 1, "top_p": 0.9, "order": "llama.cpp"}, "mirostat picks its own cutoff"),
        ({"mirostat": 2, "temperature": 0.0}, "mirostat has no effect with temperature 0"),
        ({"mirostat": 2, "do_sample": False}, "mirostat has no effect with do_sample=False"),
        ({"xtc_probability": 0.5, "temperature": 0.0}, "xtc_probability has no effect with"),
        ({"dynatemp_range": 0.5, "do_sample": False}, "dynatemp_range has no effect with"),
    ],
    ids=str,
)
def test_a_chain_that_makes_no_sense(options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        Sampler(**options)


def test_stages_in_an_order_that_makes_no_sense() -> None:
    top_k, allowed = sampling.TopK(5), sampling.AllowedIds([1])
    with pytest.raises(ValueError, match=r"allowed_token_ids comes after top_k.*put it first"):
        Sampler(stages=[top_k, allowed])
    with pytest.raises(ValueError, match="forced_tokens comes after top_k"):
        Sampler(stages=[top_k, sampling.ForcedTokens({0: [1]})])
    with pytest.raises(ValueError, match="mirostat must be the last stage; move top_k before it"):
        Sampler(stages=[sampling.Mirostat2(), top_k])
    with pytest.raises(ValueError, match="temperature occurs twice"):
        Sampler(stages=[sampling.Temperature(0.5), sampling.Temperature(2.0)])
    with pytest.raises(TypeError, match="stages must hold Stage objects; got str at index 1"):
        Sampler(stages=[top_k, "top_p"])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="give stages or options, not both"):
        Sampler(stages=[top_k], top_p=0.9)


def test_stages_in_ones_own_order() -> None:
    z = torch.tensor([[3.0, 2.0, 1.0]])
    first = Sampler(stages=[sampling.Temperature(0.5), sampling.TopP(0.8)], seed=0)(z)
    last = Sampler(stages=[sampling.TopP(0.8), sampling.Temperature(0.5)], seed=0)(z)
    assert [k.tolist() for k in (first.kept[0], last.kept[0])] == [[0], [0, 1]]
    Sampler(stages=[allowed := sampling.AllowedIds([1, 2]), sampling.TopK(1)])
    assert Sampler(stages=[allowed], do_sample=False)(z).token.tolist() == [1]
    assert Sampler(stages=[])(z).kept[0].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ({"min_tokens": 3, "stop_token_ids": [4]}, {"min_new_tokens": 3, "eos_token_id": [4]}),
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        (
            {"repeat_last_n": 2, "repeat_penalty": 2.0},
            {"penalty_last_n": 2, "repetition_penalty": 2.0},
        ),
        ({"typ_p": 0.5}, {"typical_p": 0.5}),
        ({"min_keep": 3, "top_p": 0.1}, {"min_tokens_to_keep": 3, "top_p": 0.1}),
        ({"temp": 0.5}, {"temperature": 0.5}),
    ],
    ids=lambda o: str(next(iter(o))),
)
def test_both_spellings(theirs: dict[str, Any], ours: dict[str, Any]) -> None:
    a, b = Sampler(**theirs), Sampler(**ours)
    assert a.options == b.options
    assert repr(a) == repr(b)
    z = torch.randn(1, 5, generator=torch.Generator().manual_seed(0))
    context = [[1, 2, 1, 3]]
    assert torch.equal(
        a.process(z, context, prompt_length=2), b.process(z, context, prompt_length=2)
    )


@pytest.mark.parametrize(
    "off",
    [
        {"top_k": 0},
        {"top_k": -1},
        {"top_k": None},
        {"top_p": 1.0},
        {"top_p": None},
        {"min_p": None},
        {"typical_p": None},
        {"repetition_penalty": None},
        {"guidance_scale": None},
        {"no_repeat_ngram_size": None},
        {"suppress_tokens": []},
        {"temperature": 1.0},
    ],
    ids=str,
)
def test_options_that_are_off_make_no_stage(off: dict[str, Any]) -> None:
    assert Sampler(**off).stages == []


def test_is_greedy() -> None:
    assert Sampler(temperature=0.0).is_greedy
    assert Sampler(do_sample=False, temperature=2.0).is_greedy
    assert Sampler(temperature=[0.0, 0.0]).is_greedy
    assert not Sampler(temperature=[0.0, 1.0]).is_greedy
    assert not Sampler().is_greedy


def test_an_empty_batch() -> None:
    for options in ({}, {"top_p": 0.9}, {"top_k": 3}, {"temperature": 0.0}, {"mirostat": 2}):
        sampled = Sampler(**options)(torch.zeros(0, 5))
        assert sampled.token.shape == (0,)
        assert sampled.log_prob.shape == (0,)
        assert len(sampled.kept) == 0


def test_nothing_given_is_changed() -> None:
    z, context = torch.randn(2, 5), torch.tensor([[1, 2], [3, 4]])
    before = z.clone()
    sampler = Sampler(repetition_penalty=2.0, suppress_tokens=[0], top_p=0.5, temperature=0.5)
    sampler(z, context)
    sampler.process(z, context)
    sampler.explain(z, context)
    assert torch.equal(z, before)
