"""What every wheel must do, whichever core it has; needs nothing but the package and pytest."""

import math

import torch
import torch.nn.functional as F

import lmhead


def test_loss_gradients_and_argmax_are_those_of_torch() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 16, generator=random, requires_grad=True)
    weight = torch.randn(1000, 16, generator=random, requires_grad=True)
    targets = torch.randint(1000, (32,), generator=random)

    loss = lmhead.linear_cross_entropy(hidden, weight, targets)
    ours = torch.autograd.grad(loss, (hidden, weight))
    logits = hidden @ weight.T
    plain = F.cross_entropy(logits, targets)
    torch.testing.assert_close(loss, plain)
    torch.testing.assert_close(ours, torch.autograd.grad(plain, (hidden, weight)))

    answers = lmhead.query(hidden, weight, argmax=True, entropy=True, log_prob=targets)
    assert answers.argmax is not None
    assert answers.entropy is not None
    assert answers.log_prob is not None
    assert torch.equal(answers.argmax, logits.argmax(-1))
    assert bool(((answers.entropy > 0) & (answers.entropy < math.log(1000))).all())
    torch.testing.assert_close(-answers.log_prob.mean(), plain)


def test_half_precision() -> None:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(32, 16, generator=random).bfloat16()
    weight = torch.randn(1000, 16, generator=random).bfloat16().requires_grad_()
    loss = lmhead.linear_cross_entropy(hidden, weight, torch.arange(32))
    (grad,) = torch.autograd.grad(loss, weight)
    assert loss.dtype == torch.float32
    assert grad.dtype == torch.bfloat16
    assert bool(grad.isfinite().all())
