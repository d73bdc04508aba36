"""Plain torch with dense logits: its rounding error is the tolerance for lmhead's.

Half precisions are multiplied in float32, as in lmhead. Where torch itself gives NaN (a masked
token with a softcap or label smoothing) the same sum is written out with the mask in it.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """What loss and answers are given in."""
    return torch.float32 if dtype in HALF else dtype


def logits(
    hidden: Tensor,
    weight: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
) -> Tensor:
    """(..., V) in float32 or float64."""
    dtype = result_dtype(hidden.dtype)
    x = F.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    x = scale * x
    return x if softcap is None else torch.where(x.isneginf(), x, softcap * torch.tanh(x / softcap))


def cross_entropy(
    z: Tensor,
    targets: Tensor,
    *,
    class_weight: Tensor | None = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    num_items: int | None = None,
) -> Tensor:
    """`F.cross_entropy`, written out if tokens are masked; z-loss and num_items added."""
    rows, vocab = z.shape[:-1], z.shape[-1]
    z = z.reshape(-1, vocab)
    soft = targets.is_floating_point()
    targets = targets.reshape(-1, vocab).to(z.dtype) if soft else targets.flatten()
    kept = torch.ones(len(z), dtype=torch.bool) if soft else targets != ignore_index
    weights = None if class_weight is None else class_weight.to(z.dtype)
    options: dict[str, Any] = {"weight": weights, "label_smoothing": label_smoothing}
    if not z.isneginf().any():
        losses = F.cross_entropy(z, targets, ignore_index=ignore_index, reduction="none", **options)
    else:
        losses = _masked_rows(z, targets, kept, weights, label_smoothing)
    penalties = torch.where(kept, z_loss * z.logsumexp(-1) ** 2, 0.0)
    if reduction == "none":
        return (losses + penalties).reshape(rows)
    if reduction == "sum":
        return losses.sum() + penalties.sum()
    if num_items is not None:
        return (losses.sum() + penalties.sum()) / num_items
    count = kept.sum()
    total = count if soft or weights is None else weights[targets[kept]].sum()
    return losses.sum() / total + penalties.sum() / count


def _masked_rows(
    z: Tensor, targets: Tensor, kept: Tensor, weights: Tensor | None, label_smoothing: float
) -> Tensor:
    vocab = z.shape[-1]
    truth = targets
    if not targets.is_floating_point():
        truth = F.one_hot(torch.where(kept, targets, 0), vocab).to(z.dtype)
    masked = z.isneginf()
    even = torch.where(masked, 0.0, label_smoothing / vocab)
    counts = (1.0 - label_smoothing) * truth + even
    if weights is not None:
        counts = counts * weights
    # A masked token that counts is a forbidden target: it costs infinity.
    surprise = -z.log_softmax(-1).masked_fill(masked & (counts == 0.0), 0.0)
    return torch.where(kept, (counts * surprise).sum(-1), 0.0)


def answers(z: Tensor, ids: Tensor, other: Tensor) -> dict[str, Tensor]:
    """log_prob, entropy, logsumexp and kl to the other logits, with 0 · log 0 = 0."""
    columns = ids if ids.dim() == z.dim() else ids[..., None]
    masked = z.isneginf()
    log_p, log_q = (t.log_softmax(-1).masked_fill(masked, 0.0) for t in (z, other))
    p = z.softmax(-1)
    return {
        "log_prob": z.log_softmax(-1).gather(-1, columns).reshape(ids.shape),
        "entropy": -(p * log_p).sum(-1),
        "logsumexp": z.logsumexp(-1),
        "kl": (p * (log_p - log_q)).sum(-1),
    }
