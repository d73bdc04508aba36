"""KL, JSD and total variation written out on lazy logits arrive at the sweep of `divergence`."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead
from lmhead.lazy import written_divergences
from lmhead.sweep import divergence_terms

N, V = 6, 40


def kl(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def reverse_kl_by_probabilities(p: Tensor, q: Tensor) -> Tensor:
    probs = q.softmax(-1)
    return ((probs.log() - p.log_softmax(-1)) * probs).sum(-1)


def kl_div_without_reduction(p: Tensor, q: Tensor) -> Tensor:
    return F.kl_div(q.log_softmax(-1), p.softmax(-1), reduction="none").sum(-1)


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    return 0.5 * (p.softmax(-1) - q.softmax(-1)).abs().sum(-1)


def jsd_of_two_sums(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q = p.log_softmax(-1), q.log_softmax(-1)
    log_m = torch.logaddexp(log_p, log_q) - math.log(2.0)
    first = 0.5 * (log_p.exp() * (log_p - log_m)).sum(-1)
    return first + 0.5 * (log_q.exp() * (log_q - log_m)).sum(-1)


def jsd_by_probabilities(p: Tensor, q: Tensor) -> Tensor:
    a, b = p.softmax(-1), q.softmax(-1)
    m = (a + b) / 2
    return ((a * (a.log() - m.log())).sum(-1) + (b * (b.log() - m.log())).sum(-1)) / 2


def skewed_jsd_by_kl_div(p: Tensor, q: Tensor) -> Tensor:
    log_p, log_q, beta = p.log_softmax(-1), q.log_softmax(-1), torch.tensor(0.1)
    log_m = torch.stack([log_q + torch.log1p(-beta), log_p + torch.log(beta)]).logsumexp(0)
    of_p = F.kl_div(log_m, log_p, reduction="none", log_target=True)
    of_q = F.kl_div(log_m, log_q, reduction="none", log_target=True)
    return (beta * of_p + (1 - beta) * of_q).sum(-1)


def one_half_alone(p: Tensor, q: Tensor) -> Tensor:
    a, b = p.softmax(-1), q.softmax(-1)
    return (a * (a.log() - (0.3 * a + 0.7 * b).log())).sum(-1)


def halves_of_other_weights(p: Tensor, q: Tensor) -> Tensor:
    a, b = p.softmax(-1), q.softmax(-1)
    m = a + b  # not normalised
    return 2 * (a * (a.log() - m.log())).sum(-1) - 3 * (b * (b.log() - m.log())).sum(-1)


FORMS: list[Callable[[Tensor, Tensor], Tensor]] = [
    kl, reverse_kl_by_probabilities, kl_div_without_reduction, total_variation, jsd_of_two_sums,
    jsd_by_probabilities, skewed_jsd_by_kl_div, one_half_alone, halves_of_other_weights,
]  # fmt: skip


class Heads:
    """Two heads of one vocabulary, dense or lazy."""

    def __init__(self, dtype: torch.dtype, *, lazy: bool, teacher: bool) -> None:
        torch.manual_seed(0)
        self.leaves = [
            torch.randn(*shape, dtype=torch.float64).to(dtype).requires_grad_()
            for shape in ((N, 8), (V, 8), (N, 5), (V, 5))
        ]
        self.logits: list[Tensor] = []
        for hidden, weight in (self.leaves[:2], self.leaves[2:]):
            head = lmhead.LMHead(weight.shape[1], V, dtype=dtype)
            made = torch.func.functional_call(head, {"weight": weight}, (hidden,))
            self.logits.append(made if lazy else hidden @ weight.T)
        if teacher:
            self.logits[0] = self.logits[0].detach()

    def gradients(self, values: Tensor, weights: Tensor) -> list[Tensor]:
        (values * weights.to(values.dtype)).sum().backward()  # type: ignore[no-untyped-call]
        return [torch.zeros_like(t) if t.grad is None else t.grad for t in self.leaves]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("teacher", [False, True])
@pytest.mark.parametrize("weights", [torch.ones(N), torch.linspace(0.0, 2.0, N)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_values_and_gradients(
    form: Callable[[Tensor, Tensor], Tensor],
    teacher: bool,
    weights: Tensor,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    swept: list[Tensor] = []
    rows = written_divergences.rows

    def watched(logits: lmhead.LazyLogits) -> Tensor | None:
        found = rows(logits)
        swept.extend([] if found is None else [found])
        return found

    monkeypatch.setattr(written_divergences, "rows", watched)
    dense = Heads(torch.float64, lazy=False, teacher=teacher)
    lazy = Heads(dtype, lazy=True, teacher=teacher)
    want, got = form(*dense.logits), form(*lazy.logits)
    assert swept
    allowed = 1e-12 if dtype == torch.float64 else 2e-5
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), want, rtol=0, atol=allowed)
    pairs = zip(lazy.gradients(got, weights), dense.gradients(want, weights), strict=True)
    for mine, true in pairs:
        torch.testing.assert_close(mine.double(), true, rtol=0, atol=allowed)


def test_two_halves_are_one_sweep(monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps: list[int] = []
    run = divergence_terms._Sweep.run

    def counted(*args: object, **kwargs: object) -> object:
        sweeps.append(1)
        return run(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(divergence_terms._Sweep, "run", counted)
    heads = Heads(torch.float32, lazy=True, teacher=True)
    jsd_of_two_sums(*heads.logits).mean().backward()  # type: ignore[no-untyped-call]
    assert len(sweeps) == 1


def test_a_waiting_half_is_not_used_for_other_logits() -> None:
    heads = Heads(torch.float64, lazy=True, teacher=False)
    dense = Heads(torch.float64, lazy=False, teacher=False)
    for scale in (1.0, 2.0):
        one_half_alone(*(z * scale for z in heads.logits))
        values = [one_half_alone(*(z * 3.0 for z in reversed(h.logits))) for h in (heads, dense)]
        torch.testing.assert_close(*values, rtol=0, atol=1e-12)
    with torch.no_grad():
        assert one_half_alone(*heads.logits).requires_grad is False


def test_a_half_after_a_weight_change_raises() -> None:
    heads = Heads(torch.float64, lazy=True, teacher=False)
    p, q = (z.softmax(-1) for z in heads.logits)
    m = 0.5 * (p + q)
    (p * (p.log() - m.log())).sum(-1)
    with torch.no_grad():
        heads.leaves[1].mul_(2)
    with pytest.raises(RuntimeError, match="weight of these lazy logits was modified in place"):
        (q * (q.log() - m.log())).sum(-1)


def test_no_divergence() -> None:
    """Programs that look alike: other distributions, a detached factor, a sum of three."""
    heads = [Heads(torch.float64, lazy=lazy, teacher=False) for lazy in (True, False)]
    weights = torch.linspace(0.0, 2.0, N)
    made = []
    for h in heads:
        log_p, log_q = (z.log_softmax(-1) for z in h.logits)
        cold = (2 * h.logits[0]).log_softmax(-1)
        values = (cold.exp() * (log_p - log_q)).sum(-1)
        values = values + (log_p.exp().detach() * (log_p - log_q)).sum(-1)
        three = (log_p.exp() + log_q.exp() + cold.exp()) / 3
        values = values + (log_p.exp() * (log_p - three.log())).sum(-1)
        values = values + (log_p.exp() * (log_p - torch.logaddexp(log_p, log_p))).sum(-1)
        made.append([values, *h.gradients(values, weights)])
    for mine, true in zip(*made, strict=True):
        torch.testing.assert_close(mine, true, rtol=0, atol=1e-12)
