"""Heads for huge vocabularies: a token is found in a few steps instead of among all.

In:  hidden states (..., D).
Out: `LazyLogits` on `FactoredScores`: normalised log-probabilities (..., V) that are not built.

    factors             the few hooks that a factored distribution implements
    factored_scores     `FactoredScores`: the answers, from the hooks
    factored_head       `FactoredHead`, the module around them
    adaptive_head       `AdaptiveHead`: `clusters`, `cluster_loss`, `cluster_top`, `cutoffs`,
                        `adaptive_embedding`
    hierarchical_head   `HierarchicalHead`: `tree` (`tree_makers`, `tree_files`), `tree_paths`,
                        `row_pairs`, `tree_factors`, `tree_search`
    sampled_loss        `SampledLoss`: a full head trained on few tokens; `proposals`
    advice              which of them, by their costs on this machine
"""

from lmhead.vocab.adaptive_embedding import AdaptiveEmbedding
from lmhead.vocab.adaptive_head import AdaptiveHead
from lmhead.vocab.advice import Advice, advise
from lmhead.vocab.cutoffs import choose_cutoffs
from lmhead.vocab.factored_head import FactoredHead
from lmhead.vocab.factored_scores import FactoredScores
from lmhead.vocab.factors import Factors
from lmhead.vocab.hierarchical_head import HierarchicalHead
from lmhead.vocab.sampled_loss import SampledLoss
from lmhead.vocab.tree import Tree
from lmhead.vocab.tree_files import read_tree
from lmhead.vocab.tree_makers import balanced, huffman

__all__ = [
    "AdaptiveEmbedding",
    "AdaptiveHead",
    "Advice",
    "FactoredHead",
    "FactoredScores",
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
