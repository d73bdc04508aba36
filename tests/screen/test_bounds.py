"""The bounds themselves, against integer arithmetic: no rounding in the check."""

from operator import le, mul

import pytest
import torch
from torch import Tensor

from lmhead.screen import ScreenedHead
from lmhead.screen.candidates import Pairs, lowest_linear
from lmhead.sweep import Pointwise
from screen import heads

pytestmark = pytest.mark.both_cores


# Every finite float64 is a multiple of 2^-1074, and a product of two of 2^-2148.
UNIT = 1074


def multiples(tensor: Tensor, unit: int = UNIT) -> list[int]:
    """The numbers of a tensor, exactly, as multiples of 2^-unit."""
    pairs = (x.as_integer_ratio() for x in tensor.double().flatten().tolist())
    return [n << unit - (d.bit_length() - 1) for n, d in pairs]


def exact_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[list[int]]:
    """`hidden @ weight.T + bias` in integers, as multiples of 2^-2148."""
    w, h = ([multiples(row) for row in matrix] for matrix in (weight, hidden))
    b = [0] * len(w) if bias is None else multiples(bias, 2 * UNIT)
    return [[sum(map(mul, row, x)) + z for row, z in zip(w, b, strict=True)] for x in h]


@pytest.mark.parametrize("bits", [8, "4+4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("weights", sorted(heads.WEIGHTS))
@pytest.mark.parametrize("bias", ["none", "dominating"])
def test_true_logits_lie_within_the_bounds(
    weights: str, bias: str, bits: object, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(1)
    weight = heads.WEIGHTS[weights](60, 70, random).to(dtype)
    head = heads.head_of(weight, heads.bias_of(bias, 60, random))
    screened = ScreenedHead(head, bits=bits)  # type: ignore[arg-type]
    hidden = heads.states(4, weight.float(), random).to(dtype)
    hidden = hidden[hidden.double().norm(dim=1) * screened.copy.n_max < 1e29]
    candidates = screened.candidates(hidden)
    lower, upper = candidates.bounds()
    every = Pairs(torch.full((len(hidden),), 60), torch.arange(60).repeat(len(hidden)))
    approx, radius = (t.view(-1, 60) for t in candidates.refined(every))
    computed = candidates.exact(every)[0].view(-1, 60)
    true = exact_linear(hidden, head.weight, head.bias)
    for row, z in enumerate(true):
        low, high, middle, off, float64 = (
            multiples(t[row], 2 * UNIT) for t in (lower, upper, approx, radius, computed)
        )
        (base,) = multiples(candidates.states.base[row], 2 * UNIT)
        for values in (z, float64):
            assert all(map(le, low, values))
            assert all(map(le, values, high))
            assert all(abs(v - base - m) <= o for v, m, o in zip(values, middle, off, strict=True))


@pytest.mark.parametrize("softcap", [None, 30.0, 1e-3])
@pytest.mark.parametrize("scale", [1.0, 0.1])
def test_bounds_hold_after_the_map(softcap: float | None, scale: float) -> None:
    random = torch.Generator().manual_seed(2)
    weight = heads.plain(300, 65, random)
    head = heads.head_of(weight, heads.bias_of("masks", 300, random), softcap=softcap, scale=scale)
    hidden = heads.states(3, weight, random)
    candidates = ScreenedHead(head).candidates(hidden)
    lower, upper = candidates.bounds()
    every = Pairs(torch.full((3,), 300), torch.arange(300).repeat(3))
    z = candidates.exact(every)[1].view(3, 300)
    assert bool((lower.double() <= z).all() & (z <= upper.double()).all())


def test_the_error_of_a_random_head_is_small() -> None:
    random = torch.Generator().manual_seed(3)
    weight = heads.plain(500, 256, random)
    candidates = ScreenedHead(heads.head_of(weight)).candidates(heads.states(1, weight, random))
    lower, upper = candidates.bounds()
    spread = (upper - lower).mean() / candidates.exact(candidates.best(1))[0].abs().max()
    assert spread < 0.1


def test_reaching_finds_every_token_above_a_limit() -> None:
    random = torch.Generator().manual_seed(4)
    weight = heads.plain(900, 100, random)
    hidden = heads.states(5, weight, random)
    candidates = ScreenedHead(heads.head_of(weight), bits="4+4").candidates(hidden)
    z = hidden.double() @ weight.double().T
    limit = z.topk(20, dim=1).values[:, -1] - 1e-9
    found = candidates.reaching(candidates.limits(limit))
    reached = torch.zeros(5, 900, dtype=torch.bool)
    reached[found.rows, found.ids] = True
    assert bool(reached[z >= limit[:, None]].all())
    assert bool((found.ids[1:] > found.ids[:-1])[found.rows[1:] == found.rows[:-1]].all())


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_limits_leave_out_nothing_that_rounds_to_the_same_logit(softcap: float | None) -> None:
    p = Pointwise.of(softcap=softcap, scale=0.3).plus(0.7)
    x = torch.linspace(-300, 300, 4001, dtype=torch.float64)
    z = p(x)
    t = lowest_linear(p, z)
    assert bool((t <= x).all())
    # Just below the limit the logit is smaller, even where tanh hardly grows any more.
    below = torch.nextafter(t, torch.tensor(-torch.inf, dtype=torch.float64))
    assert bool((p(below) < z)[t > -torch.inf].all())
    assert bool(((x - t)[z.abs() < 1] < 1e-8).all())
