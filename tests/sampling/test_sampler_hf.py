"""Every option against Hugging Face's own processors: alone, and in thousands of combinations.

Hugging Face computes in float64 here. Ours is given the same numbers in float64 or in float32: it
must keep the same tokens, and give the same probabilities to 1e-6, apart from the rounding of large
logits to float32.
"""

import math
import random
from typing import Any

import pytest
import torch
from compare import assert_close
from torch import Tensor

from lmhead import Sampler
from sampling.huggingface import processed

PROMPT = 3
COMBINATIONS = 2400
PARTS = 8


def check(
    logits: Tensor,
    options: dict[str, Any],
    context: Tensor,
    unconditional: Tensor | None = None,
    *,
    prompt: int = PROMPT,
    ties: str = "lowest",
) -> bool:
    """Same tokens, same probabilities; or no token left in both. Whether some were left."""
    double = None if unconditional is None else unconditional.double()
    want = processed(logits.double(), options, context, prompt, double)
    sampler = Sampler(seed=1, ties=ties, **options)
    more: dict[str, Any] = {"prompt_length": prompt, "unconditional": unconditional}
    if not bool(want.amax(1).isfinite().all()):
        with pytest.raises(ValueError, match="removed the last token"):
            sampler(logits, context, **more)
        return False
    got = sampler.process(logits, context, **more)
    assert torch.equal(got > -math.inf, want > -math.inf), f"kept words differ: {options}"
    # A logit in float32 is off by up to 6e-8 of its size, and so is the log of a probability.
    size = float(want.masked_fill(want == -math.inf, 0.0).abs().max())
    rounding = 3e-7 * size if logits.dtype == torch.float32 else 0.0
    p, truth = got.double().softmax(1), want.softmax(1)
    assert_close(p, truth, atol=1e-6, rtol=rounding, what=str(options))
    sampled = sampler(logits, context, **more)
    for row, kept in enumerate(sampled.kept):
        assert torch.equal(kept, (want[row] > -math.inf).nonzero()[:, 0])
    chosen = want.log_softmax(1).gather(1, sampled.token[:, None])[:, 0]
    assert_close(sampled.log_prob, chosen, atol=1e-6 + rounding, what="log_prob")
    raw = logits.double().log_softmax(1)
    assert_close(sampled.raw_log_prob, raw.gather(1, sampled.token[:, None])[:, 0], atol=1e-9)
    mass = raw.masked_fill(want == -math.inf, -math.inf).logsumexp(1).clamp(max=0)
    assert_close(sampled.log_kept_mass, mass, atol=1e-9)
    return True


ALONE: dict[str, list[dict[str, Any]]] = {
    "nothing": [{}],
    "temperature": [{"temperature": t} for t in (0.01, 0.5, 1.0, 3.0)],
    "top_k": [{"top_k": k} for k in (1, 2, 50, 999, 1000, 5000)],
    "top_p": [{"top_p": p} for p in (0.0, 1e-6, 0.3, 0.9, 0.999, 1.0)],
    "min_p": [{"min_p": p} for p in (0.0, 1e-9, 0.1, 0.9, 1.0)],
    "top_h": [{"top_h": h} for h in (0.01, 0.4, 0.9)],
    "typical_p": [{"typical_p": p} for p in (1e-6, 0.2, 0.9, 0.999)],
    "epsilon_cutoff": [{"epsilon_cutoff": e} for e in (1e-9, 1e-3, 0.1, 0.9)],
    "eta_cutoff": [{"eta_cutoff": e} for e in (1e-9, 1e-3, 0.1, 0.9)],
    "repetition_penalty": [{"repetition_penalty": r} for r in (0.5, 1.3, 10.0)],
    "no_repeat_ngram_size": [{"no_repeat_ngram_size": n} for n in (1, 2, 3, 9)],
    "sequence_bias": [{"sequence_bias": {(5,): -3.0, (7, 3): 4.0, (8, 8, 7, 2): 5.0, (1, 2): 9.0}}],
    "bad_words_ids": [{"bad_words_ids": [[5], [7, 3], [8, 7, 2], [999]], "eos_token_id": [999]}],
    "allowed_token_ids": [{"allowed_token_ids": [0, 3, 999]}],
    "suppress_tokens": [{"suppress_tokens": [0, 3, 999]}],
    "begin_suppress_tokens": [{"begin_suppress_tokens": [0, 3, 999]}],
    "min_length": [{"min_length": n, "eos_token_id": [4, 999]} for n in (5, 6, 7)],
    "min_new_tokens": [{"min_new_tokens": n, "eos_token_id": [4, 999]} for n in (2, 3, 4)],
    "forced_bos_token_id": [{"forced_bos_token_id": 3}],
    "forced_eos_token_id": [{"forced_eos_token_id": [3, 4], "max_length": n} for n in (6, 7)],
    "guidance_scale": [{"guidance_scale": g} for g in (0.0, 1.5, 3.0)],
}
EACH = [(name, options) for name, several in ALONE.items() for options in several]


@pytest.mark.both_cores
@pytest.mark.parametrize("options", [o for _, o in EACH], ids=[n for n, _ in EACH])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_an_option_alone(options: dict[str, Any], dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(4, 1000, generator=generator, dtype=dtype) * 3
    logits[1] *= 0.01
    logits[2] *= 5
    logits[3, 100:] = -math.inf
    context = torch.tensor([[8, 8, 7, 8, 8, 7], [7, 7, 7, 7, 7, 7], [0, 1, 2, 3, 4, 5], [9] * 6])
    unconditional = None
    if "guidance_scale" in options:
        unconditional = torch.randn(4, 1000, generator=generator, dtype=dtype)
        unconditional[3, 100:] = -math.inf
        logits[3, 100:] = -50.0
        unconditional[3, 100:] = -50.0
    for keep in (1, 5):
        check(logits, {**options, "min_tokens_to_keep": keep}, context, unconditional)
    for prompt in (0, 6):
        warned = {"repetition_penalty", "no_repeat_ngram_size"}  # HF warns without a prompt
        if prompt or not warned & set(options):
            check(logits, options, context, unconditional, prompt=prompt)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_forced_first_token(length: int) -> None:
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    context = torch.full((2, length), 7)
    check(logits, {"forced_bos_token_id": 5}, context, prompt=1)


@pytest.mark.parametrize("length", [1, 2, 3])
def test_tokens_suppressed_at_the_beginning_come_after_a_forced_first_token(length: int) -> None:
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    context = torch.full((2, length), 7)
    options = {"forced_bos_token_id": 5, "begin_suppress_tokens": [5, 6]}
    check(logits, options, context, prompt=1)


@pytest.mark.parametrize("length", [1, 2])
def test_bias_of_a_sequence_longer_than_the_context(length: int) -> None:
    logits = torch.randn(2, 20, generator=torch.Generator().manual_seed(0))
    context = torch.full((2, length), 7)
    check(logits, {"sequence_bias": {(7, 7, 3): 5.0}}, context, prompt=1)
    check(logits, {"bad_words_ids": [[7, 7, 3]]}, context, prompt=1)


@pytest.mark.both_cores
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_top_k_with_ties_keeps_them_all_if_asked(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randint(-3, 4, (50, 40), generator=generator).to(dtype)
    context = torch.zeros(50, 1, dtype=torch.int64)
    for k in (1, 2, 5, 17, 39, 40, 41):
        assert check(logits, {"top_k": k}, context, ties="keep", prompt=1)
        assert check(logits, {"top_k": k, "temperature": 0.7}, context, ties="keep", prompt=1)
    counts = Sampler(top_k=5)(logits).kept.counts()
    assert counts == [5] * 50, "the lowest ids stay, unless asked otherwise"
    assert max(Sampler(top_k=5, ties="keep")(logits).kept.counts()) > 5


class Draw:
    """One random case: logits, context and options."""

    def __init__(self, seed: int) -> None:
        self.r = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.vocab = self.r.choice([1, 2, 5, 20, 100, 101, 1000, 3000])
        self.rows = self.r.choice([1, 1, 2, 3, 7])
        self.prompt = self.r.choice([1, 2, 3])
        self.dtype = self.r.choice([torch.float32, torch.float64])

    def chance(self, p: float) -> bool:
        return self.r.random() < p

    def word(self) -> int:
        return self.r.randrange(self.vocab)

    def words(self, most: int) -> list[int]:
        return sorted({self.word() for _ in range(self.r.randint(1, most))})

    def logits(self) -> Tensor:
        z = torch.randn(self.rows, self.vocab, generator=self.generator, dtype=torch.float64)
        z = z * self.r.choice([0.01, 0.5, 1.0, 3.0, 8.0]) + self.r.choice([0.0, 0.0, -20.0, 20.0])
        if self.chance(0.25):
            masked = torch.rand(z.shape, generator=self.generator) < self.r.choice([0.1, 0.6])
            masked[:, self.word()] = False
            z[masked] = -math.inf
        return z.to(self.dtype)

    def context(self) -> Tensor:
        length = self.prompt + self.r.choice([0, 1, 3, 12])
        few = min(self.vocab, self.r.choice([2, 4, 3000]))
        return torch.randint(few, (self.rows, length), generator=self.generator)

    def options(self, context: Tensor) -> dict[str, Any]:
        r, o, last = self.r, {}, int(context[0, -1])
        makers: dict[str, tuple[float, Any]] = {
            "guidance_scale": (0.1, lambda: r.uniform(-1, 4)),
            "sequence_bias": (
                0.15,
                lambda: {
                    (self.word(),): r.uniform(-3, 3),
                    (last, self.word()): r.choice([2.5, -math.inf]),
                },
            ),
            "repetition_penalty": (0.25, lambda: r.uniform(0.3, 3)),
            "no_repeat_ngram_size": (0.15, lambda: r.choice([1, 2, 3, 4])),
            "bad_words_ids": (0.15, lambda: [[self.word()], [last, self.word()], [last, last, 0]]),
            "min_length": (0.15, lambda: r.choice([1, 4, 9])),
            "min_new_tokens": (0.15, lambda: r.choice([1, 2, 9])),
            "allowed_token_ids": (0.1, lambda: self.words(30)),
            "forced_bos_token_id": (0.05, self.word),
            "forced_eos_token_id": (0.1, lambda: r.choice([self.word(), self.words(3)])),
            "suppress_tokens": (0.15, lambda: self.words(5)),
            "begin_suppress_tokens": (0.15, lambda: self.words(5)),
            "temperature": (0.5, lambda: r.choice([r.uniform(0.2, 2), 0.05, 20.0])),
            "top_h": (0.1, lambda: r.uniform(0.01, 0.99)),
            "top_k": (0.3, lambda: r.choice([1, 2, r.randint(1, 200)])),
            "top_p": (0.3, lambda: r.choice([r.random(), 0.0, 0.999])),
            "min_p": (0.25, lambda: r.choice([r.random(), 1e-3])),
            "typical_p": (0.25, lambda: r.uniform(0.01, 0.999)),
            "epsilon_cutoff": (0.2, lambda: r.choice([r.uniform(1e-6, 0.3), 1e-4])),
            "eta_cutoff": (0.2, lambda: r.choice([r.uniform(1e-6, 0.3), 1e-4])),
            "min_tokens_to_keep": (0.4, lambda: r.choice([2, 3, 10])),
        }
        o = {name: make() for name, (p, make) in makers.items() if self.chance(p)}
        # Tokens with the same logit: which of them top-p keeps is an accident of HF's sort, and
        # typical keeps all of them.
        several = isinstance(o.get("forced_eos_token_id"), list)
        if several and {"top_k", "top_p", "typical_p"} & set(o):
            o["forced_eos_token_id"] = self.word()
        if "forced_eos_token_id" in o:
            o["max_length"] = context.shape[1] + r.choice([0, 1, 2])
        for name in ("forced_bos_token_id", "forced_eos_token_id"):  # HF refuses to suppress both
            ends = o.get(name, -1)
            if set(ends if isinstance(ends, list) else [ends]) <= set(o.get("suppress_tokens", ())):
                del o["suppress_tokens"]
        if "min_length" in o or "min_new_tokens" in o or self.chance(0.1):
            o["eos_token_id"] = self.words(2)
        return o


@pytest.mark.parametrize("part", range(PARTS))
def test_thousands_of_combinations(part: int) -> None:
    each = COMBINATIONS // PARTS
    left = 0
    for seed in range(part * each, (part + 1) * each):
        draw = Draw(seed)
        logits, context = draw.logits(), draw.context()
        options = draw.options(context)
        unconditional = None
        if "guidance_scale" in options:
            unconditional = torch.randn(
                logits.shape, generator=draw.generator, dtype=torch.float64
            ).to(logits.dtype)
            logits = logits.clamp(min=-50.0)  # inf - inf is ours to define, and theirs to leave
        try:
            left += check(logits, options, context, unconditional, prompt=draw.prompt)
        except BaseException as error:
            error.args = (f"combination {seed}: {error}",)
            raise
    assert left > 0.8 * each, "too many combinations leave no word"
