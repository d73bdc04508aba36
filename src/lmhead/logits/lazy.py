"""`LazyLogits`: what `head(hidden)` returns. It has the manners of a tensor and computes nothing.

In:  hidden states (..., D), the rows of a weight (V, D), a bias, an elementwise map.
Out: answers, each from one sweep: a loss, log-probabilities, an argmax, a top-k, a sample.

Torch's functions find their way here through `spelling`. What cannot be streamed builds the tensor
and says so with a `PerformanceWarning`.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NoReturn, Protocol

import torch
from torch import Tensor

from lmhead import checks
from lmhead.errors import PerformanceWarning
from lmhead.functional import Answers, TopK, ask, cross_entropy
from lmhead.logits.rows import Rows, SweptRows
from lmhead.sweep import GradFilter, Pointwise, Questions, Source, row_answers
from lmhead.sweep.draw import draw
from lmhead.sweep.eager import eager
from lmhead.sweep.explain import explain

Kind = Literal["logits", "log_probs", "probs"]


class Screen(Protocol):
    """Something that finds the best words without reading all of the weight: see `screen`."""

    def decide(self, source: Source, k: int) -> tuple[Tensor, Tensor] | None:
        """Values (N, k) in float64 and ids (N, k), the same as a sweep; None if it cannot."""


class LazyLogits:
    """Logits of shape (..., V) that are never built, unless something asks for all of them.

    Equivalent to: pointwise(hidden @ weight.T + bias)

    `kind` tells logits from their log_softmax and softmax, which are lazy too. `row_shift`, of
    shape (..., 1), has been subtracted from every row.
    """

    __hash__ = None  # type: ignore[assignment]

    def __init__(
        self,
        hiddens: tuple[Tensor, ...],
        weights: tuple[Tensor, ...],
        bias: Tensor | None,
        pointwise: Pointwise,
        *,
        dtype: torch.dtype,
        kind: Kind = "logits",
        row_shift: Tensor | None = None,
        grad_filter: GradFilter | None = None,
        max_bytes: int | None = None,
        screen: Screen | None = None,
    ) -> None:
        self._hiddens, self._weights, self._bias = hiddens, weights, bias
        self._screen = screen
        self._pointwise, self._dtype, self._kind = pointwise, dtype, kind
        self._row_shift, self._grad_filter, self._max_bytes = row_shift, grad_filter, max_bytes
        self._dense: Tensor | None = None

    def _with(self, **changes: Any) -> LazyLogits:
        """The same logits but for some of the fields."""
        fields: dict[str, Any] = {
            "hiddens": self._hiddens,
            "weights": self._weights,
            "bias": self._bias,
            "pointwise": self._pointwise,
            "dtype": self._dtype,
            "kind": self._kind,
            "row_shift": self._row_shift,
            "grad_filter": self._grad_filter,
            "max_bytes": self._max_bytes,
            "screen": self._screen,
        }
        return LazyLogits(**(fields | changes))

    # What it looks like -------------------------------------------------------------------------

    @property
    def shape(self) -> torch.Size:
        """(..., V)."""
        return torch.Size((*self._hiddens[0].shape[:-1], self._weights[0].shape[0]))

    @property
    def dtype(self) -> torch.dtype:
        """The type that the logits would have; products of half types are made in float32."""
        return self._dtype

    @property
    def device(self) -> torch.device:
        """Where the hidden states are."""
        return self._hiddens[0].device

    @property
    def requires_grad(self) -> bool:
        """Whether any tensor behind the logits wants a gradient."""
        behind = (*self._hiddens, *self._weights, self._bias, self._row_shift)
        return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in behind)

    @property
    def ndim(self) -> int:
        """Number of dimensions, V included."""
        return len(self.shape)

    def dim(self) -> int:
        """Number of dimensions, V included."""
        return self.ndim

    ndimension = dim

    def size(self, dim: int | None = None) -> Any:
        """The shape, or one entry of it."""
        return self.shape if dim is None else self.shape[dim]

    def numel(self) -> int:
        """How many logits there would be."""
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        """True."""
        return True

    @property
    def is_cuda(self) -> bool:
        """Whether the hidden states are on a CUDA device."""
        return self.device.type == "cuda"

    def __len__(self) -> int:
        return self.shape[0]

    def __repr__(self) -> str:
        name = {"logits": "", "log_probs": ", log_softmax", "probs": ", softmax"}[self._kind]
        shape = tuple(self.shape)
        return f"{type(self).__name__}(shape={shape}, dtype={self.dtype}{name}, not computed)"

    def __eq__(self, other: object) -> Any:
        if other is self:
            # torch.distributions asks `x == x` to find a NaN; one bool per row answers that.
            return ~self.logsumexp(-1, keepdim=True).isnan()
        raise TypeError(
            "LazyLogits cannot be compared with ==: it would build all logits. Compare answers "
            "(argmax, topk, logsumexp), or use .materialize()"
        )

    def __bool__(self) -> NoReturn:
        raise TypeError("the truth value of LazyLogits is not defined")

    def explain(self) -> str:
        """What a question will cost, before it is asked: products, tiles, bytes."""
        questions = Questions(self.source(), max_bytes=self._max_bytes)
        return explain(repr(self), questions, self.dtype.itemsize)

    # What is behind it --------------------------------------------------------------------------

    def source(self) -> Source:
        """The logits as rows (N, V), for a sweep; the row shift is left out."""
        flat = tuple(h.reshape(-1, h.shape[-1]) for h in self._hiddens)
        return Source(flat, self._weights, self._bias, self._pointwise)

    def rows(self) -> Rows:
        """The logits as rows (N, V), for decoding: no gradients; the row shift is left out."""
        return SweptRows(self.detach().source())

    @property
    def _lead(self) -> torch.Size:
        return self.shape[:-1]

    def _shift(self, rows: Tensor) -> Tensor:
        """Row values (...) or (..., K) of logits, after the row shift."""
        if self._row_shift is None:
            return rows
        return rows - (self._row_shift if rows.dim() == self.ndim else self._row_shift[..., 0])

    def map_rows(self, change: Callable[[Tensor], Tensor]) -> LazyLogits:
        """Change the leading dimensions; `change` is applied to (..., D) and (..., 1) tensors."""
        shift = None if self._row_shift is None else change(self._row_shift)
        return self._with(hiddens=tuple(change(h) for h in self._hiddens), row_shift=shift)

    # Building it --------------------------------------------------------------------------------

    def materialize(self) -> Tensor:
        """Build the whole tensor, (..., V). Warns once with its size."""
        return self._build("materialize()")

    def _build(self, what: str) -> Tensor:
        if self._dense is None:
            size = self.numel() * self.dtype.itemsize
            warnings.warn(
                f"{what} builds all logits: {tuple(self.shape)} {self.dtype}, "
                f"{size / 2**20:,.1f} MiB",
                PerformanceWarning,
                stacklevel=_frames_to_the_caller(),
            )
            self._dense = self._whole().to(self.dtype)
        return self._dense

    def _whole(self) -> Tensor:
        """All entries, (..., V), with plain differentiable operations."""
        z = self.source().dense().reshape(self.shape)
        if self._kind == "log_probs":
            return z.log_softmax(-1)
        if self._kind == "probs":
            return z.softmax(-1)
        return z if self._row_shift is None else z - self._row_shift

    def __getattr__(self, name: str) -> Any:
        method = getattr(Tensor, name, None)
        if name.startswith("_") or not callable(method):
            raise AttributeError(f"'LazyLogits' object has no attribute {name!r}")
        return lambda *args, **kwargs: method(self._build(f"{name}()"), *args, **kwargs)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        from lmhead.logits.spelling import call

        return call(func, args, kwargs or {})

    # Leading dimensions -------------------------------------------------------------------------

    def view(self, *shape: Any) -> Any:
        """Reshape the leading dimensions; the last must stay V."""
        if len(shape) == 1 and isinstance(shape[0], torch.dtype):
            return self._build("view(dtype)").view(shape[0])
        return self.reshape(*shape)

    def reshape(self, *shape: Any) -> Any:
        """Reshape the leading dimensions; the last must stay V."""
        sizes = list(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        vocab = self.shape[-1]
        if -1 in sizes:
            known = math.prod(s for s in sizes if s != -1)
            if known and self.numel() % known == 0:
                sizes[sizes.index(-1)] = self.numel() // known
        if math.prod(sizes) != self.numel():
            raise RuntimeError(f"shape {list(sizes)} is invalid for logits {tuple(self.shape)}")
        if not sizes or sizes[-1] != vocab:
            return self._build(f"reshape{tuple(shape)}").reshape(*shape)
        return self.map_rows(lambda h: h.reshape(*sizes[:-1], h.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        """Flatten leading dimensions."""
        start, end = start_dim % self.ndim, end_dim % self.ndim
        if end == self.ndim - 1 and start != end:
            return self._build("flatten() into the vocabulary").flatten(start_dim, end_dim)
        return self.map_rows(lambda h: h.flatten(start, end)) if start != end else self

    def unsqueeze(self, dim: int) -> Any:
        """A new leading dimension of size 1."""
        place = dim % (self.ndim + 1)
        if place == self.ndim:
            return self._build(f"unsqueeze({dim})").unsqueeze(dim)
        return self.map_rows(lambda h: h.unsqueeze(place))

    def squeeze(self, dim: int | None = None) -> Any:
        """Drop a leading dimension of size 1, or all of them."""
        if dim is None:
            lead = tuple(n for n in self._lead if n != 1)
            keeps_words = self.shape[-1] != 1
            return self.reshape(*lead, -1) if keeps_words else self._build("squeeze()").squeeze()
        place = dim % self.ndim
        if place == self.ndim - 1:
            return self._build(f"squeeze({dim})").squeeze(dim)
        return self.map_rows(lambda h: h.squeeze(place))

    def transpose(self, dim0: int, dim1: int) -> Any:
        """Swap leading dimensions, or (N, L, V) to (N, V, L) for `F.cross_entropy`."""
        places = list(range(self.ndim))
        places[dim0], places[dim1] = places[dim1], places[dim0]
        return self.permute(places)

    def permute(self, *dims: Any) -> Any:
        """Reorder leading dimensions, or (N, L, V) to (N, V, L) for `F.cross_entropy`."""
        from lmhead.logits.transposed import TransposedLogits

        given = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
        places = [d % self.ndim for d in given]
        if places == [0, 2, 1]:
            return TransposedLogits(self)
        if places[-1] != self.ndim - 1:
            return self._build("permute()").permute(places)
        return self.map_rows(lambda h: h.permute(places))

    def expand(self, *shape: Any) -> Any:
        """Broadcast leading dimensions."""
        sizes = tuple(shape[0] if len(shape) == 1 and not isinstance(shape[0], int) else shape)
        if sizes[-1] not in (-1, self.shape[-1]):
            return self._build(f"expand{sizes}").expand(sizes)
        return self.map_rows(lambda h: h.expand(*sizes[:-1], h.shape[-1]))

    def __getitem__(self, index: Any) -> Any:
        from lmhead.logits.selection import select

        return select(self, index)

    def __iter__(self) -> Any:
        return (self[i] for i in range(len(self)))

    def columns(self, ids: Tensor) -> Tensor:
        """Only the words `ids` (K,): computes K rows of the weight, gives (..., K)."""
        bias = None if self._bias is None else self._bias[ids]
        chosen = self._with(weights=tuple(w[ids] for w in self._weights), bias=bias)
        z = chosen.source().dense().reshape(chosen.shape)
        if self._kind == "logits":
            return self._shift(z).to(self.dtype)
        log_p = z - self._raw_lse(keepdim=True).to(z.dtype)
        return (log_p if self._kind == "log_probs" else log_p.exp()).to(self.dtype)

    def take_words(self, words: slice) -> LazyLogits | Tensor:
        """A range of words: lazy logits on a part of the weight; probabilities are computed."""
        if self._kind != "logits":
            return self.columns(torch.arange(self.shape[-1], device=self.device)[words])
        bias = None if self._bias is None else self._bias[words]
        return self._with(weights=tuple(w[words] for w in self._weights), bias=bias)

    # Arithmetic ---------------------------------------------------------------------------------

    def _combine(self, name: str, *args: Any) -> Any:
        """A function of `arithmetic`, or the tensor's own operation where that cannot stream."""
        from lmhead.logits import arithmetic

        ours, theirs = _ARITHMETIC[name]
        result = getattr(arithmetic, ours)(self, *args)
        if result is not NotImplemented:
            return result
        built = [a._build(name) if isinstance(a, LazyLogits) else a for a in args]
        return theirs(self._build(name), *built)

    def __mul__(self, other: Any) -> Any:
        return self._combine("*", other)

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return self._combine("+", other)

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self._combine("+", other * -1)

    def __rsub__(self, other: Any) -> Any:
        return (self * -1.0) + other

    def __truediv__(self, other: Any) -> Any:
        return self._combine("/", other)

    def __neg__(self) -> Any:
        return self * -1.0

    multiply = mul = __mul__
    add = __add__
    subtract = sub = __sub__
    true_divide = divide = div = __truediv__
    neg = __neg__

    def tanh(self) -> Any:
        """Lazy: soft-capping is (logits / cap).tanh() * cap."""
        return self._combine("tanh")

    def masked_fill(self, mask: Tensor, value: Any) -> Any:
        """Lazy for words masked in all rows: mask (V,), value -inf."""
        return self._combine("masked_fill", mask, value)

    def clamp(self, min: Any = None, max: Any = None) -> Any:
        """Lazy where it changes nothing but -inf."""
        return self._combine("clamp", min, max)

    # Types and places ---------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> LazyLogits:
        """Another type, or another device (which moves the hidden states and the weight)."""
        wanted = torch.empty(0, dtype=self.dtype, device=self.device).to(*args, **kwargs)
        if wanted.device == self.device:
            return self if wanted.dtype == self.dtype else self._with(dtype=wanted.dtype)

        def move(t: Tensor) -> Tensor:
            return t.to(wanted.device)

        return self.map_rows(move)._with(
            weights=tuple(map(move, self._weights)),
            bias=None if self._bias is None else move(self._bias),
            dtype=wanted.dtype,
        )

    def float(self) -> LazyLogits:
        """As float32."""
        return self.to(torch.float32)

    def double(self) -> LazyLogits:
        """As float64."""
        return self.to(torch.float64)

    def half(self) -> LazyLogits:
        """As float16."""
        return self.to(torch.float16)

    def bfloat16(self) -> LazyLogits:
        """As bfloat16."""
        return self.to(torch.bfloat16)

    def cpu(self) -> LazyLogits:
        """On the CPU."""
        return self.to("cpu")

    def requires_grad_(self, requires_grad: bool = True) -> NoReturn:  # noqa: ARG002
        """Not possible: logits are a result. Set it on the hidden states or the weight."""
        raise TypeError(
            "LazyLogits have no gradient of their own; call requires_grad_() on the hidden states "
            "or the weight, or use .materialize().requires_grad_()"
        )

    def contiguous(self, **_: Any) -> LazyLogits:
        """Itself."""
        return self

    def clone(self, **_: Any) -> LazyLogits:
        """Itself: nothing can write to it."""
        return self

    def detach(self) -> LazyLogits:
        """The same logits, cut from the graph."""
        return self.map_rows(Tensor.detach)._with(
            weights=tuple(w.detach() for w in self._weights),
            bias=None if self._bias is None else self._bias.detach(),
        )

    # Softmax and questions ----------------------------------------------------------------------

    def log_softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        """Lazy log-probabilities."""
        return self._normalized("log_probs", "log_softmax", dim, dtype)

    def softmax(self, dim: int, dtype: torch.dtype | None = None) -> Any:
        """Lazy probabilities."""
        return self._normalized("probs", "softmax", dim, dtype)

    def _normalized(self, kind: Kind, name: str, dim: int, dtype: torch.dtype | None) -> Any:
        if self._kind == "probs" or not self._is_last(dim):
            return getattr(self._build(f"{name}({dim})"), name)(dim, dtype=dtype)
        return self._with(kind=kind, dtype=dtype or self.dtype, row_shift=None)

    def exp(self) -> Any:
        """Lazy probabilities, from lazy log-probabilities."""
        return self._with(kind="probs") if self._kind == "log_probs" else self._build("exp()").exp()

    def log(self) -> Any:
        """Lazy log-probabilities, from lazy probabilities."""
        return self._with(kind="log_probs") if self._kind == "probs" else self._build("log()").log()

    def _is_last(self, dim: int) -> bool:
        return dim in (-1, self.ndim - 1)

    @eager
    def ask(self, **questions: Any) -> Answers:
        """`lmhead.query` on these logits: the same questions, the same answers.

        >>> from lmhead import LMHead
        >>> logits = LMHead(16, 100)(torch.randn(4, 16))
        >>> answers = logits.ask(entropy=True, top_k=5)
        >>> answers.entropy.shape, answers.top_k.indices.shape
        (torch.Size([4]), torch.Size([4, 5]))
        """
        kl_to = questions.pop("kl_to", None)
        if kl_to is not None:
            kl_to = kl_to.source()
        return ask(
            self.source(),
            self._lead,
            self.dtype,
            kl_to=kl_to,
            max_bytes=questions.pop("max_bytes", self._max_bytes),
            **questions,
        )

    @eager
    def cross_entropy(self, targets: Tensor, **options: Any) -> Tensor:
        """`F.cross_entropy` of these logits, which must be (N, V) or (V,); float64."""
        return cross_entropy(
            self.source(),
            self._lead,
            targets,
            grad_filter=self._grad_filter,
            max_bytes=self._max_bytes,
            **options,
        )

    @eager
    def _raw_lse(self, *, keepdim: bool = False) -> Tensor:
        """Log Σ exp of the unshifted logits, in float64."""
        answers, _ = row_answers(Questions(self.source(), max_bytes=self._max_bytes))
        assert answers.lse is not None
        return answers.lse.reshape((*self._lead, 1) if keepdim else self._lead)

    def logsumexp(self, dim: int, keepdim: bool = False) -> Tensor:
        """Log Σ_v exp z_v, (...)."""
        if not self._is_last(dim) or self._kind == "probs":
            return self._build(f"logsumexp({dim})").logsumexp(dim, keepdim)
        lse = self._raw_lse(keepdim=keepdim)
        return (torch.zeros_like(lse) if self._kind == "log_probs" else self._shift(lse)).to(
            self.dtype
        )

    def gather(self, dim: int, index: Tensor) -> Tensor:
        """Entries at given ids, (..., K)."""
        if not self._is_last(dim) or index.shape[:-1] != self._lead:
            return self._build(f"gather({dim})").gather(dim, index)
        return self._gather(index)

    @eager
    def _gather(self, index: Tensor) -> Tensor:
        checks.check_ids("index", index, self.shape[-1])
        ids = index.reshape(-1, index.shape[-1]).long()
        questions = Questions(
            self.source(), ids=ids, grad_filter=self._grad_filter, max_bytes=self._max_bytes
        )
        answers, _ = row_answers(questions)
        assert answers.picked is not None
        assert answers.lse is not None
        z = answers.picked
        if self._kind == "logits":
            return self._shift(z.reshape(index.shape)).to(self.dtype)
        log_p = (z - answers.lse[:, None]).reshape(index.shape)
        return (log_p if self._kind == "log_probs" else log_p.exp()).to(self.dtype)

    @eager
    def _screened(self, k: int) -> TopK | None:
        """The k best words by way of the head's screen, if it has one that can serve."""
        if self._screen is None or self.requires_grad or not 0 < k <= self.shape[-1]:
            return None
        if torch._C._are_functorch_transforms_active():
            return None
        decided = self._screen.decide(self.source(), k)
        if decided is None:
            return None
        values, ids = (t.reshape(*self._lead, k) for t in decided)
        return TopK(values.to(self.dtype), ids)

    def argmax(self, dim: int | None = None, keepdim: bool = False) -> Tensor:
        """The id of the largest logit: no softmax is needed, which keeps the order."""
        if dim is None or not self._is_last(dim):
            return self._build(f"argmax({dim})").argmax(dim, keepdim)
        screened = self._screened(1)
        best = self.ask(argmax=True).argmax if screened is None else screened.indices[..., 0]
        assert best is not None
        return best.unsqueeze(-1) if keepdim else best

    def topk(
        self, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
    ) -> TopK | torch.return_types.topk:
        """The k largest entries and their ids, (..., k) each."""
        if not self._is_last(dim) or not largest:
            return self._build("topk()").topk(k, dim, largest, sorted)
        top = self._screened(k)
        if top is None:
            top = self.ask(top_k=k).top_k
        if top is None:  # k = 0
            empty = torch.empty(*self._lead, 0, device=self.device)
            return TopK(empty.to(self.dtype), empty.long())
        if self.requires_grad or self._kind != "logits":
            # No token where there is none to choose: gather must not see its -1.
            values = self.gather(-1, top.indices.clamp(min=0))
            values = torch.where(top.indices < 0, top.values, values)
        else:
            values = self._shift(top.values)
        return TopK(values, top.indices)

    def max(self, dim: int | None = None, keepdim: bool = False) -> Any:
        """The largest entry and its id."""
        if dim is None or not self._is_last(dim):
            dense = self._build(f"max({dim})")
            return dense.max() if dim is None else dense.max(dim, keepdim)
        values, indices = self.topk(1)
        return TopK(values, indices) if keepdim else TopK(values[..., 0], indices[..., 0])

    @eager
    def multinomial(
        self,
        num_samples: int,
        replacement: bool = False,
        *,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Ids drawn from lazy probabilities, (..., num_samples)."""
        if self._kind != "probs" or (num_samples > 1 and not replacement):
            return self._build("multinomial()").multinomial(
                num_samples, replacement, generator=generator
            )
        with torch.no_grad():
            lse = self._raw_lse().reshape(-1)
            if bool(lse.isnan().any() | (lse == -math.inf).any()):
                raise ValueError("probs must have a finite, positive sum in every row")
            uniforms = torch.rand(
                len(lse), num_samples, dtype=torch.float64, device=self.device, generator=generator
            )
            drawn = draw(Questions(self.source(), max_bytes=self._max_bytes), lse, uniforms)
        return drawn.reshape(*self._lead, num_samples)


def _operator(name: str) -> Callable[..., Any]:
    def build(self: LazyLogits, *args: Any) -> Any:
        return getattr(self._build(name), name)(*args)

    return build


# Operators that have no lazy meaning build the tensor, as methods without one do.
for _name in (
    "lt",
    "le",
    "gt",
    "ge",
    "pow",
    "rpow",
    "mod",
    "floordiv",
    "rtruediv",
    "abs",
    "matmul",
):
    setattr(LazyLogits, f"__{_name}__", _operator(f"__{_name}__"))


def _frames_to_the_caller() -> int:
    """How many frames up the first line is that belongs neither to lmhead nor to torch."""
    ours = tuple(str(Path(module.__file__ or "").parent) for module in (torch, checks))
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(ours):
        level, frame = level + 1, frame.f_back
    return level


_ARITHMETIC: dict[str, tuple[str, Callable[..., Any]]] = {
    "*": ("times", torch.mul),
    "+": ("plus", torch.add),
    "/": ("divided", torch.div),
    "tanh": ("tanh", torch.tanh),
    "masked_fill": ("mask_words", torch.masked_fill),
    "clamp": ("clamp", torch.clamp),
}
