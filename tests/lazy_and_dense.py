"""A lazy head and dense logits of the same tensors, and an assertion that they agree.

`twins(...)` returns both; `assert_same(case, f)` applies the function `f` to the lazy logits and
to the dense ones, and compares the results and the gradients of hidden, weight and bias.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from compare import assert_close
from torch import Tensor

from lmhead import LazyLogits, LMHead, PerformanceWarning

# Tolerance for float64 sums in another order.
EXACT = 1e-11


@dataclass
class Twins:
    """The same logits twice: `lazy` from the head, `dense` from plain torch."""

    head: LMHead
    hidden: Tensor

    @property
    def lazy(self) -> Any:
        return self.head(self.hidden)

    @property
    def dense(self) -> Tensor:
        logits: Tensor = self.hidden @ self.head.weight.T
        if self.head.bias is not None:
            logits = logits + self.head.bias
        logits = self.head.scale * logits
        if self.head.softcap is not None:
            logits = self.head.softcap * torch.tanh(logits / self.head.softcap)
        return logits

    @property
    def leaves(self) -> list[Tensor]:
        tensors = [self.hidden, *self.head.parameters()]
        return [t for t in tensors if t.requires_grad]


def twins(
    *leading: int,
    hidden_size: int = 5,
    vocab: int = 13,
    bias: bool = True,
    softcap: float | None = None,
    scale: float = 1.0,
    dtype: torch.dtype = torch.float64,
    trained: bool = True,
) -> Twins:
    """A head and hidden states (*leading, hidden_size), peaked enough to tell tokens apart."""
    torch.manual_seed(sum(leading) + vocab)
    head = LMHead(hidden_size, vocab, bias=bias, softcap=softcap, scale=scale, dtype=dtype)
    with torch.no_grad():
        head.weight.mul_(3)
    head.requires_grad_(trained)
    hidden = torch.randn(*leading, hidden_size, dtype=dtype).requires_grad_(trained)
    return Twins(head, hidden)


def ids(*shape: int, vocab: int = 13) -> Tensor:
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(7))


def as_function(text: str) -> Callable[[Any], Any]:
    """Return an expression of logits `z` as a function: `as_function("z[:, -1]")`."""
    function: Callable[[Any], Any] = eval(
        f"lambda z: {text}", {"torch": torch, "F": F, "V": 13, "ids": ids, "tensor": torch.tensor}
    )
    return function


def materialized(value: Any) -> Any:
    """The tensor behind lazy logits; anything else as it is."""
    if not isinstance(value, LazyLogits):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        return value.materialize()


def backward(loss: Any) -> None:
    """`loss.backward()`, which torch leaves without types."""
    loss.backward()


def gradients(answer: Tensor, leaves: list[Tensor], seed: int = 3) -> list[Tensor]:
    """Gradients of `answer` under a random upstream gradient: a constant one hides errors."""
    generator = torch.Generator().manual_seed(seed)
    upstream = torch.randn(answer.shape, generator=generator, dtype=torch.float64).to(answer.dtype)
    grads = torch.autograd.grad(answer, leaves, upstream, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]


def assert_same(
    case: Twins,
    question: Callable[[Any], Any],
    *,
    rtol: float = EXACT,
    atol: float = EXACT,
    lazy: bool | None = None,
) -> Any:
    """Assert that `question` gives the same result and gradients for lazy and dense logits.

    `lazy` says whether the result must itself be lazy. Returns the result for the lazy logits.
    """
    ours, theirs = question(case.lazy), question(case.dense)
    if lazy is not None:
        assert isinstance(ours, LazyLogits) == lazy, f"the answer is a {type(ours).__name__}"
    shape, dtype = ours.shape, ours.dtype
    answer = materialized(ours)
    assert (shape, dtype) == (answer.shape, answer.dtype), "the shape or dtype was a promise"
    assert_close(answer, theirs, rtol=rtol, atol=atol, dtype=theirs.dtype, what="answer")
    assert answer.requires_grad == theirs.requires_grad
    if theirs.requires_grad:
        for name, a, e in zip(
            ["hidden", "weight", "bias"],
            gradients(answer, case.leaves),
            gradients(theirs, case.leaves),
            strict=False,
        ):
            assert_close(a, e, rtol=rtol, atol=atol, dtype=e.dtype, what=f"gradient of {name}")
    return ours
