"""The bounds themselves, against rational arithmetic: no rounding in the check."""

from fractions import Fraction

import pytest
import torch
from torch import Tensor

from lmhead.screen import ScreenedHead
from lmhead.screen.candidates import Pairs, lowest_linear
from lmhead.sweep import Pointwise
from screen import heads

pytestmark = pytest.mark.both_cores


def exact_linear(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> list[Fraction]:
    h = [Fraction(x) for x in hidden.double().tolist()]
    logits = [
        sum((Fraction(w) * x for w, x in zip(row, h, strict=True)), Fraction(0))
        for row in weight.double().tolist()
    ]
    if bias is None:
        return logits
    return [z + Fraction(b) for z, b in zip(logits, bias.double().tolist(), strict=True)]


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
    for row, h in enumerate(hidden):
        true = exact_linear(h, head.weight, head.bias)
        base = Fraction(float(candidates.states.base[row]))
        for token, z in enumerate(true):
            float64 = Fraction(float(computed[row, token]))
            for value in (z, float64):
                assert Fraction(float(lower[row, token])) <= value
                assert value <= Fraction(float(upper[row, token]))
                off = abs(value - base - Fraction(float(approx[row, token])))
                assert off <= Fraction(float(radius[row, token]))


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
