"""Heads for huge vocabularies: a word is found in a few steps instead of among all.

In:  hidden states (..., D).
Out: `FactoredLogits`: log-probabilities (..., V) that are not built, and answer as `LazyLogits` do.

    factors    the few hooks that a factored distribution implements
    lazy       `FactoredLogits`, what such a head returns
    head       `FactoredHead`, the module around the hooks
    adaptive   `AdaptiveHead`: `clusters`, `cluster_loss`, `cluster_top`, `cutoffs`, `embedding`
    sampled    `SampledLoss`: a full head trained on few words; `proposals`
"""

from lmhead.vocab.adaptive import AdaptiveHead
from lmhead.vocab.cutoffs import choose_cutoffs
from lmhead.vocab.embedding import AdaptiveEmbedding
from lmhead.vocab.factors import Factors
from lmhead.vocab.head import FactoredHead
from lmhead.vocab.lazy import FactoredLogits
from lmhead.vocab.sampled import SampledLoss

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "FactoredHead",
    "FactoredLogits",
    "Factors",
    "SampledLoss",
    "choose_cutoffs",
]
