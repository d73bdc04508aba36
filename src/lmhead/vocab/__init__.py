"""Heads for huge vocabularies: a word is found in a few steps instead of among all.

In:  hidden states (..., D).
Out: `FactoredLogits`: log-probabilities (..., V) that are not built, and answer as `LazyLogits` do.

    factors        the few hooks that a factored distribution implements
    lazy           `FactoredLogits`, what such a head returns
    head           `FactoredHead`, the module around the hooks
    adaptive       `AdaptiveHead`: `clusters`, `cluster_loss`, `cluster_top`, `cutoffs`, `embedding`
    hierarchical   `HierarchicalHead`: `tree` (`tree_makers`, `tree_files`), `paths`, `pairs`,
                   `tree_factors`, `tree_search`
    sampled        `SampledLoss`: a full head trained on few words; `proposals`
    advice         which of them, by their costs on this machine
"""

from lmhead.vocab.adaptive import AdaptiveHead
from lmhead.vocab.advice import Advice, advise
from lmhead.vocab.cutoffs import choose_cutoffs
from lmhead.vocab.embedding import AdaptiveEmbedding
from lmhead.vocab.factors import Factors
from lmhead.vocab.head import FactoredHead
from lmhead.vocab.hierarchical import HierarchicalHead
from lmhead.vocab.lazy import FactoredLogits
from lmhead.vocab.sampled import SampledLoss
from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_files import read_tree
from lmhead.vocab.tree_makers import balanced, huffman

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "Advice",
    "FactoredHead",
    "FactoredLogits",
    "Factors",
    "HierarchicalHead",
    "SampledLoss",
    "Tree",
    "advise",
    "balanced",
    "choose_cutoffs",
    "huffman",
    "read_tree",
]
