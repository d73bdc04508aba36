"""`linear_cross_entropy` and `query`: loss and answers from hidden states and a weight.

In:  tensors, hidden (..., D), weight (V, D), targets (...), and options.
Out: a loss, or `Answers`; no (..., V) tensor is made on the way.

    losses       cross-entropy: its options, and the checks of them
    questions    what else can be asked of the distribution, and the answers
    inputs       the tensors of a linear layer, checked and taken as autocast would
"""

from lmhead.functional.inputs import autocast
from lmhead.functional.losses import as_filter, check_loss, cross_entropy, linear_cross_entropy
from lmhead.functional.questions import Answers, TopK, ask, id_rows, query

__all__ = [
    "Answers",
    "TopK",
    "as_filter",
    "ask",
    "autocast",
    "check_loss",
    "cross_entropy",
    "id_rows",
    "linear_cross_entropy",
    "query",
]
