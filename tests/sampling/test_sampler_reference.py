"""Every stage through `Sampler` against its plain definition in `lmhead.reference`."""

import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from compare import Array, assert_close, float64
from torch import Tensor

from lmhead import Sampler
from lmhead import reference as ref
from lmhead.sampling.distribution import FOR_COINS
from sampling.textbook import Textbook

SEED = 11
CONTEXTS = [
    [8, 7, 8, 7, 8],
    [1, 2, 3, 4, 1, 2, 3, 5, 1, 2, 3],
    [9, 9, 9, 9],
    [],
    [5, 1, 2, 6, 5, 1, 2, 7, 0, 5, 1, 2],
]
PROMPTS = [2, 5, 4, 0, 1]


def logits_of(dtype: torch.dtype, vocab: int = 300) -> Tensor:
    """Five rows: ordinary, flat, peaked, with masked tokens, with equal tokens."""
    z = torch.randn(5, vocab, generator=torch.Generator().manual_seed(vocab), dtype=torch.float64)
    z[0] *= 3
    z[1] *= 0.01
    z[2] *= 12
    z[3, vocab // 5 :] = -math.inf
    z[4] = (z[4] * 2).round()
    return z.to(dtype)


def coins(positions: list[int]) -> Array:
    return ref.philox_uniform(SEED, positions, 0, stream=FOR_COINS)


def check(
    logits: Tensor,
    options: dict[str, Any],
    order: str = "hf",
    *,
    unconditional: Tensor | None = None,
) -> None:
    sampler = Sampler(order=order, seed=SEED, **options)
    more: dict[str, Any] = {"prompt_length": PROMPTS, "unconditional": unconditional}
    got = sampler.process(logits, CONTEXTS, **more)
    want = Textbook(order, options)(
        float64(logits),
        CONTEXTS,
        PROMPTS,
        unconditional=None if unconditional is None else float64(unconditional),
        coins=coins([len(c) for c in CONTEXTS]),
    )
    same_words(got, want, options)
    exact = logits.dtype == torch.float64
    # In float32 a logit of 40 is a step of 4e-6 wide; divided by a temperature, more.
    p = ref.softmax(float64(got))
    assert_close(p, ref.softmax(want), atol=1e-12 if exact else 1e-5, what=f"{order} {options}")
    sampled = sampler(logits, CONTEXTS, **more)
    for row, kept in enumerate(sampled.kept):
        np.testing.assert_array_equal(kept.numpy(), np.flatnonzero(np.isfinite(want[row])))
    log_p = ref.log_prob(want, sampled.token.numpy())
    assert_close(sampled.log_prob, log_p, atol=1e-10 if exact else 2e-5, what="log_prob")
    noise = ref.philox_gumbel(SEED, [[len(c)] for c in CONTEXTS], np.arange(logits.shape[1]))
    best = np.sort(ref.log_softmax(want) + noise, axis=1)
    clear = best[:, -1] - best[:, -2] > 1e-3  # a race that rounding cannot turn
    token = (ref.log_softmax(want) + noise).argmax(1)
    np.testing.assert_array_equal(sampled.token.numpy()[clear], token[clear])


def same_words(got: Tensor, want: Array, options: Any) -> None:
    differ = np.isfinite(float64(got)) != np.isfinite(want)
    assert not differ.any(), f"{options}: other words kept in rows {np.flatnonzero(differ.any(1))}"


ALONE: dict[str, list[dict[str, Any]]] = {
    "temperature": [{"temperature": t} for t in (0.1, 0.9, 5.0)],
    "dynatemp_range": [
        {"temperature": t, "dynatemp_range": s, "dynatemp_exponent": e}
        for t, s, e in ((1.0, 0.5, 1.0), (0.7, 0.3, 2.0), (0.5, 0.45, 0.5))
    ],
    "top_k": [{"top_k": k} for k in (1, 5, 60, 61, 299, 300, 10**6)],
    "top_p": [{"top_p": p} for p in (0.0, 0.1, 0.5, 0.95, 1.0)],
    "min_p": [{"min_p": p} for p in (0.0, 0.01, 0.5, 1.0)],
    "top_h": [{"top_h": h} for h in (0.05, 0.5, 0.97, 1.0)],
    "typical_p": [{"typical_p": p} for p in (0.01, 0.5, 0.95, 1.0)],
    "epsilon_cutoff": [{"epsilon_cutoff": e} for e in (1e-4, 0.01, 0.5)],
    "eta_cutoff": [{"eta_cutoff": e} for e in (1e-4, 0.01, 0.5)],
    "top_n_sigma": [{"top_n_sigma": n} for n in (0.1, 1.0, 2.5, 100.0)],
    "xtc_probability": [
        {"xtc_probability": p, "xtc_threshold": t}
        for p in (0.3, 0.6, 1.0)
        for t in (0.0, 0.001, 0.02, 0.1, 0.5, 0.6)
    ],
    "mirostat": [
        {"mirostat": v, "mirostat_tau": t} for v in (1, 2) for t in (0.01, 0.5, 1.5, 3.0, 5.0)
    ],
    "repetition_penalty": [
        {"repetition_penalty": r, "penalty_last_n": n} for r in (0.5, 1.4) for n in (-1, 0, 3)
    ],
    "frequency_penalty": [
        {"frequency_penalty": f, "penalty_last_n": n} for f in (-0.5, 1.2) for n in (-1, 0, 3)
    ],
    "presence_penalty": [{"presence_penalty": f} for f in (-0.5, 1.2)],
    "dry_multiplier": [
        {"dry_multiplier": 0.8, **more}
        for more in (
            {},
            {"dry_base": 1.1, "dry_allowed_length": 1},
            {"dry_base": 1.0, "dry_allowed_length": 3},
            {"dry_penalty_last_n": 8},
            {"dry_penalty_last_n": 0},
            {"dry_sequence_breakers": [1]},
            {"dry_sequence_breakers": [5, 9], "dry_allowed_length": 1},
            {"dry_sequence_breakers": [[1, 2]], "dry_allowed_length": 1},
            {"dry_sequence_breakers": [[7, 8], [1, 2, 3], 4], "dry_allowed_length": 1},
            {"dry_sequence_breakers": [[2, 3], [1, 2, 3, 4, 1, 2]], "dry_allowed_length": 1},
        )
    ],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (1, 2, 3, 4)],
    "logit_bias": [{"logit_bias": {0: 5.0, 17: -3.0, 299: -math.inf}}],
    "sequence_bias": [
        {"sequence_bias": {(3,): 2.0, (8, 3): 1.5, (2, 3, 5): -9.0, (9, 9, 9, 9, 9): 1.0}}
    ],
    "bad_words_ids": [{"bad_words_ids": [[4], [8, 3], [3, 5], [6]], "eos_token_id": [6]}],
    "allowed_token_ids": [{"allowed_token_ids": [0, 7, 59]}, {"allowed_token_ids": [0]}],
    "suppress_tokens": [{"suppress_tokens": [1, 7, 299]}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": [1, 7, 299]}],
    "min_length": [{"min_length": n, "eos_token_id": [1, 9]} for n in (4, 5, 100)],
    "min_new_tokens": [{"min_new_tokens": n, "eos_token_id": [1, 9]} for n in (1, 3, 6)],
    "forced_tokens": [{"forced_tokens": {4: 7, 5: [1, 250], 0: 100}}],
}
EACH = [(name, options) for name, several in ALONE.items() for options in several]
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


@pytest.mark.both_cores
@pytest.mark.parametrize("options", [o for _, o in EACH], ids=[n for n, _ in EACH])
@DTYPES
def test_a_stage(options: dict[str, Any], dtype: torch.dtype) -> None:
    check(logits_of(dtype), options)


@pytest.mark.both_cores
@pytest.mark.parametrize("keep", [2, 7, 400])
@pytest.mark.parametrize(
    "name",
    [
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon_cutoff",
        "eta_cutoff",
        "xtc_probability",
    ],
)
def test_min_tokens_to_keep(name: str, keep: int) -> None:
    for options in ALONE[name]:
        check(logits_of(torch.float32), {**options, "min_tokens_to_keep": keep})


@DTYPES
@pytest.mark.parametrize("scale", [-0.5, 0.0, 1.5, 4.0])
def test_guidance(scale: float, dtype: torch.dtype) -> None:
    logits = logits_of(dtype)
    other = torch.randn(logits.shape, generator=torch.Generator().manual_seed(5), dtype=dtype)
    check(logits, {"guidance_scale": scale}, unconditional=other)


def test_guidance_where_a_token_is_masked_on_one_side() -> None:
    """c forbids: forbidden. u alone forbids: infinitely better, so the token is removed."""
    c, u = torch.tensor([[1.0, 2.0, -math.inf, 0.0]]), torch.tensor([[0.0, 1.0, 1.0, -math.inf]])
    got = Sampler(guidance_scale=2.0).process(c, unconditional=u)
    assert (got > -math.inf).tolist() == [[True, True, False, False]]
    want = ref.guidance(float64(c)[:, :3], ref.log_softmax(float64(u))[:, :3], 2.0)
    assert_close(ref.softmax(float64(got)[:, :3]), ref.softmax(want), atol=1e-6)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize(("tau", "eta"), [(3.0, 0.1), (1.0, 0.7), (6.0, 0.0)])
def test_mirostat_learns(version: int, tau: float, eta: float) -> None:
    """Ten tokens in a row: the tokens kept and the state after each are the textbook's."""
    options: dict[str, Any] = {"mirostat": version, "mirostat_tau": tau, "mirostat_eta": eta}
    sampler = Sampler(seed=SEED, **options)
    logits = logits_of(torch.float64)
    mu = np.full(5, 2 * tau)
    state = None
    for position in range(10):
        sampled = sampler(logits, position=position, state=state)
        cut = Textbook("hf", options)(float64(logits), mu=mu)
        for row, kept in enumerate(sampled.kept):
            np.testing.assert_array_equal(kept.numpy(), np.flatnonzero(np.isfinite(cut[row])))
        mu = ref.mirostat_update(mu, cut, sampled.token.numpy(), tau=tau, eta=eta)
        state = sampled.state
        assert_close(state, mu, atol=1e-9, what=f"state after {position + 1} tokens")
        logits = logits.roll(1, dims=0)


def test_mirostat_counts_the_whole_vocabulary() -> None:
    """In llama.cpp the V of the formula is the vocabulary, tokens that are masked included."""
    logits = logits_of(torch.float64)
    logits[:, 150:] = -math.inf
    check(logits, {"mirostat": 1, "mirostat_tau": 1.2})


def test_mirostat_after_a_temperature() -> None:
    for order in ("hf", "llama.cpp"):
        for version in (1, 2):
            options = {"mirostat": version, "mirostat_tau": 1.7, "temperature": 0.6}
            check(logits_of(torch.float64), options, order)


def test_xtc_coins_are_those_of_the_seed_and_position() -> None:
    logits = torch.log(torch.tensor([0.5, 0.3, 0.1, 0.1])).double().expand(400, 4)
    sampler = Sampler(xtc_probability=0.37, xtc_threshold=0.2, seed=SEED)
    kept = sampler(logits, position=torch.arange(400)).kept
    tossed = coins(list(range(400))) < 0.37
    assert [len(k) == 3 for k in kept] == tossed.tolist()
    assert 100 < tossed.sum() < 200


class Draw:
    """Random options of a program that are all at work."""

    MAKERS: dict[str, Any] = {  # noqa: RUF012
        "logit_bias": lambda r: {r.randrange(300): r.uniform(-5, 5), 3: 1.0},
        "repetition_penalty": lambda r: r.uniform(0.5, 2),
        "frequency_penalty": lambda r: r.uniform(-1, 1),
        "presence_penalty": lambda r: r.uniform(-1, 1),
        "penalty_last_n": lambda r: r.choice([-1, 0, 2, 5]),
        "dry_multiplier": lambda r: r.uniform(0.1, 2),
        "dry_allowed_length": lambda r: r.choice([1, 2, 3]),
        "dry_sequence_breakers": lambda r: [r.randrange(10)],
        "no_repeat_ngram_size": lambda r: r.choice([2, 3]),
        "bad_words_ids": lambda r: [[r.randrange(1, 300)], [8, 3]],
        "allowed_token_ids": lambda r: [0, *r.sample(range(1, 60), 30)],
        "min_new_tokens": lambda r: r.choice([1, 4]),
        "suppress_tokens": lambda r: r.sample(range(1, 300), 3),
        "temperature": lambda r: r.uniform(0.4, 2),
        "dynatemp_range": lambda r: r.uniform(0.01, 0.3),
        "top_n_sigma": lambda r: r.uniform(0.5, 3),
        "top_h": lambda r: r.uniform(0.3, 0.99),
        "top_k": lambda r: r.randint(3, 100),
        "top_p": lambda r: r.uniform(0.3, 0.99),
        "min_p": lambda r: r.uniform(0.001, 0.2),
        "typical_p": lambda r: r.uniform(0.3, 0.99),
        "epsilon_cutoff": lambda r: r.uniform(1e-4, 0.05),
        "eta_cutoff": lambda r: r.uniform(1e-4, 0.05),
        "xtc_probability": lambda r: r.uniform(0.3, 1),
        "min_tokens_to_keep": lambda r: r.choice([2, 5]),
    }
    NOT_IN = {  # noqa: RUF012
        "vllm": "dry no_repeat dynatemp top_n_sigma top_h typical epsilon eta xtc suppress",
        "llama.cpp": "no_repeat bad_words allowed min_new suppress top_h epsilon eta",
        "hf": "",
    }

    def options(self, seed: int, order: str) -> dict[str, Any]:
        r = random.Random(seed)
        absent = tuple(self.NOT_IN[order].split())
        made = {k: m(r) for k, m in self.MAKERS.items() if r.random() < 0.4}
        made = {k: v for k, v in made.items() if not (absent and k.startswith(absent))}
        if "min_new_tokens" in made:
            made["eos_token_id"] = [r.randrange(1, 300)]
        if "dynatemp_range" in made:
            made.setdefault("temperature", 0.8)
        return made


@pytest.mark.parametrize("order", ["hf", "vllm", "llama.cpp"])
def test_an_order_is_a_composition_of_definitions(order: str) -> None:
    for seed in range(150):
        options = Draw().options(seed, order)
        logits = logits_of(torch.float64)
        logits[4] += torch.linspace(0, 1e-3, 300, dtype=torch.float64)  # no ties to be broken
        try:
            check(logits, options, order)
        except AssertionError as error:
            raise AssertionError(f"draw {seed}, {options}: {error}") from error


def test_orders_differ_where_their_programs_do() -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0]])
    kept = {
        order: Sampler(temperature=0.5, top_p=0.8, order=order)(logits).kept[0].tolist()
        for order in ("hf", "vllm", "llama.cpp")
    }
    assert kept == {"hf": [0], "vllm": [0], "llama.cpp": [0, 1]}


@pytest.mark.parametrize(
    ("order", "counted"), [("hf", [3, 4, 4]), ("vllm", [3, 4, 4]), ("llama.cpp", [1, 1, 3, 4, 4])]
)
def test_which_ids_frequency_and_presence_count(order: str, counted: list[int]) -> None:
    logits = torch.zeros(1, 6, dtype=torch.float64)
    context, prompt = [[1, 1, 3, 4, 4]], 2
    sampler = Sampler(frequency_penalty=0.5, presence_penalty=0.1, order=order)
    want = ref.presence_penalty(ref.frequency_penalty(np.zeros(6), counted, 0.5), counted, 0.1)
    assert_close(sampler.process(logits, context, prompt_length=prompt)[0], want, atol=1e-12)
    repeated = Sampler(repetition_penalty=2.0, order=order)
    ones = repeated.process(logits + 1, context, prompt_length=prompt)
    assert ones.tolist() == [[1.0, 0.5, 1.0, 0.5, 0.5, 1.0]], "repetition counts prompt and output"


def test_llama_cpp_looks_back_at_64_ids() -> None:
    logits = torch.ones(1, 3)
    context = [[0, *[1] * 64]]
    penalised = Sampler(repetition_penalty=2.0, order="llama.cpp").process(logits, context)
    assert penalised.tolist() == [[1.0, 0.5, 1.0]]
    everything = Sampler(repetition_penalty=2.0, order="llama.cpp", penalty_last_n=-1)
    assert everything.process(logits, context).tolist() == [[0.5, 0.5, 1.0]]
