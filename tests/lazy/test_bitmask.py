"""`mask_tokens`: the bitmask of grammar engines, and what a mask saves."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lmhead import LMHead, Sampler
from lmhead.lazy import LazyLogits
from lmhead.sweep import SweptScores

V, D = 400, 16


def pack(allowed: Tensor) -> Tensor:
    """Booleans (rows, V) as int32 (rows, ceil(V / 32)), bit i % 32 of entry i // 32."""
    entries = -(-allowed.shape[-1] // 32)
    padded = torch.zeros(len(allowed), entries * 32, dtype=torch.bool)
    padded[:, : allowed.shape[-1]] = allowed
    numbers = (padded.view(-1, entries, 32).long() << torch.arange(32)).sum(-1)
    return torch.where(numbers >= 2**31, numbers - 2**32, numbers).int()


def problem(share: float, *, rows: int, screened: bool) -> tuple[LazyLogits, Tensor, Tensor]:
    """Masked lazy logits, the same as a tensor, and the mask."""
    torch.manual_seed(0)
    head, hidden = LMHead(D, V, bias=True), torch.randn(rows, D)
    allowed = torch.rand(rows, V) < share
    allowed[:, 7] = True
    if screened:
        head.screen()
    with torch.no_grad():
        dense = torch.nn.functional.linear(hidden, head.weight, head.bias)
        return (
            head(hidden).mask_tokens(pack(allowed)),
            dense.masked_fill(~allowed, -torch.inf),
            allowed,
        )


@pytest.mark.parametrize("screened", [False, True])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("share", [0.0, 0.02, 0.2, 0.9])
def test_every_question(share: float, rows: int, screened: bool) -> None:
    z, dense, _ = problem(share, rows=rows, screened=screened)
    with torch.no_grad():
        k = 1 if share == 0.0 else 3
        ids = torch.tensor([[7, 8, 399]]).expand(rows, -1)
        assert torch.equal(z.argmax(-1), dense.argmax(-1))
        assert torch.equal(z.topk(k).indices, dense.topk(k).indices)
        assert torch.equal(z.topk(V).values.isinf(), dense.topk(V).values.isinf())
        for ours, theirs in (
            (z.logsumexp(-1), dense.logsumexp(-1)),
            (z.log_softmax(-1).gather(-1, ids), dense.log_softmax(-1).gather(-1, ids)),
            (z.softmax(-1).sum(-1), torch.ones(rows)),
            (z.ask(entropy=True).entropy, torch.special.entr(dense.softmax(-1)).sum(-1)),
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
        for sampler in (Sampler(seed=1), Sampler(temperature=0.7, top_p=0.8, seed=2)):
            assert torch.equal(sampler(z).token, sampler(dense).token)


def test_only_allowed_rows_of_the_weight_are_read() -> None:
    """Rows of forbidden tokens may be NaN: nothing touches them."""
    torch.manual_seed(0)
    head, hidden = LMHead(D, V), torch.randn(2, D)
    allowed = torch.zeros(1, V, dtype=torch.bool)
    allowed[0, [3, 5, 250]] = True
    with torch.no_grad():
        dense = (hidden @ head.weight.T)[:, [3, 5, 250]]
        head.weight[~allowed[0]] = torch.nan
        z = head(hidden).mask_tokens(pack(allowed))
        assert torch.equal(z.argmax(-1), torch.tensor([3, 5, 250])[dense.argmax(-1)])
        torch.testing.assert_close(z.logsumexp(-1), dense.logsumexp(-1))
        assert set(Sampler(seed=0)(z).token.tolist()) <= {3, 5, 250}


def test_a_mask_of_most_tokens_keeps_the_sweep() -> None:
    z, _, allowed = problem(0.9, rows=1, screened=False)
    scores = z.scores()
    assert isinstance(scores, SweptScores)
    assert scores.allowed is None
    few = z.mask_tokens(pack(torch.arange(V)[None] == 7)).scores()
    assert isinstance(few, SweptScores)
    assert few.allowed is not None
    assert few.allowed.tolist() == [7]
    assert bool(allowed[0, 7])


def test_gradients_of_a_masked_loss() -> None:
    torch.manual_seed(0)
    head, hidden = LMHead(D, V), torch.randn(3, D, requires_grad=True)
    allowed = torch.rand(3, V) < 0.05
    targets = torch.tensor([1, 2, 3])
    allowed[torch.arange(3), targets] = True
    loss = torch.nn.functional.cross_entropy
    ours = torch.autograd.grad(
        loss(head(hidden).mask_tokens(pack(allowed)), targets), [hidden, head.weight]
    )
    dense = (hidden @ head.weight.T).masked_fill(~allowed, -torch.inf)
    theirs = torch.autograd.grad(loss(dense, targets), [hidden, head.weight])
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
