"""`LMHead`: a replacement for `nn.Linear(hidden_size, vocab_size)` that returns lazy logits."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from lmhead import bypass, checks
from lmhead.checks import eager
from lmhead.lazy import LazyLogits
from lmhead.parallel.linear_layer import sharded_scores
from lmhead.scores import Scores
from lmhead.screen import ScreenedHead
from lmhead.screen.screened_scores import Screen, ScreenedScores
from lmhead.sweep import (
    GradFilter,
    Pointwise,
    Source,
    SweptScores,
    accumulation_dtype,
    as_filter,
    autocast,
)


class LMHead(nn.Linear):
    """The output layer of a language model, from hidden states to lazy logits.

    Equivalent to: softcap · tanh(scale · nn.Linear(hidden_size, vocab_size)(hidden) / softcap)

    It is an `nn.Linear`, with the same parameters and state: code that looks for linear layers
    (initialisation, resizing, adapters) finds it.

    Args:
        hidden_size: D.
        vocab_size: V.
        bias: whether to add a bias.
        softcap: logits become softcap · tanh(scale · x / softcap); None for none.
        scale: a factor of the logits, before soft-capping.
        grad_filter: the tail mass τ of the gradient filter, see `linear_cross_entropy`; None for
            exact gradients.
        device: where to put the parameters.
        dtype: the type of the parameters.

    Attributes:
        weight: (V, D), initialised as `nn.Linear` does: Kaiming-uniform with a = √5.
        bias: (V,) or None.
        max_bytes: bound on the temporary memory of a sweep; None for 128 MiB.
        screened: quantized copy that answers argmax and top-k, see `screen`; None if there is none.

    >>> head = LMHead(16, 100)
    >>> logits = head(torch.randn(4, 16))
    >>> logits.shape
    torch.Size([4, 100])
    >>> logits.argmax(-1).shape
    torch.Size([4])
    """

    weight: Tensor
    bias: Tensor | None  # type: ignore[assignment]
    low_rank_a: Tensor | None
    low_rank_b: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        vocab_size: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        grad_filter: float | GradFilter | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        checks.check_integer("hidden_size", hidden_size, low=1)
        checks.check_integer("vocab_size", vocab_size, low=1)
        checks.check_map(softcap, scale)
        super().__init__(hidden_size, vocab_size, bias=bias, device=device, dtype=dtype)
        self.softcap, self.scale = softcap, scale
        self.grad_filter = as_filter(grad_filter)
        self.max_bytes: int | None = None
        self.screened: Screen | None = None
        self._screened_version = 0
        self._add("low_rank_a", None)
        self._add("low_rank_b", None)

    @classmethod
    def from_linear(
        cls,
        linear: nn.Linear,
        *,
        softcap: float | None = None,
        scale: float = 1.0,
        grad_filter: float | GradFilter | None = None,
    ) -> LMHead:
        """Return a head on the weight and bias of a linear layer: shared, not copied.

        >>> linear = nn.Linear(16, 100)
        >>> LMHead.from_linear(linear).weight is linear.weight
        True
        """
        if isinstance(linear, LMHead):
            raise TypeError("linear must be an nn.Linear that is not an LMHead already")
        if not isinstance(linear, nn.Linear):
            raise TypeError(f"linear must be an nn.Linear; got {_describe(linear)}")
        return cls._sharing(
            linear.weight, linear.bias, softcap=softcap, scale=scale, grad_filter=grad_filter
        )

    @classmethod
    def tied(
        cls,
        embedding: nn.Embedding,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        grad_filter: float | GradFilter | None = None,
    ) -> LMHead:
        """Return a head on the weight of an embedding: one tensor, trained from both sides.

        >>> embedding = nn.Embedding(100, 16)
        >>> LMHead.tied(embedding).weight is embedding.weight
        True
        """
        if not isinstance(embedding, nn.Embedding):
            raise TypeError(f"embedding must be an nn.Embedding; got {type(embedding).__name__}")
        weight = embedding.weight
        own_bias = None
        if bias:
            bound = 1 / math.sqrt(weight.shape[1])
            own_bias = nn.Parameter(weight.new_empty(weight.shape[0]).uniform_(-bound, bound))
        return cls._sharing(weight, own_bias, softcap=softcap, scale=scale, grad_filter=grad_filter)

    @classmethod
    def _sharing(cls, weight: Tensor, bias: Tensor | None, **options: Any) -> LMHead:
        vocab_size, hidden_size = weight.shape
        head = cls(hidden_size, vocab_size, device="meta", **options)
        head.weight, head.bias = weight, bias
        return head

    def _add(self, name: str, value: Tensor | None) -> None:
        self.register_parameter(name, None if value is None else nn.Parameter(value))

    def add_low_rank(self, rank: int) -> LMHead:
        """Train W + B·A in place of W, without ever forming the sum.

        A (rank, D) starts random, B (V, rank) at zero, so nothing changes until it is trained.
        Freeze `head.weight` to train the delta alone. Returns the head.
        """
        checks.check_integer("rank", rank, low=1)
        like = self.weight.detach()
        first = like.new_empty(rank, self.hidden_size)
        self._add("low_rank_a", nn.init.kaiming_uniform_(first, a=math.sqrt(5)))
        self._add("low_rank_b", like.new_zeros(self.vocab_size, rank))
        return self

    @torch.no_grad()
    def merge_low_rank(self) -> LMHead:
        """Add the low-rank delta to the weight, W ← W + B·A, and remove it. Returns the head."""
        if self.low_rank_a is not None and self.low_rank_b is not None:
            dtype = accumulation_dtype(self.weight.dtype)
            a, step = self.low_rank_a.to(dtype), max(1, 2**22 // self.hidden_size)
            for rows, b in zip(
                torch.split(self.weight, step), torch.split(self.low_rank_b, step), strict=True
            ):
                rows.copy_(rows.to(dtype).addmm_(b.to(dtype), a))
        self._add("low_rank_a", None)
        self._add("low_rank_b", None)
        return self

    def like(self, linear: nn.Linear) -> LMHead:
        """Return a head on the weight and bias of a linear layer, with the options of this one."""
        options: Any = {"softcap": self.softcap, "scale": self.scale}
        head = type(self).from_linear(linear, grad_filter=self.grad_filter, **options)
        head.max_bytes = self.max_bytes
        return head

    def screen(self, **options: Any) -> ScreenedHead:
        """Make a quantized copy of the weight: argmax and top-k then read a quarter of the bytes.

        From then on `head(hidden).argmax(-1)` and `.topk(k)` use it where no gradient is wanted:
        the same answers. `head.screened = None` removes it. Options are those of
        `ScreenedHead`: bits, calibration, progress, cache.

        >>> head = LMHead(64, 1000).requires_grad_(False)
        >>> hidden = torch.randn(64)
        >>> before = head(hidden).argmax(-1)
        >>> screened = head.screen(bits=8)
        >>> bool(head(hidden).argmax(-1) == before)
        True
        """
        if not checks.is_dtensor(self.weight):
            return ScreenedHead(self, **options).attach()
        weight: Any = self.weight.detach()
        local_weight = nn.Parameter(weight.to_local(), requires_grad=False)
        local = LMHead._sharing(local_weight, None, softcap=self.softcap, scale=self.scale)
        self.screened = screened = ScreenedHead(local, **options)
        self._screened_version = self.weight._version  # `to_local` has a counter of its own
        return screened

    @property
    def is_plain(self) -> bool:
        """Whether the logits are hidden @ weight.T + bias: no softcap, scale or low-rank delta."""
        return self.softcap is None and self.scale == 1.0 and self.low_rank_a is None

    def train(self, mode: bool = True) -> Self:
        """Set the mode, as every module does; trainers call it before they use the weight."""
        if not self.is_plain:
            bypass.watch(self)
        return super().train(mode)

    @property
    def hidden_size(self) -> int:
        """D."""
        return self.weight.shape[1]

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.weight.shape[0]

    @eager
    def forward(self, hidden: Tensor) -> LazyLogits:
        """Return logits of shape (..., V) that compute nothing until they are queried."""
        if torch.jit.is_tracing() or torch.compiler.is_exporting():  # type: ignore[attr-defined, no-untyped-call]
            return self._exported(hidden)  # type: ignore[return-value]
        return LazyLogits.of(*self._scores(hidden))

    def _exported(self, hidden: Tensor) -> Tensor:
        """Return dense logits by plain operations, for tracing and exporting."""
        x = F.linear(hidden, self.weight)
        if self.low_rank_a is not None and self.low_rank_b is not None:
            x = x + F.linear(F.linear(hidden, self.low_rank_a), self.low_rank_b)
        pointwise = Pointwise.of(softcap=self.softcap, scale=self.scale)
        if self.bias is None:
            return pointwise(x)
        masked = self.bias == -math.inf
        z = pointwise(x + self.bias.masked_fill(masked, 0.0))
        return z.masked_fill(masked, -math.inf)

    def scores(self, hidden: Tensor) -> Scores:
        """Return the scores of hidden states (..., D), as rows."""
        return self._scores(hidden)[0]

    def _scores(self, hidden: Tensor) -> tuple[Scores, torch.Size, torch.dtype]:
        """Return scores, the leading shape of the hidden states, and the dtype of the logits."""
        weight, bias = self.weight, self.bias
        low_rank_a, low_rank_b = self.low_rank_a, self.low_rank_b
        if checks.is_dtensor(weight):
            low_rank = low_rank_a is not None and low_rank_b is not None
            scores, plain = sharded_scores(
                hidden,
                (weight, low_rank_b) if low_rank else (weight,),  # type: ignore[arg-type]
                (low_rank_a,) if low_rank else (),  # type: ignore[arg-type]
                bias,
                Pointwise.of(softcap=self.softcap, scale=self.scale),
                grad_filter=self.grad_filter,
                max_bytes=self.max_bytes,
                screen=self.screened if weight._version == self._screened_version else None,
            )
            return scores, plain.shape[:-1], autocast(plain)[0].dtype
        cast = autocast(hidden, weight)
        checks.check_hidden_and_weight(*cast)
        more = (("bias", bias), ("low_rank_a", low_rank_a), ("low_rank_b", low_rank_b))
        for name, tensor in more:
            if tensor is not None:
                checks.check_memory(name, tensor)
        hiddens, weights = cast[:1], cast[1:]
        if low_rank_a is not None and low_rank_b is not None:
            a, b = autocast(low_rank_a, low_rank_b)
            hiddens, weights = (*hiddens, hiddens[0] @ a.T), (*weights, b)
        source = Source(
            tuple(h.reshape(-1, h.shape[-1]) for h in hiddens),
            weights,
            bias,
            Pointwise.of(softcap=self.softcap, scale=self.scale),
        ).keep_masked()
        lead, dtype = hidden.shape[:-1], hiddens[0].dtype
        if self.screened is not None:
            screened = ScreenedScores(
                source, self.grad_filter, self.max_bytes, screen=self.screened
            )
            return screened, lead, dtype
        return SweptScores(source, self.grad_filter, self.max_bytes), lead, dtype

    def extra_repr(self) -> str:
        """Return what `print(model)` shows between the brackets."""
        parts: list[Any] = [self.hidden_size, self.vocab_size, f"bias={self.bias is not None}"]
        if self.softcap is not None:
            parts.append(f"softcap={self.softcap}")
        if self.scale != 1.0:
            parts.append(f"scale={self.scale}")
        if self.grad_filter is not None:
            parts.append(f"grad_filter={self.grad_filter.tail_mass:g}")
        if self.low_rank_a is not None:
            parts.append(f"low_rank={self.low_rank_a.shape[0]}")
        return ", ".join(map(str, parts))


def _describe(layer: Any) -> str:
    """Return the full name of a layer's class, and what to do if it is an adapter."""
    name = f"{type(layer).__module__}.{type(layer).__qualname__}"
    if isinstance(getattr(layer, "base_layer", None), nn.Linear):
        return f"{name}: an adapter around a linear layer; use lmhead.replace_head(model)"
    return name
