"""Logits with the words second: `F.cross_entropy(logits.transpose(1, 2), targets)`.

Torch wants the classes of a sequence there. Only the loss is lazy in this form.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

if TYPE_CHECKING:
    from lmhead.logits.shaped import Shaped


class TransposedLogits:
    """Lazy logits (N, L, V), seen as (N, V, L)."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, logits: Shaped) -> None:
        self.logits = logits

    @property
    def shape(self) -> torch.Size:
        """(N, V, L)."""
        n, length, vocab = self.logits.shape
        return torch.Size((n, vocab, length))

    def __repr__(self) -> str:
        return f"TransposedLogits(shape={tuple(self.shape)}, not computed)"

    def _build(self, what: str) -> Tensor:
        return self.logits._build(what).transpose(1, 2)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(Tensor, name):
            raise AttributeError(f"'TransposedLogits' object has no attribute {name!r}")
        return getattr(self._build(f"{name}()"), name)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is F.cross_entropy:
            return _cross_entropy(*args, **kwargs)
        built = [a._build(f"{func.__name__}()") if isinstance(a, cls) else a for a in args]
        return func(*built, **kwargs)


def _cross_entropy(input: TransposedLogits, target: Tensor, *args: Any, **kwargs: Any) -> Any:
    """(N, V, L) with ids (N, L) or probabilities (N, V, L): rows of words with their targets."""
    logits = input.logits
    n, length, vocab = logits.shape
    if target.shape not in ((n, length), (n, vocab, length)):
        raise ValueError(
            f"targets must have shape {(n, length)}, or {(n, vocab, length)} for probabilities; "
            f"got {tuple(target.shape)}"
        )
    if target.is_floating_point():
        target = target.transpose(1, 2).reshape(-1, vocab)
    else:
        target = target.reshape(-1)
    loss: Tensor = F.cross_entropy(logits.reshape(-1, vocab), target, *args, **kwargs)
    return loss if loss.dim() == 0 else loss.reshape(n, length)
