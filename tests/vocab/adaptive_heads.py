"""Small adaptive heads with large weights, and what the textbook says of them."""

from typing import Any

import torch
from compare import float64
from torch import Tensor

from lmhead import reference
from lmhead.vocab import AdaptiveHead

VOCAB, DIM = 47, 8


def make(**options: Any) -> AdaptiveHead:
    torch.manual_seed(0)
    given: dict[str, Any] = {
        "cutoffs": [6, 20],
        "div_value": 2.0,
        "bias": True,
        "dtype": torch.float64,
    } | options
    head = AdaptiveHead(DIM, VOCAB, **given)
    with torch.no_grad():
        for p in head.parameters():
            p.mul_(2.0)
    return head


def shuffled() -> Tensor:
    return torch.rand(VOCAB, generator=torch.Generator().manual_seed(3))


def textbook(head: AdaptiveHead) -> tuple[Any, list[reference.Cluster], Any]:
    biases = list(head.biases) or [None] * len(head.weights)
    clusters = [
        reference.Cluster(float64(p), float64(w), None if b is None else float64(b))
        for p, w, b in zip(head.projections, head.weights, biases, strict=True)
    ]
    bias = None if head.head_bias is None else float64(head.head_bias)
    return float64(head.head_weight), clusters, bias


def reference_log_p(head: AdaptiveHead, hidden: Tensor) -> Any:
    """By token."""
    log_p = reference.adaptive_log_probs(float64(hidden), *textbook(head))
    return log_p[:, head.place_of.numpy()]
