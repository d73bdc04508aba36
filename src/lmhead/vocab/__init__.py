"""Heads for huge vocabularies: adaptive, hierarchical and sampled softmax.

In:  hidden states (..., D).
Out: `LazyLogits` on `FactoredScores`: normalised log-probabilities (..., V) that are not built.
Names are imported on first use.

    factors             `Factors`: methods that a factored distribution implements
    factored_scores     `FactoredScores`: all answers, from those methods
    factored_head       `FactoredHead`, the module around them
    adaptive_head       `AdaptiveHead`: `clusters`, `cluster_loss`, `cluster_top`, `cutoffs`,
                        `adaptive_embedding`
    hierarchical_head   `HierarchicalHead`: `tree` (`tree_makers`, `tree_files`), `tree_paths`,
                        `row_pairs`, `tree_factors`
    sampled_loss        `SampledLoss`: a full head trained on a few sampled tokens; `proposals`
    advice              recommends one of them, by their costs on this machine
"""

from typing import TYPE_CHECKING

from lmhead.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from lmhead.vocab.adaptive_embedding import AdaptiveEmbedding as AdaptiveEmbedding
    from lmhead.vocab.adaptive_head import AdaptiveHead as AdaptiveHead
    from lmhead.vocab.advice import Advice as Advice
    from lmhead.vocab.advice import advise as advise
    from lmhead.vocab.cutoffs import choose_cutoffs as choose_cutoffs
    from lmhead.vocab.factored_head import FactoredHead as FactoredHead
    from lmhead.vocab.factored_scores import FactoredScores as FactoredScores
    from lmhead.vocab.factors import Factors as Factors
    from lmhead.vocab.hierarchical_head import HierarchicalHead as HierarchicalHead
    from lmhead.vocab.sampled_loss import SampledLoss as SampledLoss
    from lmhead.vocab.tree import Tree as Tree
    from lmhead.vocab.tree_files import read_tree as read_tree
    from lmhead.vocab.tree_makers import balanced as balanced
    from lmhead.vocab.tree_makers import huffman as huffman

__all__, __getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "lmhead.vocab.adaptive_embedding": ["AdaptiveEmbedding"],
        "lmhead.vocab.adaptive_head": ["AdaptiveHead"],
        "lmhead.vocab.advice": ["Advice", "advise"],
        "lmhead.vocab.cutoffs": ["choose_cutoffs"],
        "lmhead.vocab.factored_head": ["FactoredHead"],
        "lmhead.vocab.factored_scores": ["FactoredScores"],
        "lmhead.vocab.factors": ["Factors"],
        "lmhead.vocab.hierarchical_head": ["HierarchicalHead"],
        "lmhead.vocab.sampled_loss": ["SampledLoss"],
        "lmhead.vocab.tree": ["Tree"],
        "lmhead.vocab.tree_files": ["read_tree"],
        "lmhead.vocab.tree_makers": ["balanced", "huffman"],
    },
)
