"""Random problems for the property tests: a head, hidden states, and the sizes of tiles.

Hypothesis draws the sizes and options and one seed; the numbers come from the seed. Odd sizes,
empty batches, one token, peaked rows, exact ties and masked tokens all occur.
"""

from dataclasses import dataclass, field
from typing import Any

import dense_torch
import numpy as np
import oracle
import torch
from compare import Array
from dense_torch import HALF
from hypothesis import strategies as st
from torch import Tensor

import lmhead

DTYPES = (torch.float32, torch.float64, *HALF)
KINDS = ("even", "peaked", "ties")


@dataclass
class Problem:
    """hidden (*rows, D), weight (V, D), and the options of the head."""

    hidden: Tensor
    weight: Tensor
    head: dict[str, Any]  # bias, softcap, scale
    max_bytes: int | None
    kind: str
    random: torch.Generator = field(repr=False)

    @property
    def rows(self) -> torch.Size:
        return self.hidden.shape[:-1]

    @property
    def vocab(self) -> int:
        return self.weight.shape[0]

    @property
    def dtype(self) -> torch.dtype:
        return self.weight.dtype

    @property
    def bias(self) -> Tensor | None:
        bias: Tensor | None = self.head["bias"]
        return bias

    @property
    def allowed(self) -> Tensor:
        """The ids that are not masked."""
        if self.bias is None:
            return torch.arange(self.vocab)
        return self.bias.isfinite().nonzero().squeeze(1)

    def logits(self) -> Array:
        return oracle.head_logits(self.hidden, self.weight, **self.head)

    def ids(self, *shape: int) -> Tensor:
        """Random ids of tokens that are not masked."""
        return self.allowed[torch.randint(len(self.allowed), shape, generator=self.random)]

    def any_ids(self, *shape: int) -> Tensor:
        """Random ids, masked tokens among them."""
        return torch.randint(self.vocab, shape, generator=self.random)

    def leaves(self) -> "Leaves":
        """The tensors once more, ready for gradients."""
        return Leaves(self.hidden, self.weight, self.head)

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random, dtype=torch.float64)


class Leaves:
    """hidden, weight and bias that collect gradients, and the options of the head."""

    def __init__(self, hidden: Tensor, weight: Tensor, head: dict[str, Any]) -> None:
        self.hidden, self.weight = (t.clone().requires_grad_() for t in (hidden, weight))
        self.head = dict(head)
        self.bias: Tensor | None = head["bias"]
        if self.bias is not None:
            self.bias = self.head["bias"] = self.bias.clone().requires_grad_()

    def dense_logits(self) -> Tensor:
        return dense_torch.logits(self.hidden, self.weight, **self.head)

    def lazy_logits(self) -> Any:
        """What an `LMHead` with these tensors returns."""
        vocab, dim = self.weight.shape
        head = lmhead.LMHead(
            dim,
            vocab,
            bias=self.bias is not None,
            softcap=self.head["softcap"],
            scale=self.head["scale"],
            dtype=self.weight.dtype,
        )
        parameters = {"weight": self.weight}
        if self.bias is not None:
            parameters["bias"] = self.bias
        return torch.func.functional_call(head, parameters, (self.hidden,))


@st.composite
def problems(draw: st.DrawFn, *, saturating: bool = True) -> Problem:
    """A problem. Without `saturating`, a soft cap never flattens logits into ties."""
    few, some, many = st.integers(1, 5), st.integers(0, 40), st.integers(60, 130)
    shapes = [(some,), (some,), (many,), (few, few), (few, few, few), ()]
    rows = draw(st.sampled_from(shapes).flatmap(lambda shape: st.tuples(*shape)))
    vocab, dim = draw(st.integers(1, 300)), draw(st.integers(1, 40))
    dtype, kind = draw(st.sampled_from(DTYPES)), draw(st.sampled_from(KINDS))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    hidden, weight, bias = numbers(random, kind, rows, vocab, dim)
    masked = draw(st.sampled_from([0.0, 0.0, 0.3, 0.95]))
    if masked:
        hit = torch.rand(vocab, generator=random) < masked
        hit[torch.randint(vocab, (), generator=random)] = False
        bias[hit] = -torch.inf
    scale = draw(st.sampled_from([1.0, 1.0, 0.25, 1.7] if masked else [1.0, 0.25, -1.0, 1.7]))
    softcap = draw(st.sampled_from([None, None, 5.0, 30.0]))
    if softcap is not None and not saturating:
        x = oracle.head_logits(hidden, weight, bias=bias, scale=scale)
        softcap = max(softcap, float(np.abs(x[np.isfinite(x)]).max(initial=0.0)) / 4.0)
    has_bias = bool(masked) or draw(st.booleans())
    # From one tile for all, through chunks of rows, down to tiles of a few tokens.
    share = draw(st.sampled_from([None, 2.0, 1.0, 0.5, 0.25, 0.1]))
    size = 4 * vocab * max(1, hidden[..., 0].numel())
    return Problem(
        hidden=hidden.to(dtype),
        weight=weight.to(dtype),
        head={"bias": bias.to(dtype) if has_bias else None, "softcap": softcap, "scale": scale},
        max_bytes=None if share is None else max(1, int(share * size)),
        kind=kind,
        random=random,
    )


def numbers(
    random: torch.Generator, kind: str, rows: tuple[int, ...], vocab: int, dim: int
) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, weight and bias in float64."""
    shapes = ((*rows, dim), (vocab, dim), (vocab,))
    if kind == "ties":  # small integers: every dtype and every order of summation is exact
        hidden, weight, bias = (
            torch.randint(-2, 3, shape, generator=random).double() for shape in shapes
        )
        return hidden, weight, bias
    hidden, weight, bias = (
        torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes
    )
    size = 8.0 if kind == "peaked" else 2.0 / dim**0.5
    return size * hidden, weight, bias


def teacher(problem: Problem, dim: int, *, has_bias: bool) -> Problem:
    """Another head on other hidden states, with the same mask; for the divergence to it."""
    hidden, weight, bias = numbers(problem.random, "even", problem.rows, problem.vocab, dim)
    allowed = torch.full((problem.vocab,), -torch.inf, dtype=bias.dtype)
    allowed[problem.allowed] = bias[problem.allowed]
    return Problem(
        hidden=hidden.to(problem.dtype),
        weight=weight.to(problem.dtype),
        head={
            "bias": allowed.to(problem.dtype) if has_bias else None,
            "softcap": None,
            "scale": 1.0,
        },
        max_bytes=None,
        kind="even",
        random=problem.random,
    )
