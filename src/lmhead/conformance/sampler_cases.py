"""Cases for samplers: truncation, penalties, temperature, seeds."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.conformance.case import case, expect, expect_refusal
from lmhead.conformance.implementations import Implementation

NO_CONTEXT = torch.zeros(1, 1, dtype=torch.int64)


def kept(implementation: Implementation, logits: Tensor, **options: float) -> list[int]:
    """Return the ids that remain of logits (1, V)."""
    processed = implementation.process(logits, NO_CONTEXT, **options)
    ids: list[int] = (processed[0] > -math.inf).nonzero()[:, 0].tolist()
    return ids


def expect_kept(
    implementation: Implementation, logits: Tensor, want: list[int], **options: float
) -> None:
    """Compare the ids that remain."""
    got = kept(implementation, logits, **options)
    expect(got == want, f"{options} keeps {got}, should keep {want}")


@case("sampler", "transformers 18976")
def top_p_at_the_boundary(implementation: Implementation) -> None:
    """The token that reaches p stays, the next one does not."""
    even = torch.zeros(1, 4)  # quarters, without rounding
    for p, n in ((0.25, 1), (0.5, 2), (0.75, 3)):
        got = kept(implementation, even, top_p=p)
        expect(len(got) == n, f"top_p={p} keeps {len(got)} of 4 equal tokens, should keep {n}")


@case("sampler", "transformers PR 19839")
def top_p_of_zero(implementation: Implementation) -> None:
    """top_p = 0 keeps the most probable token."""
    expect_kept(implementation, torch.tensor([[0.1, 2.0, 0.3]]), [1], top_p=0.0)


@case("sampler", "transformers PR 27165")
def typical_reaches_the_mass(implementation: Implementation) -> None:
    """Typical sampling keeps the token that reaches the mass, and none after it."""
    z = torch.tensor([[0.4, 0.25, 0.2, 0.15]]).log()
    for mass, want in ((0.1, [1]), (0.3, [1, 2]), (0.5, [0, 1, 2]), (0.9, [0, 1, 2, 3])):
        expect_kept(implementation, z, want, typical_p=mass)


@case("sampler", "transformers; FlashInfer 3774")
def ties_at_the_last_place(implementation: Implementation) -> None:
    """top_k keeps k tokens, also where several share the k-th logit."""
    z = torch.zeros(1, 50)
    z[0, 20] = 1.0
    got = kept(implementation, z, top_k=3)
    expect(len(got) == 3, f"top_k=3 keeps {len(got)} tokens")
    expect(20 in got, "top_k=3 drops the largest logit")


@case("sampler", "transformers 2302")
def repetition_penalty_of_negative_logits(implementation: Implementation) -> None:
    """The penalty lowers negative logits, too."""
    z = torch.tensor([[2.0, -2.0, 0.0, 1.0]])
    out = implementation.process(z, torch.tensor([[0, 1, 2]]), repetition_penalty=2.0)
    want = [1.0, -4.0, 0.0, 1.0]
    expect(out[0].tolist() == want, f"gives {out[0].tolist()}, should give {want}")


@case("sampler", "vLLM 22180")
def negative_temperature(implementation: Implementation) -> None:
    """A negative temperature or a NaN is refused."""
    for value in (-0.5, math.nan):
        expect_refusal(
            lambda v=value: implementation.process(torch.zeros(1, 4), NO_CONTEXT, temperature=v),  # type: ignore[misc]
            f"temperature={value}",
        )


@case("sampler", "vLLM 22180")
def zero_temperature(implementation: Implementation) -> None:
    """Temperature 0 takes the most probable token, the lowest id of equals, or is refused."""
    z = torch.tensor([[0.0, 3.0, 1.0, 3.0], [5.0, 1.0, 2.0, 3.0]])
    try:
        got = implementation.sample(z, seeds=[1, 2], temperature=0.0).tolist()
    except ValueError:
        return
    expect(got == [1, 0], f"gives {got}, should give [1, 0]")


@case("sampler", "numerical stability")
def small_temperature(implementation: Implementation) -> None:
    """A tiny temperature does not overflow into NaN."""
    z = torch.tensor([[1000.0, 999.0, -1000.0]])
    for t in (1e-2, 1e-6, 1e-12, 1e-30):
        got = implementation.sample(z, seeds=[0], temperature=t).tolist()
        expect(got == [0], f"temperature={t} draws token {got[0]}")


@case("sampler", "FlashInfer 2455")
def nan_in_a_row(implementation: Implementation) -> None:
    """A row with a NaN is refused."""
    z = torch.zeros(2, 100)
    z[1, 57] = math.nan
    expect_refusal(lambda: implementation.sample(z, seeds=[0, 1]), "a NaN logit")


@case("sampler", "sampling")
def all_tokens_masked(implementation: Implementation) -> None:
    """A row of only -inf yields no token."""
    z = torch.zeros(2, 10)
    z[1] = -math.inf
    expect_refusal(lambda: implementation.sample(z, seeds=[0, 1]), "a row of only -inf")


@case("sampler", "FlashInfer 384")
def context_ids_out_of_range(implementation: Implementation) -> None:
    """Ids outside the vocabulary are refused."""
    for wrong in (-1, 5, 2**40):
        expect_refusal(
            lambda w=wrong: implementation.process(  # type: ignore[misc]
                torch.zeros(1, 5), torch.tensor([[0, w]]), repetition_penalty=1.1
            ),
            f"context id {wrong}",
        )


@case("sampler", "vLLM 17524, 51226; FlashInfer 4861")
def seed_of_a_row(implementation: Implementation) -> None:
    """A row's token depends on its own seed, not on its neighbours or its place."""
    random = torch.Generator().manual_seed(3)
    z = torch.randn(6, 1000, generator=random)
    seeds = [11, 12, 13, 14, 15, 16]
    alone = [int(implementation.sample(z[i : i + 1], seeds=[s])) for i, s in enumerate(seeds)]
    together = implementation.sample(z, seeds=seeds).tolist()
    expect(together == alone, f"in a batch {together}, one by one {alone}")
    flipped = implementation.sample(z.flip(0), seeds=seeds[::-1]).tolist()
    expect(flipped[::-1] == alone, f"in reverse order {flipped[::-1]}, one by one {alone}")


@case("sampler", "torch 48841")
def probability_zero_is_never_drawn(implementation: Implementation) -> None:
    """Masked tokens are never drawn."""
    z = torch.full((4000, 100), -math.inf)
    z[:, 3], z[:, 99] = 0.0, 1.0
    drawn = set(implementation.sample(z, seeds=list(range(4000))).tolist())
    expect(drawn <= {3, 99}, f"draws {sorted(drawn - {3, 99})[:5]}, which have probability 0")
    expect(drawn == {3, 99}, f"draws only {sorted(drawn)} in 4000 rows")


@case("sampler", "sampling")
def frequencies_match_probabilities(implementation: Implementation) -> None:
    """Frequencies of 4000 draws agree with the probabilities (chi-square at 1e-6)."""
    p = torch.tensor([0.5, 0.25, 0.15, 0.07, 0.03], dtype=torch.float64)
    n = 4000
    token = implementation.sample(p.log().float().expand(n, 5).contiguous(), seeds=list(range(n)))
    seen = torch.bincount(token, minlength=5).double()
    chi = float(((seen - n * p) ** 2 / (n * p)).sum())
    expect(chi < 33.4, f"chi-square {chi:.1f} with 4 degrees of freedom, should be < 33.4")


@case("sampler", "torch 2576")
def more_than_2_to_the_24_tokens(implementation: Implementation) -> None:
    """A vocabulary of 2^24 + 3 tokens can be sampled."""
    vocab = 2**24 + 3
    z = torch.full((1, vocab), -math.inf)
    z[0, vocab - 1] = 0.0
    got = implementation.sample(z, seeds=[3]).tolist()
    expect(got == [vocab - 1], f"draws {got[0]}, the only possible token is {vocab - 1}")
