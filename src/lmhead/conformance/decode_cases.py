"""Cases for greedy decoding: which token, in which order, in any batch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmhead.conformance.case import case, expect
from lmhead.conformance.implementations import Implementation


def problem(rows: int, vocab: int = 503, dim: int = 64, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Return random hidden (N, D) and weight (V, D), float32."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, dim, generator=random)
    return hidden, torch.randn(vocab, dim, generator=random)


def float64_order(hidden: Tensor, weight: Tensor, k: int) -> list[list[int]]:
    """Return the ids of the k largest float64 logits, the lowest id first among equals."""
    logits = torch.stack([(weight.double() * h.double()).sum(-1) for h in hidden])
    order: list[list[int]] = (
        logits.sort(dim=1, descending=True, stable=True).indices[:, :k].tolist()
    )
    return order


@case("decode", "definition")
def argmax_of_random_rows(implementation: Implementation) -> None:
    """The token with the largest logit."""
    hidden, weight = problem(20)
    got = implementation.argmax(hidden, weight).tolist()
    expect(got == [row[0] for row in float64_order(hidden, weight, 1)], f"gives {got}")


@case("decode", "definition")
def topk_in_order(implementation: Implementation) -> None:
    """The k largest logits, largest first."""
    hidden, weight = problem(20, seed=1)
    got = implementation.topk(hidden, weight, 10).tolist()
    expect(got == float64_order(hidden, weight, 10), "ids or their order differ")


@case("decode", "ties")
def ties_go_to_the_lowest_id(implementation: Implementation) -> None:
    """Equal rows of the weight: the lowest id, in argmax and top-k."""
    hidden, weight = problem(4, seed=2)
    best = implementation.argmax(hidden, weight).tolist()
    for row, token in enumerate(best):
        copies = weight.clone()
        copies[[3, 250, 500]] = weight[token]
        want = min(3, token)
        got = int(implementation.argmax(hidden[row : row + 1], copies))
        expect(got == want, f"argmax gives {got} of equal tokens 3, {token}, 250, 500")
        ids = implementation.topk(hidden[row : row + 1], copies, 3)[0].tolist()
        expected = sorted({3, 250, 500, token})[:3]
        expect(ids == expected, f"top-k gives {ids} of equal tokens, should give {expected}")


@case("decode", "exact arithmetic")
def near_ties_are_decided_in_float64(implementation: Implementation) -> None:
    """Logits that differ by less than float32 rounding are in the order of exact arithmetic."""
    hidden, weight = problem(200, dim=256, seed=3)
    wrong = 0
    for row in range(len(hidden)):
        close = weight.clone()
        best = int((close @ hidden[row]).argmax())
        close[7] = close[best]
        close[7, row] = torch.nextafter(close[best, row], hidden[row, row].sign() * math.inf)
        want = float64_order(hidden[row : row + 1], close, 1)[0][0]
        wrong += int(implementation.argmax(hidden[row : row + 1], close)) != want
    expect(wrong == 0, f"{wrong} of 200 tokens differ from exact arithmetic")


@case("decode", "batch invariance")
def the_same_token_in_any_batch(implementation: Implementation) -> None:
    """A row's top-k does not depend on the other rows, where logits nearly tie."""
    hidden, weight = problem(33, vocab=2000, dim=96, seed=4)
    weight[1000:] = weight[:1000]  # copies with the last bit of one entry changed
    weight[1000:, 0] = torch.nextafter(weight[:1000, 0], torch.tensor(math.inf))
    together = implementation.topk(hidden, weight, 8).tolist()
    alone = [implementation.topk(h[None], weight, 8)[0].tolist() for h in hidden]
    expect(
        together == alone,
        f"{sum(a != b for a, b in zip(together, alone, strict=True))} of 33 rows differ",
    )


@case("decode", "lmhead docs/lazy.md")
def nan_yields_no_token(implementation: Implementation) -> None:
    """A row with a NaN gives -1 or an error, not a token; other rows are unaffected."""
    hidden, weight = problem(3, seed=5)
    clean = implementation.argmax(hidden, weight).tolist()
    hidden[1, 4] = math.nan
    try:
        got = implementation.argmax(hidden, weight).tolist()
    except (ValueError, RuntimeError):
        return
    expect([got[0], got[2]] == [clean[0], clean[2]], "another row has changed")
    expect(got[1] < 0, f"gives token {got[1]} for a row of NaNs")


@case("decode", "lmhead docs/lazy.md")
def overflow_of_float32(implementation: Implementation) -> None:
    """Finite inputs whose logits float32 cannot hold are ordered by exact arithmetic."""
    hidden, weight = problem(5, seed=6)
    hidden, weight = hidden * 1e25, weight * 1e25
    got = implementation.argmax(hidden, weight).tolist()
    want = [row[0] for row in float64_order(hidden, weight, 1)]
    expect(got == want, f"gives {got}, should give {want}")
