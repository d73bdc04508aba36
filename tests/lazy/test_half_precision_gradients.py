"""Gradients of bfloat16 heads: several reductions of one head's logits are added before rounding.

Where they cancel, bfloat16 sums of rounded gradients would be off by more than dense torch's.
"""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import lmhead

N, D, V = 24, 16, 200
TARGETS = torch.arange(N) * 7 % V
ROWS = torch.linspace(0.5, 2.0, N)[:, None]

PROGRAMS: dict[str, Callable[[Tensor], Tensor]] = {
    "log-sum-exp of two temperatures": lambda z: (
        z.float().logsumexp(-1) - (z.float() * 1.01).logsumexp(-1)
    ).sum(),
    "entropy minus log-sum-exp": lambda z: (
        (z.float().softmax(-1) * z.float()).sum(-1) - z.float().logsumexp(-1)
    ).sum(),
    "two targets of shifted rows": lambda z: (
        z[:-1].float().log_softmax(-1).gather(-1, TARGETS[1:, None])
        - 0.99 * z[:-1].float().log_softmax(-1).gather(-1, TARGETS[:-1, None])
    ).sum(),
    "losses of halves": lambda z: (
        F.cross_entropy(z[::2].float(), TARGETS[::2])
        - 0.98 * F.cross_entropy(z[1::2].float(), TARGETS[1::2])
    ),
    "ranges of tokens": lambda z: (
        z[:, :190].float().logsumexp(-1) - z[:, :189].float().logsumexp(-1)
    ).sum(),
    "a column and a mean": lambda z: (
        z[:, 5].float() - z.float().logsumexp(-1) + z.float().mean(-1)
    ).sum(),
    "two programs": lambda z: (z.float().sigmoid().sum(-1) - 0.5 * z.float().tanh().sum(-1)).sum(),
    "a mask": lambda z: (
        z.float().masked_fill(torch.arange(V) > 190, -torch.inf).logsumexp(-1)
        - z.float().logsumexp(-1)
    ).sum(),
    "a temperature per row": lambda z: (
        (z.float() / ROWS).logsumexp(-1) - (z.float() / (ROWS + 0.01)).logsumexp(-1)
    ).sum(),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_cancelling_gradients(name: str) -> None:
    torch.manual_seed(0)
    stored = [torch.randn(N, D), 0.3 * torch.randn(V, D), torch.randn(V)]
    stored = [t.bfloat16() for t in stored]

    def gradients(dtype: torch.dtype, *, lazy: bool) -> list[Tensor]:
        leaves = [t.to(dtype, copy=True).requires_grad_() for t in stored]
        hidden, weight, bias = leaves
        if lazy:
            head = lmhead.LMHead(D, V, bias=True, dtype=dtype)
            given = {"weight": weight, "bias": bias}
            z = torch.func.functional_call(head, given, (hidden,))
        else:
            z = F.linear(hidden, weight, bias)
        PROGRAMS[name](z).backward()  # type: ignore[no-untyped-call]
        made = [leaf.grad for leaf in leaves]
        assert all(g is not None and type(g) is Tensor and g.dtype == dtype for g in made)
        return [g.double() for g in made if g is not None]

    truth = gradients(torch.float64, lazy=False)
    plain = gradients(torch.bfloat16, lazy=False)
    ours = gradients(torch.bfloat16, lazy=True)
    for place, (a, b, t) in enumerate(zip(ours, plain, truth, strict=True)):
        rounding = 2**-8 * float(t.norm())
        assert float((a - t).norm()) <= max(rounding, 0.5 * float((b - t).norm())), place


def test_no_wide_gradient_reaches_hooks() -> None:
    hidden = torch.randn(N, D, dtype=torch.bfloat16, requires_grad=True)
    head = lmhead.LMHead(D, V, dtype=torch.bfloat16)
    seen: list[Tensor] = []
    hidden.register_hook(seen.append)  # type: ignore[no-untyped-call]
    head.weight.register_hook(seen.append)  # type: ignore[no-untyped-call]
    z = head(hidden)[:, :150].float()
    (z.logsumexp(-1).sum() + z.sigmoid().sum()).backward()
    assert [type(g) for g in seen] == [Tensor, Tensor]
    assert {g.dtype for g in seen} == {torch.bfloat16}
