"""Snippets of code that uses logits, the batches they run on, and the run of one snippet.

A snippet is a function of (z, x): logits z (B, T, V) and a `Batch` x with what a trainer has beside
them. It returns a tensor or a tuple of tensors. `run` calls it once, on dense logits (`F.linear`)
or on lazy ones (an `LMHead` with the same weight), and returns the results and the gradients of all
tensors that entered, under one random upstream gradient.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from lmhead import LazyLogits, LMHead, PerformanceWarning

Function = Callable[[Any, "Batch"], Any]


class Sizes(NamedTuple):
    """Shape of a batch: B sequences of T positions, V tokens, D features."""

    B: int = 4
    T: int = 6
    V: int = 37
    D: int = 5


@dataclass(frozen=True)
class Snippet:
    """One entry of the catalogue.

    Attributes:
        name: `source-function`, the id of its test.
        function: the code.
        grad: False for code that runs under `no_grad`, such as a sampler.
        builds: why the logits may be built (with a `PerformanceWarning`); None if they may not.
        large: what the code itself makes that is as large as the logits; None if nothing.
        two: whether the code uses the logits of a second model.
    """

    name: str
    function: Function
    grad: bool
    builds: str | None
    large: str | None
    two: bool


SNIPPETS: dict[str, Snippet] = {}


def snippet(
    *, grad: bool = True, builds: str | None = None, large: str | None = None
) -> Callable[[Function], Function]:
    """Register a function of (z, x) under the name of its file and its own name."""

    def register(function: Function) -> Function:
        source = function.__module__.rpartition(".")[2]
        name = f"{source}-{function.__name__}"
        if name in SNIPPETS:
            raise ValueError(f"two snippets are called {name}")
        two = "x.other" in inspect.getsource(function)
        SNIPPETS[name] = Snippet(name, function, grad, builds, large, two)
        return function

    return register


@dataclass
class Batch:
    """What code has beside the logits; `leaves` holds every tensor that collects a gradient.

    Attributes:
        ids: (B, T) token ids.
        labels: (B, T) token ids, -100 where a position does not count.
        mask: (B, T) bool, True where a position counts; no row and not the batch is empty.
        advantages: (B, T).
        temperature: (B, 1, 1), positive; a leaf.
        row: (B, T, 1), positive; a leaf.
        token_bias: (V,); a leaf.
        class_weight: (V,), positive.
        allowed: (V,) bool, most True.
        other: logits (B, T, V) of a second model with its own width.
        rng: for code that takes a generator; `torch.manual_seed` is called as well.

    As large as the logits, and made when first used:
        full: (B, T, V); a leaf.
        probabilities: (B, T, V), rows add to 1.
        allowed_rows: (B, T, V) bool; allows every label.
        forbidden_rows: the reverse.
    """

    sizes: Sizes
    ids: Tensor
    labels: Tensor
    mask: Tensor
    advantages: Tensor
    temperature: Tensor
    row: Tensor
    token_bias: Tensor
    class_weight: Tensor
    allowed: Tensor
    rng: torch.Generator
    leaves: dict[str, Tensor] = field(default_factory=dict)
    other: Any = None

    def _normal(self, seed: int) -> Tensor:
        shape, random = self.sizes[:3], torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=random).to(self.row.dtype)

    @cached_property
    def full(self) -> Tensor:
        self.leaves["full"] = self._normal(11).requires_grad_()
        return self.leaves["full"]

    @cached_property
    def probabilities(self) -> Tensor:
        return torch.softmax(2 * self._normal(12), -1)

    @cached_property
    def allowed_rows(self) -> Tensor:
        random = torch.Generator().manual_seed(13)
        return (torch.rand(self.sizes[:3], generator=random) < 0.8).scatter_(
            -1, self.ids[..., None], True
        )

    @cached_property
    def forbidden_rows(self) -> Tensor:
        return ~self.allowed_rows

    @property
    def B(self) -> int:  # noqa: N802
        return self.sizes.B

    @property
    def T(self) -> int:  # noqa: N802
        return self.sizes.T

    @property
    def V(self) -> int:  # noqa: N802
        return self.sizes.V


def make_batch(sizes: Sizes, dtype: torch.dtype, seed: int = 0) -> Batch:
    """Random tensors: the same numbers for every dtype, up to rounding."""
    B, T, V, D = sizes
    random = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        # float32 numbers, so that a float64 run starts from the numbers of a float32 run
        return torch.randn(*shape, generator=random).to(dtype)

    ids = torch.randint(V, (B, T), generator=random)
    mask = torch.rand(B, T, generator=random) < 0.7
    mask[:, 1] = True
    allowed = torch.rand(V, generator=random) < 0.8
    allowed[:4] = True
    spread = torch.linspace(0.5, 2.0, B * T).view(B, T, 1).to(dtype)
    leaves = {
        "hidden": normal(B, T, D) * spread,
        "weight": normal(V, D),
        "bias": normal(V),
        "other_hidden": normal(B, T, D + 2) * spread.flip(1),
        "other_weight": normal(V, D + 2),
        "temperature": 0.5 + torch.rand(B, 1, 1, generator=random).to(dtype),
        "row": 0.5 + torch.rand(B, T, 1, generator=random).to(dtype),
        "token_bias": normal(V),
    }
    leaves = {name: leaf.detach().requires_grad_() for name, leaf in leaves.items()}
    return Batch(
        sizes=sizes,
        ids=ids,
        labels=ids.masked_fill(~mask, -100),
        mask=mask,
        advantages=normal(B, T),
        temperature=leaves["temperature"],
        row=leaves["row"],
        token_bias=leaves["token_bias"],
        class_weight=0.5 + torch.rand(V, generator=random).to(dtype),
        allowed=allowed,
        rng=torch.Generator().manual_seed(seed + 1),
        leaves=leaves,
    )


def make_head(weight: Tensor, bias: Tensor | None, max_bytes: int | None) -> LMHead:
    """An `LMHead` whose parameters are these tensors themselves."""
    head = LMHead(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    head.max_bytes = max_bytes
    del head.weight
    head.weight = weight
    if bias is not None:
        del head.bias
        head.bias = bias
    return head


def logits_of(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, *, lazy: bool, max_bytes: int | None = None
) -> Any:
    if lazy:
        return make_head(weight, bias, max_bytes)(hidden)
    return F.linear(hidden, weight, bias)


def materialized(value: Any) -> Any:
    """The tensor of lazy logits; anything else as it is."""
    if not isinstance(value, LazyLogits):
        return value
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PerformanceWarning)
        return value.materialize()


class Run(NamedTuple):
    """Results of a snippet, and the gradient of every leaf by name."""

    results: tuple[Tensor, ...]
    gradients: dict[str, Tensor]


def run(
    entry: Snippet,
    sizes: Sizes,
    dtype: torch.dtype,
    *,
    lazy: bool,
    other_lazy: bool | None = None,
    max_bytes: int | None = None,
    finish: Callable[[Any], Any] = materialized,
) -> Run:
    """Call a snippet on fresh tensors; `finish` turns each result into a plain tensor."""
    x = make_batch(sizes, dtype)
    leaf = x.leaves
    with torch.set_grad_enabled(entry.grad):
        z = logits_of(leaf["hidden"], leaf["weight"], leaf["bias"], lazy=lazy, max_bytes=max_bytes)
        if entry.two:
            x.other = logits_of(
                leaf["other_hidden"],
                leaf["other_weight"],
                None,
                lazy=lazy if other_lazy is None else other_lazy,
                max_bytes=max_bytes,
            )
        torch.manual_seed(5)
        results = entry.function(z, x)
        if not isinstance(results, tuple):
            results = (results,)
        results = tuple(finish(r) for r in results)
    return Run(results, gradients(results, leaf))


def gradients(results: tuple[Any, ...], leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Gradients under random upstream gradients: constant ones hide errors."""
    random = torch.Generator().manual_seed(3)
    upstream = [torch.randn(r.shape, generator=random).to(r.dtype) for r in results]
    kept = [(r, u) for r, u in zip(results, upstream, strict=True) if r.requires_grad]
    if not kept:
        return {}
    found = torch.autograd.grad(
        [r for r, _ in kept], list(leaves.values()), [u for _, u in kept], allow_unused=True
    )
    return {
        name: torch.zeros_like(leaf) if g is None else g
        for (name, leaf), g in zip(leaves.items(), found, strict=True)
    }
