"""The head that a checkpoint names: the one place that knows all kinds.

In:  {"kind": "full" | "sampled" | "adaptive" | "hierarchical", ...}, the sizes of the model, and
     for a new head how often each word occurs.
Out: a head for `DecoderLM`, or None for its own `LMHead`.

A head that is opened again gets the order of its words from its saved buffers, so that frequencies
are needed once, when it is made.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from lmhead.nn import DecoderConfig
from lmhead.vocab import AdaptiveHead, HierarchicalHead

KINDS = ("full", "sampled", "adaptive", "hierarchical")


def build_head(
    spec: Mapping[str, Any], sizes: DecoderConfig, frequencies: Any = None
) -> nn.Module | None:
    """The head of a specification; None for the full softmax that `DecoderLM` makes by itself.

    "sampled" is a full head too: only its training loss is another.

    >>> sizes = DecoderConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> build_head({"kind": "full"}, sizes) is None
    True
    """
    kind = spec.get("kind", "full")
    if kind not in KINDS:
        raise ValueError(f"head must be one of {', '.join(KINDS)}; got {kind!r}")
    if kind in ("full", "sampled"):
        return None
    return _MAKERS[kind](spec, sizes, frequencies)


def specify_head(kind: str, head: nn.Module) -> dict[str, Any]:
    """What makes the same head again, but for its tensors; for `config.json`."""
    spec: dict[str, Any] = {"kind": kind}
    if isinstance(head, AdaptiveHead):
        spec |= {"cutoffs": list(head.cutoffs), "div_value": head.div_value}
    return spec


def _adaptive(spec: Mapping[str, Any], sizes: DecoderConfig, frequencies: Any) -> nn.Module:
    return AdaptiveHead(
        sizes.hidden_size,
        sizes.vocab_size,
        cutoffs=spec.get("cutoffs"),
        div_value=spec.get("div_value", 4.0),
        frequencies=frequencies,
    )


def _hierarchical(spec: Mapping[str, Any], sizes: DecoderConfig, frequencies: Any) -> nn.Module:
    # Opened again, it takes the tree of its saved buffer, whichever it is made with.
    return HierarchicalHead(
        sizes.hidden_size,
        sizes.vocab_size,
        tree=spec.get("tree", "balanced" if frequencies is None else "huffman"),
        frequencies=frequencies,
    )


_MAKERS = {"adaptive": _adaptive, "hierarchical": _hierarchical}
