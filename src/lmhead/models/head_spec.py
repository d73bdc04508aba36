"""The head that a checkpoint describes.

In:  {"kind": "full" | "sampled" | "adaptive" | "hierarchical", ...}, the sizes of the model, and
     for a new head the frequencies of the tokens.
Out: a head for `DecoderLM`, or None for its own `LMHead`.

A saved head has the order of its tokens in its buffers: frequencies are needed only for a new one.
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
    """Return the head of a specification; None for the full softmax that `DecoderLM` makes itself.

    "sampled" is a full head too: only its training loss differs.

    >>> sizes = DecoderConfig(
    ...     vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2
    ... )
    >>> build_head({"kind": "full"}, sizes) is None
    True
    """
    kind = spec.get("kind", "full")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ValueError(f"head must be one of {', '.join(KINDS)}; got {kind!r}")
    if kind in ("full", "sampled"):
        return None
    return _MAKERS[kind](spec, sizes, frequencies)


def specify_head(kind: str, head: nn.Module) -> dict[str, Any]:
    """Return the specification of a head for `config.json`; its tensors are saved apart."""
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


def _hierarchical(_: Mapping[str, Any], sizes: DecoderConfig, frequencies: Any) -> nn.Module:
    # A saved head takes the tree of its buffer, whichever it is made with.
    return HierarchicalHead(
        sizes.hidden_size,
        sizes.vocab_size,
        tree="balanced" if frequencies is None else "huffman",
        frequencies=frequencies,
    )


_MAKERS = {"adaptive": _adaptive, "hierarchical": _hierarchical}
